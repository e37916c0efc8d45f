"""Real links break, stall and crawl; a peer that was stopped goes on. The steps stay the reference's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world


def world_of(run: RunConfig, seed: int, capacity: int = 2, times: Model | None = None) -> World:
    batches = MadeUpBatches(run)
    return training_world(run, small_model(run), batches, [2, 2], 2, seed, capacity=capacity, times=times)


CUTS: list[tuple[str, str, Moment]] = [
    ("d0", "r1.0", faults.received(msg.Slots, 1)),
    ("r1.0", "r2.0", faults.received(msg.Forward, 1)),
    ("r1.1", "r2.1", faults.received(msg.Backward, 2)),
    ("r1.0", "r1.1", faults.received(msg.Attempt, 2)),
    ("r2.0", "r2.1", faults.ended(tasks.SumPart, 1)),
    ("r2.0", "d0", faults.ended(tasks.Assemble, 2)),
    ("r1.1", "d0", faults.chosen(1)),
]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        pytest.param(number, seconds, marks=pytest.mark.soak if (number + turn) % 2 else ())
        for number in range(len(CUTS))
        for turn, seconds in enumerate((0.0, 2.0))
    ],
)
def test_a_link_that_breaks_and_comes_back_costs_no_member(number: int, seconds: float) -> None:
    one, other, moment = CUTS[number]
    run = small_run(minimum=2, steps=3)
    world = world_of(run, seed=number)

    def cut(world: World, node: Node) -> None:
        assert world.cut(one, other, seconds)

    fault = Fault(world, (one, other), moment, cut)
    Invariants(world)
    world.run(until_s=600)
    check_equal(world, run)
    assert fault.delivered


def test_a_frozen_peer_is_worked_around_and_wakes_without_harm() -> None:
    for seconds in (2.0, 60.0):
        run = small_run(minimum=2, steps=5)
        world = world_of(run, seed=1)

        def freeze(world: World, node: Node, seconds: float = seconds) -> None:
            world.freeze(node.id, seconds)

        fault = Fault(world, ("r1.1",), faults.added_in_mid_backward(2), freeze)
        Invariants(world)
        world.run(until_s=600)
        history = check_equal(world, run)
        assert fault.delivered
        assert history.removals == (1 if seconds > 20 else 0)


def test_a_peers_own_sleep_is_nobodys_silence() -> None:
    run = small_run(minimum=2, steps=5)
    world = world_of(run, seed=2)
    fault = Fault(world, ("r1.1",), faults.received(msg.Forward, 2), lambda w, n: w.freeze(n.id, 3.9))
    world.run(until_s=600)
    check_equal(world, run)
    assert fault.delivered
    suspicions = [who for _, who, kind, _ in world.notes if kind == "suspected"]
    assert "r1.1" not in suspicions


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("spare", ["never", "links"])
def test_slow_links_make_nobody_compute_twice(spare: str) -> None:
    """A microbatch that takes longer than usual is on its way, not lost (I6), and so is what a line is tried
    with."""
    run = small_run(minimum=2, steps=2)
    run = replace(run, fleet=replace(run.fleet, spare=spare))
    world = world_of(run, seed=3, times=Model(latency_s=(0.2, 0.9), bulk_s=9.0))
    invariants = Invariants(world)
    world.run(until_s=3000)
    check_equal(world, run)
    assert all(len(peers) == 1 for peers in invariants.computed.values())
    assert not [kind for _, _, kind, _ in world.notes if kind in ("repair", "suspected", "double")]


@pytest.mark.parametrize("capacity", first_of([1, 8, 2], 2))
def test_a_slow_peer_slows_and_breaks_nothing(capacity: int) -> None:
    run = small_run(minimum=2, steps=3)
    world = world_of(run, seed=4, capacity=capacity)
    world.nodes["r1.1"].slowness = 40.0
    Invariants(world)
    world.run(until_s=3000)
    history = check_equal(world, run)
    assert history.removals == 0


def test_forwards_lost_with_a_link_did_not_use_their_slots() -> None:
    """The only way on breaks again and again; every slot that its victims held is there again."""
    run = small_run(stages=1, minimum=1, steps=3, evaluate_every=0)
    batches = MadeUpBatches(run)
    world = training_world(run, small_model(run), batches, [1], 1, seed=5, capacity=2)
    cuts = []

    def cut(node: Node, event: object) -> None:
        iteration = node.peer.iteration
        if node.id != "d0" or iteration is None or len(cuts) >= 12:
            return
        sent = sum(credit.used for credit in iteration.sender.credits.values())
        if sent > _received(world, iteration.t) and world.cut("d0", "r1.0"):
            cuts.append(world.clock.now)

    world.watchers.append(cut)
    world.run(until_s=2000)
    check_equal(world, run)
    assert len(cuts) == 12


def _received(world: World, t: int) -> int:
    iteration = world.nodes["r1.0"].peer.iteration
    return len(iteration.units) if iteration is not None and iteration.t == t else 99
