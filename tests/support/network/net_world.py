"""A small world for network tests: one run, its owner, and peers that write down what reaches them."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch.addresses import Address
from anabranch.net.connection_limits import Limits
from anabranch.net.framing import Blob
from anabranch.net.handshake import Credential, Gate, Hello
from anabranch.net.identity import Identity
from anabranch.net.iroh.engine import IrohEngine, installed
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket, issue_certificate, issue_ticket

RUN = "tiny-1"
NOW_S = 1_800_000_000
#: Only a test that hangs meets this; nothing is asserted about time.
PATIENCE_S = 60.0

OWNER = Identity.from_seed(b"owner".ljust(32))


def identity(name: str) -> Identity:
    return Identity.from_seed(name.encode().ljust(32))


def certificate(peer: Identity, *, run: str = RUN, issuer: Identity = OWNER, hours: int = 1) -> bytes:
    return issue_certificate(
        issuer, run=run, peer_id=peer.peer_id, role="relay", expires_at_s=NOW_S + hours * 3600
    )


def ticket(*, run: str = RUN, owner: Identity = OWNER, hours: int = 1) -> Ticket:
    return issue_ticket(owner, run=run, role="relay", expires_at_s=NOW_S + hours * 3600, quota=3, peers=[])


def gate(
    run: str = RUN, owner: Identity = OWNER, authorize: Callable[[Hello], str | None] = lambda hello: None
) -> Gate:
    return Gate(run, owner.peer_id, authorize)


MakeTransport = Callable[..., TcpTransport]


def make_tcp(
    who: Identity,
    incarnation: int,
    its_gate: Gate,
    engine: IrohEngine | None,
    on_link: Callable[[Link], None],
    limits: Limits,
) -> TcpTransport:
    clock = lambda: NOW_S  # noqa: E731
    return TcpTransport(who, incarnation, its_gate, on_link, limits=limits, unix_time_s=clock, engine=engine)


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is true."""

    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await soon(poll())


@dataclass
class Inbox:
    """End of a link and everything that it reported."""

    link: Link
    received: list[tuple[bytes, Blob | None]] = field(default_factory=list)
    closings: list[str] = field(default_factory=list)
    on_message: Callable[[bytes, Blob | None], None] | None = None

    def start(self) -> Inbox:
        self.link.start(self._take, self.closings.append)
        return self

    def _take(self, message: bytes, blob: Blob | None) -> None:
        assert not self.closings, "a message after the end"
        self.received.append((message, blob))
        if self.on_message is not None:
            self.on_message(message, blob)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent, on both connections."""
        link = self.link
        waiting = link._control_bytes + link._queue.queued_bytes
        if link.closed_reason is None:
            lanes = (link.control, link.bulk)
            waiting += sum(lane.transport.get_write_buffer_size() for lane in lanes)
        return waiting

    @property
    def messages(self) -> list[bytes]:
        return [message for message, _ in self.received]

    async def count(self, number: int) -> None:
        await until(lambda: len(self.received) >= number or bool(self.closings))
        assert len(self.received) >= number, self.closings

    async def closed(self) -> str:
        await until(lambda: bool(self.closings))
        return self.closings[0]


class Peer:
    """A listening peer. Links that others dial are started at once unless `start` is False."""

    def __init__(
        self, who: Identity, make: Callable[[Callable[[Link], None]], TcpTransport], start: bool
    ) -> None:
        self.identity = who
        self.inboxes: list[Inbox] = []
        self.host, self.port = "", 0
        self.carrier: Peer | None = None
        self._start = start
        self.transport = make(self._on_link)

    @property
    def address(self) -> Address:
        """Address at which others dial this peer: its own, or its carrier's."""
        if self.carrier is not None:
            return Address(self.carrier.host, self.carrier.port, self.carrier.identity.peer_id)
        if (engine := self.transport.engine) is not None:
            return Address("127.0.0.1", int(engine.sockets[0].rpartition(":")[2]), kind="udp")
        return Address(self.host, self.port)

    def via(self, carrier: Peer) -> None:
        self.carrier = carrier

    def _on_link(self, link: Link) -> None:
        self.inboxes.append(Inbox(link))
        if self._start:
            self.inboxes[-1].start()

    async def incoming(self, number: int = 0) -> Inbox:
        await until(lambda: len(self.inboxes) > number)
        return self.inboxes[number]

    async def dial(self, other: Peer, credential: Credential | None = None, start: bool = True) -> Inbox:
        shown = certificate(self.identity) if credential is None else credential
        link = await soon(self.transport.dial_any(other.identity.peer_id, [other.address], shown))
        inbox = Inbox(link)
        return inbox.start() if start else inbox


