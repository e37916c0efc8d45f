"""Relays that give false gradients of microbatches that others have by then, again and again: the step is
neither held up nor skipped, and nobody else is blamed."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from swarm.byzantine.test_review_overflows import skips
from swarm.byzantine.test_review_stalls import go_on, overflowing, removed, swarm

STEPS = 12
#: Payload that overflows where it is used, and one that no task can use.
FALSE, BROKEN = 666, (1, 2)
#: Times that a guest sends each false gradient, and seconds between two of them.
TIMES, EVERY_S = 100, 0.1


def giving(world: World, guests: set[str], payload: Payload) -> list[int]:
    """Let the guests compute nothing, and give `payload` again and again as the gradient of each microbatch
    that the data node sent them from the third step on. Returns the indices of those sent, as they are."""
    carry, sent = world.carry, list[int]()

    def give(guest: Node, fence: msg.Fence, index: int, times: int) -> None:
        iteration = guest.peer.iteration
        if not times or iteration is None or iteration.t != fence.t:
            return
        said = msg.Backward(guest.peer.ctx.fence(fence.t, fence.base), index)
        sent.append(index)
        carry(guest, "d0", msg.encode(said), payload)
        world.clock.after(EVERY_S, lambda: give(guest, fence, index, times - 1))

    def on_its_way(sender: Node, peer: str, data: bytes, tensor: Payload | None) -> None:
        said = msg.decode(data)
        if isinstance(said, msg.Forward | msg.Backward) and said.fence.t >= 3:
            if sender.id in guests:
                return
            if peer in guests and isinstance(said, msg.Forward) and said.train:
                give(world.nodes[peer], said.fence, said.index, TIMES)
        carry(sender, peer, data, tensor)

    world.carry = on_its_way  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("payload", [FALSE, BROKEN])
@pytest.mark.parametrize("guests", [{"r1.0"}, {"r1.0", "r1.1"}])
def test_false_gradients_again_and_again(guests: set[str], payload: Payload) -> None:
    """Guests are one or two relays of four. Seen live: with one whose gradients overflow the run ended after
    3 s, as overflows counted as of several relays' inputs; with two after 6 s, as they were."""
    world = swarm(4, stages=1, steps=STEPS)
    world.strict = False  # tasks may fail
    overflowing(world, 0, lambda task, inputs: isinstance(task, tasks.WeightGradient) and FALSE in inputs)
    sent = giving(world, guests, payload)
    assert go_on(world, 600.0) == STEPS
    assert len(sent) > 20 and skips(world) == []
    blamed = {fields["subject"] for _, _, kind, fields in world.notes if kind == "refused"}
    assert blamed and blamed <= guests
    assert set(removed(world)) <= guests
