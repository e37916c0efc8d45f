"""A relay that asks its next stage for the same gradients again and again, each time as if anew (R5)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

MICROBATCHES, STEPS, EVERY_S = 12, 4, 0.05


def gradients_sent(
    asker: str, every_s: float, more: Sequence[Machine] = ()
) -> tuple[int, Counter[tuple[str, ...]]]:
    """Run in which `asker`, a relay of stage 1, asks both replicas of stage 2 for all gradients every
    `every_s`: how often it asked, and gradients sent by (sender, receiver, gradient). more: machines beside
    two relays of each stage."""
    settings = Settings("want", 1, 2, MICROBATCHES, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(2))]
    world = counting_world(settings, [*machines, *more], 1)
    ways, asked_at, sent = itertools.count(1000), [-every_s], Counter[tuple[str, ...]]()

    def ask(node: Node, event: ev.Event) -> None:
        iteration, now = node.peer.iterations.current, world.clock.now
        if node.id != asker or iteration is None or now < asked_at[-1] + every_s:
            return
        asked_at.append(now)
        fence = node.peer.ctx.fence(iteration.t, iteration.base)
        for index, peer in itertools.product(range(MICROBATCHES), ("r2.0", "r2.1")):
            world.carry(node, peer, msg.encode(msg.Want(fence, index, True, next(ways))), None)

    carry = world.carry

    def count(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Backward) and payload is not None:
            sent[sender.id, peer, f"{said.fence.t} {said.fence.base} {said.index}"] += 1
        carry(sender, peer, message, payload)

    world.carry = count  # type: ignore[method-assign]
    world.bookkeepers.append(ask)
    world.run(until_s=2000.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    return len(asked_at) - 1, sent


def test_a_gradient_is_sent_to_one_peer_twice_at_most() -> None:
    asked, sent = gradients_sent("r1.0", EVERY_S)
    assert asked > 20
    assert max(times for (_, peer, _), times in sent.items() if peer == "r1.0") <= 2


def test_who_asks_for_what_others_sent_gets_few_of_their_gradients() -> None:
    """A relay asks for all microbatches, of which its fellows sent two thirds."""
    _, sent = gradients_sent("g", EVERY_S / 2, [Machine("g", 1)])
    to_others = {what for _, peer, what in sent if peer.startswith("r1")}
    taken = sum(times for (_, peer, what), times in sent.items() if peer == "g" and what in to_others)
    assert 0 < taken < len(to_others)  # it was twice as many
