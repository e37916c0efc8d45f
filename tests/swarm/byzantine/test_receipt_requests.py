"""Peers that ask for receipts all the time: a short question with an answer of up to half a megabyte (I7)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.audit.kept_work import RECEIPT
from anabranch.protocol.context.rate_limits_and_bans import RECEIPT_BYTES
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from support.grids import every_value
from swarm.byzantine.test_audit import audited_world

#: Seconds of asking, and questions a second; a receipt takes a kilobyte here.
ASKED_S, PER_S = 8.0, 1000


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("asker", "asked"), every_value(["stranger", "r2.1", "r1.1"], ["d0", "r1.0"]))
def test_receipts_are_sent_to_the_stage_and_at_a_bounded_rate(asker: str, asked: str) -> None:
    """The leader sent receipts to whoever had a ticket, and to each a thousand a second."""
    world, sent, steps = audited_world(share=1.0, steps=100), list[int](), set[int]()
    carry = world.carry

    def count(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if (sender.id, peer) == (asked, asker) and isinstance(said := msg.decode(message), msg.Work):
            sent.extend([len(message)] * bool(said.stage == 1 and said.receipt))
        if asker in world.nodes or peer != asker:
            carry(sender, peer, message, payload)

    def ask() -> None:
        t = world.history().t
        steps.add(t)
        for _ in range(PER_S // 20):
            world.nodes[asked].handle(ev.Received(asker, msg.FetchWork(t, 1, "r1.0", RECEIPT), None))
        world.clock.after(0.05, ask)

    def begin() -> None:
        if asker not in world.nodes:
            shown = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, "ticket")
            world.nodes[asked].handle(ev.LinkUp(asker, 1, shown))
        ask()

    world.carry = count  # type: ignore[method-assign]
    world.clock.after(3.0, begin)
    while world.clock.now < 3.0 + ASKED_S:
        world.clock.step()
    most = RECEIPT_BYTES.burst + RECEIPT_BYTES.per_s * ASKED_S
    assert len(steps) > 10 and sum(sent) <= most * 1.1
    assert bool(sent) == (asker == "r1.1")
