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
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.net import errors
from anabranch.net.connection_limits import CarryLimits
from anabranch.net.errors import DialError, Refused
from anabranch.net.framing import TOKEN_BYTES
from anabranch.net.handshake import Hello, ServerHandshake
from anabranch.net.lane import Lane, ReadingRate
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
class _Offer:
    """Circuit that waits for its target to come. met: result is the target's connection."""

    opener: str
    target: str
    met: asyncio.Future[Lane]


@dataclass(eq=False)
class Circuit:
    """Forwarded connection. opener, target: ids of its two peers. near, far: the carrier's connections to
    them. seen_bytes, idle_checks: bytes carried at the last check for idle circuits, and checks since without
    any."""

    opener: str
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
    """Circuits that this process forwards.

    link_of(peer): open link that the peer dialled directly; None: there is none. circuits: those that are
    forwarded now.
    """

    def __init__(self, limits: CarryLimits, link_of: Callable[[str], Link | None]) -> None:
        self.limits = limits
        self.circuits: set[Circuit] = set()
        self._link_of = link_of
        self._offers: dict[bytes, _Offer] = {}
        #: Circuits and offers of each peer, in either part.
        self._of_peer: Counter[str] = Counter()
        self._ended_bytes = 0
        self._check: asyncio.TimerHandle | None = None
        rate = limits.bytes_per_s
        self._rate = ReadingRate(rate, max(_BURST_S * rate, 1.0)) if rate else None

    @property
    def carried_bytes(self) -> int:
        """Bytes forwarded since the start, each counted once."""
        return self._ended_bytes + sum(circuit.carried_bytes for circuit in self.circuits)

    def close(self) -> None:
        """End all circuits."""
        for circuit in list(self.circuits):
            circuit.close()
        if self._check is not None:
            self._check.cancel()

    async def carry(self, near: Lane, hello: Hello) -> None:
        """Serve an opener, whose handshake was accepted: read the target's id, offer the circuit to the
        target, and connect both once it comes.

        near: the opener's connection. Raises Refused (no link to the target, too many circuits, the target
        did not come) and ConnectionError.
        """
        wish = b""
        while len(wish) < TARGET_BYTES:
            wish += await near.receive()
        if len(wish) > TARGET_BYTES:
            raise Refused(errors.MALFORMED, "bytes after the target's id, before the circuit is there")
        target = wish.hex()
        for _ in range(math.ceil(self.limits.link_s / _LOOK_S)):
            if self._link_of(target) is None and not near.lost.done():
                await asyncio.sleep(_LOOK_S)
        offer = self._offer(hello.peer_id, target)
        self._of_peer.update((offer.opener, offer.target))
        try:
            far = await self._met(offer)
        except BaseException:
            self._of_peer.subtract((offer.opener, offer.target))
            raise
        near.hold()
        near.write((ServerHandshake.accept(),))
        self._connect(Circuit(offer.opener, offer.target, near, far))

    def _offer(self, opener: str, target: str) -> _Offer:
        """Check the opener's wish for a circuit against the limits; returns the circuit's record. Raises
        Refused with the limit that stands against it."""
        limits = self.limits
        if self._link_of(target) is None or opener == target:
            raise Refused(errors.CARRIER, f"it has no link that peer {target[:12]} dialled")
        if len(self.circuits) + len(self._offers) >= limits.circuits:
            raise Refused(errors.CARRIER, f"it carries {limits.circuits} circuits, and will not carry more")
        open_now: list[Circuit | _Offer] = [*self.circuits, *self._offers.values()]
        pair = sum((each.opener, each.target) == (opener, target) for each in open_now)
        if pair >= limits.circuits_of_pair:
            raise Refused(errors.CARRIER, f"the two peers have {pair} circuits already")
        for peer in (opener, target):
            if self._of_peer[peer] >= limits.circuits_of_peer:
                raise Refused(errors.CARRIER, f"peer {peer[:12]} has {limits.circuits_of_peer} circuits")
        return _Offer(opener, target, asyncio.get_running_loop().create_future())

    async def _met(self, offer: _Offer) -> Lane:
        """Offer a circuit to its target, and wait for it. Raises Refused."""
        link = self._link_of(offer.target)
        assert link is not None  # `_offer` has looked
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = offer
        link.offer(token)
        try:
            return await asyncio.wait_for(offer.met, self.limits.offer_s)
        except asyncio.TimeoutError:
            raise Refused(errors.CARRIER, f"peer {offer.target[:12]} did not come") from None
        finally:
            del self._offers[token]

    async def meet(self, far: Lane, hello: Hello) -> None:
        """Take the connection of a circuit's target, whose handshake is verified but not answered yet: accept
        it, and hand it to the circuit that waits. Raises Refused if none does, and ConnectionError."""
        offer = self._offers.get(hello.link_id)
        if offer is None or offer.target != hello.peer_id or offer.met.done():
            raise Refused(errors.LANE, "no circuit waits for this peer")
        far.write((ServerHandshake.accept(),))
        ready = await far.receive()
        if ready != READY or offer.met.done():
            raise Refused(errors.LANE, "the circuit has ended, or was not met as agreed")
        far.hold()
        offer.met.set_result(far)

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
            self._of_peer.subtract((circuit.opener, circuit.target))
            self._of_peer += Counter()  # forgets peers without circuits

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


async def upgrade(outer: Lane, context: ssl.SSLContext, *, server_side: bool, timeout_s: float) -> Lane:
    """Run TLS inside an established connection; returns the inner connection. `outer` is used up. Nothing is
    awaited before the inner connection gets the bytes that come. Raises DialError where Python cannot do it,
    and OSError if the connection breaks."""
    loop, below = asyncio.get_running_loop(), outer.transport
    if type(below).__module__ == "asyncio.sslproto":
        # asyncio's TLS transport fails on an error of a TLS layer above it (TypeError in _abort, until
        # Python 3.11.8 and 3.12.2): a carrier that damages bytes could end this process with it.
        below._force_close = lambda error: below.abort()  # type: ignore[attr-defined]
    if sys.version_info < (3, 11) and "uvloop" not in type(loop).__module__:
        raise DialError("circuits need Python 3.11 or uvloop: install either (pip install uvloop)")
    inner = Lane()
    transport = await loop.start_tls(
        below, inner, context, server_side=server_side, ssl_handshake_timeout=timeout_s
    )
    if transport is None:
        raise ConnectionError("the connection ended during the handshake")
    inner.use(transport)
    return inner
