"""Swarms, links and faults drawn at random: whatever happens, the run ends and every bit is right."""

from __future__ import annotations

import pytest
from trials import Trial

KINDS = [("kill",), ("cut", "kill", "freeze", "slow")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("seed", range(4))
def test_a_few(seed: int, kinds: tuple[str, ...]) -> None:
    Trial(seed, kinds).carry_out()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_many(kinds: tuple[str, ...]) -> None:
    delivered = 0
    for seed in range(100, 300):
        trial = Trial(seed, kinds)
        try:
            trial.carry_out()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}\n{trial.report()}") from error
        delivered += sum(1 for fault in trial.faults if fault.delivered)
    assert delivered > 200
