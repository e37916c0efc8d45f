"""A step does without a member that is silent, where it can; where it cannot, the verdict comes soon."""

from __future__ import annotations

from itertools import pairwise

import pytest

from anabranch.protocol.failure_detection.verdict import Verdict
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of
from support.swarms.faulty_network import carry_on
from support.swarms.observations import commit_times, verdicts

#: Whoever is silent is suspected after so long (s), or if it is silent to all; what it held is done again
#: within so long.
PATIENCE_S, TO_ALL_S, AGAIN_S = 4.0, 2.5, 1.5
FREEZES_AT = 2.0


def swarm(replicas: int, seed: int, task_s: float = 0.06) -> World:
    """Two data nodes, two stages; a step takes less than a second, with tasks of that length."""
    settings = Settings("run", 1, 2, 6, 1_000_000, min_replicas=2)
    machines = [Machine(f"d{n}", 0) for n in range(2)] + [
        Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)
    ]
    slow = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), task_s))
    return counting_world(settings, machines, seed, slow)


def frozen(
    replicas: int, seconds: float, seed: int, peer: str = "r1.1", task_s: float = 0.06
) -> tuple[World, list[float]]:
    """A swarm in which one peer is frozen for a while; when its steps were committed."""
    world = swarm(replicas, seed, task_s)
    Invariants(world)
    world.clock.at(FREEZES_AT, lambda: world.freeze(peer, seconds))
    times = commit_times(world)
    while world.clock.now < FREEZES_AT + seconds + 4.0:
        world.clock.step()
    return world, times


def longest_wait(times: list[float]) -> float:
    """Seconds from the freeze to the next commit, or between two later ones."""
    later = [FREEZES_AT, *(time for time in times if time > FREEZES_AT + 0.2)]
    return max(b - a for a, b in pairwise(later))


@pytest.mark.parametrize("seed", first_of(range(2)))
def test_a_stage_of_three_goes_on_without_one_that_is_frozen(seed: int) -> None:
    """It is suspected, not removed; when it wakes it catches up, and has its part in the steps again."""
    world, times = frozen(3, 7.5, seed)
    assert 0.5 * PATIENCE_S < longest_wait(times) < TO_ALL_S + AGAIN_S < PATIENCE_S + 0.1
    assert world.history().removals == 0 and not wrong_states(world)
    assert verdicts(world, "r1.1", Verdict.SUSPECTED) and verdicts(world, "r1.1", Verdict.REFUTED)
    last = world.history().commits[-1]
    assert "r1.1" in last.stages[1].members
    without = [commit for commit in world.history().commits if "r1.1" not in commit.stages[1].members]
    assert len(without) >= 3


@pytest.mark.parametrize(("peer", "seconds"), [("r1.1", PATIENCE_S), ("d1", TO_ALL_S)])
def test_where_two_are_needed_a_frozen_one_goes_as_soon_as_it_is_silent_to_all(
    peer: str, seconds: float
) -> None:
    """A data node, as steps are short; a relay, one of two with its stage's state, after its timeout."""
    world, times = frozen(2, 6.0, 4, peer)
    assert longest_wait(times) < seconds + AGAIN_S
    (removal,) = [f for _, who, kind, f in world.notes if kind == "peer_removed" and who == "d0"]
    assert removal["subject"] == peer and f"silent for {int(seconds)}" in str(removal["reason"])
    assert not wrong_states(world)


@pytest.mark.parametrize("peer", ["r1.1", "d1"])
@pytest.mark.parametrize(("seconds", "removals"), [(3.0, 0), (9.0, 1)])
def test_where_steps_are_long_a_member_that_is_needed_is_given_its_timeout(
    peer: str, seconds: float, removals: int
) -> None:
    """A machine that stutters for three seconds keeps its seat."""
    world, _ = frozen(2, seconds, 4, peer, task_s=0.3)
    removed = [f for _, who, kind, f in world.notes if kind == "peer_removed" and who == "d0"]
    assert len(removed) == removals and all("silent for 4" in str(f["reason"]) for f in removed)
    assert verdicts(world, peer, Verdict.SUSPECTED) and not wrong_states(world)


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_link_that_is_silent_costs_nobody_a_suspicion_before_the_timeout(seed: int) -> None:
    """The witnesses hear the peer, and say so."""
    world = swarm(2, seed)
    for other in ("d0", "r2.0"):
        world.clock.at(FREEZES_AT, lambda other=other: world.lose("r1.1", other, 3.8))  # type: ignore[misc]
    carry_on(world, FREEZES_AT + 4.0, 10.0)
    assert world.history().removals == 0 and not verdicts(world, "r1.1", Verdict.SUSPECTED)


def test_a_member_that_others_hear_is_neither_left_out_nor_removed() -> None:
    """Nothing that it says reaches the leader for a while: that is the link."""
    world = swarm(3, 5)
    world.clock.at(FREEZES_AT, lambda: world.lose("r1.1", "d0", 9.0))
    carry_on(world, FREEZES_AT + 9.0, 10.0)
    assert world.history().removals == 0
    assert not [f for _, _, kind, f in world.notes if kind == "waiting" and "without" in str(f)]
