"""Everything dies; the run is taken up from its log and its newest checkpoint, and nobody can tell."""

from __future__ import annotations

import random

import msgspec
import pytest

from anabranch.config import RunConfig
from anabranch.protocol.consensus.log_replay import fold
from anabranch.protocol.log.records import Member
from anabranch.protocol.peer.bootstrap import SavedCheckpoint, lead
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.torch_world import node_member
from anabranch.train.stage.protocol_inputs import schedule_of
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world


def power_cut(world: World, committed: int, events: int) -> None:
    """Kill every process so many events after so many commits are in the log."""
    left = [events]

    def watch(node: Node, event: object) -> None:
        if sum(b'"kind":"commit"' in line for line in world.log) < committed:
            return
        left[0] -= 1
        if left[0] < 0:
            for peer, other in world.nodes.items():
                if other.alive:
                    world.crash(peer)

    world.watchers.append(watch)


def first_life(run: RunConfig, seed: int, committed: int, events: int) -> World:
    world = training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 2, seed, capacity=2)
    power_cut(world, committed, events)
    world.run(until_s=600)
    return world


def next_life(run: RunConfig, former: World, incarnation: int) -> World:
    """New processes with the log and the checkpoints of the former ones."""
    batches = MadeUpBatches(run)
    world = World(incarnation, former.settings, former.genesis, former.make_computer)
    lines = former.nodes["d0"].disk.lines
    world.log, world.checkpoints = list(lines), dict(former.checkpoints)
    schedule = schedule_of(run, lambda t: f"batch {t}", batches.tokens_per_iteration)
    saved = None
    if world.checkpoints:
        t = max(world.checkpoints)
        saved = SavedCheckpoint(t, tuple(world.checkpoints[t][stage][1] for stage in range(3)))
    first = msgspec.structs.replace(node_member("d0", 0, 2), incarnation=incarnation)
    disk = former.nodes["d0"].disk
    peer = lead(first, former.settings, schedule, former.genesis, disk.kept(incarnation), saved)
    world.add_leader(peer, first, disk)
    for peer, stage in (("d1", 0), ("r1.0", 1), ("r1.1", 1), ("r2.0", 2), ("r2.1", 2)):
        member = msgspec.structs.replace(node_member(peer, stage, 2), incarnation=incarnation)
        world.add(member, "d0", at=world.random.uniform(0.0, 0.5))
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("checkpoint_every", [0, 1, 2])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_taken_up_again(seed: int, checkpoint_every: int) -> None:
    run = small_run(minimum=2, steps=5, checkpoint_every=checkpoint_every, evaluate_every=1)
    draw = random.Random(seed * 10 + checkpoint_every)
    former = first_life(run, seed, committed=draw.randint(1, 4), events=draw.randint(0, 150))
    committed = fold(former.nodes["d0"].disk.lines).t
    assert 1 <= committed < 5
    world = next_life(run, former, incarnation=2)
    Invariants(world)
    world.run(until_s=600)
    history = check_equal(world, run)
    newest = max(former.checkpoints, default=0)
    assert history.rolled_back == committed - newest
    assert history.term == 2


def test_taken_up_twice() -> None:
    run = small_run(minimum=2, steps=5, checkpoint_every=2)
    world = first_life(run, 4, committed=3, events=60)
    second = next_life(run, world, incarnation=2)
    power_cut(second, committed=5, events=20)
    second.run(until_s=600)
    assert second.history().t < 5
    third = next_life(run, second, incarnation=3)
    third.run(until_s=600)
    assert check_equal(third, run).term == 3


def test_lost_before_the_first_step() -> None:
    run = small_run(minimum=2, steps=2)
    world = first_life(run, 5, committed=0, events=90)
    assert world.history().t == 0
    again = next_life(run, world, incarnation=2)
    again.run(until_s=600)
    assert check_equal(again, run).rolled_back == 0


@pytest.mark.parametrize("late_s", [0.0, pytest.param(30.0, marks=pytest.mark.soak)])
def test_three_voters_come_back(late_s: float) -> None:
    """All die at once. The founder is elected when another voter is back, perhaps much later, and takes the
    run up from its checkpoint; the log goes on from what any of them had."""
    run = small_run(minimum=2, steps=6, checkpoint_every=2)
    world = training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 2, 5, voters=3)
    Invariants(world)
    died: list[int] = []

    def strike(node: Node, event: object) -> None:
        if died or len(node.peer.ctx.log.voters) < 3 or node.peer.committed < 3:
            return
        died.append(world.history().t)
        for peer in world.nodes:
            world.crash(peer)
        world.clock.after(1.0, come_back)

    def come_back() -> None:
        for peer, node in list(world.nodes.items()):
            if peer == "d0":
                founder_comes_back(world)
            else:
                member = msgspec.structs.replace(node.member, incarnation=2)
                world.clock.after(late_s + world.random.uniform(0.0, 0.5), lambda m=member: start(m))

    def start(member: Member) -> None:
        world.add(member, "d0", at=world.clock.now)

    world.watchers.append(strike)
    world.run(until_s=900)
    history = check_equal(world, run)
    assert died and history.rolled_back == died[0] - 2 and history.term >= 2
