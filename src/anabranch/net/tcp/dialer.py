"""Dialling: connections that this side makes, directly, through iroh or a carrier. Not here: accepting."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from anabranch.addresses import Address
from anabranch.net import errors
from anabranch.net.address_race import first_of
from anabranch.net.circuit import READY, upgrade
from anabranch.net.errors import DialError, Refused
from anabranch.net.handshake import (
    BULK,
    CARRY,
    CONTROL,
    LINK_ID_BYTES,
    MEET,
    AnswerReader,
    ClientHandshake,
    Credential,
)
from anabranch.net.lane import Lane
from anabranch.net.link import Link, Way
from anabranch.net.resource_manager import Reservation, ResourceRefused
from anabranch.net.tcp.endpoint import Endpoint, carried_name
from anabranch.net.tcp.link_table import LinkTable
from anabranch.net.tcp.sockets import connect, host_of, tune
from anabranch.net.tcp.tls import channel_binding, proved_key, tls_timeouts

_T = TypeVar("_T")


@dataclass
class Progress:
    """Step that a dial takes now (`step`, one of those in `net.errors`), for the error if the dial fails
    there or never ends."""

    step: str = errors.TCP


class Dialer:
    """Dialling side of a transport: connects to other peers, and makes a link of two connections to a peer.
    end: key, limits and budgets of this side. links: table that keeps the links. only_engine: True if only
    addresses through iroh are dialled."""

    def __init__(self, end: Endpoint, links: LinkTable, only_engine: bool) -> None:
        self._end = end
        self._links = links
        self._only_engine = only_engine
        #: Credential that this side showed last to each peer that it dialled without a carrier.
        self._shown: dict[str, Credential] = {}

    async def dial_any(self, peer_id: str, addresses: Sequence[Address], credential: Credential) -> Link:
        """Make a link to the peer `peer_id`, which reads nothing until its `start`, at the first of its
        addresses that answers; later ones are tried while earlier ones are silent or after they failed. With
        `only_engine` others than those through iroh are left out. credential: shown to the peer. An error
        after an address has answered ends the dial; only at a carrier, unless it is a refusal, the other
        addresses are tried. Raises DialError if no address leads to the peer, or none is left, and Refused by
        either side."""
        connect = lambda address: self.reach(peer_id, address, credential)  # noqa: E731
        left = [address for address in addresses if address.kind or not self._only_engine]
        while True:
            address, lane = await first_of(left, connect, _abort)
            try:
                return await self._within(address, self._dial, peer_id, address, lane, credential)
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
        """Test whether the peer `peer_id` answers at an address: connect, and close as soon as a key is
        proved. Returns "" if it is the peer's, else the reason of the failure, which is not raised. An
        address at a carrier fails, as the carrier answers there."""
        try:
            if address.kind:
                lane = await self._within(address, self._connect_iroh, peer_id, address)
            else:
                lane = await self._within(address, self._connect_tls, address)
        except DialError as error:
            return str(error)
        found = proved_key(lane)
        lane.transport.abort()
        return "" if found == peer_id else f"another machine answers at {address}"

    async def meet(self, link: Link, token: bytes, reserved: Reservation) -> Lane:
        """Come for a circuit that was offered to this side: dial the carrier at the other end of `link` for
        the circuit of `token`. Returns the TLS connection with the peer that opened the circuit, whose
        handshake this side has to serve yet. Raises Refused if the carrier refuses, DialError and OSError if
        the connection cannot be made. reserved: given back when the connection ends or cannot be made."""
        carrier, address = link.peer_id, link.way.address
        assert address is not None  # only a link that this side dialled brings offers
        outer = None
        try:
            outer = await self._connect_tls(address, Progress())
            await introduce(outer, self.introduction(carrier, outer, MEET, token, self._shown[carrier]))
            outer.write((READY,))
            timeout_s = self._end.limits.handshake_timeout_s + 1
            inner = await upgrade(outer, self._end.server_context, server_side=True, timeout_s=timeout_s)
        except BaseException:
            reserved.release_all()
            if outer is not None:
                outer.transport.abort()
            raise
        inner.lost.add_done_callback(lambda _: reserved.release_all())
        return inner

    async def reach(self, peer_id: str, address: Address, credential: Credential) -> Lane:
        """Connection to the peer `peer_id` at one of its addresses, whose key is proved; no handshake has
        begun on it. credential: shown to the carrier, if the address is at one. Raises DialError if the
        connection cannot be made, Refused if another key answers there."""
        return await self._within(address, self._connect, peer_id, address, credential)

    def introduction(
        self, server: str, lane: Lane, name: str, link_id: bytes, credential: Credential
    ) -> ClientHandshake:
        """Handshake of this side, not begun yet, for the connection `lane` that this side made to the peer
        `server`. name, link_id, credential: kind of the connection, id of its link, and what this side shows
        (`Hello`). Raises Refused if another key answered."""
        return ClientHandshake(
            self._end.identity,
            self._end.incarnation,
            run=self._end.gate.run,
            server=server,
            server_certificate_key=proved_key(lane),
            lane=name,
            link_id=link_id,
            credential=credential,
            binding=channel_binding(lane),
        )

    async def _within(
        self, address: Address, work: Callable[..., Coroutine[Any, Any, _T]], *given: object
    ) -> _T:
        """Do a part of a dial, `work(*given, progress)`, in the time for a handshake; returns its result.
        Raises DialError, with the step, for a timeout, a wrong TLS version and errors of the network; Refused
        passes through."""
        timeout_s, what, at = self._end.limits.handshake_timeout_s, _named(address), Progress()
        try:
            return await asyncio.wait_for(work(*given, at), timeout_s)
        except DialError as error:
            error.step = error.step or at.step
            raise
        except asyncio.TimeoutError as error:
            raise DialError(f"{what} did not answer within {timeout_s:g} s ({at.step})", at.step) from error
        except ssl.SSLError as error:
            why = f"{what} does not use TLS 1.3 ({error.reason or error})"
            raise DialError(why, at.step) from error
        except OSError as error:
            why = error.strerror or str(error) or "the connection broke"
            step = errors.NAME if isinstance(error, socket.gaierror) else at.step
            # A carrier that nobody finds says nothing about the peer: its refusal is not the cause.
            cause = None if address.carrier else error
            raise DialError(f"cannot reach {what} ({step}): {why}", step) from cause

    async def _connect(self, peer_id: str, address: Address, credential: Credential, at: Progress) -> Lane:
        """Connection to the peer `peer_id` at an address, whose key is proved. credential: shown to the
        carrier, if the address is at one. at: gets the steps. Raises Refused if another key is proved,
        DialError if this process or the peer has too many connections or the way fails, and OSError."""
        try:
            connection = self._end.resources.outgoing(peer_id)
        except ResourceRefused as refusal:
            raise DialError(f"no connection to {_named(address)}: {refusal}") from refusal
        try:
            if address.carrier:
                lane = await self._open_circuit(peer_id, address, credential, at)
            elif address.kind:
                lane = await self._connect_iroh(peer_id, address, at)
            else:
                lane = await self._connect_tls(address, at)
            if (found := proved_key(lane)) != peer_id:
                lane.transport.abort()
                who = "another peer" if found else "a server without a peer's key"
                raise Refused(errors.SERVER_KEY, f"{who} answers at {_named(address)}")
        except BaseException:
            connection.release_all()
            raise
        lane.lost.add_done_callback(lambda _: connection.release_all())
        return lane

    async def _connect_iroh(self, peer_id: str, address: Address, at: Progress) -> Lane:
        """TLS connection to the peer `peer_id` through iroh. at: gets the steps. Raises DialError if iroh is
        not in use or finds no way, OSError if the connection breaks."""
        if self._end.engine is None:
            raise DialError(f"{_named(address)}: iroh is not in use here", errors.IROH)
        at.step = errors.IROH
        connection = await self._end.engine.connect(peer_id, address)
        at.step = errors.TLS_STEP
        return await self._secure(connection)

    async def _connect_tls(self, address: Address, at: Progress) -> Lane:
        at.step = errors.TCP
        connection = await connect(address.host, address.port)
        at.step = errors.TLS_STEP
        lane = await self._secure(connection, address.host)
        tune(lane)
        return lane

    async def _secure(self, connection: socket.socket, name: str = "") -> Lane:
        """TLS connection over a connected socket. name: host name that is told to the other end; "": none."""
        end, loop = self._end, asyncio.get_running_loop()
        options = {"server_hostname": name, **tls_timeouts(end.limits)}
        try:
            _, lane = await loop.create_connection(
                Lane, ssl=end.client_context, sock=connection, **options
            )
        except BaseException:
            connection.close()
            raise
        return lane

    async def _dial(
        self, peer_id: str, address: Address, control: Lane, credential: Credential, at: Progress
    ) -> Link:
        """Make a link to the peer `peer_id` from `control`, a connection with proved key, and a bulk
        connection that is made now; both go through the handshake, in which this side shows `credential`. at:
        gets the steps. Raises Refused, DialError and OSError; then all connections are dropped."""
        end, link_id = self._end, secrets.token_bytes(LINK_ID_BYTES)
        lanes = [control]
        incarnation = 0
        try:
            for name in (CONTROL, BULK):
                if name == BULK:
                    lanes.append(await self._connect(peer_id, address, credential, at))
                at.step = errors.HANDSHAKE
                handshake = self.introduction(peer_id, lanes[-1], name, link_id, credential)
                await introduce(lanes[-1], handshake)
                incarnation = handshake.server_incarnation
                end.fence.check(peer_id, incarnation)
        except BaseException:
            for lane in lanes:
                lane.transport.abort()
            raise
        end.fence.note(peer_id, incarnation)
        if not address.carrier:
            self._shown[peer_id] = credential
        host = carried_name(address.carrier) if address.carrier else host_of(control)
        reservation = end.resources.link(peer_id, "", host)
        way = Way(address, address.carrier, bool(address.kind))
        return self._links.make(peer_id, incarnation, None, (lanes[0], lanes[1]), reservation, way)

    async def _open_circuit(
        self, peer_id: str, address: Address, credential: Credential, at: Progress
    ) -> Lane:
        """Connection to the peer `peer_id` through the carrier at `address`: TLS with the peer inside one
        with the carrier, to which `credential` is shown. at: gets the steps. Raises DialError (also if the
        carrier refuses) and OSError."""
        outer = await self._connect_tls(address, at)
        try:
            at.step = errors.CIRCUIT
            link_id = secrets.token_bytes(LINK_ID_BYTES)
            await introduce(outer, self.introduction(address.carrier, outer, CARRY, link_id, credential))
            outer.resume_reading()
            outer.write((bytes.fromhex(peer_id),))
            answer = AnswerReader()
            while not answer.receive(await outer.receive()):
                pass
            at.step = errors.INNER_TLS
            timeout_s = self._end.limits.handshake_timeout_s + 1
            return await upgrade(outer, self._end.client_context, server_side=False, timeout_s=timeout_s)
        except Refused as refusal:
            outer.transport.abort()
            raise DialError(f"{_named(address)}: {refusal}") from refusal
        except BaseException:
            outer.transport.abort()
            raise


async def introduce(lane: Lane, handshake: ClientHandshake) -> None:
    """Run the dialling side's handshake on the connection `lane`, which then reads nothing until its link
    starts. Raises Refused by either side, ConnectionError if the connection is lost."""
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


def _abort(lane: Lane) -> None:
    lane.transport.abort()


def _named(address: Address) -> str:
    """Words for an address in a message to the user, such as "the carrier at HOST:PORT"."""
    if address.kind:
        return f"iroh, {address.relay_url or f'UDP {address.where}'}"
    return f"the carrier at {address.where}" if address.carrier else address.where
