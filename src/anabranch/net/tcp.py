"""Transport over TLS 1.3 and TCP: dials peers, accepts connections, and pairs them to links."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import secrets
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from anabranch.addresses import Address, block_of
from anabranch.background import background
from anabranch.net import errors
from anabranch.net.address_race import first_of
from anabranch.net.circuit import READY, Carrier, Opener, upgrade
from anabranch.net.connection_limits import STALL_CHECKS, CarryLimits, Limits, LineCaps
from anabranch.net.door.prices import DoorPrices
from anabranch.net.errors import DialError, ListenError, PortInUseError, Refused
from anabranch.net.handshake import (
    BULK,
    CARRY,
    CONTROL,
    LINK_ID_BYTES,
    MEET,
    AnswerReader,
    ClientHandshake,
    Credential,
    Gate,
    Hello,
    IncarnationFence,
    ServerHandshake,
)
from anabranch.net.identity import Identity, peer_id_of_certificate
from anabranch.net.lane import Lane, TokenBucket
from anabranch.net.link import LineBuckets, Link, Way
from anabranch.net.resource_manager import AttemptRate, Reservation, ResourceManager, ResourceRefused
from anabranch.net.ticket import OPEN, Grant, MembershipCertificate

#: Connections that the kernel queues while the event loop is busy; a plain choice above any swarm's burst.
_BACKLOG = 256
#: Seconds to wait after a failed accept (out of file descriptors, or the caller has vanished).
_ACCEPT_RETRY_S = 0.05
#: Burst of a capped line, in seconds of its rate: short, as it is meant to leave room for others.
CAP_BURST_S = 0.25
#: Remedy where BBR is missing, for a sentence.
BBR_REMEDY = "as root: modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control='cubic bbr'"
_T = TypeVar("_T")


@dataclass
class _HalfOpen:
    """An accepted control connection that waits for its bulk connection."""

    lane: Lane
    hello: Hello
    caller: _Caller
    expiry: asyncio.TimerHandle


@dataclass(frozen=True)
class _Caller:
    """Where an incoming connection comes from. host: address of its other end, or a name for the carrier.
    via: id of the carrier of a circuit ("": none). iroh: True if it came through iroh."""

    host: str
    via: str = ""
    iroh: bool = False


def bbr_missing() -> bool:
    """True if this kernel, which is Linux, does not let this process use BBR congestion control. Other
    systems have no such option."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return False
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            return True
    return False


class Engine(Protocol):
    """Other way to connect to peers by their keys: iroh (`net.iroh.engine` documents the members)."""

    on_incoming: Callable[[socket.socket, str, str], None]
    on_path: Callable[[str, str], None]
    paths: dict[str, str]
    sockets: list[str]

    async def connect(self, peer: str, address: Address) -> socket.socket: ...

    async def close(self) -> None: ...


