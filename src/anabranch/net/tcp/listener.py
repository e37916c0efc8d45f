"""Accepting: connections that others make, from the first byte until they are part of a link or a circuit, or
refused. Not here: connections that this side makes (`dialer`), and what a carrier does (`net.circuit`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from anabranch.addresses import block_of, plain_host
from anabranch.background import background
from anabranch.net import errors
from anabranch.net.circuit import Carrier, Opener
from anabranch.net.door.prices import DoorPrices
from anabranch.net.errors import Refused
from anabranch.net.handshake import BULK, CARRY, CONTROL, MEET, Hello, ServerHandshake
from anabranch.net.lane import Lane
from anabranch.net.link import Link, Way
from anabranch.net.resource_manager import AttemptRate, Reservation, ResourceRefused
from anabranch.net.tcp.dialer import Dialer
from anabranch.net.tcp.endpoint import Endpoint, carried_name
from anabranch.net.tcp.link_table import LinkTable
from anabranch.net.tcp.sockets import bind, tune
from anabranch.net.tcp.tls import channel_binding, tls_timeouts
from anabranch.net.ticket import OPEN, Grant, MembershipCertificate
from anabranch.net.tls_overhead import TlsFlood

#: Seconds to wait after a failed accept (out of file descriptors, or the caller has vanished).
_ACCEPT_RETRY_S = 0.05
#: Connections that one counts as which was cut for TLS messages without content (`tls_overhead`). Until it is
#: cut it costs as much as 256 KiB of KeyUpdates that came at once: 0.3 s, and a handshake 2 ms.
FLOOD_ATTEMPTS = 150.0


@dataclass(frozen=True)
class _Caller:
    """Where an incoming connection comes from. host: address of its other end, or a name for the carrier.
    via: id of the carrier of a circuit ("": none). iroh: True if it came through iroh."""

    host: str
    via: str = ""
    iroh: bool = False


@dataclass
class _HalfOpen:
    """An accepted control connection (`lane`) that waits for its bulk connection. hello: what its peer said.
    caller: where it came from. expiry: timer that drops it."""

    lane: Lane
    hello: Hello
    caller: _Caller
    expiry: asyncio.TimerHandle


class Listener:
    """Accepts connections of other peers, and makes links of them. end: key, admission rules and limits of
    this side. dialer: comes for circuits that carriers offer. carrier: serves circuits. on_link: gets each
    link. on_refused: called for each refused connection, with its kind, the caller's host and the reason."""

    def __init__(
        self,
        end: Endpoint,
        links: LinkTable,
        dialer: Dialer,
        carrier: Carrier,
        on_link: Callable[[Link], None],
        on_refused: Callable[[str, str, str], None],
    ) -> None:
        self.carrier = carrier
        self._end, self._links, self._dialer = end, links, dialer
        self._on_link = on_link
        self._on_refused = on_refused
        self._prices = DoorPrices()
        self._attempts = AttemptRate(end.limits.attempts_per_s, end.limits.attempts_burst)
        self._sockets: list[tuple[socket.socket, asyncio.Task[None]]] = []
        #: Host of each connection in its handshake.
        self.pending: dict[asyncio.Task[None], str] = {}
        #: Circuits that are being opened through this process.
        self._openers: set[asyncio.Task[None]] = set()
        self._half_open: dict[tuple[str, bytes], _HalfOpen] = {}

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links at an address; returns host and port (0 picks a free port). Raises ListenError if the
        address cannot be used."""
        listener = await bind(host, port)
        self._sockets.append((listener, background(self._accept(listener))))
        name = listener.getsockname()
        return str(name[0]), int(name[1])

    def take_iroh(self, connection: socket.socket, peer: str, path: str) -> None:
        """Accept a connection of another peer that came through iroh. Limits by address count it under the IP
        address in `path`; connections through an iroh relay, or whose path is not known yet, share one name.
        peer: not used, as the handshake proves the caller's key."""
        host = path.rpartition(":")[0].strip("[]") or "iroh relay"
        self._take(connection, _Caller(host, iroh=True))

    def offered(self, link: Link, token: bytes) -> None:
        """Come for the circuit of `token` that the carrier at the other end of `link` offers: dial the
        carrier in a task of its own, and serve the peer that opened the circuit as an incoming connection.
        The offer is refused and counted if no connection can begin now."""
        caller = _Caller(carried_name(link.peer_id), link.peer_id)

        async def meet(reserved: Reservation) -> None:
            await self._greet(await self._dialer.meet(link, token, reserved), caller, reserved)

        self._begin(caller, functools.partial(self._end.resources.offered, link.peer_id), meet)

    async def close(self) -> None:
        """Stop listening, end pending handshakes and circuits that are being opened, and drop control
        connections that wait for their bulk connection. Links stay."""
        tasks = [task for _, task in self._sockets] + [*self.pending, *self._openers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener, _ in self._sockets:
            listener.close()
        self._sockets.clear()
        for half in list(self._half_open.values()):
            self._drop_half_open(half)

    # Handshakes of incoming connections.

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            self._take(connection, _Caller(plain_host(address[0])))

    def _take(self, connection: socket.socket, caller: _Caller) -> None:
        """Begin the handshake on a connection of another peer; close the connection if no more can begin now
        (`_begin`)."""
        reserve = functools.partial(self._end.resources.incoming, caller.host)
        if not self._begin(caller, reserve, functools.partial(self._shake_hands, connection, caller)):
            connection.close()

    def _begin(
        self,
        caller: _Caller,
        reserve: Callable[[], Reservation],
        handshake: Callable[[Reservation], Coroutine[Any, Any, None]],
    ) -> bool:
        """Run the handshake of an incoming connection as a task, which counts as pending. False: no
        connection can begin now; it is refused and counted. reserve: makes its reservation, which `handshake`
        gets."""
        reserved = self._reserve(caller.host, reserve)
        if isinstance(reserved, str):
            self._refuse(errors.BUSY, caller.host, reserved)
            return False
        # The coroutine is made by the task: one that is cancelled at once leaves none that nobody awaits.
        task = background(self._welcome(functools.partial(handshake, reserved), caller.host))
        self.pending[task] = caller.host
        task.add_done_callback(lambda ended: self.pending.pop(ended, None))
        return True

    def _reserve(self, host: str, reserve: Callable[[], Reservation]) -> Reservation | str:
        """Reserve one more connection from `host` by `reserve()`, and return the reservation; or return the
        reason why none can begin now."""
        limits = self._end.limits
        if not self._attempts.take(host, asyncio.get_running_loop().time()):
            return "its address block has begun too many connections of late; try again"
        if [*self.pending.values()].count(host) >= limits.max_pending_of_host:
            return "too many handshakes from this address are pending"
        if len(self.pending) >= limits.max_pending_handshakes and not self._give_way(host):
            return "too many handshakes are pending"
        try:
            return reserve()
        except ResourceRefused as refusal:
            return str(refusal)

    def _give_way(self, host: str) -> bool:
        """End the oldest pending handshake of the network (`block_of`) that has most of them, in favour of
        one of `host`; False if that one's network would then have as many. An honest caller needs a few round
        trips, and one host has addresses without end."""
        blocks = [block_of(each) for each in self.pending.values()]
        fullest, count = Counter(blocks).most_common(1)[0]
        if blocks.count(block_of(host)) + 1 >= count:
            return False
        oldest = list(self.pending)[blocks.index(fullest)]
        self._refuse(errors.BUSY, self.pending.pop(oldest), "others wait, and it has not shown who it is")
        asyncio.get_running_loop().call_soon(oldest.cancel)  # once it has begun: it frees what it holds
        return True

    async def _welcome(self, handshake: Callable[[], Coroutine[Any, Any, None]], host: str) -> None:
        """Run `handshake()`, which handles an incoming connection from `host` from its first byte until it is
        part of a link; a failure or a timeout refuses and counts the connection, and no error leaves."""
        limit_s = self._end.limits.handshake_timeout_s
        try:
            await asyncio.wait_for(handshake(), limit_s)
        except Refused as refusal:
            self._refuse(refusal.kind, host, refusal.reason)
        except asyncio.TimeoutError:
            self._refuse(errors.TIMEOUT, host, f"it did not complete the handshake within {limit_s:g} s")
        except TlsFlood as flood:
            self._refuse(errors.TLS, host, str(flood))
        except ssl.SSLError:
            self._refuse(errors.TLS, host, "it does not use TLS 1.3")
        except OSError:
            self._refuse(errors.VANISHED, host, "it vanished during the handshake")
        except Exception as error:
            # A defect here, on bytes of a stranger, costs the stranger's connection and nothing else.
            self._refuse(errors.DEFECT, host, f"its handshake failed here: {type(error).__name__}: {error}")

    def _refuse(self, kind: str, host: str, reason: str) -> None:
        """Count and report a refused connection."""
        self._end.refusals[kind] += 1
        self._on_refused(kind, host, reason)

    async def _shake_hands(self, connection: socket.socket, caller: _Caller, reserved: Reservation) -> None:
        end, lane = self._end, Lane()
        try:
            # uvloop returns its own TLS layer as the protocol, so the lane is made here.
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: lane, connection, ssl=end.server_context, **tls_timeouts(end.limits)
            )
        except BaseException:
            reserved.release_all()
            raise
        lane.lost.add_done_callback(lambda _: self._ended(lane, caller, reserved))
        tune(lane)
        await self._greet(lane, caller, reserved)

    def _ended(self, lane: Lane, caller: _Caller, reserved: Reservation) -> None:
        """Release the reservation of a connection that has ended. One of a caller that was let in and then
        cut as a flood counts as FLOOD_ATTEMPTS more connections of its network; not through iroh, where
        others share the name."""
        reserved.release_all()
        if lane.flooded and lane.known and not caller.iroh:
            self._attempts.charge(caller.host, asyncio.get_running_loop().time(), FLOOD_ATTEMPTS)

    async def _greet(self, lane: Lane, caller: _Caller, reserved: Reservation) -> None:
        """Run the listening side's handshake on a connection with TLS, and admit the caller. reserved:
        reservation of the connection, which is charged to the caller's key and ticket, too. Raises Refused,
        which the caller is then told, and ConnectionError."""
        end = self._end
        with _refusal_told(lane):
            block, loop = block_of(caller.host), asyncio.get_running_loop()
            price, binding = self._prices.bits(block, loop.time()), channel_binding(lane)
            handshake = ServerHandshake(end.identity, end.incarnation, end.gate, binding=binding, price=price)
            lane.write((handshake.greeting(),))
            hello = None
            while hello is None:
                hello = handshake.receive(await lane.receive(), now_s=end.unix_time_s())
            walks_in = isinstance(hello.credential, Grant) and hello.credential.role == OPEN
            refusal = None
            if walks_in and hello.lane != BULK:
                refusal = self._prices.pay(block, hello.peer_id, hello.work, loop.time())
            if refusal:
                raise Refused(errors.BUSY, refusal)
            _charge(reserved, hello)
            if hello.lane in (CARRY, MEET):
                await self._carry(lane, hello, caller)
            else:
                self._admit(lane, hello, caller)

    # Circuits.

    async def _carry(self, lane: Lane, hello: Hello, caller: _Caller) -> None:
        """Serve a verified caller whose connection is about a circuit (`Hello.lane`). One that opens a
        circuit through this process is accepted, and served on in a task of its own; one that comes for a
        circuit is handed to that circuit. Raises Refused if the caller may not, or no circuit waits."""
        self._end.fence.check(hello.peer_id, hello.incarnation)
        if caller.via:
            raise Refused(errors.CARRIER, "a circuit cannot lead through another circuit")
        if (reason := self._end.gate.authorize(hello)) is not None:
            raise Refused(errors.NOT_AUTHORIZED, reason)
        if hello.lane == MEET:
            await self.carrier.meet(lane, hello)
            return
        credential, block = hello.credential, block_of(caller.host)
        opener = Opener(hello.peer_id, isinstance(credential, Grant), block, _ticket_of(credential))
        lane.write((ServerHandshake.accept(),))
        # Apart from pending handshakes, or openers of circuits that nobody meets would keep all others out.
        task = background(self._welcome(functools.partial(self._open_for, lane, opener), caller.host))
        self._openers.add(task)
        task.add_done_callback(self._openers.discard)

    async def _open_for(self, lane: Lane, opener: Opener) -> None:
        with _refusal_told(lane):
            await self.carrier.carry(lane, opener)

    # Links.

    def _admit(self, lane: Lane, hello: Hello, caller: _Caller) -> None:
        """Admit a caller whose Hello is verified: keep a control connection until its bulk connection comes,
        then make the link of both and pass it on. If too many control connections wait, another one is
        dropped for it (`_make_room`). Raises Refused if the incarnation is stale, the gate refuses, or the
        two do not fit together."""
        self._end.fence.check(hello.peer_id, hello.incarnation)
        key = hello.peer_id, hello.link_id
        if hello.lane == CONTROL:
            self._keep_control(key, lane, hello, caller)
            return
        found = self._half_open.get(key)
        same = found is not None and (found.caller.via, found.caller.iroh) == (caller.via, caller.iroh)
        if found is None or not same or found.hello.incarnation != hello.incarnation:
            raise Refused(errors.LANE, "there is no control connection for this bulk connection")
        del self._half_open[key]
        found.expiry.cancel()
        lane.hold()
        lane.write((ServerHandshake.accept(),))
        credential = found.hello.credential
        reservation = self._end.resources.link(hello.peer_id, _ticket_of(credential), caller.host)
        lanes = found.lane, lane
        way = Way(via=caller.via, iroh=caller.iroh, host=caller.host if caller.iroh else "")
        self._on_link(
            self._links.make(hello.peer_id, hello.incarnation, credential, lanes, reservation, way)
        )

    def _keep_control(self, key: tuple[str, bytes], lane: Lane, hello: Hello, caller: _Caller) -> None:
        end = self._end
        if key in self._half_open:
            raise Refused(errors.LANE, "this link has a control connection already")
        if (reason := end.gate.authorize(hello)) is not None:
            raise Refused(errors.NOT_AUTHORIZED, reason)
        end.fence.note(hello.peer_id, hello.incarnation)
        while len(self._half_open) >= end.limits.max_pending_handshakes:
            self._make_room()
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(end.limits.handshake_timeout_s, self._expire, key)
        self._half_open[key] = _HalfOpen(lane, hello, caller, expiry)
        lane.hold()
        lane.write((ServerHandshake.accept(),))

    def _make_room(self) -> None:
        """Drop the oldest half-open link of the network (`block_of`) that has most of them: the bulk
        connection of an honest caller comes within a round trip, and nobody fills the table for all."""
        blocks = [block_of(half.caller.host) for half in self._half_open.values()]
        fullest = Counter(blocks).most_common(1)[0][0]
        oldest = list(self._half_open.values())[blocks.index(fullest)]
        self._refuse(errors.BUSY, oldest.caller.host, "too many links wait for their bulk connection")
        self._drop_half_open(oldest)

    def _expire(self, key: tuple[str, bytes]) -> None:
        half = self._half_open[key]
        self._refuse(errors.TIMEOUT, half.caller.host, "its bulk connection did not come")
        self._drop_half_open(half)

    def _drop_half_open(self, half: _HalfOpen) -> None:
        half.expiry.cancel()
        del self._half_open[half.hello.peer_id, half.hello.link_id]
        half.lane.transport.abort()


def _charge(reserved: Reservation, hello: Hello) -> None:
    """Charge the reservation of a connection to the peer that showed its key on it (to its circuits, if the
    connection is for one), and to its ticket. hello: what that peer said. Raises Refused if one of them has
    no room."""
    try:
        reserved.join("circuits" if hello.lane in (CARRY, MEET) else "peer", hello.peer_id)
        if ticket := _ticket_of(hello.credential):
            reserved.join("ticket", ticket)
    except ResourceRefused as refusal:
        raise Refused(errors.BUSY, str(refusal)) from refusal


@contextlib.contextmanager
def _refusal_told(lane: Lane) -> Iterator[None]:
    """Context in which an exception ends the connection: the other side is told of a Refused before the
    close; any other error drops the connection at once. Without an exception the connection stays."""
    try:
        yield
    except Refused as refusal:
        lane.write((ServerHandshake.refuse(refusal),))
        lane.transport.close()
        raise
    except BaseException:
        lane.transport.abort()
        raise


def _ticket_of(credential: Grant | MembershipCertificate) -> str:
    """Key of the ticket with which a peer came, by the credential that it showed; "" for the owner's own
    peer."""
    return credential.ticket_key if isinstance(credential, Grant) else credential.ticket
