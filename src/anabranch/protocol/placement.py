"""Which stage a joiner is given: GWTF's utilisation rule (arXiv 2509.21221, joining of nodes).

The bottleneck is the stage with the highest utilisation, flow over capacity. Every microbatch passes every
stage, so that is the stage that can pass the fewest per second; there one more replica raises the throughput
of the whole. Before all others comes a stage that one death would leave without anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from anabranch.protocol.records import Member

#: A backward takes about twice a forward, where a member did not measure it.
BACKWARD_OF_FORWARD = 2.0
#: No machine is quicker than this per block (s): a bound on what can be claimed.
LEAST_S = 1e-6


def pass_s(member: Member, blocks: int) -> float:
    """Seconds that one microbatch, forward and backward, takes of a member at a stage of so many blocks."""
    backward_s = member.backward_s if member.backward_s > 0.0 else BACKWARD_OF_FORWARD * member.forward_s
    return max(member.forward_s + backward_s, LEAST_S) * blocks


def first_passes(member: Member, blocks: int) -> tuple[float, float]:
    """Seconds of a forward and of an input gradient at a stage of so many blocks, by what a member measured
    when it joined. A weight gradient takes about as long as a forward, where both are one measurement."""
    gradient_s = member.backward_s - member.forward_s if member.backward_s > 0.0 else member.forward_s
    return blocks * member.forward_s, blocks * max(0.0, gradient_s)


def stage_rates(members: Iterable[Member], blocks: Sequence[int]) -> list[float]:
    """Microbatches per second that each relay stage can pass; `blocks` of stages 1 to S.

    Bounded by compute, and by room: a microbatch keeps its place at a stage until its gradient is back from
    all later stages (their seconds, without the links'), so a capacity of c passes c per that time.
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
        room = sum(member.capacity for member in stage) / sum(means[position:])
        rates.append(min(compute, room))
    return rates


def neediest_stage(members: Iterable[Member], blocks: Sequence[int]) -> int:
    """The stage (1 to S) that the next joiner is given."""
    known = list(members)
    rates = stage_rates(known, blocks)
    counts = [sum(member.stage == stage for member in known) for stage in range(1, len(blocks) + 1)]
    order = [(min(counts[k], 2), rates[k], k + 1) for k in range(len(blocks))]
    return min(order)[2]
