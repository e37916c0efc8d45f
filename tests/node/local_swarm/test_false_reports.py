"""A live stranger with a relay ticket that floods the leader with escape sequences and forged lines (H4)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from anabranch.net.errors import NetError
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket, parse_ticket
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Note, RunFinished, Step, encode_event
from anabranch.protocol.messages import Report, encode
from support.local_swarms import check_exact, created, small_run, swarm_of

pytestmark = pytest.mark.slow
#: Keys of the stranger, messages with each key, lines in a message and bytes of a line: 100 MB.
KEYS, MESSAGES, LINES, LINE_BYTES = 4, 100, 4, 60_000
#: Bytes by which the event log may grow in the meantime: what honest peers report.
GROWTH_BYTES = 1 << 20
HOSTILE = "\x1b[2J\x1b]0;pwned\x07error: send money"


async def flood(ticket: Ticket) -> int:
    """Send reports with several keys of one ticket; returns the number of messages that were sent."""
    sent = 0
    door = ticket.first_peer
    for _ in range(KEYS):
        stranger = Identity.generate()
        gate = Gate(ticket.grant.run, ticket.grant.owner, lambda hello: "go away")
        transport = TcpTransport(stranger, 1, gate, lambda link: None)
        line = encode_event(Note(peer=stranger.peer_id, text=HOSTILE.ljust(LINE_BYTES, "x")))
        forged = encode_event(RunFinished(peer=door.peer_id, t=1, reason=HOSTILE))
        closed = asyncio.Event()
        with contextlib.suppress(NetError):
            link = await transport.dial(door.peer_id, door.host, door.port, ticket)
            link.start(lambda message, blob: None, lambda reason: closed.set())  # noqa: B023
            for _ in range(MESSAGES):
                if closed.is_set():
                    break
                link.send(encode(Report((line,) * LINES + (forged,))))
                sent += 1
                await asyncio.sleep(0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(closed.wait(), 0.5)
        await transport.close()
    return sent


def test_a_stranger_fills_no_log_and_writes_on_no_terminal(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=6)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda _: bool(swarm.of(Step)))
        before = directory.events.stat().st_size
        sent = asyncio.run(flood(parse_ticket(swarm.ticket(), now_s=0.0)))
        assert sent > KEYS
        swarm.to_the_end()
    assert directory.events.stat().st_size - before < GROWTH_BYTES
    for written in (directory.events, *directory.peers_path.glob("*/output.txt")):
        text = written.read_text()
        assert "send money" not in text and "\x1b" not in text
    check_exact(directory, 6)
