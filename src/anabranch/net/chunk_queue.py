"""Send queue of a bulk connection: cuts payloads into chunks, and chooses the order of the chunks. No I/O.

Lower priority numbers go first, strictly. Within a priority, chunks alternate between the oldest payload and
the shortest later one, if that is shorter than the rest of the oldest: payloads of one size go in order, each
at full speed, and a small one does not wait behind a large one.
"""

from __future__ import annotations

from collections import deque

from blake3 import blake3

from anabranch.net.framing import (
    MAX_OPEN_STREAMS,
    Blob,
    checksum_of,
    chunk_header,
    done_frame,
    hash_text,
    open_frame,
    payload_hasher,
)

#: Number of priorities, from 0 (most urgent). Two payloads of each can be open at once.
PRIORITIES = MAX_OPEN_STREAMS // 2

Pieces = list[bytes | memoryview]


class _Outgoing:
    __slots__ = ("blob", "hasher", "message", "opened", "sent", "stream", "view")

    def __init__(self, message: bytes, blob: Blob) -> None:
        self.message = message
        self.blob = blob
        self.view = blob.view()
        self.sent = 0
        self.stream = -1  # assigned when its first chunk is sent
        self.opened = blake3()  # hasher of the OPEN frame's body
        self.hasher = None if blob.hash else payload_hasher(blob.dtype, blob.shape)

    @property
    def left(self) -> int:
        return len(self.view) - self.sent


class ChunkQueue:
    """Send queue of payloads, in chunks of at most `chunk_bytes`. The most urgent priority goes first; within
    one, chunks of the oldest and the shortest payload alternate. queued_bytes: bytes of messages and payloads
    that wait, and one for each message. As a bool: True while any bytes wait."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._queues: list[deque[_Outgoing]] = [deque() for _ in range(PRIORITIES)]
        # By priority: the payload that overtakes the oldest, and True if it sent the last chunk.
        self._quick: list[_Outgoing | None] = [None] * PRIORITIES
        self._quick_turn = [False] * PRIORITIES
        self._next_stream = 0
        self.queued_bytes = 0

    def __bool__(self) -> bool:
        return self.queued_bytes > 0

    def put(self, message: bytes, blob: Blob, priority: int) -> None:
        """Queue a message with its payload. priority: 0 (most urgent) to PRIORITIES - 1. The payload's buffer
        is not copied. Raises ValueError for another priority or an unfit blob."""
        if not 0 <= priority < PRIORITIES:
            raise ValueError(f"priority {priority} is not within 0..{PRIORITIES - 1}")
        outgoing = _Outgoing(message, blob)
        self._queues[priority].append(outgoing)
        self.queued_bytes += outgoing.left + len(message) + 1

    def next_pieces(self) -> Pieces:
        """Remove the next chunk from the queue and return its frames and buffers, to be written in order; []
        if nothing waits. The first chunk of a payload brings its message, too, the last one its checksum."""
        for priority, queue in enumerate(self._queues):
            if queue:
                return self._advance(priority, queue, self._choose(priority, queue))
        return []

    def clear(self) -> None:
        for queue in self._queues:
            queue.clear()
        self._quick = [None] * PRIORITIES
        self.queued_bytes = 0

    def _choose(self, priority: int, queue: deque[_Outgoing]) -> _Outgoing:
        oldest = queue[0]
        quick = self._quick[priority]
        if quick is None and len(queue) > 1:
            shortest = min(queue, key=lambda outgoing: outgoing.left)
            if shortest.left < oldest.left:
                quick = self._quick[priority] = shortest
                # It goes first and is shorter, so it ends before the oldest.
                self._quick_turn[priority] = False
        if quick is None:
            return oldest
        self._quick_turn[priority] = not self._quick_turn[priority]
        return quick if self._quick_turn[priority] else oldest

    def _advance(self, priority: int, queue: deque[_Outgoing], outgoing: _Outgoing) -> Pieces:
        pieces: Pieces = []
        if outgoing.stream < 0:
            outgoing.stream = self._next_stream
            # There are far more numbers than open streams, so no open one is reused.
            self._next_stream = (self._next_stream + 1) & 0xFFFF
            header, body = open_frame(outgoing.stream, outgoing.message, outgoing.blob, len(outgoing.view))
            outgoing.opened.update(body)
            pieces += (header, body)
            self.queued_bytes -= len(outgoing.message) + 1
        if outgoing.left:
            piece = outgoing.view[outgoing.sent : outgoing.sent + self._chunk_bytes]
            if outgoing.hasher is not None:
                outgoing.hasher.update(piece)
            outgoing.sent += len(piece)
            self.queued_bytes -= len(piece)
            pieces += (chunk_header(outgoing.stream, len(piece)), piece)
        if not outgoing.left:
            payload_hash = outgoing.blob.hash if outgoing.hasher is None else hash_text(outgoing.hasher)
            pieces.append(done_frame(outgoing.stream, checksum_of(outgoing.opened, payload_hash)))
            queue.remove(outgoing)
            if self._quick[priority] is outgoing:
                self._quick[priority] = None
        return pieces
