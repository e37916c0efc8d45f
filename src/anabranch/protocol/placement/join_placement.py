"""Choice of the stage that a joiner will serve.

A stage that a single crash would leave empty comes before all others, whether links are measured or not. Else
the joiner gets, by measured links, the stage with which an iteration is shortest (`cost_model`); or by rates
alone the stage that passes the fewest microbatches per second, since every microbatch passes every stage
(GWTF's utilisation rule, arXiv 2509.21221, joining of nodes). Not here: which of the two rules applies
(`fleet.admission`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import msgspec

from anabranch.protocol.log.records import Member
from anabranch.protocol.placement.cost_model import CostModel
from anabranch.protocol.placement.rates import Batch, stage_counts, stage_rates
from anabranch.protocol.telemetry.link_table import LinkEstimate

#: Number of replicas below which a stage comes before all others: two, so that one crash does not empty it.
KEPT_FIRST = 2


def neediest_stage(members: Iterable[Member], blocks: Sequence[int]) -> int:
    """Stage (1 to S) for the next joiner, links not considered: the one with fewest members if any has fewer
    than KEPT_FIRST, else (and among equals) the one that passes fewest microbatches per second.
    blocks: number of blocks of each of the stages 1 to S."""
    known = list(members)
    rates, counts = stage_rates(known, blocks), stage_counts(known, blocks)
    order = [(min(counts[k], KEPT_FIRST), rates[k], k + 1) for k in range(len(blocks))]
    return min(order)[2]


def best_stage(
    joiner: Member,
    members: Iterable[Member],
    blocks: Sequence[int],
    batch: Batch,
    way: Callable[[str, str], LinkEstimate],
) -> int:
    """Stage (1 to S) at which the joiner makes an iteration shortest, by compute and links. Every stage must
    have a member. way: function (sender, receiver) -> estimate of the link."""
    known = list(members)
    model = CostModel([*known, msgspec.structs.replace(joiner, stage=1)], blocks, batch, cache(way))
    now = {member.id: member.stage for member in known if member.stage}
    return min(range(1, len(blocks) + 1), key=lambda stage: model.seconds({**now, joiner.id: stage}))
