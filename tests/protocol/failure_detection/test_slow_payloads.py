"""Carriers that are left, or not, for payloads that became slow."""

from __future__ import annotations

import pytest

from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member

CARRIER, OTHER, ME = (letter * 64 for letter in "abc")
PEERS = [str(number) * 64 for number in range(1, 6)]
ACTIVATION_BYTES = 4 << 20


class Sender:
    """Relay whose links to five peers a carrier forwards, beside which there is another one."""

    def __init__(self) -> None:
        settings = Settings("run", 1, 2, 1, 1, activation_bytes=ACTIVATION_BYTES)
        self.ctx: PeerContext = make_context(ME, 1, 1, settings, CARRIER)
        data_nodes = [Member(peer, 0, 1, "", 4, address=f"{peer[0]}:1") for peer in (CARRIER, OTHER)]
        relays = [Member(peer, 2, 1, "", 4) for peer in PEERS]
        members = [*data_nodes, Member(ME, 1, 1, "", 4), *relays]
        self.ctx.run.membership.enter(members, {member.id: 1 for member in members}, 1)
        self.connections, self.now = Connections(self.ctx), 0.0
        for peer in PEERS:
            self.ctx.links.opened(peer, 1, CARRIER)

    def send(self, peer: str, seconds: float, size_bytes: int = ACTIVATION_BYTES) -> str:
        """A payload takes so long, and a heartbeat is answered then; returns why the carrier is left."""
        self.now += 10.0
        self.ctx.clock.now = self.now
        self.ctx.costs.sums_arrived(peer, size_bytes, seconds, self.now)
        return self.connections.slow_carrier(peer, 0.1)


@pytest.mark.parametrize("size_bytes", [ACTIVATION_BYTES, 64 << 10])
def test_the_carrier_is_left_only_for_a_payload_that_took_long_itself(size_bytes: int) -> None:
    """A small part of a sum that took 0.3 s was reckoned as an activation that took 19 s."""
    sender = Sender()
    for _ in range(4):
        assert not sender.send(PEERS[0], 0.2)
    long_s = 4.0 if size_bytes == ACTIVATION_BYTES else 0.3
    found = [sender.send(PEERS[0], long_s, size_bytes) for _ in range(3)]
    assert any(found) == (size_bytes == ACTIVATION_BYTES)


@pytest.mark.parametrize("slow", [2, 3])
def test_two_peers_alone_do_not_have_a_carrier_left_by_others(slow: int) -> None:
    """Two keys that read slowly had all links of a peer go over from a good carrier to another one. Where all
    but few are slow, the others go over, too: not all links are timed."""
    sender = Sender()
    for peer in PEERS * 3:
        assert not sender.send(peer, 0.2)
    for peer in PEERS[:slow]:
        assert any(sender.send(peer, 4.0) for _ in range(2))
        sender.connections.link_down(peer)
    assert sender.ctx.links.lossy == (set() if slow == 2 else set(PEERS[3:]))
