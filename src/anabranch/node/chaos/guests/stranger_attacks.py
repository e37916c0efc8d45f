"""Attacks of a stranger with a relay ticket, which computes nothing and takes what it can from a live run.

Once its link is closed, an attacker comes again with a new key.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from anabranch.addresses import Address
from anabranch.net.errors import NetError
from anabranch.net.framing import Blob, chunk_header, open_frame
from anabranch.net.handshake import Credential, Gate
from anabranch.net.identity import Identity
from anabranch.net.lane import Lane
from anabranch.net.link import Link
from anabranch.net.tcp.dialer import Dialer, Progress
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket
from anabranch.protocol.messages import Backward, Fence, Message, Ping, encode

CHUNK = bytes(1 << 20)
#: Messages that a flood sends at once; a plain choice.
BURST = 2000
#: Seconds between two dials of a stranger that was refused. A choice: an attacker in a hurry.
AGAIN_S = 0.05
#: Scheduling priority of a stranger's process: what it spends on this machine is no cost of the run.
NICENESS = 10

Attack = Callable[[Link, "asyncio.Future[str]"], Awaitable[None]]


async def flood(link: Link, message: Message, closed: asyncio.Future[str]) -> None:
    """Send a message without end, BURST at a time, until the link is closed."""
    data = encode(message)
    while not closed.done():
        for _ in range(BURST):
            link.send(data)
        while link.closed_reason is None and not link.control.writable:
            await asyncio.sleep(0)
        await asyncio.sleep(0)


async def unfinished_payloads(link: Link, closed: asyncio.Future[str]) -> None:
    """Begin sixteen payloads of 4 MiB, send 3 MiB of each, and wait until the run closes the link."""
    for stream in range(16):
        link.bulk.write(open_frame(stream, b"", Blob("uint8", (4 << 20,), bytes(4 << 20)), 4 << 20))
        for _ in range(3):
            link.bulk.write((chunk_header(stream, len(CHUNK)), CHUNK))
        await asyncio.sleep(0)
    await closed


#: Attacks by deed.
ATTACKS: dict[str, Attack] = {
    "ping flood": lambda link, closed: flood(link, Ping(1, 0), closed),
    "flood about past iterations": lambda link, closed: flood(
        link, Backward(Fence(1, 1, 0, "0" * 32, 1), 0), closed
    ),
    "unfinished payloads": unfinished_payloads,
}


class GuestDialer(Dialer):
    """Dialer of a hostile guest: connects from the IP address `host`, as another machine would."""

    def __init__(self, transport: TcpTransport, host: str) -> None:
        super().__init__(transport.end, transport.links, only_engine=False)
        self._host = host

    async def _connect(self, peer_id: str, address: Address, credential: Credential, at: Progress) -> Lane:
        connection = socket.socket()
        connection.setblocking(False)
        connection.bind((self._host, 0))
        await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port))
        return await self._secure(connection)


class GuestTransport(TcpTransport):
    """Transport that dials from an address of its own, `host`, as another machine would."""

    host = "127.0.1.1"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dialer = GuestDialer(self, self.host)


async def attack(ticket: Ticket, deed: str) -> None:
    """Attack the run by the attack named `deed` until this process is ended: with a new key after each link
    that the run closes, and again AGAIN_S after a failed dial. Prints `begun` and `closed REASON`."""
    grant, there = ticket.grant, ticket.first_peer
    gate = Gate(grant.run, grant.owner, lambda hello: None)
    while True:
        transport = GuestTransport(Identity.generate(), 1, gate, lambda link: None)
        try:
            link = await transport.dial(there.peer_id, there.host, there.port, ticket)
        except NetError:
            await asyncio.sleep(AGAIN_S)
            continue
        closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link.start(lambda message, blob: None, closed.set_result)
        print("begun", flush=True)
        await ATTACKS[deed](link, closed)
        print("closed", await closed, flush=True)
        await transport.close()
