"""Link to one authenticated peer, over two connections: queues, priorities, orderly closing.

Messages without a payload travel on the control connection, messages with a payload on the bulk connection,
so a heartbeat never waits behind a tensor. There is no order between the two connections, nor among payloads
of different priority or size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from anabranch.addresses import Address
from anabranch.net.chunk_queue import ChunkQueue
from anabranch.net.connection_limits import STALL_BYTES, STALL_CHECKS, Limits
from anabranch.net.framing import (
    MAX_MESSAGE_BYTES,
    MAX_PAUSES,
    MIN_CHUNK_BYTES,
    Blob,
    FrameReader,
    Goodbye,
    Offer,
    Parsed,
    close_frame,
    message_frame,
    offer_frame,
    pause_frame,
)
from anabranch.net.lane import Lane, TokenBucket
from anabranch.net.resource_manager import Reservation
from anabranch.net.ticket import Grant, MembershipCertificate

#: Bytes given to the bulk connection before the event loop gets a turn.
_TURN_BYTES = 256 << 10
#: Seconds of a pause between payloads after which a PAUSE frame is sent, so that TCP keeps its rate: less
#: than the least time after which kernels forget it (their retransmission timeout, 0.2 s and a round trip). A
#: choice.
_WARM_S = 0.2
#: Buffers of the frame readers. A bulk chunk read together with its header is copied once.
_BULK_SCRATCH_BYTES = 8 << 10
_CONTROL_SCRATCH_BYTES = 64 << 10

OnMessage = Callable[[bytes, Blob | None], None]
OnClosed = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """Path on which a link was made.

    address: address that this side dialled; None: the other side dialled. via: id of the carrier that
    forwards the link's bytes; "": none. iroh: True if the bytes go through iroh. host: of a link that the
    other side dialled through iroh, the IP address that it came from or "iroh relay", as its socket is a
    local one; "": any other link.
    """

    address: Address | None = None
    via: str = ""
    iroh: bool = False
    host: str = ""


@dataclass(frozen=True)
class LineBuckets:
    """Caps of this machine's line, which all its links share: of bytes that it sends (up) and receives
    (down); None: no cap."""

    up: TokenBucket | None = None
    down: TokenBucket | None = None


class Link:
    """Link to one peer. Nothing is read until `start`; after the link has closed, `send` does nothing.

    credential: ticket grant or certificate that the other side showed when it dialled; None if this side
    dialled. way: address and carrier over which it was made.
    """

    def __init__(
        self,
        *,
        peer_id: str,
        incarnation: int,
        credential: Grant | MembershipCertificate | None,
        control: Lane,
        bulk: Lane,
        limits: Limits,
        on_gone: Callable[[Link], None],
        reservation: Reservation | None = None,
        way: Way = Way(),
        on_offer: Callable[[Link, bytes], None] | None = None,
        line: LineBuckets = LineBuckets(),
    ) -> None:
        """control, bulk: connections with completed handshakes that read nothing yet. incarnation: the
        peer's. on_gone: called when the link has closed. reservation: charged with unfinished payloads.
        on_offer: called with the token of each circuit that the peer offers; None: it may offer none. line:
        limits the bytes of payloads, together with the other links that share it."""
        self.peer_id = peer_id
        self.incarnation = incarnation
        self.credential = credential
        #: Reason why the link closed; None while it is open.
        self.closed_reason: str | None = None
        self.control = control
        self.bulk = bulk
        self.way = way
        self._on_offer = on_offer
        self._line = line
        self._limits = limits
        self._reservation = reservation
        self._payloads: FrameReader | None = None
        #: Number of finished payloads; it and the bytes received at the last progress; checks since.
        self._finished = 0
        self._progress = 0, 0
        self._idle_checks = 0
        self._holds = self._holds_all = False
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._on_message: OnMessage | None = None
        self._on_closed: OnClosed | None = None
        self._control_pieces: list[bytes] = []
        self._control_bytes = 0
        self._control_scheduled = False
        # On a capped line about a second's bytes: the other links' turns come soon.
        chunk_bytes = limits.chunk_bytes if line.up is None else max(MIN_CHUNK_BYTES, line.up.second_bytes)
        self._queue = ChunkQueue(min(limits.chunk_bytes, chunk_bytes))
        self._bulk_scheduled = False
        #: Callbacks that wait for a short queue of payloads, with the bytes that it may hold then.
        self._awaiting_room: list[tuple[int, Callable[[], None]]] = []
        self._warming: asyncio.TimerHandle | None = None
        self._pauses = 0
        """PAUSE frames since the last payload."""
        self.control.attach(self._write_control, self._lane_lost)
        # Not written at once: if the kernel takes all of it, uvloop reports the connection writable again and
        # again within one turn of the loop.
        self.bulk.attach(self._schedule_bulk, self._lane_lost)

    @property
    def max_payload_bytes(self) -> int:
        """Largest payload (bytes) that is accepted."""
        return self._limits.max_payload_bytes

    @property
    def broke_framing(self) -> bool:
        """True if the link closed because the other side sent bytes that the framing does not allow, or began
        more payloads than the protocol can need."""
        return self.control.broke_framing or self.bulk.broke_framing

    def start(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Begin to read; to be called once. `on_message(message, payload or None)` is called for each
        message, `on_closed(reason)` once, after the last message; soon, if the link has closed already."""
        self._on_message = on_message
        self._on_closed = on_closed
        if self.closed_reason is not None:
            self._loop.call_soon(on_closed, self.closed_reason)
            return
        limits = self._limits
        self.control.rate = TokenBucket(limits.control_bytes_per_s, limits.control_burst_bytes)
        offers = self._on_offer is not None
        self.control.on_refused = self.bulk.on_refused = self.close
        self.control.open(self._reader(0, _CONTROL_SCRATCH_BYTES, offers), self._received)
        if self.closed_reason is None:
            self._payloads = self._reader(self._limits.max_payload_bytes, _BULK_SCRATCH_BYTES)
            self.bulk.rate = self._line.down
            self.bulk.open(self._payloads, self._received)

    def hold_payloads(self, hold: bool) -> None:
        """Stop reading payloads (`hold` True), which then wait at the other side, or read on (False).
        Messages without payload are read in any case."""
        self._holds = hold
        if self.closed_reason is None:
            (self.bulk.pause_for if hold else self.bulk.resume_for)("held")

    def hold_messages(self, hold: bool) -> None:
        """Stop reading messages (`hold` True), with payload and without, which then wait at the other side,
        or read on (False)."""
        self._holds_all = hold
        if self.closed_reason is None:
            for lane in (self.control, self.bulk):
                (lane.pause_for if hold else lane.resume_for)("in turn")

    def limit_payloads(self, max_payload_bytes: int) -> None:
        """Change the largest payload (bytes) that is accepted from now on; payloads that have begun are not
        affected. A larger one, or a packed one that is larger when unpacked, is a broken frame: the link
        closes."""
        self._limits = replace(self._limits, max_payload_bytes=max_payload_bytes)
        if self._payloads is not None:
            self._payloads.max_payload_bytes = max_payload_bytes

    def check_progress(self) -> None:
        """Close the link if its peer stalls; to be called STALL_CHECKS times in `Limits.stall_s`. It stalls
        if in STALL_CHECKS calls in a row payloads were unfinished and not held back by this side, none was
        finished and fewer than STALL_BYTES came. Any chunk counts, as urgent payloads overtake others without
        limit."""
        count = self._payloads.unfinished if self._payloads is not None else 0
        finished, seen = self._progress
        moved = self._finished != finished or self.bulk.bytes_received >= seen + STALL_BYTES
        if moved or not count or self._holds or self._holds_all:
            self._progress, self._idle_checks = (self._finished, self.bulk.bytes_received), 0
            return
        self._idle_checks += 1
        if self._idle_checks >= STALL_CHECKS:
            self.close(f"no progress of {count} unfinished payloads in {self._limits.stall_s:g} s")

    def _reader(self, max_payload_bytes: int, scratch_bytes: int, offers: bool = False) -> FrameReader:
        return FrameReader(
            max_payload_bytes=max_payload_bytes,
            max_message_bytes=self._limits.max_message_bytes,
            scratch_bytes=scratch_bytes,
            reservation=self._reservation,
            offers=offers,
        )

    def offer(self, token: bytes) -> None:
        """Offer a circuit, by its token, to the peer, which dialled directly; not if the link is closed."""
        if self.closed_reason is None:
            self._queue_control((offer_frame(token),))

    def send(self, message: bytes, payload: Blob | None = None, *, priority: int = 0) -> None:
        """Queue a message; returns at once. The payload's buffer must not change until it is sent.

        Messages without a payload keep their order; they travel on a connection of their own, so they may
        overtake payloads and be overtaken. priority: 0..7 orders payloads, lower first; among equals a
        shorter one may overtake. A link whose queue exceeds its limit is closed; a closed link drops the
        message. Raises ValueError for a message over the limit, an unfit blob or another priority.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
        if self.closed_reason is not None:
            return
        if payload is None:
            self._queue_control(message_frame(message))
            self._control_bytes += len(message)
            if self._control_bytes > self._limits.max_queued_control_bytes:
                self._give_up("control messages", self._control_bytes)
        else:
            self._queue.put(message, payload, priority)
            self._schedule_bulk()
            if self._queue.queued_bytes > self._limits.max_queued_bulk_bytes:
                self._give_up("payloads", self._queue.queued_bytes)

    def when_room(self, most_bytes: int, then: Callable[[], None]) -> None:
        """Call `then` soon, once at most `most_bytes` bytes of payloads wait to be sent, or the link has
        closed. A sender that waits so does not fill the queue of a peer that reads nothing."""
        if self.closed_reason is not None or self._queue.queued_bytes <= most_bytes:
            self._loop.call_soon(then)
        else:
            self._awaiting_room.append((most_bytes, then))

    def _tell_room(self) -> None:
        """Call, soon, the callbacks given to `when_room` for which there is room now."""
        waiting, self._awaiting_room = self._awaiting_room, []
        for most_bytes, then in waiting:
            self.when_room(most_bytes, then)

    def _queue_control(self, pieces: Sequence[bytes]) -> None:
        self._control_pieces += pieces
        if not self._control_scheduled:
            self._control_scheduled = True
            # All messages of this turn of the event loop leave as one write.
            self._loop.call_soon(self._write_control)

    def close(self, reason: str) -> None:
        """Close the link, and tell the other side the reason. Queued messages may be lost. `on_closed` is
        called soon. Nothing if it has closed already."""
        if self.closed_reason is not None:
            return
        self._control_pieces.append(close_frame(reason))
        self._flush_control()
        self._end(reason)
        # The bulk connection is dropped after the control connection (see _lane_lost), or the other side
        # could see it break before it has read the reason.
        self.control.resume_reading()
        self.control.transport.close()

    def abort(self) -> None:
        """Drop both connections at once: queued messages are lost, and the other side is told no reason. The
        link closes, and `on_closed` is called, once the first of them is gone."""
        self.control.transport.abort()
        self.bulk.transport.abort()

    async def wait_gone(self) -> None:
        """Wait until both connections are closed."""
        await asyncio.wait((self.control.lost, self.bulk.lost))

    def _give_up(self, what: str, size_bytes: int) -> None:
        self.close(f"{size_bytes} bytes of {what} wait to be sent: the peer reads too slowly")

    def _write_control(self) -> None:
        self._control_scheduled = False
        if not self._control_pieces or not self.control.writable or self.closed_reason is not None:
            return
        self._control_bytes = 0
        self._flush_control()

    def _flush_control(self) -> None:
        pieces, self._control_pieces = self._control_pieces, []
        # Joined: one TLS record for many small messages instead of two for each.
        self.control.write((b"".join(pieces),))

    def _schedule_bulk(self) -> None:
        if not self._bulk_scheduled:
            self._bulk_scheduled = True
            self._loop.call_soon(self._write_bulk)

    def _write_bulk(self) -> None:
        self._bulk_scheduled = False
        queue, lane, up = self._queue, self.bulk, self._line.up
        if up is not None and queue and (wait_s := up.turn_s(self, self._loop.time())):
            self._bulk_scheduled = True
            self._loop.call_later(wait_s, self._write_bulk)
            return
        turn_bytes = _TURN_BYTES if up is None else 1
        pieces: list[bytes | memoryview] = []
        size_bytes = 0
        while queue and lane.writable and size_bytes < turn_bytes and self.closed_reason is None:
            piece = queue.next_pieces()
            size_bytes += sum(map(len, piece))
            pieces += piece
        if pieces:
            lane.write(pieces)
            if up is not None:
                up.pause_s(size_bytes, self._loop.time())
            if queue and lane.writable:
                self._schedule_bulk()
            self._tell_room()
            self._pauses = 0
            self._plan_warming()

    def _plan_warming(self) -> None:
        """Plan the next PAUSE frame (`_warm`) for _WARM_S from now, in place of one that is planned already;
        none on a connection that keeps its rate in a pause (`Lane.forgets_rate`)."""
        if self._warming is not None:
            self._warming.cancel()
        self._warming = self._loop.call_later(_WARM_S, self._warm) if self.bulk.forgets_rate else None

    def _warm(self) -> None:
        """Send a PAUSE frame on the bulk connection, as nothing else was sent for _WARM_S, and plan the next;
        nothing more after MAX_PAUSES of them in a row, once the link has closed, or while payloads wait,
        whose writing plans the next one. While the send buffer is full, none is sent but the next one
        planned."""
        if self._queue or self.closed_reason is not None or self._pauses >= MAX_PAUSES:
            return
        if self.bulk.writable:
            self._pauses += 1
            self.bulk.write((pause_frame(),))
        self._plan_warming()

    def _received(self, lane: Lane, received: Sequence[Parsed]) -> None:
        on_message = self._on_message
        assert on_message is not None  # lanes read nothing before start
        for item in received:
            if self.closed_reason is not None:
                return
            if isinstance(item, Goodbye):
                self._end(f"closed by the peer: {item.reason}")
                self.abort()
                return
            if isinstance(item, Offer):
                assert self._on_offer is not None  # otherwise the frame is refused
                self._on_offer(self, item.token)
                continue
            self._finished += item[1] is not None
            on_message(*item)

    def _lane_lost(self, lane: Lane, why: str) -> None:
        if self.closed_reason is None:
            name = "control" if lane is self.control else "bulk"
            self._end(f"{why} ({name})")
            self.abort()
        elif lane is self.control:
            self.bulk.transport.abort()

    def _end(self, reason: str) -> None:
        self.closed_reason = reason
        self.bulk.stop()
        if self._reservation is not None:
            self._reservation.release_all()
        self._queue.clear()
        self._tell_room()
        if self._warming is not None:
            self._warming.cancel()
        self._control_pieces.clear()
        self._control_bytes = 0
        if self._on_closed is not None:
            self._loop.call_soon(self._on_closed, reason)
        self._on_gone(self)