class World:
    """Makes peers on one backend and closes them at the end."""

    def __init__(self, make_transport: MakeTransport, carried: bool = False, iroh: bool = False) -> None:
        """carried: True if peers dial each other through a carrier; iroh: through iroh."""
        self._iroh = iroh
        self._make = make_transport
        self._peers: list[Peer] = []
        self._carried = carried
        self._carrier: Peer | None = None

    async def peer(
        self,
        name: str,
        *,
        incarnation: int = 1,
        its_gate: Gate | None = None,
        limits: Limits | None = None,
        start: bool = True,
        listens: bool = True,
    ) -> Peer:
        who = identity(name)
        engine = None
        if self._iroh:
            engine = IrohEngine(who, bind=["127.0.0.1:0"])
            await engine.start()
        make = functools.partial(self._make, who, incarnation, its_gate or gate(), engine)
        peer = Peer(who, lambda on_link: make(on_link, limits or Limits()), start)
        self._peers.append(peer)
        if listens:
            peer.host, peer.port = await peer.transport.listen("127.0.0.1", 0)
        if self._carried:
            await self._attach(peer)
        return peer

    async def _attach(self, peer: Peer) -> None:
        """Let a peer be dialled through the world's carrier only."""
        if self._carrier is None:
            self._carried = False
            self._carrier, self._carried = await self.peer("carrier of the world"), True
        await soon(peer.dial(self._carrier, certificate(peer.identity, hours=10**5)))
        peer.via(self._carrier)

    async def pair(self, *, limits: Limits | None = None, start: bool = True) -> tuple[Inbox, Inbox]:
        """Two ends of one link: the dialler's and the listener's."""
        anna = await self.peer("anna", limits=limits)
        bert = await self.peer("bert", limits=limits, start=start)
        dialled = await anna.dial(bert)
        return dialled, await bert.incoming()

    async def close(self) -> None:
        for peer in self._peers:
            await soon(peer.transport.close())


@dataclass(frozen=True)
class Backend:
    """A backend of the conformance suite, and the event loop that it runs on."""

    name: str
    make_transport: MakeTransport
    new_event_loop: Callable[[], asyncio.AbstractEventLoop]
    carried: bool = False
    iroh: bool = False

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        """Run a scenario in a world of its own. Errors that only the loop saw fail it as well."""
        loop = self.new_event_loop()
        unseen: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: unseen.append(context))

        async def whole() -> None:
            world = World(self.make_transport, self.carried, self.iroh)
            try:
                await scenario(world)
            finally:
                await world.close()

        try:
            loop.run_until_complete(whole())
            left = asyncio.all_tasks(loop)
        finally:
            loop.close()
        assert not unseen, unseen
        assert not left, left


def backends(carried: bool = False) -> list[Backend]:
    """Backends without a carrier, or those that use one."""
    name = "circuit" if carried else "tcp"
    found = [Backend(name, make_tcp, asyncio.new_event_loop, carried)]
    if carried and sys.version_info < (3, 11):
        found = []  # see `circuit_backends`
    try:
        import uvloop
    except ImportError:
        return found
    return [*found, Backend(f"{name}-uvloop", make_tcp, uvloop.new_event_loop, carried)]


def circuit_backends() -> list[Backend]:
    """Backends on which peers can be ends of circuits: asyncio's TLS inside TLS needs Python 3.11."""
    return [each for each in backends() if sys.version_info >= (3, 11) or "uvloop" in each.name]


def iroh_backends() -> list[Backend]:
    """Backends that dial through iroh, if it is installed; each peer has a process more."""
    return [
        replace(each, name=each.name.replace("tcp", "iroh"), iroh=True) for each in backends() if installed()
    ]
