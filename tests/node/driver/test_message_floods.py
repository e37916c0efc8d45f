"""Floods over real connections: a guest that pings without end is answered within its budget, then
disconnected and banned (I5, I7)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from anabranch.net.connection_limits import Limits
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import issue_certificate
from anabranch.node.driver.peer_driver import LivePeer
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Ping, encode
from anabranch.protocol.messages.table import ALLOWANCES, Rate
from anabranch.protocol.peer.peer import Peer

RUN = "run"
OWNER, CALLER = (Identity.from_seed(name.ljust(32)) for name in (b"owner", b"mallory"))
CERTIFICATE = issue_certificate(
    OWNER, run=RUN, peer_id=CALLER.peer_id, role="relay", expires_at_s=int(time.time()) + 3600
)


class Nothing:
    """Nothing is computed here."""


def live_peer(path: Path, limits: Limits) -> LivePeer:
    peer = Peer(OWNER.peer_id, 1, OWNER.peer_id, Settings(RUN, 1, 1, 1, 1))
    gate = Gate(RUN, OWNER.peer_id, lambda hello: None)
    transport = lambda accept: TcpTransport(OWNER, 1, gate, accept, limits=limits)  # noqa: E731
    return LivePeer(peer, Nothing(), transport, b"", path / "events.jsonl")  # type: ignore[arg-type]


class Guest:
    """Client with a valid certificate, and what it is sent."""

    def __init__(self, port: int) -> None:
        self._port = port
        gate = Gate(RUN, OWNER.peer_id, lambda hello: None)
        self.transport = TcpTransport(CALLER, 1, gate, lambda link: None)
        self.answers = 0

    async def link(self) -> Link:
        link = await self.transport.dial(OWNER.peer_id, "127.0.0.1", self._port, CERTIFICATE)
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link.start(self._answered, self.closed.set_result)
        return link

    def _answered(self, message: bytes, payload: object) -> None:
        self.answers += 1


def test_a_ping_flood_is_answered_within_its_budget_and_banned(tmp_path: Path) -> None:
    async def scenario() -> None:
        live = live_peer(tmp_path, Limits())
        handled = 0

        def count(_: LivePeer, event: ev.Event) -> None:
            nonlocal handled
            handled += isinstance(event, ev.Received)

        live.watchers.append(count)
        _, port = await live.links.transport.listen("127.0.0.1", 0)
        guest, began_s = Guest(port), time.monotonic()
        link = await guest.link()
        while not guest.closed.done():
            for number in range(1000):
                link.send(encode(Ping(number, 0)))
            await asyncio.sleep(0)
        assert "too many messages of this kind (the last: Ping)" in await guest.closed
        budget = ALLOWANCES[Rate.HEARTBEAT]
        most = budget.burst + budget.per_s * (time.monotonic() - began_s)
        assert guest.answers <= most + 1 and budget.burst < handled <= most + 1
        assert live.peer.ctx.rate_limits.over_budget == {"Ping": 1}
        await guest.link()
        assert "not for a while" in await asyncio.wait_for(guest.closed, 30.0)
        for transport in (guest.transport, live.links.transport):
            await transport.close()
        live.journal.close()

    asyncio.run(scenario())


def test_control_bytes_wait_unread_beyond_their_rate() -> None:
    """Bytes read of a link in any time are at most the burst and the share of the rate; all of them come."""
    sent = 40

    async def scenario() -> None:
        limits = Limits(control_bytes_per_s=200_000, control_burst_bytes=100_000)
        owner_gate, received, began_s = Gate(RUN, OWNER.peer_id, lambda hello: None), 0, time.monotonic()

        def take(message: bytes, payload: object) -> None:
            nonlocal received
            received += len(message)
            elapsed_s = time.monotonic() - began_s
            # A read of the lane's buffer (64 KiB) may come on top.
            assert received <= 100_000 + 200_000 * elapsed_s + (64 << 10)

        transport = TcpTransport(
            OWNER, 1, owner_gate, lambda link: link.start(take, lambda reason: None), limits=limits
        )
        _, port = await transport.listen("127.0.0.1", 0)
        guest = Guest(port)
        link = await guest.link()
        for _ in range(sent):
            link.send(bytes(10_000))
        while received < sent * 10_000:
            await asyncio.sleep(0.01)
        assert link.closed_reason is None
        for closing in (guest.transport, transport):
            await closing.close()

    asyncio.run(scenario())