class TcpTransport:
    """Dials other peers and accepts their connections, for one peer; use within one running event loop."""

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        gate: Gate,
        on_link: Callable[[Link], None],
        *,
        limits: Limits | None = None,
        unix_time_s: Callable[[], float] = time.time,
        carry: CarryLimits | None = None,
        engine: Engine | None = None,
        only_engine: bool = False,
        caps: LineCaps | None = None,
    ) -> None:
        """`on_link` receives each link that another peer dialled, and must call `start` on it. carry: limits
        of the circuits that this process forwards for others. engine: iroh endpoint of this peer, which
        `close` ends; None: addresses through iroh are not used. only_engine: True if only those are.
        caps: of this machine's line."""
        if "tls-unique" not in ssl.CHANNEL_BINDING_TYPES:
            raise ListenError(
                "this Python's TLS library has no channel bindings (tls-unique): use another build of Python"
            )
        self._identity = identity
        self._incarnation = incarnation
        self._gate = gate
        self._on_link = on_link
        self.engine = engine
        self._only_engine = only_engine
        caps = caps or LineCaps()
        self._line = LineBuckets(_bucket(caps.up_bytes_per_s), _bucket(caps.down_bytes_per_s))
        if engine is not None:
            engine.on_incoming = self._through_engine
        #: Called for each refused connection, with its kind, the caller's host and the reason.
        self.on_refused: Callable[[str, str, str], None] = lambda kind, host, reason: None
        #: Numbers of refused connections and broken frames, by kind (`errors.TICKET`, `errors.FRAME`, ...).
        self.refusals: Counter[str] = Counter()
        self._limits = limits or Limits()
        self.resources = ResourceManager(self._limits.budgets())
        self.carrier = Carrier(carry or CarryLimits(), self._dialled_link)
        self._prices = DoorPrices()
        self._attempts = AttemptRate(self._limits.attempts_per_s, self._limits.attempts_burst)
        self._progress_check: asyncio.TimerHandle | None = None
        self._unix_time_s = unix_time_s
        self._fence = IncarnationFence()
        self._server_context = _server_context(identity)
        self._client_context = _client_context()
        self._listeners: list[tuple[socket.socket, asyncio.Task[None]]] = []
        #: Host of each connection in its handshake.
        self._pending: dict[asyncio.Task[None], str] = {}
        #: Circuits that are being opened through this process.
        self._openers: set[asyncio.Task[None]] = set()
        #: Credential that this side showed last to each peer that it dialled directly.
        self._shown: dict[str, Credential] = {}
        self._half_open: dict[tuple[str, bytes], _HalfOpen] = {}
        self._links: set[Link] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def use_limits(self, limits: Limits) -> None:
        """Replace the limits, as soon as the sizes of the run are known. Open links follow in the largest
        payload and in the budgets."""
        self._limits = limits
        self.resources.use_budgets(limits.budgets())
        for link in self._links:
            link.limit_payloads(limits.max_payload_bytes)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links at an address; returns host and port (0 picks a free port). Raises ListenError."""
        listener = await _bind(host, port)
        self._listeners.append((listener, background(self._accept(listener))))
        name = listener.getsockname()
        return str(name[0]), int(name[1])

    async def dial(self, peer_id: str, host: str, port: int, credential: Credential) -> Link:
        """Make a link to the peer `peer_id` at host:port. Raises DialError, and Refused by either side."""
        return await self.dial_any(peer_id, (Address(host, port),), credential)

    async def dial_any(self, peer_id: str, addresses: Sequence[Address], credential: Credential) -> Link:
        """Make a link to the peer `peer_id`, at the first of its addresses that answers; later ones are tried
        while earlier ones are silent. Raises DialError, and Refused by either side."""
        connect = lambda address: self._reach(peer_id, address, credential)  # noqa: E731
        left = [address for address in addresses if address.kind or not self._only_engine]
        while True:
            address, lane = await first_of(left, connect, _abort)
            try:
                return await self._within(address, self._dial(peer_id, address, lane, credential))
            except DialError:
                lane.transport.abort()
                # A carrier can let the first connection pass and not the second: other ways are tried.
                left = [other for other in left if other != address]
                if not address.carrier or not left:
                    raise
            except BaseException:
                lane.transport.abort()
                raise

    async def probe(self, peer_id: str, address: Address) -> str:
        """Connect to an address, and close as soon as the peer's key is proved; returns the reason of a
        failure, "" if there is none."""
        try:
            connect = self._connect_iroh(peer_id, address) if address.kind else self._connect_tls(address)
            lane = await self._within(address, connect)
        except DialError as error:
            return str(error)
        found = peer_id_of_certificate(_ssl_object(lane).getpeercert(True))
        lane.transport.abort()
        return "" if found == peer_id else f"another machine answers at {address}"

    async def close(self) -> None:
        """Stop listening, end pending handshakes and circuits, and close every link with a reason for its
        peer; returns once the links are gone."""
        tasks = [task for _, task in self._listeners] + [*self._pending, *self._openers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener, _ in self._listeners:
            listener.close()
        self._listeners.clear()
        for half in list(self._half_open.values()):
            self._drop_half_open(half)
        for link in list(self._links):
            link.close("the peer is shutting down")
        self.carrier.close()
        if self._closing:
            await asyncio.wait(self._closing)
        if self.engine is not None:
            await self.engine.close()
        if self._progress_check is not None:
            self._progress_check.cancel()

    # Dialling.

    async def _within(self, address: Address, work: Coroutine[Any, Any, _T]) -> _T:
        """Do a part of a dial in the time for a handshake; returns its result. Raises DialError for a
        timeout, a wrong TLS version and errors of the network."""
        timeout_s, what = self._limits.handshake_timeout_s, _named(address)
        try:
            return await asyncio.wait_for(work, timeout_s)
        except asyncio.TimeoutError as error:
            raise DialError(f"{what} did not answer within {timeout_s:g} s") from error
        except ssl.SSLError as error:
            raise DialError(f"{what} does not use TLS 1.3 ({error.reason or error})") from error
        except OSError as error:
            why = error.strerror or str(error) or "the connection broke"
            raise DialError(f"cannot reach {what}: {why}") from error

    async def _reach(self, peer_id: str, address: Address, credential: Credential) -> Lane:
        """Connection to a peer at one of its addresses, whose key is proved. Raises DialError, Refused."""
        return await self._within(address, self._connect(peer_id, address, credential))

    async def _connect(self, peer_id: str, address: Address, credential: Credential) -> Lane:
        try:
            connection = self.resources.outgoing(peer_id)
        except ResourceRefused as refusal:
            raise DialError(f"no connection to {_named(address)}: {refusal}") from refusal
        try:
            if address.carrier:
                lane = await self._open_circuit(peer_id, address, credential)
            elif address.kind:
                lane = await self._connect_iroh(peer_id, address)
            else:
                lane = await self._connect_tls(address)
        except BaseException:
            connection.release_all()
            raise
        lane.lost.add_done_callback(lambda _: connection.release_all())
        return lane

    async def _connect_iroh(self, peer_id: str, address: Address) -> Lane:
        """TLS connection to a peer through iroh. Raises DialError and OSError."""
        if self.engine is None:
            raise DialError(f"{_named(address)}: iroh is not in use here")
        connection = await self.engine.connect(peer_id, address)
        try:
            _, lane = await asyncio.get_running_loop().create_connection(
                Lane, sock=connection, ssl=self._client_context, server_hostname="", **self._tls_timeouts()
            )
        except BaseException:
            connection.close()
            raise
        return lane

    async def _connect_tls(self, address: Address) -> Lane:
        loop = asyncio.get_running_loop()
        _, lane = await loop.create_connection(
            Lane, address.host, address.port, ssl=self._client_context, **self._tls_timeouts()
        )
        _tune(lane)
        return lane

    async def _dial(self, peer_id: str, address: Address, control: Lane, credential: Credential) -> Link:
        """Make a link from `control`, a connection with proved key, and a bulk connection that is made now;
        both go through the handshake. Raises Refused, DialError; then all connections are dropped."""
        link_id = secrets.token_bytes(LINK_ID_BYTES)
        lanes = [control]
        incarnation = 0
        try:
            for name in (CONTROL, BULK):
                if name == BULK:
                    lanes.append(await self._connect(peer_id, address, credential))
                handshake = self._introduction(peer_id, lanes[-1], name, link_id, credential)
                await _introduce(lanes[-1], handshake)
                incarnation = handshake.server_incarnation
                self._fence.check(peer_id, incarnation)
        except BaseException:
            for lane in lanes:
                lane.transport.abort()
            raise
        self._fence.note(peer_id, incarnation)
        if not address.carrier:
            self._shown[peer_id] = credential
        caller = _Caller(_carried(address.carrier) if address.carrier else _host(control), address.carrier)
        reservation = self.resources.link(peer_id, "", caller.host)
        return self._link(
            peer_id, incarnation, None, (lanes[0], lanes[1]), reservation,
            Way(address, caller.via, bool(address.kind)),
        )  # fmt: skip

    def _introduction(
        self, server: str, lane: Lane, name: str, link_id: bytes, credential: Credential
    ) -> ClientHandshake:
        """Handshake of this side on a connection that it made. Raises Refused if another key answered."""
        return ClientHandshake(
            self._identity,
            self._incarnation,
            run=self._gate.run,
            server=server,
            server_certificate_key=peer_id_of_certificate(_ssl_object(lane).getpeercert(True)),
            lane=name,
            link_id=link_id,
            credential=credential,
            binding=_binding(lane),
        )

    # Circuits.

    def _dialled_link(self, peer: str) -> Link | None:
        """Open link that a peer dialled without a carrier; None: there is none."""
        for link in self._links:
            open_and_theirs = link.closed_reason is None and link.way.address is None
            if link.peer_id == peer and open_and_theirs and not link.way.via and not link.way.iroh:
                return link
        return None

    async def _open_circuit(self, peer_id: str, address: Address, credential: Credential) -> Lane:
        """Connection to a peer through the carrier at `address`: TLS with the peer inside one with the
        carrier. Raises DialError (also if the carrier refuses) and OSError."""
        outer = await self._connect_tls(address)
        try:
            link_id = secrets.token_bytes(LINK_ID_BYTES)
            handshake = self._introduction(address.carrier, outer, CARRY, link_id, credential)
            await _introduce(outer, handshake)
            outer.resume_reading()
            outer.write((bytes.fromhex(peer_id),))
            answer = AnswerReader()
            while not answer.receive(await outer.receive()):
                pass
            timeout_s = self._limits.handshake_timeout_s + 1
            return await upgrade(outer, self._client_context, server_side=False, timeout_s=timeout_s)
        except Refused as refusal:
            outer.transport.abort()
            raise DialError(f"{_named(address)}: {refusal}") from refusal
        except BaseException:
            outer.transport.abort()
            raise

    def _offered(self, link: Link, token: bytes) -> None:
        """Come for a circuit that the carrier at the other end of `link` offers: dial the carrier in a task
        of its own. The offer is refused and counted if no connection can begin now."""
        host = _carried(link.peer_id)
        reserved = self._reserve(host, lambda: self.resources.offered(link.peer_id))
        if isinstance(reserved, str):
            self._refuse(errors.BUSY, host, reserved)
            return
        caller = _Caller(host, link.peer_id)
        self._begin(self._meet(link, token, reserved), caller)

    async def _meet(self, link: Link, token: bytes, reserved: Reservation) -> None:
        """Dial a carrier for the circuit of `token`, and run the listening side's handshake with the peer
        that opened it. reserved: reservation of the connection, given back when it ends."""
        carrier, address = link.peer_id, link.way.address
        assert address is not None  # only a link that this side dialled brings offers
        try:
            outer = await self._connect_tls(address)
        except BaseException:
            reserved.release_all()
            raise
        try:
            await _introduce(outer, self._introduction(carrier, outer, MEET, token, self._shown[carrier]))
            outer.write((READY,))
            timeout_s = self._limits.handshake_timeout_s + 1
            inner = await upgrade(outer, self._server_context, server_side=True, timeout_s=timeout_s)
        except BaseException:
            reserved.release_all()
            outer.transport.abort()
            raise
        inner.lost.add_done_callback(lambda _: reserved.release_all())
        await self._greet(inner, _Caller(_carried(carrier), carrier), reserved)

    # Accepting.

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            host = address[0]
            reserved = self._reserve(host, functools.partial(self.resources.incoming, host))
            if isinstance(reserved, str):
                self._refuse(errors.BUSY, host, reserved)
                connection.close()
                continue
            caller = _Caller(host)
            self._begin(self._shake_hands(connection, caller, reserved), caller)

    def _through_engine(self, connection: socket.socket, peer: str, path: str) -> None:
        """Accept a connection that came through iroh, and is counted with its UDP address, or with all those
        that came through the relay."""
        host = path.rpartition(":")[0].strip("[]") or "iroh relay"
        reserved = self._reserve(host, functools.partial(self.resources.incoming, host))
        if isinstance(reserved, str):
            self._refuse(errors.BUSY, host, reserved)
            connection.close()
            return
        caller = _Caller(host, iroh=True)
        self._begin(self._shake_hands(connection, caller, reserved), caller)

    def _begin(self, handshake: Coroutine[Any, Any, None], caller: _Caller) -> None:
        """Run the handshake of an incoming connection as a task, which counts as pending."""
        task = background(self._welcome(handshake, caller.host))
        self._pending[task] = caller.host
        task.add_done_callback(self._pending.pop)

    def _reserve(self, host: str, reserve: Callable[[], Reservation]) -> Reservation | str:
        """Reserve one more connection from `host`, or return the reason why none can begin now."""
        if not self._attempts.take(host, asyncio.get_running_loop().time()):
            return "its address block has begun too many connections of late; try again"
        if len(self._pending) >= self._limits.max_pending_handshakes:
            return "too many handshakes are pending"
        if [*self._pending.values()].count(host) >= self._limits.max_pending_of_host:
            return "too many handshakes from this address are pending"
        try:
            return reserve()
        except ResourceRefused as refusal:
            return str(refusal)

    async def _welcome(self, handshake: Coroutine[Any, Any, None], host: str) -> None:
        """Handle an incoming connection, from its first byte until it is part of a link or refused."""
        limit_s = self._limits.handshake_timeout_s
        try:
            await asyncio.wait_for(handshake, limit_s)
        except Refused as refusal:
            self._refuse(refusal.kind, host, refusal.reason)
        except asyncio.TimeoutError:
            self._refuse(errors.TIMEOUT, host, f"it did not complete the handshake within {limit_s:g} s")
        except ssl.SSLError:
            self._refuse(errors.TLS, host, "it does not use TLS 1.3")
        except OSError:
            self._refuse(errors.VANISHED, host, "it vanished during the handshake")
        except Exception as error:
            # A defect here, on bytes of a stranger, costs the stranger's connection and nothing else.
            self._refuse(errors.DEFECT, host, f"its handshake failed here: {type(error).__name__}: {error}")

    def _refuse(self, kind: str, host: str, reason: str) -> None:
        """Count and report a refused connection."""
        self.refusals[kind] += 1
        self.on_refused(kind, host, reason)

    async def _shake_hands(self, connection: socket.socket, caller: _Caller, reserved: Reservation) -> None:
        loop = asyncio.get_running_loop()
        lane = Lane()
        try:
            # uvloop returns its own TLS layer as the protocol, so the lane is made here.
            await loop.connect_accepted_socket(
                lambda: lane, connection, ssl=self._server_context, **self._tls_timeouts()
            )
        except BaseException:
            reserved.release_all()
            raise
        lane.lost.add_done_callback(lambda _: reserved.release_all())
        _tune(lane)
        await self._greet(lane, caller, reserved)

    async def _greet(self, lane: Lane, caller: _Caller, reserved: Reservation) -> None:
        """Run the listening side's handshake on a connection with TLS, and admit the caller."""
        with _refusal_told(lane):
            block, loop = block_of(caller.host), asyncio.get_running_loop()
            price = self._prices.bits(block, loop.time())
            handshake = ServerHandshake(
                self._identity, self._incarnation, self._gate, binding=_binding(lane), price=price
            )
            lane.write((handshake.greeting(),))
            hello = None
            while hello is None:
                hello = handshake.receive(await lane.receive(), now_s=self._unix_time_s())
            walks_in = isinstance(hello.credential, Grant) and hello.credential.role == OPEN
            pays = walks_in and hello.lane != BULK
            if pays and (refusal := self._prices.pay(block, hello.peer_id, hello.work, loop.time())):
                raise Refused(errors.BUSY, refusal)
            self._charge(reserved, hello)
            if hello.lane in (CARRY, MEET):
                await self._carry(lane, hello, caller)
            else:
                self._admit(lane, hello, caller)

    @staticmethod
    def _charge(reserved: Reservation, hello: Hello) -> None:
        """Charge a connection to the peer that showed its key on it, and to its ticket. Raises Refused."""
        try:
            reserved.join("circuits" if hello.lane in (CARRY, MEET) else "peer", hello.peer_id)
            if ticket := _ticket_of(hello.credential):
                reserved.join("ticket", ticket)
        except ResourceRefused as refusal:
            raise Refused(errors.BUSY, str(refusal)) from refusal

    async def _carry(self, lane: Lane, hello: Hello, caller: _Caller) -> None:
        """Serve a peer that opens a circuit here, or comes for one, until its circuit is connected. Raises
        Refused."""
        self._fence.check(hello.peer_id, hello.incarnation)
        if caller.via:
            raise Refused(errors.CARRIER, "a circuit cannot lead through another circuit")
        if (reason := self._gate.authorize(hello)) is not None:
            raise Refused(errors.NOT_AUTHORIZED, reason)
        if hello.lane == MEET:
            await self.carrier.meet(lane, hello)
            return
        opener = Opener(hello.peer_id, isinstance(hello.credential, Grant), block_of(caller.host))
        lane.write((ServerHandshake.accept(),))
        # Apart from pending handshakes, or openers of circuits that nobody meets would keep all others out.
        task = background(self._welcome(self._open_for(lane, opener), caller.host))
        self._openers.add(task)
        task.add_done_callback(self._openers.discard)

    async def _open_for(self, lane: Lane, opener: Opener) -> None:
        with _refusal_told(lane):
            await self.carrier.carry(lane, opener)

    def _admit(self, lane: Lane, hello: Hello, caller: _Caller) -> None:
        """Admit a caller whose Hello is verified: keep a control connection until its bulk connection comes,
        then make the link of both. Raises Refused."""
        self._fence.check(hello.peer_id, hello.incarnation)
        key = hello.peer_id, hello.link_id
        if hello.lane == CONTROL:
            if key in self._half_open:
                raise Refused(errors.LANE, "this link has a control connection already")
            if len(self._half_open) >= self._limits.max_pending_handshakes:
                raise Refused(errors.BUSY, "too many links are waiting for their bulk connection; try again")
            reason = self._gate.authorize(hello)
            if reason is not None:
                raise Refused(errors.NOT_AUTHORIZED, reason)
            self._fence.note(hello.peer_id, hello.incarnation)
            loop = asyncio.get_running_loop()
            expiry = loop.call_later(self._limits.handshake_timeout_s, self._expire, key)
            self._half_open[key] = _HalfOpen(lane, hello, caller, expiry)
            lane.hold()
            lane.write((ServerHandshake.accept(),))
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
        reservation = self.resources.link(hello.peer_id, _ticket_of(credential), caller.host)
        lanes, way = (found.lane, lane), Way(via=caller.via, iroh=caller.iroh)
        self._on_link(self._link(hello.peer_id, hello.incarnation, credential, lanes, reservation, way))

    def _expire(self, key: tuple[str, bytes]) -> None:
        half = self._half_open[key]
        self._refuse(errors.TIMEOUT, half.caller.host, "its bulk connection did not come")
        self._drop_half_open(half)

    def _drop_half_open(self, half: _HalfOpen) -> None:
        half.expiry.cancel()
        del self._half_open[half.hello.peer_id, half.hello.link_id]
        half.lane.transport.abort()

    # Links.

    def _link(
        self,
        peer_id: str,
        incarnation: int,
        credential: Grant | MembershipCertificate | None,
        lanes: tuple[Lane, Lane],
        reservation: Reservation,
        way: Way,
    ) -> Link:
        for older in list(self._links):
            if older.peer_id == peer_id and older.incarnation < incarnation:
                older.close(f"incarnation {incarnation} of this peer has taken over")
        link = Link(
            peer_id=peer_id,
            incarnation=incarnation,
            credential=credential,
            control=lanes[0],
            bulk=lanes[1],
            limits=self._limits,
            on_gone=self._gone,
            reservation=reservation,
            way=way,
            line=self._line,
            on_offer=self._offered if way.address is not None and not way.via and not way.iroh else None,
        )
        self._links.add(link)
        self._plan_progress_check()
        return link

    def _plan_progress_check(self) -> None:
        if self._progress_check is None:
            later = asyncio.get_running_loop().call_later
            self._progress_check = later(self._limits.stall_s / STALL_CHECKS, self._check_progress)

    def _check_progress(self) -> None:
        self._progress_check = None
        for link in list(self._links):
            link.check_progress()
        if self._links:
            self._plan_progress_check()

    def _gone(self, link: Link) -> None:
        self._links.discard(link)
        if link.broke_framing:
            self.refusals[errors.FRAME] += 1
        task = background(self._drop_after_closing(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _drop_after_closing(self, link: Link) -> None:
        """Let a closing link send its reason, then drop its connections."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(link.wait_gone(), self._limits.shutdown_timeout_s)
        link.abort()

    def _tls_timeouts(self) -> dict[str, Any]:
        # The timeout around the whole handshake ends it; this one must not be shorter.
        timeouts = {"ssl_handshake_timeout": self._limits.handshake_timeout_s + 1}
        if sys.version_info >= (3, 11):
            timeouts["ssl_shutdown_timeout"] = self._limits.shutdown_timeout_s
        return timeouts


async def _introduce(lane: Lane, handshake: ClientHandshake) -> None:
    """Run the dialling side's handshake on a connection, which then reads nothing until its link starts.
    Raises Refused, ConnectionError."""
    while not handshake.accepted:
        data = await lane.receive()
        try:
            works = handshake.works
            reply = await asyncio.to_thread(handshake.receive, data) if works else handshake.receive(data)
        except Refused as refusal:
            if refusal.kind == errors.VERSION:
                lane.write((handshake.farewell(),))
                lane.transport.close()
            raise
        if reply:
            lane.write((reply,))
    lane.hold(handshake.rest())


@contextlib.contextmanager
def _refusal_told(lane: Lane) -> Iterator[None]:
    """Tell the other side of a refusal, and drop the connection after it or any other error."""
    try:
        yield
    except Refused as refusal:
        lane.write((ServerHandshake.refuse(refusal),))
        lane.transport.close()
        raise
    except BaseException:
        lane.transport.abort()
        raise


def _bucket(bytes_per_s: float) -> TokenBucket | None:
    return TokenBucket(bytes_per_s, max(1.0, CAP_BURST_S * bytes_per_s)) if bytes_per_s else None


def _abort(lane: Lane) -> None:
    lane.transport.abort()


def _carried(carrier: str) -> str:
    """Name of the far end of a circuit in counts and reports, in place of its address, which is not known."""
    return f"carrier {carrier[:12]}"


def _named(address: Address) -> str:
    """An address in a sentence."""
    if address.kind:
        return f"iroh, {address.relay_url or f'UDP {address.host}:{address.port}'}"
    if not address.carrier:
        return f"{address.host}:{address.port}"
    return f"carrier {address.carrier[:12]} at {address.host}:{address.port}"


def _ticket_of(credential: Grant | MembershipCertificate) -> str:
    """Key of the ticket with which a peer came; "" for the owner's own peer."""
    return credential.ticket_key if isinstance(credential, Grant) else credential.ticket


def _server_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No TLS session tickets: a resumed session does not show the certificate.
    context.num_tickets = 0
    identity.load_into(context)
    return context


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # There is no certificate authority. The key in the certificate is compared with the dialled one instead;
    # TLS proves that the server holds it.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _ssl_object(lane: Lane) -> ssl.SSLObject:
    found = lane.transport.get_extra_info("ssl_object")
    assert isinstance(found, ssl.SSLObject)
    return found


def _binding(lane: Lane) -> bytes:
    """Channel binding: bytes that only the two ends of this TLS connection know (the client's Finished
    message).

    In TLS 1.3 they are a MAC over the whole handshake, keys included.
    """
    binding = _ssl_object(lane).get_channel_binding("tls-unique")
    if not binding:
        raise Refused(errors.TLS, "the TLS connection has no channel binding")
    return binding


async def _bind(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"cannot listen on {host!r}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is in use") from error
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _host(lane: Lane) -> str:
    """Address of the other end; "" if the connection is gone."""
    found = lane.transport.get_extra_info("peername")
    return str(found[0]) if found else ""


def _tune(lane: Lane) -> None:
    """Set options of a connected socket: no delay of small packets, and BBR congestion control if
    available."""
    connection = lane.transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION") and not _host(lane).startswith(("127.", "::1")):
        # BBR keeps its rate on lossy long-distance paths, where loss-based algorithms halve theirs. Within
        # one machine its pacing only costs time.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
