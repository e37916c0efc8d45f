"""A relay that asks its next stage for the same gradients again and again, each time as if anew (R5)."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS, EVERY_S = 4, 0.05


def test_a_gradient_is_sent_to_one_peer_twice_at_most() -> None:
    settings = Settings("want", 1, 2, 12, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2))]
    world = counting_world(settings, machines, 1)
    ways, asked_at, sent = itertools.count(1000), list[float](), Counter[tuple[object, ...]]()

    def ask(node: Node, event: ev.Event) -> None:
        iteration, now = node.peer.iterations.current, world.clock.now
        if node.id != "r1.0" or iteration is None or (asked_at and now < asked_at[-1] + EVERY_S):
            return
        asked_at.append(now)
        fence = node.peer.ctx.fence(iteration.t, iteration.base)
        for index, peer in itertools.product(range(12), ("r2.0", "r2.1")):
            world.carry(node, peer, msg.encode(msg.Want(fence, index, True, next(ways))), None)

    carry = world.carry

    def count(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Backward) and payload is not None and peer == "r1.0":
            sent[sender.id, said.fence.t, said.fence.base, said.index] += 1
        carry(sender, peer, message, payload)

    world.carry = count  # type: ignore[method-assign]
    world.bookkeepers.append(ask)
    world.run(until_s=2000.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert len(asked_at) > 20 and max(sent.values()) <= 2


@pytest.mark.xfail(strict=True, reason="who asks for a microbatch may be its new holder")
def test_a_relay_that_asks_for_what_it_never_sent_does_not_double_the_gradients() -> None:
    """A relay without work of its own asks for all microbatches: each gradient goes to it twice."""
    settings = Settings("want", 1, 2, 12, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2))]
    world = counting_world(settings, [*machines, Machine("g", 1)], 1)
    ways, asked_at, sent = itertools.count(1000), [-EVERY_S], [0]

    def ask(node: Node, event: ev.Event) -> None:
        iteration, now = node.peer.iterations.current, world.clock.now
        if node.id != "g" or iteration is None or now < asked_at[-1] + EVERY_S / 2:
            return
        asked_at.append(now)
        fence = node.peer.ctx.fence(iteration.t, iteration.base)
        for index, peer in itertools.product(range(12), ("r2.0", "r2.1")):
            world.carry(node, peer, msg.encode(msg.Want(fence, index, True, next(ways))), None)

    carry = world.carry

    def count(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        gradient = payload is not None and isinstance(msg.decode(message), msg.Backward)
        sent[0] += gradient and sender.id.startswith("r2")
        carry(sender, peer, message, payload)

    world.carry = count  # type: ignore[method-assign]
    world.watchers.append(ask)
    world.run(until_s=2000.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert sent[0] < 1.5 * 12 * STEPS
