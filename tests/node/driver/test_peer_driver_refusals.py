"""Violations of the rules of a live link: bytes that are no message or no frame, a payload that the message
has not; each is refused by name (I7)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from anabranch.net.framing import Blob
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import issue_certificate
from anabranch.node.driver.peer_driver import LivePeer
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Refused
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Leave, encode
from anabranch.protocol.peer.peer import Peer

RUN = "run"
OWNER, CALLER = (Identity.from_seed(name.ljust(32)) for name in (b"owner", b"mallory"))
CERTIFICATE = issue_certificate(
    OWNER, run=RUN, peer_id=CALLER.peer_id, role="relay", expires_at_s=int(time.time()) + 3600
)


class Nothing:
    """Nothing is computed here."""


def live_peer(path: Path) -> LivePeer:
    peer = Peer(OWNER.peer_id, 1, OWNER.peer_id, Settings(RUN, 1, 1, 1, 1))
    gate = Gate(RUN, OWNER.peer_id, lambda hello: None)
    transport = lambda accept: TcpTransport(OWNER, 1, gate, accept)  # noqa: E731
    return LivePeer(peer, Nothing(), transport, b"", path / "events.jsonl")  # type: ignore[arg-type]


def send_no_message(link: Link) -> None:
    link.send(b"\xc1 is no msgpack")


def send_a_payload_with_a_leave(link: Link) -> None:
    link.send(encode(Leave("bye")), Blob("uint8", (1,), b"x"))


def send_no_frame(link: Link) -> None:
    link.control.write((b"\xff" * 8,))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (send_no_message, "bytes: not a message"),
        (send_a_payload_with_a_leave, "bytes: a Leave with a payload"),
        (send_no_frame, "bytes: broken frame"),
    ],
)
def test_garbled_links_are_closed_counted_and_told(tmp_path: Path, say: object, reason: str) -> None:
    async def scenario() -> None:
        live = live_peer(tmp_path)
        host, port = await live.links.transport.listen("127.0.0.1", 0)
        gate = Gate(RUN, OWNER.peer_id, lambda hello: None)
        caller = TcpTransport(CALLER, 1, gate, lambda link: None)
        link = await caller.dial(OWNER.peer_id, host, port, CERTIFICATE)
        closed = asyncio.get_running_loop().create_future()
        link.start(lambda message, blob: None, closed.set_result)
        say(link)  # type: ignore[operator]
        await asyncio.wait_for(closed, 30.0)
        stranger = TcpTransport(CALLER, 1, gate, lambda link: None)
        with pytest.raises(Exception, match="the certificate cannot be read"):
            await stranger.dial(OWNER.peer_id, host, port, b"no certificate")
        live.journal.flush()
        assert live.peer.ctx.rate_limits.counts [CALLER.peer_id] == {"bytes": 1}
        assert CALLER.peer_id not in live.peer.ctx.links.up
        for transport in (caller, stranger, live.links.transport):
            await transport.close()
        live.journal.close()

    asyncio.run(scenario())
    refused = {event.subject: event.reason for event in events_of(tmp_path / "events.jsonl", Refused)}
    assert refused[CALLER.peer_id].startswith(reason)
    assert refused[""].startswith("a connection from 127.0.0.1: ")
