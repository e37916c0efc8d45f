"""A relay that sends other activations than it signed: who has found that out gives it no gradient."""

from __future__ import annotations

from collections import Counter

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import wrong_states
from swarm.byzantine.test_audit import STEPS, audited_world, give_lying_worker


def test_it_gets_no_gradient_from_those_that_found_it_out() -> None:
    """It sends each microbatch on again and again. Once another relay computed one, the next stage took the
    liar for one more sender of it, and gave it the gradient: it gave the microbatch back, claimed it, and
    counted as a relay that works, so that it was tried again after a few steps."""
    world, liar = audited_world(share=1.0), "r1.1"
    worker = give_lying_worker(world, liar, tasks.Forward, signs=False)
    carry, refused, given = world.carry, Counter[str](), Counter[str]()

    def watch(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        knows = sender.peer.ctx.links.is_forger(liar)
        if peer == liar and knows and isinstance(said, msg.Lack):
            refused[sender.id] += said.refused
        if peer == liar and knows and isinstance(said, msg.Backward):
            given[sender.id] += payload is not None
        carry(sender, peer, message, payload)

    def ask(node: Node, event: ev.Event) -> None:
        """The liar asks after its microbatches, too."""
        iteration = node.peer.iterations.current
        if node.id != liar or iteration is None or not refused:
            return
        fence = node.peer.ctx.fence(iteration.t, iteration.base)
        for index in iteration.units:
            for peer in refused:
                world.carry(node, peer, msg.encode(msg.Want(fence, index, True, 1000)), None)

    world.carry = watch  # type: ignore[method-assign]
    world.bookkeepers.append(ask)
    world.run(until_s=1800.0)
    assert worker.lies > 0 and sum(refused.values()) > 0
    assert not given
    assert world.history().t == STEPS and wrong_states(world).keys() <= {liar}
