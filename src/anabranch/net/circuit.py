"""Circuits: connections of two peers that cannot dial each other, whose bytes a carrier forwards.

    opener -> carrier    a connection with a handshake of lane CARRY; then the target's id, 32 bytes
    carrier -> target    frame OFFER with a token, on the link that the target dialled
    target -> carrier    a connection with a handshake of lane MEET, whose link id is the token; then READY
    carrier -> opener    Answer; from here on the carrier passes bytes on, both ways, without looking at them
    opener <-> target    TLS and a handshake, as on a connection without a carrier (`upgrade`)

The scheme is that of TURN for TCP (RFC 6062): each connection has its own flow control, so a slow circuit
holds up nobody else. The carrier sees sizes and times. It cannot read, alter or forge a byte without breaking
the inner TLS connection. A circuit leads only to a peer that holds a direct link to the carrier, so never to
an outside address, and never through a second carrier.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.net import errors
from anabranch.net.connection_limits import CarryLimits
from anabranch.net.errors import DialError, Refused
from anabranch.net.framing import TOKEN_BYTES
from anabranch.net.handshake import Hello, ServerHandshake
from anabranch.net.lane import Lane, TokenBucket
from anabranch.net.link import Link

#: The opener's wish is the id of the peer to reach, in binary.
TARGET_BYTES = 32
#: Byte with which a target says that it has nothing more to say to the carrier.
READY = b"\x01"
#: Shortest burst (s) of a capped carrier, so that one read buffer does not stop it.
_BURST_S = 0.25
#: Seconds between looks for the link of a target that is just dialling the carrier.
_LOOK_S = 0.05


@dataclass(eq=False)
class _Wish:
    """Circuit that an opener asked for, and that is not there yet. near: the opener's connection. target: id
    of the wanted peer, "" until it is read. met: gets the target's connection."""

    opener: Opener
    near: Lane
    met: asyncio.Future[Lane]
    target: str = ""


@dataclass(frozen=True)
class Opener:
    """Peer that opens a circuit. guest: True if it showed a ticket, with which anybody can make keys without
    end; False if a certificate of membership. block: address block of its connection. ticket: key of the
    ticket with which it came; "" for the owner's own peer."""

    peer: str
    guest: bool
    block: str
    ticket: str = ""


