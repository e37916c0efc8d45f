"""The stage that a joiner is given, against trying every stage."""

from __future__ import annotations

import random
from statistics import fmean

import msgspec
import pytest

from anabranch.protocol.placement import first_passes, neediest_stage, pass_s, stage_rates
from anabranch.protocol.records import Member


def member(stage: int, forward_s: float, capacity: int = 64, backward_s: float = 0.0) -> Member:
    return Member(
        f"{stage} {forward_s} {capacity}",
        stage,
        1,
        "class",
        capacity,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def test_a_stage_that_one_death_would_end_comes_first() -> None:
    members = [member(1, 0.01), member(1, 0.01), member(2, 1e-4), member(3, 0.01), member(3, 0.01)]
    assert neediest_stage(members, (1, 1, 1)) == 2
    assert neediest_stage([m for m in members if m.stage != 3], (1, 1, 1)) == 3


def test_the_bottleneck_counts_its_blocks_its_backward_and_its_room() -> None:
    even = [member(stage, 0.01) for stage in (1, 1, 2, 2)]
    assert neediest_stage(even, (1, 3)) == 2
    assert neediest_stage([*even[:2], member(2, 0.01, backward_s=0.2), even[3]], (1, 1)) == 2
    tight = [member(1, 0.01), member(1, 0.01), member(2, 0.01, capacity=1), member(2, 0.01, capacity=1)]
    assert stage_rates(tight, (1, 1))[1] == pytest.approx(2.0 / pass_s(tight[0], 1))
    # One place each at the stage before them, for as long as both stages take, is less than that.
    assert neediest_stage([msgspec.structs.replace(m, stage=3 - m.stage) for m in tight], (1, 1)) == 1


def test_what_a_joiner_measured_of_a_block_is_told_of_a_stage() -> None:
    """Before it has worked; the backward that was measured has the weight gradient, too."""
    assert first_passes(member(1, 0.01, backward_s=0.025), 4) == pytest.approx((0.04, 0.06))
    assert first_passes(member(1, 0.01), 4) == pytest.approx((0.04, 0.04))


def test_nearly_as_good_as_trying_every_stage() -> None:
    """Mean regret of the throughput, over what the best stage for this joiner would give: at most 3 %."""
    dice = random.Random(3)
    regrets = []
    for _ in range(400):
        stages = dice.randint(2, 11)
        blocks = [dice.randint(1, 4) for _ in range(stages)]
        members = [
            member(stage, dice.uniform(0.005, 0.05), dice.randint(2, 20))
            for stage in range(1, stages + 1)
            for _ in range(dice.randint(2, 8))
        ]
        joiner = member(1, dice.uniform(0.005, 0.05), dice.randint(2, 20))

        def throughput(
            stage: int, members: list[Member] = members, joiner: Member = joiner, blocks: list[int] = blocks
        ) -> float:
            return min(stage_rates([*members, msgspec.structs.replace(joiner, stage=stage)], blocks))

        best = max(throughput(stage) for stage in range(1, stages + 1))
        regrets.append(1.0 - throughput(neediest_stage(members, blocks)) / best)
    assert fmean(regrets) <= 0.03
    assert sum(regret <= 1e-9 for regret in regrets) >= 0.9 * len(regrets)


def test_absurd_speeds_are_bounded() -> None:
    assert neediest_stage([member(1, 0.0), member(1, 0.0), member(2, 0.01), member(2, 0.01)], (1, 1)) == 2
