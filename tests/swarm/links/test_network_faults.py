"""Trouble on the wires without a crash: what is lost, late, twice or out of order harms no step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from anabranch.protocol.context.clock import OwnTime
from anabranch.sim.checks.invariants import Invariants
from support.swarms.faulty_network import carry_on, swarm
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world

PAIRS = [("r1.0", "r2.0"), ("r2.0", "r1.0"), ("d0", "r1.1"), ("r2.1", "d0"), ("r1.0", "r1.1"), ("d1", "d0")]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_one_way_loss(number: int) -> None:
    world = swarm(number)
    seconds = (2.0, 30.0)[number % 2]
    world.clock.at(5.0, lambda: world.lose(*PAIRS[number], seconds))
    carry_on(world, 5.0 + seconds)


SIDES = [["r1.1"], ["r1.1", "r2.1"], ["d1", "r1.0", "r2.0"], ["r2.0", "r2.1"], ["d1"]]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("number", range(len(SIDES)))
def test_a_partition_heals_and_there_is_one_history(number: int) -> None:
    world = swarm(number)
    seconds = (40.0, 3.0)[number % 2]
    world.clock.at(5.0, lambda: world.partition(SIDES[number], seconds))
    carry_on(world, 5.0 + seconds, 90.0)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("policy", ["greedy", "auction"])
def test_links_at_a_hundredth_of_their_speed(policy: str) -> None:
    world = swarm(1, policy)
    for one, other in (("d0", "r1.0"), ("r1.1", "r2.0"), ("r2.1", "d0")):
        world.clock.at(4.0, lambda one=one, other=other: world.crawl(one, other, 100.0, 40.0))  # type: ignore[misc]
    carry_on(world, 44.0)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("policy", ["greedy", "auction"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_messages_twice_and_in_any_order(seed: int, policy: str) -> None:
    world = swarm(seed, policy)
    world.clock.at(2.0, lambda: world.disorder(0.3, 0.3, 30.0))
    carry_on(world, 32.0)


@pytest.mark.parametrize(
    ("peer", "seconds"), [("d0", 3600.0), ("d0", -5.0), ("d1", 5.0), ("r1.0", 5.0), ("r1.0", -3600.0)]
)
def test_a_clock_that_jumps_makes_nobody_suspect_anybody(peer: str, seconds: float) -> None:
    world = swarm(2)
    world.clock.at(6.0, lambda: world.nodes[peer].jump_clock(seconds))
    world.clock.at(9.0, lambda: world.nodes[peer].jump_clock(-seconds))
    carry_on(world, 10.0, 20.0)
    assert world.history().removals == 0
    assert not [f for _, _, kind, f in world.notes if kind == "suspected"]


def test_a_machine_that_vanishes_without_a_word() -> None:
    world = swarm(3)
    world.clock.at(6.0, lambda: world.vanish("r1.1"))
    carry_on(world, 6.0)
    assert world.history().removals == 1


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("number", range(3))
def test_torch_numerics_under_trouble(number: int) -> None:
    run = small_run(minimum=2, steps=6)
    world = training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 2, seed=number, capacity=3)
    strikes: list[Callable[[], None]] = [
        lambda: world.lose("r2.0", "d0", 15.0),
        lambda: world.partition(["r1.1", "r2.1"], 15.0),
        lambda: world.disorder(0.2, 0.2, 10.0),
    ]
    world.clock.at(1.5, strikes[number])
    Invariants(world)
    world.run(until_s=600)
    check_equal(world, run)


# --- own time ------------------------------------------------------------------------------------------


def test_own_time_leaves_out_sleep_and_jumps() -> None:
    own = OwnTime(1.0)
    assert own.take(100.0) == 100.0
    assert own.awaits(100.5) == 100.5
    assert own.take(100.6) == 100.6  # a little late is awake
    own.awaits(101.0)
    assert own.take(161.0) == 101.0  # slept for a minute
    assert own.awaits(102.0) == 162.0
    assert own.take(12.0) == 101.0  # set back
    assert own.awaits(102.0) == 13.0
    assert own.take(12.5) == 101.5


def test_own_time_never_falls_and_keeps_pace() -> None:
    draw, own, clock, true, before = random.Random(4), OwnTime(1.0), 0.0, 0.0, 0.0
    for _ in range(2000):
        pause = draw.uniform(0.0, 1.0)
        true, clock = true + pause, clock + pause
        if draw.random() < 0.05:
            clock += draw.choice([-50.0, -0.5, 70.0])
        now = own.take(clock)
        assert before <= now <= before + 2.0
        before = now
        own.awaits(now + 1.0)
    assert true * 0.85 < before < true * 1.1
