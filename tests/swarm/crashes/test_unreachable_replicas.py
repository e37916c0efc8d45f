"""Replicas of a stage that cannot reach each other, while they reach everybody else: the coordinator sums the
parts of their reduce, and nobody loses its seat."""

from __future__ import annotations

import math

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault

SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1))


def swarm(replicas: int, end_s: float, seed: int = 0) -> World:
    # Each is to own a unit: who owns none has nothing to tell the others of its stage.
    policy = "static" if replicas > 2 else "greedy"
    settings = Settings(f"parted {seed}", 1, 2, 4, 10_000, 0, 0, 0, replicas, policy, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(replicas)]
    world = counting_world(settings, machines, seed, SLOW)
    Invariants(world)
    world.clock.at(end_s, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    return world


def part(world: World, pairs: list[tuple[str, str]], until_s: float) -> None:
    """Nothing passes between the two of each pair; their links stay open."""
    world.trouble.swallow([(a, b) for pair in pairs for a, b in (pair, pair[::-1])], until_s)


def steps_after(world: World, after_s: float) -> int:
    return sum(kind == "step" and peer == "d0" and at > after_s for at, peer, kind, _ in world.notes)


def removed(world: World) -> dict[str, str]:
    notes = [f for _, peer, kind, f in world.notes if kind == "peer_removed" and peer == "d0"]
    return {str(f["subject"]): str(f["reason"]) for f in notes}


@pytest.mark.parametrize("replicas", first_of([2, 3]))
def test_two_that_cannot_reach_each_other_keep_their_seats(replicas: int) -> None:
    world = swarm(replicas, 60.0)
    world.clock.at(5.0, lambda: part(world, [("r1.0", "r1.1")], math.inf))
    world.run(300.0)
    assert not wrong_states(world)
    assert removed(world) == {}
    assert steps_after(world, 40.0) >= 3


def test_one_direction_is_enough() -> None:
    world = swarm(2, 60.0, seed=1)
    world.clock.at(5.0, lambda: world.lose("r2.0", "r2.1"))
    world.run(300.0)
    assert not wrong_states(world)
    assert removed(world) == {}
    assert steps_after(world, 40.0) >= 3


@pytest.mark.costly
def test_one_is_cut_off_from_two() -> None:
    world = swarm(3, 60.0)
    world.clock.at(5.0, lambda: part(world, [("r1.0", "r1.1"), ("r1.0", "r1.2")], math.inf))
    world.run(300.0)
    assert not wrong_states(world)
    assert removed(world) == {}
    assert steps_after(world, 40.0) >= 3


def test_it_happens_in_the_middle_of_a_reduce() -> None:
    """Each has the other's part, and neither hears the sums."""
    world = swarm(2, 60.0)

    def parted(world: World, node: Node) -> None:
        part(world, [("r1.0", "r1.1")], math.inf)

    fault = Fault(world, ("r1.0", "r1.1"), faults.ended(tasks.SumPart, 3), parted)
    world.run(300.0)
    assert fault.delivered
    assert not wrong_states(world)
    assert removed(world) == {}
    assert steps_after(world, 40.0) >= 3
