"""Swarms, links and faults drawn at random: the run ends, and every bit is right (I3, I4)."""

from __future__ import annotations

import pytest

from anabranch.flow.graph.problem import Return
from support.grids import every_value
from support.swarms.crash_trials import Trial
from support.swarms.routing_trials import COMBINATIONS, RoutedTrial

KINDS = [("kill",), ("cut", "kill", "freeze", "slow")]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("seed", "kinds"), every_value(range(2), KINDS))
def test_a_few(seed: int, kinds: tuple[str, ...]) -> None:
    Trial(seed, kinds).carry_out()


def test_an_ask_whose_slot_another_took() -> None:
    Trial(149, ("kill",)).carry_out()


def test_a_step_is_taken_before_a_snapshot_that_was_asked_for() -> None:
    Trial(258, ("kill",)).carry_out()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_many(kinds: tuple[str, ...]) -> None:
    delivered = 0
    for seed in (2, 3, *range(100, 300)):
        trial = Trial(seed, kinds)
        try:
            trial.carry_out()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}\n{trial.report()}") from error
        delivered += sum(1 for fault in trial.faults if fault.delivered)
    assert delivered > 200


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("seed", "policy", "returns"),
    [
        pytest.param(14, "static", "own", marks=pytest.mark.soak),
        (17, "auction", "any"),
        (10, "auction", "any"),
        pytest.param(102, "greedy", "any", marks=pytest.mark.soak),
        (111, "auction", "any"),
        (2005, "gwtf", "own"),
        pytest.param(2003, "gwtf", "any", marks=pytest.mark.soak),
        (2001, "swarm", "any"),
    ],
)
def test_a_few_that_only_count(seed: int, policy: str, returns: Return) -> None:
    RoutedTrial(seed, policy, returns).carry_out()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("policy", "returns"), COMBINATIONS)
def test_many_that_only_count(policy: str, returns: Return) -> None:
    struck = 0
    for seed in range(1000, 1200):
        trial = RoutedTrial(seed, policy, returns)
        try:
            trial.carry_out()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}\n{trial.report()}") from error
        struck += len(trial.faults)
    assert struck > 200
