"""Reduces whose parts are summed by peers of adjacent stages, too, and what may happen to these."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Attempt, ReducePart
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of
from support.swarms.fault_points import Fault

Effect = Callable[[World, Node], None]
Whom = tuple[str, ...]
SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1))
STEPS = 12


class Swarm:
    """Two stages of two and two data nodes, where every reduce is spread by chance. helped: (stage,
    iteration, helper) of the reduces that somebody helped with."""

    def __init__(self, seed: int) -> None:
        kept = {"min_replicas": 2, "snapshot_every": 2}
        settings = Settings(f"helpers {seed}", 1, 2, 4, STEPS, spread="always", **kept)  # type: ignore[arg-type]
        machines = [Machine(f"d{n}", 0) for n in range(2)]
        machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2)]
        self.world = counting_world(settings, machines, seed, SLOW)
        self.helped: set[tuple[int, int, str]] = set()
        Invariants(self.world)
        self.world.watchers.append(self._watch)

    def _watch(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and isinstance(event.task, tasks.SumPart):
            for stage, help in node.peer.helping._helps.items():
                if help.reduced:
                    self.helped.add((stage, help.message.fence.t, node.id))

    def run(self, until_s: float = 300.0) -> None:
        self.world.run(until_s)
        assert not wrong_states(self.world)


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_steps_are_right_whoever_sums(seed: int) -> None:
    swarm = Swarm(seed)
    swarm.run()
    assert swarm.world.history().t == STEPS
    assert len({stage for stage, _, _ in swarm.helped}) >= 2
    assert len(swarm.helped) >= STEPS


def struck(swarm: Swarm, effect: Effect, count: int = 3, whom: Whom = ()) -> list[Fault]:
    """Something happens to a peer while it adds up for others: the `count`-th time that one does. whom: to
    one of these (else to any but the leader)."""
    world, seen = swarm.world, set[tuple[str, int]]()

    def helps(node: Node, event: ev.Event) -> bool:
        running = node.peer.ctx.tasks.running
        if running is None or not isinstance(running.task, tasks.SumPart):
            return False
        if not node.peer.helping._helps:
            return False
        seen.add((node.id, running.task.t))
        return len(seen) >= count

    peers = whom or tuple(peer for peer in world.nodes if peer != "d0")
    return [Fault(world, peers, helps, effect)]


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_helper_that_dies_is_done_without(seed: int) -> None:
    swarm = Swarm(10 + seed)
    hit = struck(swarm, lambda world, node: world.crash(node.id))
    swarm.run()
    assert all(fault.delivered for fault in hit)
    assert swarm.world.history().t == STEPS


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_a_helper_that_freezes_is_done_without(seed: int) -> None:
    swarm = Swarm(20 + seed)
    hit = struck(swarm, lambda world, node: world.freeze(node.id, 30.0))
    swarm.run(600.0)
    assert all(fault.delivered for fault in hit)
    assert swarm.world.history().t == STEPS


def test_members_that_a_helper_cannot_hear_reduce_without_it() -> None:
    """A relay of stage 2 hears nothing of stage 1 any more: what stands still is tried again evenly."""
    swarm = Swarm(30)
    world = swarm.world

    def deaf(world: World, node: Node) -> None:
        for member in ("r1.0", "r1.1"):
            if member != node.id:
                world.lose(member, node.id, math.inf)

    hit = struck(swarm, deaf, whom=("r2.0", "r2.1"))
    swarm.run(900.0)
    assert all(fault.delivered for fault in hit)
    assert world.history().t == STEPS


def test_a_link_that_breaks_between_member_and_helper_loses_nothing() -> None:
    swarm = Swarm(40)
    cuts = 0

    def cut(node: Node, event: ev.Event) -> None:
        nonlocal cuts
        if isinstance(event, ev.Finished) and isinstance(event.task, tasks.Freeze) and cuts < 20:
            reduce = node.peer.replica.all_reduce.reduce
            for helper in reduce.message.helpers if reduce else ():
                cuts += swarm.world.cut(node.id, helper)

    swarm.world.watchers.append(cut)
    swarm.run()
    assert cuts >= 5
    assert swarm.world.history().t == STEPS


@pytest.mark.parametrize("spread", ["links", "always"])
def test_a_member_without_a_unit_sends_nothing_and_takes_the_step(spread: str) -> None:
    """More replicas than microbatches: who owns none gets the gradient from those who do."""
    settings = Settings("idle", 1, 1, 2, STEPS, min_replicas=4, policy="static", spread=spread)
    machines = [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(4))]
    world = counting_world(settings, machines, 50, SLOW)
    Invariants(world)
    sent: set[tuple[str, int]] = set()
    owners: dict[int, set[str]] = {}

    def watch(node: Node, event: ev.Event) -> None:
        if not isinstance(event, ev.Received):
            return
        message = event.message
        if isinstance(message, Attempt) and message.stage == 1:
            owners[message.fence.t] = {message.members[owner] for owner in message.owners}
        if isinstance(message, ReducePart) and message.stage == 1:
            sent.add((event.peer, message.fence.t))

    world.watchers.append(watch)
    world.run(300.0)
    assert not wrong_states(world)
    assert world.history().t == STEPS
    assert sent and all(peer in owners[t] for peer, t in sent)
