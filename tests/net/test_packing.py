"""Packed integers come back as they were, in as few bytes as said; what cannot be unpacked is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.net.errors import FrameError
from anabranch.net.packing import CHUNK, MAX_WIDTH, pack, size_bounds, unpack

#: The least and the greatest value of every width, and their neighbours of the next.
EDGES = [0, -1] + [
    sign * (1 << bits) + more
    for bits in range(7, 64, 8)
    for sign, more in ((1, -1), (1, 0), (-1, 0), (-1, -1))
    if -(1 << 63) <= sign * (1 << bits) + more < 1 << 63
]


def width_of(value: int) -> int:
    """Bytes of a value in two's complement."""
    return next(width for width in range(1, 9) if -(1 << 8 * width - 1) <= value < 1 << 8 * width - 1)


def chunks_of_widths(widths: list[int], last: int, seed: int) -> np.ndarray:
    """Chunks of values that need so many bytes each, the last one of `last` values."""
    draw, values = np.random.default_rng(seed), []
    for number, width in enumerate(widths):
        limit = 1 << 8 * width - 1
        chunk = draw.integers(-limit, limit, CHUNK, dtype=np.int64, endpoint=False)
        chunk[draw.integers(CHUNK)] = random.Random(seed + number).choice((-limit, limit - 1))
        if number == len(widths) - 1:
            chunk = chunk[:last]
        values.append(chunk)
    return np.concatenate(values) if values else np.empty(0, np.int64)


def shift_of(values: np.ndarray) -> int:
    """Zero bits in which all values end; 0 if all are zero."""
    some = [int(value) for value in values if value]
    return min(((value & -value).bit_length() - 1 for value in some), default=0)


def expected_size(values: np.ndarray) -> int:
    chunks = [values[at : at + CHUNK] for at in range(0, len(values), CHUNK)]
    shifted = [chunk >> shift_of(chunk) for chunk in chunks]
    return sum(2 + len(each) * max(width_of(int(v)) for v in (each.min(), each.max())) for each in shifted)


def check(values: np.ndarray) -> np.ndarray:
    packed = pack(values)
    assert len(packed) == expected_size(values)
    least, most = size_bounds(len(values))
    assert least <= len(packed) <= most
    back = unpack(packed, len(values))
    assert back.dtype == np.int64 and back.flags.writeable
    np.testing.assert_array_equal(back, values)
    return packed


@given(st.lists(st.sampled_from(EDGES) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=40))
def test_any_values_come_back(values: list[int]) -> None:
    check(np.array(values, dtype=np.int64))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 8), max_size=5), st.integers(1, CHUNK), st.integers(0, 1 << 20))
def test_chunks_of_any_widths_in_any_order_come_back(widths: list[int], last: int, seed: int) -> None:
    check(chunks_of_widths(widths, last, seed))


@pytest.mark.parametrize("edge", EDGES)
def test_one_value_decides_the_width_of_its_chunk_alone(edge: int) -> None:
    values = np.zeros(3 * CHUNK + 5, dtype=np.int64)
    values[CHUNK + 17] = edge
    packed, shift = check(values), shift_of(values)
    assert list(packed[-8:]) == [1, width_of(edge >> shift), 1, 1, 0, shift, 0, 0]


@pytest.mark.parametrize("shift", [0, 1, 7, 20, 56, 63])
def test_zero_bits_at_the_end_take_no_bytes(shift: int) -> None:
    """Sums of contributions in a coarse unit: a byte a value, whatever the unit."""
    values = np.random.default_rng(shift).integers(-128, 128, 2 * CHUNK + 9)
    values[::5] |= 1
    values = np.clip(values, -(1 << 63 - shift), (1 << 63 - shift) - 1) << shift
    assert len(check(values)) == len(values) + 2 * 3


@pytest.mark.parametrize("width", range(1, MAX_WIDTH + 1))
@pytest.mark.parametrize("count", [1, CHUNK - 1, CHUNK, CHUNK + 1, 150 * CHUNK + 77])
def test_every_width_at_every_length(width: int, count: int) -> None:
    check(chunks_of_widths([width] * -(-count // CHUNK), (count - 1) % CHUNK + 1, count))


def test_many_groups_of_scattered_chunks() -> None:
    """More chunks of a width than are copied at a time, with others between them."""
    widths = [random.Random(number).randint(1, 8) for number in range(900)]
    check(chunks_of_widths(widths, 3, 1))


def test_nothing_takes_no_bytes() -> None:
    assert len(check(np.empty(0, dtype=np.int64))) == 0


GOOD = pack(chunks_of_widths([2, 5, 3], 10, 1))
COUNT = 2 * CHUNK + 10


def changed(at: int, value: int) -> np.ndarray:
    bad = GOOD.copy()
    bad[at] = value
    return bad


@pytest.mark.parametrize(
    ("packed", "count", "sentence"),
    [
        (GOOD[:-1], COUNT, "packed values of 2 to .* bytes each"),
        (GOOD[1:], COUNT, "not .* packed values of their widths"),
        (np.concatenate((GOOD, GOOD[-1:])), COUNT, "not .* packed values|bytes each"),
        (GOOD, COUNT + 1, "not .* packed values"),
        (GOOD, 3 * CHUNK + 1, "packed values of 2 to .* bytes each"),
        (GOOD, 0, "not 0 packed values"),
        (GOOD, 1 << 60, "not .* packed values"),
        (GOOD[:0], 1, "0 bytes are not 1 packed"),
        (GOOD[:COUNT], COUNT, "not .* packed values"),
        (changed(-4, 0), COUNT, "packed values of 0 to 5 bytes"),
        (changed(-5, 9), COUNT, "packed values of 2 to 9 bytes"),
        (changed(-6, 255), COUNT, "packed values of 3 to 255 bytes"),
        (changed(-4, 4), COUNT, "of their widths"),
        (changed(-1, 64), COUNT, "without their lowest 64 bits"),
    ],
)
def test_what_is_not_packed_is_refused(packed: np.ndarray, count: int, sentence: str) -> None:
    with pytest.raises(FrameError, match=sentence):
        unpack(packed, count)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_unpacked_or_refused(data: bytes, count: int) -> None:
    try:
        values = unpack(np.frombuffer(data, dtype=np.uint8), count)
    except FrameError as error:
        assert str(error)
    else:
        assert values.shape == (count,) and values.nbytes <= MAX_WIDTH * len(data)
