"""64-bit integers in as few bytes as they need, and back: lossless.

What travels so are sums of gradients (`train/exact.py`): of their 64 bits the upper ones only repeat the
sign. Values are taken in chunks of 1,024 (the last may be shorter), each written with as many bytes a value
as its greatest magnitude needs:

    chunks  those of width 1, then those of width 2, and so on, in their order; last the shorter one, if any
    widths  one byte for each chunk, in their order: bytes a value, 1..8

A chunk's values are little-endian two's complement in so many bytes, cut into planes (`_PLANES`): the low
words of up to 64 chunks, then their next ones. Computers copy words much quicker than values of five bytes;
the widths come last so that the words stand at even addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.net.errors import FrameError

CHUNK = 1024
MAX_WIDTH = 8

#: The words of a value of so many bytes, the lowest first; the last one carries the sign.
_PLANES: dict[int, tuple[np.dtype[Any], ...]] = {
    width: tuple(map(np.dtype, words))
    for width, words in {
        1: ("<i1",),
        2: ("<i2",),
        3: ("<u2", "<i1"),
        4: ("<i4",),
        5: ("<u4", "<i1"),
        6: ("<u4", "<i2"),
        7: ("<u4", "<u2", "<i1"),
        8: ("<i8",),
    }.items()
}
#: A magnitude below the first of these needs one byte, below the second two, and so on.
_LIMITS = np.array([1 << (8 * width - 1) for width in range(1, MAX_WIDTH)], dtype=np.int64)
#: Chunks whose planes lie together: while they are copied, they are in the cache.
_TOGETHER = 64

Values = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def size_bounds(count: int) -> tuple[int, int]:
    """The least and the most bytes that so many values can take."""
    chunks = -(-count // CHUNK)
    return count + chunks, MAX_WIDTH * count + chunks


def pack(values: Values) -> Bytes:
    """The bytes of a contiguous vector."""
    widths = np.concatenate([np.empty(0, np.uint8), *map(_widths, _tables(values))])
    packed = np.empty(_size(widths, len(values)), dtype=np.uint8)
    packed[len(packed) - len(widths) :] = widths
    at = 0
    for table, rows, width in _groups(values, widths):
        for words, place in _places(table[rows], width):
            plane = packed[at : at + place.size * words.itemsize].view(words)
            plane.reshape(place.shape)[...] = place
            at += plane.nbytes
    return packed


def unpack(packed: Bytes, count: int) -> Values:
    """The `count` values of these bytes. Raises FrameError unless they are exactly so many."""
    least, most = size_bounds(count)
    if not least <= len(packed) <= most:
        raise FrameError(f"{len(packed)} bytes are not {count} packed values")
    widths = packed[len(packed) - (least - count) :]
    if count and (widths.min() < 1 or widths.max() > MAX_WIDTH):
        raise FrameError(f"packed values of {widths.min()} to {widths.max()} bytes each")
    if _size(widths, count) != len(packed):
        raise FrameError(f"{len(packed)} bytes are not {count} packed values of their widths")
    values = np.empty(count, dtype=np.int64)
    at = 0
    for table, rows, width in _groups(values, widths):
        chunks, planes = table[rows], []
        for words, place in _places(chunks, width):
            plane = packed[at : at + place.size * words.itemsize].view(words)
            planes.append((place, plane.reshape(place.shape)))
            at += plane.nbytes
        *low, (_, top) = planes
        chunks[...] = top
        if low:
            chunks <<= 8 * (width - top.itemsize)
        for place, plane in low:
            place[...] = plane
        if not isinstance(rows, slice):  # a copy
            table[rows] = chunks
    return values


def _tables(values: Values) -> list[Values]:
    """Chunks as rows: the whole ones, and the shorter one by itself."""
    whole = len(values) // CHUNK * CHUNK
    tables = [values[:whole].reshape(-1, CHUNK)]
    if whole < len(values):
        tables.append(values[whole:].reshape(1, -1))
    return tables


def _widths(table: Values) -> Bytes:
    """Bytes that the greatest magnitude of each row needs."""
    greatest = np.maximum(table.max(axis=1), ~table.min(axis=1))
    widths: Bytes = (np.searchsorted(_LIMITS, greatest, side="right") + 1).astype(np.uint8)
    return widths


def _size(widths: Bytes, count: int) -> int:
    """Bytes of `count` values in chunks of these widths."""
    whole = count // CHUNK
    of_whole, of_rest = (int(some.sum(dtype=np.int64)) for some in (widths[:whole], widths[whole:]))
    return len(widths) + CHUNK * of_whole + count % CHUNK * of_rest


def _groups(values: Values, widths: Bytes) -> Iterator[tuple[Values, slice | NDArray[np.intp], int]]:
    """(table, some of its rows, the width of these), in the order in which they are written."""
    tables = _tables(values)
    whole = len(tables[0])
    for table, its in zip(tables, (widths[:whole], widths[whole:]), strict=False):
        for width in _PLANES:
            found = np.flatnonzero(its == width)
            for begin in range(0, len(found), _TOGETHER):
                rows = found[begin : begin + _TOGETHER]
                adjacent = rows[-1] - rows[0] == len(rows) - 1
                yield table, slice(rows[0], rows[-1] + 1) if adjacent else rows, width


def _places(chunks: Values, width: int) -> Iterator[tuple[np.dtype[Any], NDArray[Any]]]:
    """(type, its places in all values) of each word of values of this width."""
    at = 0
    for words in _PLANES[width]:
        yield words, chunks.view(words)[:, at // words.itemsize :: MAX_WIDTH // words.itemsize]
        at += words.itemsize
