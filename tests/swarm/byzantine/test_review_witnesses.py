"""Honest relays that take long are not doubted (`protocol.recovery.witnesses`)."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Event
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import go_on, removed, rollbacks

SLOW = tasks.Forward | tasks.InputGradient | tasks.WeightGradient


@pytest.mark.costly
def test_a_new_leader_does_not_take_a_long_step_for_one_that_is_held_up() -> None:
    """It does not know yet how long a step takes: four stalls were over after 75 s, and a relay of another
    stage, which was left with one, moved to the stage with one replica."""
    settings = Settings("long", 1, 2, 2, 5, min_replicas=1, snapshot_every=2, voters=3)
    stages = {"d0": 0, "d1": 0, "a": 1, "b0": 2, "b1": 2}
    world = counting_world(settings, [Machine(name, stage) for name, stage in stages.items()], 1)
    Invariants(world)
    task_s, died = world.task_s, list[float]()
    world.task_s = lambda node, task: task_s(node, task) * (  # type: ignore[method-assign]
        3000.0 if isinstance(task, SLOW) and task.t > 2 else 1.0
    )

    def watch(node: Node, event: Event) -> None:
        if not died and world.log and world.history().t == 2 and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.crash("d0")

    world.watchers.append(watch)
    assert go_on(world, 5000.0) == 5 and died and wrong_states(world) == {}
    assert removed(world).keys() <= {"d0"} and rollbacks(world) == []


@pytest.mark.costly
def test_after_a_change_of_leader_nobody_is_doubted_since_another_one_applies_late() -> None:
    """The new leader does not know how long a step takes. After 50 s it moved a relay there, and after 50 s
    more the replica that had the state lost its seat: it was busy with microbatches of 20 s, and gave it
    late."""
    settings = Settings("late", 1, 2, 2, 8, min_replicas=1, snapshot_every=2, voters=3)
    stages = {"d0": 0, "d1": 0, "d2": 0, "a0": 1, "late": 1, "b0": 2, "b1": 2, "b2": 2}
    world = counting_world(settings, [Machine(name, stage) for name, stage in stages.items()], 1)
    Invariants(world)
    task_s, died, late = world.task_s, list[float](), list[float]()

    def slow_s(node: Node, task: tasks.Task) -> float:
        if node.id == "late" and isinstance(task, tasks.Apply) and task.t == 4:
            late.append(world.clock.now)
            return 200.0
        return task_s(node, task) * (1000.0 if isinstance(task, SLOW) else 1.0)

    def watch(node: Node, event: Event) -> None:
        if not died and world.log and world.history().t == 4 and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.crash("d0")

    world.task_s = slow_s  # type: ignore[method-assign]
    world.watchers.append(watch)
    assert go_on(world, 5000.0) == 8 and died and late and wrong_states(world) == {}
    assert removed(world).keys() == {"d0"} and rollbacks(world) == []


def test_a_witness_gets_the_state_from_the_one_that_has_it() -> None:
    """A replica, one of two, is busy with a step for long. The witness asked that one first, for its newest
    state; and that it then had the state of the other one did not count, as that was not agreed: the other
    one lost its seat."""
    settings = Settings("older", 1, 2, 6, 30, min_replicas=1, snapshot_every=2)
    stages = {"d0": 0, "a0": 1, "a1": 1, "b0": 2, "b1": 2, "b2": 2}
    world = counting_world(settings, [Machine(name, stage) for name, stage in stages.items()], 1)
    Invariants(world)
    task_s, busy = world.task_s, list[float]()

    def slow_s(node: Node, task: tasks.Task) -> float:
        if node.id == "a0" and isinstance(task, tasks.Apply) and task.t == 6:
            busy.append(world.clock.now)
            return 150.0
        return task_s(node, task)

    world.task_s = slow_s  # type: ignore[method-assign]
    assert go_on(world, 900.0) == 30 and busy and wrong_states(world) == {}
    out = {peer: why for peer, why in removed(world).items() if not why.startswith("moves to")}
    assert out.keys() <= {"a0"} and rollbacks(world) == []
