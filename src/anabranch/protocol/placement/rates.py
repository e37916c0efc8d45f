"""Estimates from members' own measurements: pass times, rates of stages, sizes of a batch.

Not here: links (`cost_model`) and the choice of a stage (`join_placement`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member

#: Duration of a backward pass in forward passes, for a member that did not measure it (the usual ratio).
BACKWARD_OF_FORWARD = 2.0
#: Bounds (s) of the believed pass time per block, against false reports.
LEAST_S, MOST_S = 1e-6, 1e4
#: Most members for which stages are chosen by links: at this size the choice for one joiner takes the leader
#: a tenth of a second.
SEARCHED = 64


def pass_s(member: Member, blocks: int) -> float:
    """Compute seconds of one microbatch, forward plus backward, through `blocks` blocks at `member`; those of
    one block are taken as at least LEAST_S and at most MOST_S."""
    forward_s = min(member.forward_s, MOST_S) if member.forward_s > 0.0 else 0.0
    backward_s = member.backward_s if member.backward_s > 0.0 else BACKWARD_OF_FORWARD * forward_s
    return min(max(forward_s + backward_s, LEAST_S), MOST_S) * blocks


def first_passes(member: Member, blocks: int) -> tuple[float, float]:
    """Compute seconds (forward pass, input gradient) at a member that has not worked yet, from the
    measurement that it joined with. The measured backward contains the weight gradient, which is assumed to
    take as long as a forward."""
    gradient_s = member.backward_s - member.forward_s if member.backward_s > 0.0 else member.forward_s
    return blocks * member.forward_s, blocks * max(0.0, gradient_s)


def stage_rates(members: Iterable[Member], blocks: Sequence[int]) -> list[float]:
    """Rate of each of the stages 1 to S in microbatches per second, limited by compute and by slots
    (microbatches that a replica can hold at once); links are not considered. 0 for a stage without members.

    A microbatch occupies a slot of a stage until its gradient is back from all later stages: by Little's law
    a stage with c slots passes c microbatches in that time. blocks: number of blocks of stages 1 to S.
    """
    stages: list[list[Member]] = [[] for _ in blocks]
    for member in members:
        if 1 <= member.stage <= len(blocks):
            stages[member.stage - 1].append(member)
    per_block = [fmean(pass_s(m, 1) for m in stage) for stage in stages if stage]
    usual_s = fmean(per_block) if per_block else LEAST_S
    means = [
        fmean(pass_s(m, count) for m in stage) if stage else usual_s * count
        for stage, count in zip(stages, blocks, strict=True)
    ]
    rates = []
    for position, (stage, count) in enumerate(zip(stages, blocks, strict=True)):
        compute = sum(1.0 / pass_s(member, count) for member in stage)
        room = float(sum(member.capacity for member in stage)) / sum(means[position:])
        rates.append(min(compute, room))
    return rates


def stage_counts(members: Iterable[Member], blocks: Sequence[int]) -> list[int]:
    """Number of members of each of the stages 1 to S."""
    found = Counter(member.stage for member in members)
    return [found[stage] for stage in range(1, len(blocks) + 1)]


def with_slots(member: Member, settings: Settings) -> Member:
    """Copy of `member` whose capacity is the number of microbatches that it can hold at once, those included
    whose activations it would recompute."""
    return msgspec.structs.replace(member, capacity=settings.slots(member.stage, member.capacity))


@dataclass(frozen=True)
class Batch:
    """Sizes of an iteration: number of microbatches, and bytes on the wire of an activation, of one block's
    gradient sums and reduced gradient together (`block_bytes`), and of the same for stage 0 (`ends_bytes`; 0:
    not known)."""

    microbatches: int
    activation_bytes: int
    block_bytes: int
    ends_bytes: int = 0


def batch_of(settings: Settings) -> Batch:
    """Sizes of a run's iteration, from its settings."""
    sizes = settings.activation_bytes, settings.block_bytes, settings.ends_bytes
    return Batch(settings.microbatches, *sizes)