@dataclass(eq=False)
class Circuit:
    """Forwarded connection. target: id of the peer that it leads to. near, far: the carrier's connections to
    opener and target. seen_bytes: bytes carried until the last check for idle circuits. idle_checks: number
    of the last checks in a row that found no new bytes."""

    opener: Opener
    target: str
    near: Lane
    far: Lane
    seen_bytes: int = 0
    idle_checks: int = 0

    @property
    def carried_bytes(self) -> int:
        return self.near.bytes_received + self.far.bytes_received

    def close(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class Carrier:
    """Carrier of this process: opens, forwards and ends circuits for other peers, within `limits`.

    link_of(peer): open link that the peer dialled directly; None: there is none. circuits: those that are
    forwarded now; one without bytes for `limits.idle_s` is ended.
    """

    def __init__(self, limits: CarryLimits, link_of: Callable[[str], Link | None]) -> None:
        self.limits = limits
        self.circuits: set[Circuit] = set()
        self._link_of = link_of
        self._wishes: set[_Wish] = set()
        #: Wishes that were offered to their targets, by token.
        self._offers: dict[bytes, _Wish] = {}
        self._ended_bytes = 0
        self._check: asyncio.TimerHandle | None = None
        rate = limits.bytes_per_s
        self._rate = TokenBucket(rate, max(_BURST_S * rate, 1.0)) if rate else None

    @property
    def carried_bytes(self) -> int:
        """Bytes forwarded since the start, each counted once."""
        return self._ended_bytes + sum(circuit.carried_bytes for circuit in self.circuits)

    def close(self) -> None:
        """End all circuits that are forwarded now. Openers that still wait for one are not told."""
        for circuit in list(self.circuits):
            circuit.close()
        if self._check is not None:
            self._check.cancel()

    async def carry(self, near: Lane, opener: Opener) -> None:
        """Serve an opener, whose handshake was accepted: read the target's id, offer the circuit to the
        target, and connect both once the target comes. Returns then; the bytes are forwarded until one of the
        two connections ends.

        near: the opener's connection, which `carry` does not close after an error. If too many circuits are
        open, another one may be ended for this one. Raises Refused (no link to the target, too many circuits,
        the target did not come, the opener left or sent too much) and ConnectionError.
        """
        wish = _Wish(opener, near, asyncio.get_running_loop().create_future())
        self._check_opener(wish)
        self._wishes.add(wish)
        try:
            wish.target = await _read_target(near)
            await self._check_target(wish)
            far = await self._met(wish)
        finally:
            self._wishes.discard(wish)
        near.hold()
        near.write((ServerHandshake.accept(),))
        self._connect(Circuit(opener, wish.target, near, far))

    def _check_opener(self, wish: _Wish) -> None:
        """Raise Refused if the opener of `wish` has too many circuits, or if this process carries as many as
        it may and `_give_way` found none to end in favour of the new one."""
        limits, opener = self.limits, wish.opener.peer
        if sum(opener in (each.opener.peer, each.target) for each in self._open()) >= limits.circuits_of_peer:
            raise Refused(errors.CARRIER, f"the calling peer has {limits.circuits_of_peer} circuits already")
        if len(self._open()) >= limits.circuits and not self._give_way(wish, self._open()):
            raise Refused(errors.CARRIER, f"it carries {limits.circuits} circuits, and will not carry more")

    async def _check_target(self, wish: _Wish) -> None:
        """Wait up to `limits.link_s` for a link of the peer that `wish` names, and check that the circuit may
        lead to that peer. If the peer has as many circuits as it may, another one may be ended for this one.
        Raises Refused if the peer has no link or is the opener, or if there is no room (the reason names the
        limit)."""
        limits, opener, target = self.limits, wish.opener.peer, wish.target
        for _ in range(math.ceil(limits.link_s / _LOOK_S)):
            if self._link_of(target) is None and not wish.near.lost.done():
                await asyncio.sleep(_LOOK_S)
        if self._link_of(target) is None or opener == target:
            raise Refused(errors.CARRIER, "the peer to reach has not connected to it")
        others = [each for each in self._open() if each is not wish]
        pair = sum((each.opener.peer, each.target) == (opener, target) for each in others)
        if pair >= limits.circuits_of_pair:
            raise Refused(errors.CARRIER, f"the two peers have {pair} circuits already")
        its = [each for each in others if target in (each.opener.peer, each.target)]
        if len(its) >= limits.circuits_of_peer and not self._give_way(wish, its):
            raise Refused(errors.CARRIER, f"the peer to reach has {limits.circuits_of_peer} circuits already")

    def _open(self) -> list[Circuit | _Wish]:
        return [*self._wishes, *self.circuits]

    def _give_way(self, wish: _Wish, full: Sequence[Circuit | _Wish]) -> bool:
        """End one of `full`, the circuits and wishes that have reached a limit, in favour of the new `wish`;
        False if none may be ended (`_spare`). A wish is ended before a circuit, and one of the opener with
        most of `full` before others. The connection of its opener is aborted."""
        given = self._spare(wish.opener, full)
        if not given:
            return False
        of_peer = Counter(each.opener.peer for each in full)
        given.sort(key=lambda each: (isinstance(each, _Wish), of_peer[each.opener.peer]))
        given[-1].near.transport.abort()
        self._forget(given[-1])
        return True

    @staticmethod
    def _spare(opener: Opener, full: Sequence[Circuit | _Wish]) -> list[Circuit | _Wish]:
        """Those of `full` that may be ended for a new circuit of `opener`; [] if none may.

        If guests opened any of them: those of the address block whose guests have most, for a member at once,
        for a guest only if its own block has at least two fewer; for a guest never a member's. Else those of
        the ticket with most (of its fullest block), if the opener's ticket has at least two fewer, or those
        of the opener's ticket from its fullest block, if the opener's block has at least two fewer. So many
        keys are worth no more than one address, and many seats of a ticket no more than one ticket."""
        guests = [each for each in full if each.opener.guest]
        if guests or opener.guest:
            return _crowd(guests, lambda each: each.opener.block, opener.block if opener.guest else None)
        ticket = _crowd(full, lambda each: each.opener.ticket, opener.ticket)
        if ticket:
            return _crowd(ticket, lambda each: each.opener.block)
        same = [each for each in full if each.opener.ticket == opener.ticket]
        return _crowd(same, lambda each: each.opener.block, opener.block)

    def _forget(self, gone: Circuit | _Wish) -> None:
        """Close a circuit, or drop a wish for one (`gone`), so that no limit counts it any longer."""
        if isinstance(gone, Circuit):
            gone.close()
            self._ended(gone)
        else:
            self._wishes.discard(gone)

    async def _met(self, wish: _Wish) -> Lane:
        """Offer the circuit of `wish` to its target, and return the connection with which the target comes
        for it within `limits.offer_s`. Raises Refused if it does not come, or if the opener leaves."""
        link = self._link_of(wish.target)
        assert link is not None  # `_check_target` has looked
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = wish
        link.offer(token)
        taken = False
        try:
            awaited = (wish.met, wish.near.lost)
            await asyncio.wait(awaited, timeout=self.limits.offer_s, return_when=asyncio.FIRST_COMPLETED)
            if wish.near.lost.done():
                raise Refused(errors.VANISHED, "it vanished before the circuit was there")
            if not wish.met.done():
                raise Refused(errors.CARRIER, "the peer to reach did not come")
            taken = True
            return wish.met.result()
        finally:
            del self._offers[token]
            if not taken and not wish.met.cancel():
                wish.met.result().transport.abort()

    async def meet(self, far: Lane, hello: Hello) -> None:
        """Take the connection `far` of a circuit's target, whose Hello is verified and not answered yet:
        accept it, and hand it to the wish whose token the Hello names. Returns once the target is READY.
        Raises Refused if no circuit waits for this peer, or it ends meanwhile, or other bytes come;
        ConnectionError if the connection breaks."""
        wish = self._offers.get(hello.link_id)
        if wish is None or wish.target != hello.peer_id or wish.met.done():
            raise Refused(errors.LANE, "no circuit waits for this peer")
        far.write((ServerHandshake.accept(),))
        ready = await far.receive()
        if ready != READY or wish.met.done():
            raise Refused(errors.LANE, "the circuit has ended, or was not met as agreed")
        far.hold()
        wish.met.set_result(far)

    def _connect(self, circuit: Circuit) -> None:
        self.circuits.add(circuit)
        for lane, other in ((circuit.near, circuit.far), (circuit.far, circuit.near)):
            lane.bytes_received = 0
            lane.lost.add_done_callback(lambda _: self._ended(circuit))
            lane.forward_to(other, self._rate)
        if self._check is None:
            self._plan_check()

    def _ended(self, circuit: Circuit) -> None:
        if circuit in self.circuits:
            self.circuits.discard(circuit)
            self._ended_bytes += circuit.carried_bytes

    def _plan_check(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(self.limits.idle_s / 2, self._check_idle)

    def _check_idle(self) -> None:
        self._check = None
        for circuit in list(self.circuits):
            seen, circuit.seen_bytes = circuit.seen_bytes, circuit.carried_bytes
            circuit.idle_checks = 0 if circuit.seen_bytes != seen else circuit.idle_checks + 1
            if circuit.idle_checks >= 2:
                circuit.close()
        if self.circuits:
            self._plan_check()


def _crowd(
    full: Sequence[Circuit | _Wish], group_of: Callable[[Circuit | _Wish], str], group: str | None = None
) -> list[Circuit | _Wish]:
    """Circuits and wishes of the largest group of `full`; [] if that has not at least two more than the group
    `group` (None: without this condition). group_of(each): name of the group of a circuit or wish."""
    counts = Counter(map(group_of, full))
    most = max(counts.values(), default=0)
    if group is not None and counts[group] + 2 > most:
        return []
    largest = next((name for name, count in counts.items() if count == most), None)
    return [each for each in full if group_of(each) == largest]


async def _read_target(near: Lane) -> str:
    """Id of the peer that an opener wants to reach, read from the opener's connection `near`. Raises Refused
    for further bytes, ConnectionError if the opener leaves."""
    wanted = b""
    while len(wanted) < TARGET_BYTES:
        wanted += await near.receive()
    if len(wanted) > TARGET_BYTES:
        raise Refused(errors.MALFORMED, "bytes after the target's id, before the circuit is there")
    return wanted.hex()


async def upgrade(outer: Lane, context: ssl.SSLContext, *, server_side: bool, timeout_s: float) -> Lane:
    """TLS connection run inside the established connection `outer`, which must not be used afterwards; a
    circuit's two ends encrypt with it. server_side: True at the listening side. timeout_s: of the TLS
    handshake. `outer` hands its incoming bytes over before the first await, so that none are lost. Raises
    DialError on Python before 3.11 without uvloop, and OSError (ConnectionError) if the connection breaks."""
    loop, below = asyncio.get_running_loop(), outer.transport
    abort = getattr(type(below).abort, "__code__", None)
    if type(below).__module__ == "asyncio.sslproto" and abort and "_force_close" not in abort.co_names:
        # asyncio's TLS transport fails on an error of a TLS layer above it (TypeError in _abort, until
        # Python 3.11.8 and 3.12.2): a carrier that damages bytes could end this process with it. Later ones
        # do not, and their abort() calls _force_close, so that this would recurse.
        below._force_close = lambda error: below.abort()  # type: ignore[attr-defined]
    if sys.version_info < (3, 11) and "uvloop" not in type(loop).__module__:
        raise DialError("circuits need Python 3.11 or uvloop: install either (pip install uvloop)")
    inner = Lane()
    inner.forgets_rate = outer.forgets_rate
    transport = await loop.start_tls(
        below, inner, context, server_side=server_side, ssl_handshake_timeout=timeout_s
    )
    if transport is None:
        raise ConnectionError("the connection ended during the handshake")
    inner.use(transport)
    return inner
