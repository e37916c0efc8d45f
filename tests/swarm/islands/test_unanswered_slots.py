"""Slots of whole-model islands whose tokens or losses get no answer, as no round trip is waited for (decision
0058): contributions that do not count leave the sum again (I1), and machines that are behind keep seats."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Apply, Forward, Recount, Task
from anabranch.protocol.messages import AnyMessage
from anabranch.protocol.rounds.plan import counted
from anabranch.sim.kernel.simulated_peer import Node
from swarm.islands.test_overdue_slots import removed
from swarm.islands.test_rounds import check_replayed, island_run, world_of

#: Round in which the losses of a machine are lost, or that it cannot open.
LOST = 5


@pytest.mark.costly
@pytest.mark.parametrize("late", ["drop", "carry"])
def test_a_slot_whose_loss_never_came_leaves_the_sum_again(late: str) -> None:
    """Its machine added and claimed it, and its data node does not get the loss in time: the round ends
    without the slot. Where late slots are carried it counts in the next round."""
    run = island_run(late=late)
    world, silent = world_of(run), "r1.1"
    subtracted: list[str | None] = []

    def mouth(message: AnyMessage) -> AnyMessage | None:
        lost = isinstance(message, msg.Forward) and message.train and message.fence.t == LOST
        return None if lost else message

    def watch(node: Node, event: ev.Event) -> None:
        if node.id == silent and isinstance(event, ev.Finished) and isinstance(event.task, Recount):
            subtracted.append(event.result.error)

    world.mouths[silent] = mouth
    world.watchers.append(watch)
    world.run(until_s=2000)
    assert subtracted == [""]
    assert len(counted(world.history().commits[LOST - 1].stages[1].owners)) == 2
    check_replayed(run, world)


def test_a_machine_that_has_not_opened_the_round_keeps_its_seat() -> None:
    """It is heard, and applies the step before for minutes. In a run that waits for late slots its slot goes
    to another machine after half a minute, whether it waits for a credit or was sent at once."""
    run = island_run(late="wait")
    world, behind = world_of(run, relays=4), "r1.1"
    plain = world.task_s

    def task_s(node: Node, task: Task) -> float:
        if isinstance(task, Apply) and task.t == LOST - 1 and node.id == behind:
            return 600.0
        return 20.0 if isinstance(task, Forward) and task.steps else plain(node, task)

    world.task_s = task_s  # type: ignore[method-assign]
    world.run(until_s=5000)
    assert behind in {slot.peer for slot in world.history().plans[LOST]}
    assert not removed(world)
    part = world.history().commits[LOST - 1].stages[1]
    assert behind not in {part.members[owner] for owner in part.owners}
    check_replayed(run, world)
