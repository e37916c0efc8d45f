"""Framing without a network: whatever is sent comes out the same, whatever else is refused."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.net import framing
from anabranch.net.chunk_queue import PRIORITIES, ChunkQueue
from anabranch.net.errors import FrameError
from anabranch.net.framing import (
    CHUNK,
    CLOSE,
    DTYPES,
    MAX_CHUNK_BYTES,
    MAX_OPEN_STREAMS,
    MAX_PAUSES,
    MESSAGE,
    OPEN,
    PACKED,
    PAUSE,
    Blob,
    FrameReader,
    Goodbye,
    Received,
    chunk_header,
    close_frame,
    message_frame,
    pause_frame,
)
from anabranch.net.packing import size_bounds

LIMIT = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Chunks of any size: the payloads here are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "MIN_CHUNK_BYTES", 1)
        yield


def reader(scratch_bytes: int = 8192) -> FrameReader:
    return FrameReader(max_payload_bytes=LIMIT, scratch_bytes=scratch_bytes)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    dtype = draw(st.sampled_from([*sorted(DTYPES), PACKED]))
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=4)))
    count = int(np.prod(shape, dtype=np.int64))
    size_bytes = draw(st.integers(*size_bounds(count))) if dtype == PACKED else count * DTYPES[dtype]
    return Blob(dtype, shape, random.Random(size_bytes).randbytes(size_bytes))


items = st.lists(
    st.tuples(st.binary(max_size=300), st.none() | blobs(), st.integers(0, PRIORITIES - 1)), max_size=12
)


def wire(sent: list[tuple[bytes, Blob | None, int]], chunk_bytes: int) -> bytes:
    """The bytes of one connection: messages first, then the payloads as the outbox orders them."""
    outbox = ChunkQueue(chunk_bytes)
    out = bytearray()
    for message, blob, priority in sent:
        if blob is None:
            out += b"".join(message_frame(message))
        else:
            outbox.put(message, blob, priority)
    while pieces := outbox.next_pieces():
        out += b"".join(pieces)
    assert outbox.queued_bytes == 0
    return bytes(out)


def drip(frames: FrameReader, data: bytes, sizes: random.Random) -> list[Received | Goodbye]:
    """Feed as a network would: in pieces of any size, never more than the reader asks for."""
    out: list[Received | Goodbye] = []
    at = 0
    while at < len(data):
        buffer = frames.get_buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(data) - at, sizes.choice((1, 3, 8, 100, 5000, 1 << 20)))
        buffer[:count] = data[at : at + count]
        out.extend(frames.received(count))
        at += count
    return out


def plain(message: bytes, blob: Blob | None) -> tuple[object, ...]:
    return (message, None) if blob is None else (message, blob.dtype, blob.shape, bytes(blob.data))


@given(items, st.integers(1, 700), st.integers(), st.sampled_from([64, 300, 8192]))
def test_what_is_sent_is_what_arrives(
    sent: list[tuple[bytes, Blob | None, int]], chunk_bytes: int, seed: int, scratch_bytes: int
) -> None:
    arrived = drip(reader(scratch_bytes), wire(sent, chunk_bytes), random.Random(seed))
    got = [plain(*item) for item in arrived if not isinstance(item, Goodbye)]
    assert sorted(map(repr, got)) == sorted(repr(plain(message, blob)) for message, blob, _ in sent)
    messages = [plain(message, blob) for message, blob, _ in sent if blob is None]
    assert [item for item in got if len(item) == 2] == messages


@given(st.binary(max_size=3000), st.integers())
def test_random_bytes_are_read_or_refused(data: bytes, seed: int) -> None:
    try:
        drip(reader(), data, random.Random(seed))
    except FrameError as error:
        assert str(error)


@given(items, st.data())
@settings(max_examples=200)
def test_a_flipped_byte_never_passes_for_another_payload(
    sent: list[tuple[bytes, Blob | None, int]], data: st.DataObject
) -> None:
    sound = wire(sent, 200)
    if not sound:
        return
    at = data.draw(st.integers(0, len(sound) - 1))
    damaged = bytearray(sound)
    damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        arrived = drip(reader(), bytes(damaged), random.Random(0))
    except FrameError:
        return
    payloads = {repr(plain(message, blob)) for message, blob, _ in sent if blob is not None}
    for item in arrived:
        if not isinstance(item, Goodbye) and item[1] is not None:
            assert repr(plain(*item)) in payloads


def header(kind: int, stream: int, length: int, reserved: int = 0) -> bytes:
    return struct.pack("!BBHI", kind, reserved, stream, length)


def tensor(
    code: int = 3, shape: tuple[int, ...] = (1,), size_bytes: int = 4, message_bytes: int = 0
) -> bytes:
    body = struct.pack("!BBHIQ", code, len(shape), 0, message_bytes, size_bytes)
    body += struct.pack(f"!{len(shape)}Q", *shape)
    return header(OPEN, 0, len(body)) + body


OPENED = tensor(0, (8,), 8)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (header(0, 0, 0), "no frame of kind 0"),
        (header(6, 0, 0), "no frame of kind 6"),
        (header(8, 0, 0), "no frame of kind 8"),
        (header(PAUSE, 1, 0), "reserved"),
        (header(PAUSE, 0, 1), "a pause of 1 bytes"),
        (header(PAUSE, 0, 0xFFFFFFFF), "a pause of 4294967295 bytes"),
        (OPENED + pause_frame(), "a pause within a payload"),
        (OPENED + header(CHUNK, 0, 4) + bytes(4) + pause_frame(), "a pause within a payload"),
        (pause_frame() * (MAX_PAUSES + 1), "more than 100 pauses"),
        (pause_frame() * MAX_PAUSES + message_frame(b"")[0] + pause_frame(), "more than 100 pauses"),
        (header(MESSAGE, 1, 0), "reserved"),
        (header(MESSAGE, 0, 0, reserved=1), "reserved"),
        (header(MESSAGE, 0, LIMIT + 1), "a message of 1048577 bytes"),
        (header(OPEN, 0, 2 * LIMIT), "exceeds"),
        (header(OPEN, 0, 3) + b"abc", "cut short"),
        (tensor(code=99), "no dtype of code 99"),
        (tensor(6, (4,), 4), "4 bytes are not a packed tensor"),
        (tensor(6, (4,), 35), "35 bytes are not a packed tensor"),
        (tensor(6, (LIMIT // 8 + 1,), LIMIT // 2), "exceeds 1048576 bytes unpacked"),
        (tensor(6, (2**62, 4), 2**20), "are not a packed tensor"),
        (tensor(6, (0, 2**62), 0), "too large"),
        (tensor(shape=(1,) * 5), "5 dimensions"),
        (tensor(shape=(2,)), "are not a float32 tensor"),
        (tensor(shape=(2**62, 4), size_bytes=0), "are not a float32 tensor"),
        (tensor(shape=(0, 2**62), size_bytes=0), "too large"),
        (tensor(message_bytes=1), "do not add up"),
        (tensor(message_bytes=LIMIT + 1), "a message of"),
        (tensor(shape=(LIMIT,), size_bytes=4 * LIMIT), "a payload of 4194304 bytes exceeds"),
        (OPENED + OPENED, "open already"),
        (OPENED + header(CHUNK, 0, 0), "a chunk of 0 bytes"),
        (OPENED + header(CHUNK, 0, MAX_CHUNK_BYTES + 1), "a chunk of"),
        (OPENED + header(CHUNK, 0, 9), "more than its 8 bytes"),
        (OPENED + header(CHUNK, 1, 1), "not open"),
        (OPENED + header(4, 0, 16) + bytes(16), "8 bytes early"),
        (OPENED + header(4, 0, 15), "invalid end"),
        (header(4, 7, 16), "not open"),
        (OPENED + header(CHUNK, 0, 8) + bytes(8) + header(4, 0, 16) + bytes(16), "checksum"),
        (header(CLOSE, 0, 513), "a reason of 513"),
        (close_frame("bye") + b"x", "after the end"),
        (
            b"".join(tensor()[:2] + struct.pack("!H", n) + tensor()[4:] for n in range(MAX_OPEN_STREAMS + 1)),
            "at once",
        ),
    ],
)
def test_each_breach_is_named(data: bytes, sentence: str) -> None:
    with pytest.raises(FrameError, match=sentence):
        reader().feed(data)
    with pytest.raises(FrameError, match=sentence):
        drip(reader(), data, random.Random(1))


def test_pauses_are_counted_between_payloads_and_only_where_these_travel() -> None:
    """A payload begins the count anew; a connection without payloads has no pauses between them."""
    blob = Blob("uint8", (4,), b"data")
    payload = wire([(b"", blob, 0)], 4)
    frames = reader()
    for _ in range(3):
        assert not frames.feed(pause_frame() * MAX_PAUSES)
        assert len(frames.feed(payload)) == 1
    with pytest.raises(FrameError, match="no frame of kind 7"):
        FrameReader(max_payload_bytes=0).feed(pause_frame())


def test_nothing_is_read_after_a_breach_or_a_goodbye() -> None:
    broken = reader()
    with pytest.raises(FrameError):
        broken.feed(header(9, 0, 0))
    with pytest.raises(FrameError, match="after the end"):
        broken.feed(b"".join(message_frame(b"again")))
    ended = reader()
    assert ended.feed(close_frame("ende, schluß, aus")) == [Goodbye("ende, schluß, aus")]
    with pytest.raises(FrameError, match="after the end"):
        ended.feed(b"".join(message_frame(b"again")))


def test_a_long_reason_is_cut() -> None:
    (goodbye,) = reader().feed(close_frame("ä" * 10_000))
    assert isinstance(goodbye, Goodbye)
    assert goodbye.reason == "ä" * 256


def test_memory_follows_the_bytes_that_arrived() -> None:
    """A refused announcement costs nothing; an allowed one is set aside once, after its check."""
    huge = FrameReader(max_payload_bytes=64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            FrameReader(max_payload_bytes=1 << 20).feed(tensor(0, (1 << 40,), 1 << 40))
        with pytest.raises(FrameError):
            reader().feed(header(MESSAGE, 0, 0xFFFFFFFF))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        huge.feed(tensor(0, (64 << 20,), 64 << 20))
        assert 64 << 20 <= tracemalloc.get_traced_memory()[1] < 66 << 20
    finally:
        tracemalloc.stop()


def test_payload_bytes_land_where_they_stay() -> None:
    """Only what came in one read with a chunk's header is copied; the rest is written into its place."""
    frames = reader(scratch_bytes=64)
    size_bytes, chunk_bytes = 8192, 1024
    data = wire([(b"", Blob("uint8", (size_bytes,), bytes(size_bytes)), 0)], chunk_bytes)
    in_place = 0
    at = 0
    arrived: list[Received | Goodbye] = []
    while at < len(data):
        buffer = frames.get_buffer()
        count = min(len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        in_place += count if isinstance(buffer.obj, np.ndarray) else 0
        arrived += frames.received(count)
        at += count
    assert len(arrived) == 1
    assert in_place >= size_bytes - 64 * (size_bytes // chunk_bytes)


# The order in which payloads leave.


def order(outbox: ChunkQueue) -> list[tuple[int, int]]:
    """(frame kind, stream) of every frame that leaves."""
    frames = []
    data = b""
    while pieces := outbox.next_pieces():
        data += b"".join(pieces)
    at = 0
    while at < len(data):
        kind, _, stream, length = struct.unpack_from("!BBHI", data, at)
        frames.append((kind, stream))
        at += 8 + length
    return frames


def chunks(outbox: ChunkQueue) -> list[int]:
    return [stream for kind, stream in order(outbox) if kind == CHUNK]


def put(outbox: ChunkQueue, size_bytes: int, priority: int = 0) -> None:
    outbox.put(b"", Blob("uint8", (size_bytes,), bytes(size_bytes)), priority)


def test_equal_payloads_leave_one_after_the_other() -> None:
    outbox = ChunkQueue(10)
    for _ in range(3):
        put(outbox, 30)
    assert chunks(outbox) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_short_payload_shares_the_way_with_a_long_one() -> None:
    outbox = ChunkQueue(10)
    put(outbox, 60)
    outbox.next_pieces()  # the long one is under way
    put(outbox, 60)
    put(outbox, 20)
    # Stream 1 is the short one: chunks alternate with stream 0 until it is through.
    assert chunks(outbox) == [1, 0, 1, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2]


def test_a_more_urgent_payload_breaks_in() -> None:
    outbox = ChunkQueue(10)
    put(outbox, 30, priority=5)
    outbox.next_pieces()
    put(outbox, 20, priority=1)
    assert chunks(outbox) == [1, 1, 0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, PRIORITIES - 1), st.integers(0, 6)), max_size=60)
)
def test_no_more_streams_are_open_than_a_reader_allows(steps: list[tuple[int, int, int]]) -> None:
    outbox, frames = ChunkQueue(16), reader()
    arrived = 0
    for size_bytes, priority, turns in steps:
        put(outbox, size_bytes, priority)
        for _ in range(turns):
            for piece in outbox.next_pieces():
                arrived += len(frames.feed(piece))
    while pieces := outbox.next_pieces():
        for piece in pieces:
            arrived += len(frames.feed(piece))
    assert arrived == len(steps)


def test_clearing_forgets_everything() -> None:
    outbox = ChunkQueue(10)
    put(outbox, 100)
    put(outbox, 20)
    outbox.next_pieces()
    outbox.clear()
    assert not outbox
    assert outbox.queued_bytes == 0
    assert outbox.next_pieces() == []
    assert chunk_header(1, 2) == header(CHUNK, 1, 2)
