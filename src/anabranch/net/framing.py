"""Framing of messages and payloads on an established connection. No I/O.

A frame is an 8-byte header, `kind u8 | 0 u8 | stream u16 | length u32` (big-endian), and `length` bytes:

    MESSAGE  the message
    OPEN     dtype u8 | dims u8 | form u16 | message length u32 | payload bytes u64 | shape u64 x dims |
             message
             (a packed payload, `net.packing`, has fewer bytes than its shape implies)
    CHUNK    the next bytes of the payload of `stream`: MIN_CHUNK_BYTES at least, or its last ones
    DONE     checksum of the whole payload: 16 bytes of BLAKE3 over the OPEN frame's body and the payload's
             hash as text
    CLOSE    the reason as UTF-8; nothing follows
    OFFER    token of a circuit (`net.circuit`) that waits for the receiver; control connections only
    PAUSE    nothing: keeps TCP's rate between two payloads; bulk connections only

The hash of a payload (`payload_hasher`) is the one in receipts of audited runs, so each end hashes it once.
With form 0 it is of the bytes that travel. With form 1 (`OF_VALUES`) it is of the tensor that packed bytes
unpack to, and whoever unpacks them compares the checksum (`Blob.check`).

A message with a payload is delivered once its DONE has arrived with the right checksum. Chunks of several
streams may interleave. Announced sizes are checked, and their memory reserved (`net.resource_manager`),
before it is allocated; the memory of a payload is mapped once and only touched as its bytes arrive.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3

from anabranch.net import scaled_packing
from anabranch.net.errors import FrameError
from anabranch.net.packing import MAX_WIDTH, size_bounds
from anabranch.net.resource_manager import Reservation, ResourceRefused

MESSAGE, OPEN, CHUNK, DONE, CLOSE, OFFER, PAUSE = range(1, 8)

#: Bytes per element of every dtype that can be sent; its index in this order is its code on the wire.
DTYPES = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4, "float64": 8, "bfloat16": 2}
#: Dtype of packed 64-bit integers (`net.packing`); its code follows the others.
PACKED = "packed"
#: Dtype of packed 64-bit integers with a power of two for each block (`net.scaled_packing`).
SCALED = "scaled"
#: Form of a packed payload whose checksum is over the hash of its values.
OF_VALUES = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_DIMS = 4
MAX_CHUNK_BYTES = 1 << 20
#: Least bytes of a chunk that is not its payload's last: shorter ones cost their receiver more than their
#: bytes do. A choice: on a capped line a frame's header and TLS record cost a hundredth of it.
MIN_CHUNK_BYTES = 4 << 10
MAX_REASON_BYTES = 512
#: Most payloads that can be open at once on one connection: two of each priority of the sender's queue.
MAX_OPEN_STREAMS = 16
CHECKSUM_BYTES = 16
#: Bytes of a payload's hash.
HASH_BYTES = 16
#: Size of a circuit's token: not to be guessed while the circuit waits.
TOKEN_BYTES = 16
#: Most PAUSE frames between two payloads. A link sends five a second (`net.link`), so they bridge 20 seconds;
#: after that a connection costs nothing. A choice.
MAX_PAUSES = 100

_HEADER = struct.Struct("!BBHI")
_TENSOR = struct.Struct("!BBHIQ")
_NAMES = (*DTYPES, PACKED, SCALED)
_CODES = {dtype: code for code, dtype in enumerate(_NAMES)}


@dataclass(frozen=True)
class Blob:
    """Payload of a message: bytes of a tensor, little-endian and row-major, with its dtype and shape.

    With dtype `PACKED` the bytes are those of `packing.pack`, with `SCALED` of `scaled_packing.pack`. data:
    any contiguous buffer; a received one is writable. It must not change until it is sent. hash: of the
    tensor (`payload_hasher`), "" if it is not known; of a received payload this end computed it, and it is ""
    for packed ones. check: of a received payload of form OF_VALUES (else None), to be called with the hash of
    its tensor before anything uses it; raises FrameError if the sender's checksum is another."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytearray | bytes
    hash: str = ""
    check: Callable[[str], None] | None = None

    def view(self) -> memoryview:
        """View of `data` as flat bytes, not a copy. Raises ValueError if the dtype or the shape cannot be
        sent, `data` is not contiguous, or its size does not fit them."""
        if self.dtype not in _CODES:
            raise ValueError(f"dtype {self.dtype!r} cannot be sent; only {', '.join(_NAMES)}")
        if len(self.shape) > MAX_DIMS:
            raise ValueError(f"{len(self.shape)} dimensions exceed {MAX_DIMS}")
        view = memoryview(self.data)
        if not view.c_contiguous:
            raise ValueError("the buffer is not contiguous")
        if not _fits(view.nbytes, self.dtype, self.shape):
            raise ValueError(f"{view.nbytes} bytes are not a {self.dtype} tensor of shape {self.shape}")
        # cast() refuses shapes that contain a zero.
        return view.cast("B") if view.nbytes else memoryview(b"")


