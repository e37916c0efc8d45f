"""Transport over TLS 1.3 and TCP: dials peers, accepts connections, and pairs them to links."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabranch.net import errors
from anabranch.net.background import background
from anabranch.net.connection_limits import STALL_CHECKS, Limits
from anabranch.net.errors import DialError, ListenError, PortInUseError, Refused
from anabranch.net.handshake import (
    BULK,
    CONTROL,
    LINK_ID_BYTES,
    ClientHandshake,
    Credential,
    Gate,
    Hello,
    IncarnationFence,
    ServerHandshake,
)
from anabranch.net.identity import Identity, peer_id_of_certificate
from anabranch.net.lane import Lane
from anabranch.net.link import Link
from anabranch.net.resource_manager import AttemptRate, Reservation, ResourceManager, ResourceRefused
from anabranch.net.ticket import Grant, MembershipCertificate

#: Connections that the kernel queues while the event loop is busy; a plain choice above any swarm's burst.
_BACKLOG = 256
#: Seconds to wait after a failed accept (out of file descriptors, or the caller has vanished).
_ACCEPT_RETRY_S = 0.05


@dataclass
class _HalfOpen:
    """An accepted control connection that waits for its bulk connection."""

    lane: Lane
    hello: Hello
    host: str
    expiry: asyncio.TimerHandle


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
    ) -> None:
        """`on_link` receives each link that another peer dialled, and must call `start` on it."""
        if "tls-unique" not in ssl.CHANNEL_BINDING_TYPES:
            raise ListenError(
                "this Python's TLS library has no channel bindings (tls-unique): use another build of Python"
            )
        self._identity = identity
        self._incarnation = incarnation
        self._gate = gate
        self._on_link = on_link
        #: Called for each refused connection, with its kind, the caller's host and the reason.
        self.on_refused: Callable[[str, str, str], None] = lambda kind, host, reason: None
        #: Numbers of refused connections and broken frames, by kind (`errors.TICKET`, `errors.FRAME`, ...).
        self.refusals: Counter[str] = Counter()
        self._limits = limits or Limits()
        self.resources = ResourceManager(self._limits.budgets())
        self._attempts = AttemptRate(self._limits.attempts_per_s, self._limits.attempts_burst)
        self._progress_check: asyncio.TimerHandle | None = None
        self._unix_time_s = unix_time_s
        self._fence = IncarnationFence()
        self._server_context = _server_context(identity)
        self._client_context = _client_context()
        self._listeners: list[tuple[socket.socket, asyncio.Task[None]]] = []
        #: Host of each connection in its handshake.
        self._pending: dict[asyncio.Task[None], str] = {}
        self._half_open: dict[tuple[str, bytes], _HalfOpen] = {}
        self._links: set[Link] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def use_limits(self, limits: Limits) -> None:
        """Replace the limits, as soon as the sizes of the run are known; links that are open follow."""
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
        timeout_s = self._limits.handshake_timeout_s
        try:
            return await asyncio.wait_for(self._dial(peer_id, host, port, credential), timeout_s)
        except asyncio.TimeoutError as error:
            raise DialError(f"{host}:{port} did not answer within {timeout_s:g} s") from error
        except ssl.SSLError as error:
            raise DialError(f"{host}:{port} does not use TLS 1.3 ({error.reason or error})") from error
        except OSError as error:
            why = error.strerror or str(error) or "the connection broke"
            raise DialError(f"cannot reach {host}:{port}: {why}") from error

    async def close(self) -> None:
        """Stop listening and close every link, with the reason for the other sides."""
        tasks = [task for _, task in self._listeners] + list(self._pending)
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
        if self._closing:
            await asyncio.wait(self._closing)
        if self._progress_check is not None:
            self._progress_check.cancel()

    # Dialling.

    async def _dial(self, peer_id: str, host: str, port: int, credential: Credential) -> Link:
        link_id = secrets.token_bytes(LINK_ID_BYTES)
        lanes: list[Lane] = []
        incarnation = 0
        try:
            for name in (CONTROL, BULK):
                lane = await self._connect(peer_id, host, port)
                lanes.append(lane)
                handshake = ClientHandshake(
                    self._identity,
                    self._incarnation,
                    run=self._gate.run,
                    server=peer_id,
                    server_certificate_key=peer_id_of_certificate(_ssl_object(lane).getpeercert(True)),
                    lane=name,
                    link_id=link_id,
                    credential=credential,
                    binding=_binding(lane),
                )
                await _introduce(lane, handshake)
                incarnation = handshake.server_incarnation
                self._fence.check(peer_id, incarnation)
        except BaseException:
            for lane in lanes:
                lane.transport.abort()
            raise
        self._fence.note(peer_id, incarnation)
        reservation = self.resources.link(peer_id, "", _host(lanes[0]))
        return self._link(peer_id, incarnation, None, lanes[0], lanes[1], reservation)

    async def _connect(self, peer_id: str, host: str, port: int) -> Lane:
        loop = asyncio.get_running_loop()
        try:
            connection = self.resources.outgoing(peer_id)
        except ResourceRefused as refusal:
            raise DialError(f"no connection to {host}:{port}: {refusal}") from refusal
        try:
            _, lane = await loop.create_connection(
                Lane, host, port, ssl=self._client_context, **self._tls_timeouts()
            )
        except BaseException:
            connection.release_all()
            raise
        lane.lost.add_done_callback(lambda _: connection.release_all())
        _tune(lane)
        return lane

    # Accepting.

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            reserved = self._reserve(address[0])
            if isinstance(reserved, str):
                self._refuse(errors.BUSY, address[0], reserved)
                connection.close()
                continue
            task = background(self._welcome(connection, address[0], reserved))
            self._pending[task] = address[0]
            task.add_done_callback(self._pending.pop)

    def _reserve(self, host: str) -> Reservation | str:
        """Reserve one more connection from `host`, or return the reason why none can begin now."""
        if not self._attempts.take(host, asyncio.get_running_loop().time()):
            return "its address block has begun too many connections of late; try again"
        if len(self._pending) >= self._limits.max_pending_handshakes:
            return "too many handshakes are pending"
        if [*self._pending.values()].count(host) >= self._limits.max_pending_of_host:
            return "too many handshakes from this address are pending"
        try:
            return self.resources.incoming(host)
        except ResourceRefused as refusal:
            return str(refusal)

    async def _welcome(self, connection: socket.socket, host: str, reserved: Reservation) -> None:
        """Handle an incoming connection, from its first byte until it is part of a link or refused."""
        limit_s = self._limits.handshake_timeout_s
        try:
            await asyncio.wait_for(self._shake_hands(connection, host, reserved), limit_s)
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

    async def _shake_hands(self, connection: socket.socket, host: str, reserved: Reservation) -> None:
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
        try:
            _tune(lane)
            handshake = ServerHandshake(self._identity, self._incarnation, self._gate, binding=_binding(lane))
            lane.write((handshake.greeting(),))
            hello = None
            while hello is None:
                hello = handshake.receive(await lane.receive(), now_s=self._unix_time_s())
            self._charge(reserved, hello)
            self._admit(lane, hello, host)
        except Refused as refusal:
            lane.write((ServerHandshake.refuse(refusal),))
            lane.transport.close()
            raise
        except BaseException:
            lane.transport.abort()
            raise

    @staticmethod
    def _charge(reserved: Reservation, hello: Hello) -> None:
        """Charge a connection to the peer that showed its key on it, and to its ticket. Raises Refused."""
        try:
            reserved.join("peer", hello.peer_id)
            if ticket := _ticket_of(hello.credential):
                reserved.join("ticket", ticket)
        except ResourceRefused as refusal:
            raise Refused(errors.BUSY, str(refusal)) from refusal

    def _admit(self, lane: Lane, hello: Hello, host: str) -> None:
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
            self._half_open[key] = _HalfOpen(lane, hello, host, expiry)
            lane.hold()
            lane.write((ServerHandshake.accept(),))
            return
        found = self._half_open.get(key)
        if found is None or found.hello.incarnation != hello.incarnation:
            raise Refused(errors.LANE, "there is no control connection for this bulk connection")
        del self._half_open[key]
        found.expiry.cancel()
        lane.hold()
        lane.write((ServerHandshake.accept(),))
        credential = found.hello.credential
        reservation = self.resources.link(hello.peer_id, _ticket_of(credential), host)
        lanes = found.lane, lane
        self._on_link(self._link(hello.peer_id, hello.incarnation, credential, *lanes, reservation))

    def _expire(self, key: tuple[str, bytes]) -> None:
        half = self._half_open[key]
        self._refuse(errors.TIMEOUT, half.host, "its bulk connection did not come")
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
        control: Lane,
        bulk: Lane,
        reservation: Reservation,
    ) -> Link:
        for older in list(self._links):
            if older.peer_id == peer_id and older.incarnation < incarnation:
                older.close(f"incarnation {incarnation} of this peer has taken over")
        link = Link(
            peer_id=peer_id,
            incarnation=incarnation,
            credential=credential,
            control=control,
            bulk=bulk,
            limits=self._limits,
            on_gone=self._gone,
            reservation=reservation,
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
            reply = handshake.receive(data)
        except Refused as refusal:
            if refusal.kind == errors.VERSION:
                lane.write((handshake.farewell(),))
                lane.transport.close()
            raise
        if reply:
            lane.write((reply,))
    lane.hold(handshake.rest())


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
