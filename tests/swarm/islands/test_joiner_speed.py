"""Speed at which a machine is believed to fill its first slot: times that it measured when it joined lack the
optimizer's steps, and what else the machine does."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Forward, Task
from anabranch.protocol.rounds.plan import counted
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.torch_world import node_member
from swarm.islands.test_rounds import check_replayed, island_run, world_of

#: Iteration during which the stranger joins.
JOINS = 4


def world_with_joiner(late: str, slowness: float) -> World:
    """Three machines for four slots, whose inner steps take many times as long as they measured when they
    joined, and a fourth that joins during round JOINS and takes `slowness` times as long as these."""
    run = island_run(slots=4, steps=4, late=late)
    run = replace(run, run=replace(run.run, steps=18), batch=replace(run.batch, microbatches=4))
    world = world_of(run, relays=3)
    plain = world.task_s
    joined: list[str] = []

    def by_steps(node: Node, task: Task) -> float:
        return plain(node, task) * (max(1, task.steps) if isinstance(task, Forward) else 1)

    def join(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and node.peer.committed == JOINS - 1 and not joined:
            joined.append("r1.9")
            stranger = node_member("r1.9", 1)
            stranger = msgspec.structs.replace(stranger, forward_s=stranger.forward_s * slowness)
            world.add(stranger, "d0", world.clock.now, slowness=slowness)

    world.task_s = by_steps  # type: ignore[method-assign]
    world.bookkeepers.append(join)
    for node in world.nodes.values():
        node.slowness = 1.0
    world.run(until_s=4000)
    check_replayed(run, world)
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("late", "slowness", "least", "most"), [("drop", 1.0, 3, 5), ("wait", 2.0, 2, 3)])
def test_a_joiner_gets_as_many_steps_as_others_of_its_speed(
    late: str, slowness: float, least: int, most: int
) -> None:
    history = world_with_joiner(late, slowness).history()
    t = next(t for t, plan in sorted(history.plans.items()) if any(slot.peer == "r1.9" for slot in plan))
    [own] = [k for k, slot in enumerate(history.plans[t]) if slot.peer == "r1.9"]
    assert JOINS < t < JOINS + 3
    assert least <= history.plans[t][own].steps <= most
    assert own in counted(history.commits[t - 1].stages[1].owners)