def _fits(size_bytes: int, dtype: str, shape: Sequence[int]) -> bool:
    """True if a payload of this dtype and shape can have `size_bytes` bytes; packed ones have a range."""
    count = math.prod(shape)
    if dtype == PACKED:
        least, most = size_bounds(count)
        return least <= size_bytes <= most
    if dtype == SCALED:
        least, most = scaled_packing.size_bounds(count)
        return least <= size_bytes <= most
    return size_bytes == count * DTYPES[dtype]


def payload_hasher(dtype: str, shape: Sequence[int]) -> blake3:
    """Hasher of a payload of this dtype and shape, which it hashes first; to be updated with the payload's
    bytes. `hash_text` reads it. The hash is that of the tensor in receipts
    (`train.stage.audit.payload_hash`)."""
    return blake3(f"torch.{dtype} {tuple(shape)}".encode())


def hash_text(hasher: blake3) -> str:
    return hasher.hexdigest(length=HASH_BYTES)


def checksum_of(opened: blake3, payload_hash: str) -> bytes:
    """Checksum of a payload. opened: hasher of its OPEN frame's body, which is not changed. payload_hash:
    hash of the payload, as text."""
    return opened.copy().update(payload_hash.encode()).digest(length=CHECKSUM_BYTES)


@dataclass(frozen=True)
class Goodbye:
    """Last frame of a connection (CLOSE), with the other side's reason."""

    reason: str


@dataclass(frozen=True)
class Offer:
    """Offer of a circuit by the carrier at the other end of the connection."""

    token: bytes


Received = tuple[bytes, Blob | None]
Parsed = Received | Goodbye | Offer


def message_frame(message: bytes) -> tuple[bytes, bytes]:
    return _HEADER.pack(MESSAGE, 0, 0, len(message)), message


def open_frame(stream: int, message: bytes, blob: Blob, size_bytes: int) -> tuple[bytes, bytes]:
    """Header and body of the frame that announces the payload `blob` of `message`; its `size_bytes` bytes
    follow as chunks of `stream`. The payload's checksum also covers this body."""
    shape = blob.shape
    form = OF_VALUES if blob.hash and blob.dtype in (PACKED, SCALED) else 0
    body = b"".join(
        (
            _TENSOR.pack(_CODES[blob.dtype], len(shape), form, len(message), size_bytes),
            struct.pack(f"!{len(shape)}Q", *shape),
            message,
        )
    )
    return _HEADER.pack(OPEN, 0, stream, len(body)), body


def pause_frame() -> bytes:
    return _HEADER.pack(PAUSE, 0, 0, 0)


def chunk_header(stream: int, size_bytes: int) -> bytes:
    return _HEADER.pack(CHUNK, 0, stream, size_bytes)


def done_frame(stream: int, checksum: bytes) -> bytes:
    return _HEADER.pack(DONE, 0, stream, CHECKSUM_BYTES) + checksum


def close_frame(reason: str) -> bytes:
    # Truncation may split a character; the reader replaces the rest of it.
    body = reason.encode()[:MAX_REASON_BYTES]
    return _HEADER.pack(CLOSE, 0, 0, len(body)) + body


def offer_frame(token: bytes) -> bytes:
    return _HEADER.pack(OFFER, 0, 0, len(token)) + token


