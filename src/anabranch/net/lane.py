"""A TLS connection as an asyncio protocol: first bytes of the handshake, then frames (`framing`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from anabranch.net.errors import FrameError
from anabranch.net.framing import FrameReader, Parsed
from anabranch.net.resource_manager import ResourceRefused
from anabranch.net.tls_overhead import CountedTls, TlsFlood

_HANDSHAKE_BUFFER_BYTES = 4096
#: Size of the send buffer above which the lane stops feeding it: urgent messages wait behind few bytes.
_HIGH_WATER_BYTES = 64 << 10
#: Read buffer, and size of the send buffer above which reading stops, of a connection whose bytes are
#: forwarded: with the TLS layer's own buffers a forwarded connection holds about half a MiB at most.
_FORWARD_BYTES = 64 << 10

OnReceived = Callable[["Lane", Sequence[Parsed]], None]
OnLaneLost = Callable[["Lane", str], None]


#: Least seconds between two questions of a link for its turn on a capped line. A choice: far below a chunk's.
TURN_S = 0.01


class TokenBucket:
    """Token bucket that limits the bytes read from lanes, or written to them, to `bytes_per_s`. It is full at
    first. burst_bytes: most bytes at once after a pause. Several lanes may share one."""

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        self._bytes_per_s, self._burst_bytes = bytes_per_s, burst_bytes
        self._left, self._at = burst_bytes, -math.inf
        self._waiting: dict[object, float] = {}
        """Link that waits for a turn, in their order -> time (s) at which it asks again."""

    @property
    def second_bytes(self) -> int:
        """Bytes that the rate permits in one second; at least 1."""
        return max(1, int(self._bytes_per_s))

    def turn_s(self, who: object, now: float) -> float:
        """Seconds after which `who`, any object, is to ask again for its turn to write; 0: it is its turn
        now, which this call uses up. Turns come in the order in which they were first asked for, so that no
        link of a slow line waits for ever; one that does not ask again within TURN_S of that time loses its
        place."""
        self._waiting = {each: at for each, at in self._waiting.items() if now < at + TURN_S or each is who}
        self._waiting.setdefault(who, now)
        pause_s = self.pause_s(0, now)
        if not pause_s and next(iter(self._waiting)) is who:
            del self._waiting[who]
            return 0.0
        wait_s = max(pause_s, TURN_S)
        self._waiting[who] = now + wait_s
        return wait_s

    def pause_s(self, size_bytes: int, now: float) -> float:
        """Charge bytes that were read or written at time `now` (s), at once and in full; returns the seconds
        for which nothing more may be read or written, 0 while tokens are left."""
        elapsed_s = max(0.0, now - self._at)
        self._left = min(self._burst_bytes, self._left + self._bytes_per_s * elapsed_s) - size_bytes
        self._at = now
        return max(0.0, -self._left / self._bytes_per_s)


class Lane(asyncio.BufferedProtocol):
    """TLS connection: in its handshake until `hold` is called, reading nothing until `open`, and then frames.
    A carrier's is never opened: `forward_to` passes its bytes on to another connection.

    lost: future that is done when the connection is gone. writable: False while the transport's send buffer
    is full. bytes_received: without those of the handshake. bytes_sent: since a link took the lane over
    (`attach`). broke_framing: True if the other side sent bytes that are no frames, began more payloads than
    the protocol can need, or flooded the connection (`flooded`). on_refused: called with the reason when a
    payload or a long message found no room; it is to close the connection. rate: limits the bytes that are
    read; None: no limit. forgets_rate: True if the kernel lets the connection begin slowly again after a
    pause, as TCP without BBR does. known: True once the handshake is over (`hold`).
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.writable = True
        self.bytes_received = 0
        self.bytes_sent = 0
        self.broke_framing = False
        self.forgets_rate = False
        self.known = False
        self.on_refused: Callable[[str], None] | None = None
        self.rate: TokenBucket | None = None
        self.transport: asyncio.Transport
        self._buffer = memoryview(bytearray(_HANDSHAKE_BUFFER_BYTES))
        self._inbox = bytearray()
        self._arrival: asyncio.Future[None] | None = None
        self._why_lost = ""
        self._tls: CountedTls | None = None
        self._reader: FrameReader | None = None
        self._stopped = False
        self._resume: asyncio.TimerHandle | None = None
        self._on_received: OnReceived
        self._on_writable: Callable[[], None] | None = None
        self._on_lost: OnLaneLost | None = None
        self._forward: Lane | None = None
        self._read_pauses: set[str] = set()
        """Reasons for which this connection is not read now."""

    @property
    def flooded(self) -> bool:
        """True if the other side sent too many TLS messages without content (`tls_overhead`), for which the
        connection is dropped."""
        return self._tls is not None and self._tls.flooded

    # During the handshake.

    async def receive(self) -> bytes:
        """Wait for bytes of the handshake; returns at least one. Raises ConnectionError if the connection is
        lost, TlsFlood if it was dropped for TLS messages without content."""
        while not self._inbox:
            if self._why_lost:
                raise TlsFlood if self.flooded else ConnectionError(self._why_lost)
            self._arrival = self._loop.create_future()
            await self._arrival
        data = bytes(self._inbox)
        self._inbox.clear()
        return data

    def hold(self, rest: bytes = b"") -> None:
        """End the handshake, and read nothing until `open` or `forward_to`. rest: bytes that came after it,
        which are kept for these."""
        self.known = True
        if self._tls is not None:
            self._tls.stranger = False
        self._inbox += rest
        self.pause_reading()

    # Afterwards.

    def attach(self, on_writable: Callable[[], None], on_lost: OnLaneLost) -> None:
        """Register the callbacks of the link that takes this lane over: `on_writable()` when the send buffer
        has room again, `on_lost(lane, reason)` when the connection is lost, soon if it is lost already.
        `bytes_sent` counts from here on."""
        self._on_writable = on_writable
        self._on_lost = on_lost
        self.bytes_sent = 0  # the handshake's do not count, on either side
        if self._why_lost:
            self._loop.call_soon(on_lost, self, self._why_lost)

    def open(self, reader: FrameReader, on_received: OnReceived) -> None:
        """Read frames from now on, beginning with bytes that came after the handshake; `on_received(lane,
        messages)` gets what `reader` parses from them."""
        self._reader = reader
        self._on_received = on_received
        beginning = bytes(self._inbox)
        self._inbox.clear()
        if beginning:
            self.bytes_received += len(beginning)
            self._parse(lambda: reader.feed(beginning))
        self.resume_reading()

    def stop(self) -> None:
        """Drop unfinished payloads, and ignore bytes that still come. The connection stays open."""
        self._stopped = True
        if self._reader is not None:
            self._reader.end()
        if self._resume is not None:
            self._resume.cancel()

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.bytes_sent += sum(map(len, pieces))
        # Both asyncio's and uvloop's TLS transports send the list in one call, without joining it.
        self.transport.writelines(cast("Iterable[bytes]", pieces))

    def pause_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_for(self, why: str) -> None:
        """Read nothing until `resume_for` was called for this reason (`why`, any text), and for all others
        that hold."""
        self._read_pauses.add(why)
        self.pause_reading()

    def resume_for(self, why: str) -> None:
        self._read_pauses.discard(why)
        if not self._read_pauses:
            self.resume_reading()

    def _pause_for_s(self, pause_s: float) -> None:
        """Read nothing for `pause_s` seconds; a pause by the rate that is planned already gives way, as the
        new one is longer."""
        if self._resume is not None:
            self._resume.cancel()
        self.pause_for("rate")
        self._resume = self._loop.call_later(pause_s, self.resume_for, "rate")

    # Forwarding by a carrier.

    def forward_to(self, other: Lane, rate: TokenBucket | None) -> None:
        """Pass all bytes on to the connection `other` from now on, as quickly as it takes them. rate: limits
        them, with the connections that share it; None: no limit. When this connection ends, `other` is
        closed."""
        self._forward, self.rate = other, rate
        self._buffer = memoryview(bytearray(_FORWARD_BYTES))
        self.transport.set_write_buffer_limits(high=_FORWARD_BYTES)
        beginning = bytes(self._inbox)
        self._inbox.clear()
        if beginning:
            self.bytes_received += len(beginning)
            other.write((beginning,))
        if self._why_lost:
            other.transport.close()
        elif not self._read_pauses:
            self.resume_reading()

    def _forwarded(self, other: Lane, count: int) -> None:
        self.bytes_received += count
        # A copy: the transport may keep what it is given, and the buffer is used again.
        other.write((bytes(self._buffer[:count]),))
        if self.rate is not None and (pause_s := self.rate.pause_s(count, self._loop.time())):
            self._pause_for_s(pause_s)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.use(cast(asyncio.Transport, transport))

    def use(self, transport: asyncio.Transport) -> None:
        """Take over a transport, also one of `loop.start_tls`, which does not call `connection_made`."""
        self.transport = transport
        tls = transport.get_extra_info("ssl_object")
        self._tls = tls if isinstance(tls, CountedTls) else None
        self.transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reader is None or self._stopped:
            return self._buffer
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        if self._forward is not None:
            self._forwarded(self._forward, nbytes)
            return
        if reader is None:
            self._inbox += self._buffer[:nbytes]
            self._wake()
            if len(self._inbox) >= _HANDSHAKE_BUFFER_BYTES * 2:
                self._end("it sent too much before the handshake was over")
                self.transport.abort()
            return
        if self._stopped:
            return
        self.bytes_received += nbytes
        if self.rate is not None and (pause_s := self.rate.pause_s(nbytes, self._loop.time())):
            self._pause_for_s(pause_s)
        self._parse(lambda: reader.received(nbytes))

    def _parse(self, parse: Callable[[], Sequence[Parsed]]) -> None:
        try:
            received = parse()
        except FrameError as error:
            self._break(error)
        except ResourceRefused as refusal:
            self.broke_framing = refusal.own
            if self.on_refused is not None:
                self.on_refused(str(refusal))
        else:
            if received:
                self._on_received(self, received)

    def eof_received(self) -> None:
        # Returning None makes the transport close itself.
        self._end("the connection ended without a goodbye")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.flooded:
            self.broke_framing = True
            self._end(str(TlsFlood()))
        self._end("the connection ended without a goodbye" if exc is None else f"the connection broke: {exc}")
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self.writable = False
        if self._forward is not None:
            self._forward.pause_for("full")

    def resume_writing(self) -> None:
        self.writable = True
        if self._forward is not None:
            self._forward.resume_for("full")
        if self._on_writable is not None:
            self._on_writable()

    def _break(self, error: FrameError) -> None:
        self.broke_framing = True
        self._end(f"broken frame: {error}")
        self.transport.abort()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _end(self, why: str) -> None:
        if self._why_lost:
            return
        self._why_lost = why
        self._wake()
        if self._forward is not None:
            if self._resume is not None:
                self._resume.cancel()
            # The received bytes have been written to it, and are sent before its end.
            self._forward.transport.close()
        if self._on_lost is not None:
            self._on_lost(self, why)
