"""A link over two lanes: queues, priorities, the order in which things end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from anabranch.net.framing import (
    MAX_MESSAGE_BYTES,
    Blob,
    FrameReader,
    Goodbye,
    Received,
    close_frame,
    message_frame,
)
from anabranch.net.lane import Lane
from anabranch.net.outbox import BulkOutbox
from anabranch.net.ticket import Grant, MembershipCertificate
from anabranch.net.transport import LaneCounters, Limits, LinkCounters, OnClosed, OnMessage

#: Bytes given to the bulk connection before the event loop gets a turn.
_TURN_BYTES = 512 << 10
#: How much of a chunk's beginning may be read together with its header (and be copied once).
_BULK_SCRATCH_BYTES = 8 << 10
_CONTROL_SCRATCH_BYTES = 64 << 10


class LaneLink:
    """`transport.Link` over a control and a bulk connection. Made by a backend after both handshakes."""

    def __init__(
        self,
        *,
        peer_id: str,
        incarnation: int,
        credential: Grant | MembershipCertificate | None,
        control: Lane,
        bulk: Lane,
        limits: Limits,
        on_gone: Callable[[LaneLink], None],
    ) -> None:
        """`control` and `bulk` are lanes on hold, their handshakes done."""
        self.peer_id = peer_id
        self.incarnation = incarnation
        self.credential = credential
        self._control = control
        self._bulk = bulk
        self._limits = limits
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._on_message: OnMessage | None = None
        self._on_closed: OnClosed | None = None
        self._closed_reason: str | None = None
        self._control_pieces: list[bytes] = []
        self._control_bytes = 0
        self._control_scheduled = False
        self._outbox = BulkOutbox(limits.chunk_bytes)
        self._bulk_scheduled = False
        self._bulk_paused = False
        self._control_sent = 0
        self._control_received = 0
        self._bulk_received = 0
        self._control.attach(self._write_control, self._lane_lost)
        self._bulk.attach(self._write_bulk, self._lane_lost)

    @property
    def closed_reason(self) -> str | None:
        return self._closed_reason

    @property
    def queued_bytes(self) -> int:
        waiting = self._control_bytes + self._outbox.queued_bytes
        if self._closed_reason is None:
            waiting += self._control.transport.get_write_buffer_size()
            waiting += self._bulk.transport.get_write_buffer_size()
        return waiting

    @property
    def counters(self) -> LinkCounters:
        control, bulk = self._control, self._bulk
        return LinkCounters(
            LaneCounters(
                self._control_sent, self._control_received, control.bytes_sent, control.bytes_received
            ),
            LaneCounters(
                self._outbox.messages_sent, self._bulk_received, bulk.bytes_sent, bulk.bytes_received
            ),
        )

    @property
    def broke_framing(self) -> bool:
        """Whether the other side sent bytes that the framing does not allow."""
        return self._control.broke_framing or self._bulk.broke_framing

    def start(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        if self._closed_reason is not None:
            self._loop.call_soon(on_closed, self._closed_reason)
            return
        limits = self._limits
        self._control.open(
            FrameReader(
                max_payload_bytes=0,
                max_message_bytes=limits.max_message_bytes,
                scratch_bytes=_CONTROL_SCRATCH_BYTES,
            ),
            self._received,
        )
        if self._closed_reason is None:
            self._bulk.open(
                FrameReader(
                    max_payload_bytes=limits.max_payload_bytes,
                    max_message_bytes=limits.max_message_bytes,
                    scratch_bytes=_BULK_SCRATCH_BYTES,
                ),
                self._received,
            )
            if self._bulk_paused:
                self._bulk.pause_reading()

    def send(self, message: bytes, payload: Blob | None = None, *, priority: int = 0) -> None:
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")
        if self._closed_reason is not None:
            return
        if payload is None:
            self._control_pieces += message_frame(message)
            self._control_bytes += len(message)
            self._control_sent += 1
            if not self._control_scheduled:
                self._control_scheduled = True
                # Everything sent in this turn of the loop leaves as one write.
                self._loop.call_soon(self._write_control)
            if self._control_bytes > self._limits.max_queued_control_bytes:
                self._give_up("control messages", self._control_bytes)
        else:
            self._outbox.put(message, payload, priority)
            self._schedule_bulk()
            if self._outbox.queued_bytes > self._limits.max_queued_bulk_bytes:
                self._give_up("payloads", self._outbox.queued_bytes)

    def pause_bulk(self) -> None:
        self._bulk_paused = True
        if self._on_message is not None:
            self._bulk.pause_reading()

    def resume_bulk(self) -> None:
        self._bulk_paused = False
        if self._on_message is not None:
            self._bulk.resume_reading()

    def close(self, reason: str) -> None:
        if self._closed_reason is not None:
            return
        self._control_pieces.append(close_frame(reason))
        pieces, self._control_pieces = self._control_pieces, []
        self._control.write((b"".join(pieces),))
        self._end(reason)
        # The bulk connection goes after the control connection has (see _lane_lost), lest the other
        # side sees it break before it has read why.
        self._control.resume_reading()
        self._control.transport.close()

    def abort(self) -> None:
        """Drop both connections at once."""
        self._control.transport.abort()
        self._bulk.transport.abort()

    async def wait_gone(self) -> None:
        """Wait until both connections are gone."""
        await asyncio.wait((self._control.lost, self._bulk.lost))

    def _give_up(self, what: str, size_bytes: int) -> None:
        self.close(f"{size_bytes} bytes of {what} wait to be sent: the peer reads too slowly")

    def _write_control(self) -> None:
        self._control_scheduled = False
        if not self._control_pieces or not self._control.writable or self._closed_reason is not None:
            return
        pieces, self._control_pieces = self._control_pieces, []
        self._control_bytes = 0
        # Joined: one TLS record for many small messages instead of two for each.
        self._control.write((b"".join(pieces),))

    def _schedule_bulk(self) -> None:
        if not self._bulk_scheduled:
            self._bulk_scheduled = True
            self._loop.call_soon(self._write_bulk)

    def _write_bulk(self) -> None:
        self._bulk_scheduled = False
        outbox, lane = self._outbox, self._bulk
        pieces: list[bytes | memoryview] = []
        size_bytes = 0
        while outbox and lane.writable and size_bytes < _TURN_BYTES and self._closed_reason is None:
            piece = outbox.next_pieces()
            size_bytes += sum(map(len, piece))
            pieces += piece
        if pieces:
            lane.write(pieces)
            if outbox and lane.writable:
                self._schedule_bulk()

    def _received(self, lane: Lane, received: Sequence[Received | Goodbye]) -> None:
        on_message = self._on_message
        assert on_message is not None  # lanes read nothing before start
        for item in received:
            if self._closed_reason is not None:
                return
            if isinstance(item, Goodbye):
                self._end(f"closed by the peer: {item.reason}")
                self.abort()
                return
            if lane is self._control:
                self._control_received += 1
            else:
                self._bulk_received += 1
            on_message(*item)

    def _lane_lost(self, lane: Lane, why: str) -> None:
        if self._closed_reason is None:
            name = "control" if lane is self._control else "bulk"
            self._end(f"{why} ({name})")
            self.abort()
        elif lane is self._control:
            self._bulk.transport.abort()

    def _end(self, reason: str) -> None:
        self._closed_reason = reason
        self._outbox.clear()
        self._control_pieces.clear()
        self._control_bytes = 0
        if self._on_closed is not None:
            self._loop.call_soon(self._on_closed, reason)
        self._on_gone(self)