class _Incoming:
    """Payload that is being received. opened: hasher of its OPEN frame's body. hasher: hasher of the
    payload's bytes so far; None for form OF_VALUES, whose hash is of the unpacked values."""

    __slots__ = ("blob", "hasher", "message", "opened", "received", "target")

    def __init__(
        self, message: bytes, dtype: str, shape: tuple[int, ...], size_bytes: int, form: int, opened: blake3
    ) -> None:
        """message: that of the OPEN frame, kept until the payload is whole. dtype, shape, form, size_bytes:
        of the payload, as the frame announces them; its memory is mapped now."""
        self.message = message
        # Not a bytearray, which would write zeros to all of it at once.
        self.target = np.empty(size_bytes, dtype=np.uint8).data
        self.blob = Blob(dtype, shape, self.target)
        self.opened = opened
        self.hasher = None if form == OF_VALUES else payload_hasher(dtype, shape)
        self.received = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are reserved for this payload and its message."""
        return len(self.target) + len(self.message)


class FrameReader:
    """Parser of a connection's bytes into messages, payloads and a Goodbye. The caller writes received bytes
    into `get_buffer()` and calls `received(count)`, as asyncio.BufferedProtocol does, so that payload bytes
    are received in place. After a FrameError, a ResourceRefused or a Goodbye the reader accepts nothing more.
    max_payload_bytes: 0 refuses payloads (control connection). reservation: charged with each payload and its
    message from its OPEN to its DONE, and with each frame for which the buffer has to grow until it is whole;
    None: unbounded. scratch_bytes: of the buffer for all but the bytes of payloads. offers: True if the other
    side may offer circuits."""

    def __init__(
        self,
        *,
        max_payload_bytes: int,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        scratch_bytes: int = 64 << 10,
        reservation: Reservation | None = None,
        offers: bool = False,
    ) -> None:
        self._reservation = reservation
        self._offers = offers
        self.max_payload_bytes = max_payload_bytes
        self._max_message_bytes = max_message_bytes
        self._small = memoryview(bytearray(scratch_bytes))
        # `_small`, or a buffer of the size of one longer frame.
        self._scratch = self._small
        # Bytes of an incomplete frame at the beginning of `_scratch`.
        self._filled = 0
        self._streams: dict[int, _Incoming] = {}
        # Payload that the current chunk belongs to, and bytes of the chunk that are still to come.
        self._current: _Incoming | None = None
        self._chunk_left = 0
        # PAUSE frames since the last frame of a payload.
        self._pauses = 0
        self._finished = False

    def get_buffer(self) -> memoryview:
        """Buffer for the next bytes; never empty."""
        if self._current is not None:
            start = self._current.received
            return self._current.target[start : start + self._chunk_left]
        return self._scratch[self._filled :]

    def received(self, count: int) -> Sequence[Parsed]:
        """Parse `count` bytes that were written into the last `get_buffer()`; returns what is complete now:
        messages, offers, a Goodbye. Raises FrameError for bytes that the framing does not allow,
        ResourceRefused if a payload or a long message has no room."""
        if self._finished:
            raise FrameError("bytes after the end of the connection")
        if self._current is not None:
            self._take_chunk(self._current, count)
            return ()
        try:
            return self._parse(self._filled + count)
        except (FrameError, ResourceRefused):
            self.end()
            raise

    @property
    def unfinished(self) -> int:
        """Number of payloads that have begun and not ended."""
        return len(self._streams)

    def end(self) -> None:
        """Drop the unfinished payloads, give their memory back, and accept nothing more."""
        self._finished = True
        self._current = None
        for incoming in self._streams.values():
            self._release(incoming)
        self._streams.clear()
        self._shrink()

    def feed(self, data: bytes | memoryview) -> list[Parsed]:
        """Parse the bytes `data`, which lie in the caller's buffer and are copied into the reader's; returns
        and raises as `received` does."""
        out: list[Parsed] = []
        view = memoryview(data)
        while view:
            buffer = self.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            out.extend(self.received(count))
            view = view[count:]
        return out

    def _parse(self, end: int) -> list[Parsed]:
        """Parse all complete frames in `_scratch[:end]`, keep the beginning of the next frame, and return
        what became complete (messages, offers, a Goodbye). Raises FrameError, and ResourceRefused if a
        payload or a long frame has no room."""
        out: list[Parsed] = []
        scratch = self._scratch
        at = 0
        while end - at >= _HEADER.size:
            kind, zero, stream, length = _HEADER.unpack_from(scratch, at)
            self._check_header(kind, zero, stream, length)
            body = at + _HEADER.size
            if kind == CHUNK:
                incoming = self._streams[stream]
                have = min(length, end - body)
                start = incoming.received
                incoming.target[start : start + have] = scratch[body : body + have]
                self._chunk_left = length
                self._take_chunk(incoming, have)
                at = body + have
                continue
            if end - body < length:
                if _HEADER.size + length > len(scratch):
                    self._grow(_HEADER.size + length)
                break
            at = body + length
            self._take_frame(kind, stream, bytes(scratch[body:at]), out)
            if self._finished:
                if at != end:
                    raise FrameError("bytes after the end of the connection")
                break
        self._filled = end - at
        if at == end:
            self._shrink()
        elif at or self._scratch is not scratch:
            self._scratch[: end - at] = bytes(scratch[at:end])
        return out

    def _grow(self, size_bytes: int) -> None:
        """Use a buffer of `size_bytes` bytes, for one long frame. Raises ResourceRefused without room."""
        self._shrink()
        if self._reservation is not None:
            self._reservation.reserve(memory_bytes=size_bytes)
        self._scratch = memoryview(bytearray(size_bytes))

    def _shrink(self) -> None:
        """Use the small buffer again, and give back what a larger one took."""
        if self._scratch is not self._small:
            if self._reservation is not None:
                self._reservation.release(memory_bytes=len(self._scratch))
            self._scratch = self._small

    def _take_chunk(self, incoming: _Incoming, count: int) -> None:
        start = incoming.received
        if incoming.hasher is not None:
            incoming.hasher.update(incoming.target[start : start + count])
        incoming.received = start + count
        self._chunk_left -= count
        self._current = incoming if self._chunk_left else None

    def _check_header(self, kind: int, zero: int, stream: int, length: int) -> None:
        """Raise FrameError for a frame header that is not allowed now, before any of the frame's body is
        stored. kind, zero, stream, length: its fields (see the module)."""
        if zero or (stream and kind in (MESSAGE, CLOSE, OFFER, PAUSE)):
            raise FrameError("a reserved field is not zero")
        if kind == MESSAGE:
            if length > self._max_message_bytes:
                raise FrameError(f"a message of {length} bytes exceeds {self._max_message_bytes}")
        elif kind == OPEN:
            self._check_open(stream, length)
        elif kind == CHUNK:
            incoming = self._streams.get(stream)
            if incoming is None:
                raise FrameError(f"a chunk of stream {stream}, which is not open")
            if not 0 < length <= MAX_CHUNK_BYTES:
                raise FrameError(f"a chunk of {length} bytes is not within 1..{MAX_CHUNK_BYTES}")
            left = len(incoming.target) - incoming.received
            if length > left:
                raise FrameError(f"stream {stream} carries more than its {len(incoming.target)} bytes")
            if length < min(left, MIN_CHUNK_BYTES):
                raise FrameError(f"a chunk of {length} bytes is not the last of stream {stream}")
        elif kind == DONE:
            if stream not in self._streams or length != CHECKSUM_BYTES:
                raise FrameError(f"an invalid end of stream {stream}, or one that is not open")
        elif kind == CLOSE:
            if length > MAX_REASON_BYTES:
                raise FrameError(f"a reason of {length} bytes exceeds {MAX_REASON_BYTES}")
        elif kind == OFFER and self._offers:
            if length != TOKEN_BYTES:
                raise FrameError(f"a circuit's token has {TOKEN_BYTES} bytes, not {length}")
        elif kind == PAUSE and self.max_payload_bytes:
            self._check_pause(length)
        else:
            raise FrameError(f"there is no frame of kind {kind}")

    def _check_pause(self, length: int) -> None:
        """Count a PAUSE frame. Raises FrameError if the frame has a body (`length` bytes), comes within a
        payload, where it would pass for progress, or is more than the MAX_PAUSES-th since the last
        payload."""
        if length:
            raise FrameError(f"a pause of {length} bytes, which has none")
        if self._streams:
            raise FrameError("a pause within a payload")
        self._pauses += 1
        if self._pauses > MAX_PAUSES:
            raise FrameError(f"more than {MAX_PAUSES} pauses between two payloads")

    def _check_open(self, stream: int, length: int) -> None:
        if not self.max_payload_bytes:
            raise FrameError("this connection carries no payloads")
        if stream in self._streams:
            raise FrameError(f"stream {stream} is open already")
        if len(self._streams) >= MAX_OPEN_STREAMS:
            raise FrameError(f"more than {MAX_OPEN_STREAMS} payloads are open at once")
        if length > _TENSOR.size + 8 * MAX_DIMS + self._max_message_bytes:
            raise FrameError(f"a message of {length} bytes exceeds {self._max_message_bytes}")

    def _take_frame(self, kind: int, stream: int, body: bytes, out: list[Parsed]) -> None:
        if kind == MESSAGE:
            out.append((body, None))
        elif kind == OPEN:
            self._pauses = 0
            self._streams[stream] = self._open(body)
        elif kind == DONE:
            out.append(self._finish(stream, body))
        elif kind == OFFER:
            out.append(Offer(body))
        elif kind == CLOSE:
            self._finished = True
            out.append(Goodbye(body.decode(errors="replace")))

    def _open(self, body: bytes) -> _Incoming:
        if len(body) < _TENSOR.size:
            raise FrameError("a tensor header is cut short")
        code, dims, form, message_bytes, size_bytes = _TENSOR.unpack_from(body)
        if code >= len(_NAMES):
            raise FrameError(f"there is no dtype of code {code}")
        if dims > MAX_DIMS:
            raise FrameError(f"{dims} dimensions exceed {MAX_DIMS}")
        if form > (OF_VALUES if _NAMES[code] in (PACKED, SCALED) else 0):
            raise FrameError(f"a {_NAMES[code]} tensor has no form {form}")
        if message_bytes > self._max_message_bytes:
            raise FrameError(f"a message of {message_bytes} bytes exceeds {self._max_message_bytes}")
        message_at = _TENSOR.size + 8 * dims
        if len(body) != message_at + message_bytes:
            raise FrameError("a tensor header's lengths do not add up")
        if size_bytes > self.max_payload_bytes:
            raise FrameError(f"a payload of {size_bytes} bytes exceeds {self.max_payload_bytes}")
        shape = struct.unpack_from(f"!{dims}Q", body, _TENSOR.size)
        dtype = _NAMES[code]
        if not _fits(size_bytes, dtype, shape):
            raise FrameError(f"{size_bytes} bytes are not a {dtype} tensor of shape {shape}")
        if dtype in (PACKED, SCALED) and math.prod(shape) * MAX_WIDTH > self.max_payload_bytes:
            raise FrameError(f"a payload of shape {shape} exceeds {self.max_payload_bytes} bytes unpacked")
        if not size_bytes and math.prod(size or 1 for size in shape) > self.max_payload_bytes:
            # An empty tensor could have any shape, but libraries overflow on its strides.
            raise FrameError(f"the shape {shape} is too large")
        if self._reservation is not None:
            self._reservation.reserve(memory_bytes=size_bytes + message_bytes, streams=1)
        return _Incoming(body[message_at:], dtype, shape, size_bytes, form, blake3(body))

    def _finish(self, stream: int, checksum: bytes) -> Received:
        incoming = self._streams.pop(stream)
        self._release(incoming)
        if incoming.received != len(incoming.target):
            raise FrameError(f"stream {stream} ended {len(incoming.target) - incoming.received} bytes early")

        def check(payload_hash: str) -> None:
            if checksum_of(incoming.opened, payload_hash) != checksum:
                raise FrameError("a payload's checksum is wrong: it was damaged or altered on its way")

        if incoming.hasher is None:
            return incoming.message, replace(incoming.blob, check=check)
        found = hash_text(incoming.hasher)
        check(found)
        packed = incoming.blob.dtype in (PACKED, SCALED)
        return incoming.message, replace(incoming.blob, hash="" if packed else found)

    def _release(self, incoming: _Incoming) -> None:
        if self._reservation is not None:
            self._reservation.release(memory_bytes=incoming.held_bytes, streams=1)
