"""Honest replicas that apply steps late (`protocol.coordinator.state_agreement`)."""

from __future__ import annotations

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import go_on, removed


def test_a_replica_that_applies_every_other_step_late_keeps_its_seat() -> None:
    """Its steps stalled once or twice each, as the release waits for it (with delay = 1; else the reduce
    does). After four such steps it lost its seat, and would have been banned the next time."""
    settings = Settings("late", 1, 1, 6, 16, min_replicas=2, delay=Delay(1))
    machines = [Machine(name, int(name[0] == "r")) for name in ("d0", "r1.0", "r1.1")]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    task_s = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        20.0
        if node.id == "r1.1" and isinstance(task, tasks.Apply) and task.t > 3 and task.t % 2 == 0
        else 20.0 * task_s(node, task)
    )
    assert go_on(world, 900.0) == 16
    assert removed(world) == {} and wrong_states(world) == {}
