"""Slots of whole-model islands that are claimed before their data node has answered (decision 0058), and then
do not count: their contributions leave the sum again (I1)."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Recount
from anabranch.protocol.messages import AnyMessage
from anabranch.protocol.rounds.plan import counted
from anabranch.sim.kernel.simulated_peer import Node
from swarm.islands.test_rounds import check_replayed, island_run, world_of

#: Round in which the losses of a machine are lost.
LOST = 5


def test_a_slot_whose_loss_never_came_leaves_the_sum_again() -> None:
    """Its machine added and claimed it, and its data node does not get the loss in time: the round ends
    without the slot."""
    run = island_run()
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
