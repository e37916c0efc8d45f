"""Local search for a better assignment of relays to stages: the best move of one relay or exchange of two,
repeated. DT-FM (Yuan et al., NeurIPS 2022) also exchanges relays, but judges by links alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from typing import Protocol

from anabranch.counter_rng import CounterRng
from anabranch.protocol.placement.cost_model import Deal


class Judge(Protocol):
    """Estimator of an assignment's iteration time, in whatever model: the leader's (`CostModel`) or the
    planner's."""

    @property
    def stages(self) -> int: ...
    def seconds(self, deal: Mapping[str, int]) -> float: ...


def bettered(
    judge: Judge,
    deal: Deal,
    movable: Collection[str],
    rng: CounterRng,
    steps: int = 64,
    tried: int = 1000,
    keeps: int = 1,
) -> Iterator[Deal]:
    """Local search: yield ever better assignments of relays to stages, each one change away from the previous
    one, until no tried change helps.

    :param judge: model of the iteration time.
    :param deal: assignment to begin with, relay -> stage.
    :param movable: relays that may change their stage.
    :param steps: greatest number of changes.
    :param tried: greatest number of candidates per change, drawn with `rng` if there are more.
    :param keeps: number of replicas that a move must leave at a stage.
    """
    now_s = judge.seconds(deal)
    for _ in range(steps):
        every = list(_changes(deal, judge.stages, movable, keeps))
        if len(every) > tried:
            rng.shuffle(every)
            del every[tried:]
        found = [(judge.seconds(changed), at) for at, changed in enumerate(every)]
        best_s, at = min(found, default=(math.inf, 0))
        if best_s >= now_s:
            return
        now_s, deal = best_s, every[at]
        yield deal


def _changes(deal: Deal, stages: int, movable: Collection[str], keeps: int) -> Iterator[Deal]:
    """Yield all assignments that differ from `deal` by an exchange of two relays or a move of one (arguments:
    `bettered`)."""
    there, count = sorted(peer for peer in movable if peer in deal), Counter(deal.values())
    for one, other in combinations(there, 2):
        if deal[one] != deal[other]:
            yield {**deal, one: deal[other], other: deal[one]}
    for peer in there:
        if count[deal[peer]] > keeps:
            yield from ({**deal, peer: stage} for stage in range(1, stages + 1) if stage != deal[peer])
