"""Lossless packing of 64-bit integers into as few bytes as they need.

Used for sums of gradients (`train.numerics.exact`), whose upper bits mostly repeat the sign; for values that
are small numbers times a power of two the sender takes `scaled_packing` (`scaled_packing.pays`). Values are
packed in chunks of 1,024 (the last may be shorter). A chunk is shifted right by the zero bits that all its
values end in; each of its values then takes as many bytes as the chunk's greatest magnitude needs:

    chunks  those of width 1, then those of width 2, and so on, each in order; last the shorter one, if any
    widths  one byte for each chunk, in order: bytes per value, 1..8
    shifts  one byte for each chunk, in order: zero bits that were left out, 0..63

A chunk's values are little-endian two's complement of that width, split into planes (`_PLANES`): the low
words of up to 64 chunks, then the next words. Computers copy words much faster than values of five bytes. The
widths come last so that the words are aligned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.net.errors import FrameError

CHUNK = 1024
MAX_WIDTH = 8
MAX_SHIFT = 63

#: Words of a value by its width, lowest first; the last word carries the sign.
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
#: Exclusive limits of the magnitudes that fit in 1, 2, ..., 7 bytes.
_LIMITS = np.array([1 << (8 * width - 1) for width in range(1, MAX_WIDTH)], dtype=np.int64)
#: Chunks whose planes lie together, so few that they stay in the cache while they are copied.
_TOGETHER = 64

Values = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def size_bounds(count: int) -> tuple[int, int]:
    """Smallest and largest packed size of `count` values, in bytes."""
    chunks = -(-count // CHUNK)
    return count + 2 * chunks, MAX_WIDTH * count + 2 * chunks


def pack(values: Values) -> Bytes:
    """Pack a contiguous vector of 64-bit integers, which is not changed; returns the bytes."""
    tables = _tables(values)
    shifts = np.concatenate([np.empty(0, np.uint8), *map(_shifts, tables)])
    if shifts.any():
        values = values.copy()
        tables = _tables(values)
        whole = len(tables[0])
        for table, its in zip(tables, (shifts[:whole], shifts[whole:]), strict=False):
            table >>= its[:, None].astype(np.int64)
    widths = np.concatenate([np.empty(0, np.uint8), *map(_widths, tables)])
    packed = np.empty(_size(widths, len(values)), dtype=np.uint8)
    head = packed[len(packed) - 2 * len(widths) :]
    head[: len(widths)], head[len(widths) :] = widths, shifts
    at = 0
    for table, rows, width in _groups(values, widths):
        for word, view in _words(table[rows], width):
            plane = packed[at : at + view.size * word.itemsize].view(word)
            plane.reshape(view.shape)[...] = view
            at += plane.nbytes
    return packed


def unpack(packed: Bytes, count: int) -> Values:
    """Unpack `count` values. Raises FrameError if the bytes are not exactly `count` packed values."""
    least, most = size_bounds(count)
    if not least <= len(packed) <= most:
        raise FrameError(f"{len(packed)} bytes are not {count} packed values")
    chunks = (least - count) // 2
    widths, shifts = packed[len(packed) - 2 * chunks :][:chunks], packed[len(packed) - chunks :]
    if count and (widths.min() < 1 or widths.max() > MAX_WIDTH):
        raise FrameError(f"packed values of {widths.min()} to {widths.max()} bytes each")
    if count and shifts.max() > MAX_SHIFT:
        raise FrameError(f"packed values without their lowest {shifts.max()} bits")
    if _size(widths, count) != len(packed):
        raise FrameError(f"{len(packed)} bytes are not {count} packed values of their widths")
    values = np.empty(count, dtype=np.int64)
    at = 0
    for table, rows, width in _groups(values, widths):
        chunk, planes = table[rows], []
        for word, view in _words(chunk, width):
            plane = packed[at : at + view.size * word.itemsize].view(word)
            planes.append((view, plane.reshape(view.shape)))
            at += plane.nbytes
        *low, (_, top) = planes
        chunk[...] = top
        if low:
            chunk <<= 8 * (width - top.itemsize)
        for view, plane in low:
            view[...] = plane
        if not isinstance(rows, slice):  # a copy
            table[rows] = chunk
    if shifts.any():
        tables = _tables(values)
        whole = len(tables[0])
        for table, its in zip(tables, (shifts[:whole], shifts[whole:]), strict=False):
            table <<= its[:, None].astype(np.int64)
    return values


def _tables(values: Values) -> list[Values]:
    """Two-dimensional views whose rows are chunks: the whole ones, and a shorter last one if there is one."""
    whole = len(values) // CHUNK * CHUNK
    tables = [values[:whole].reshape(-1, CHUNK)]
    if whole < len(values):
        tables.append(values[whole:].reshape(1, -1))
    return tables


def _widths(table: Values) -> Bytes:
    """Bytes per value that each row of `table` needs, from the row's greatest magnitude; 1 to 8."""
    greatest = np.maximum(table.max(axis=1), ~table.min(axis=1))
    widths: Bytes = (np.searchsorted(_LIMITS, greatest, side="right") + 1).astype(np.uint8)
    return widths


def _shifts(table: Values) -> Bytes:
    """Zero bits in which all values of each row end; 0 for a row of zeros."""
    combined = np.bitwise_or.reduce(table, axis=1)
    lowest = (combined & -combined).view(np.uint64)
    bits = np.frexp(lowest.astype(np.float64))[1] - 1  # exact: powers of two
    shifts: Bytes = np.where(combined == 0, 0, bits).astype(np.uint8)
    return shifts


def _size(widths: Bytes, count: int) -> int:
    """Packed size, in bytes, of `count` values. widths: bytes per value in each chunk."""
    whole = count // CHUNK
    of_whole, of_rest = (int(some.sum(dtype=np.int64)) for some in (widths[:whole], widths[whole:]))
    return 2 * len(widths) + CHUNK * of_whole + count % CHUNK * of_rest


def _groups(values: Values, widths: Bytes) -> Iterator[tuple[Values, slice | NDArray[np.intp], int]]:
    """Groups of chunks with values of equal width, in the order of the packed bytes, as (table, rows of the
    table in the group, bytes per value)."""
    tables = _tables(values)
    whole = len(tables[0])
    for table, its in zip(tables, (widths[:whole], widths[whole:]), strict=False):
        for width in _PLANES:
            found = np.flatnonzero(its == width)
            for begin in range(0, len(found), _TOGETHER):
                rows = found[begin : begin + _TOGETHER]
                adjacent = rows[-1] - rows[0] == len(rows) - 1
                yield table, slice(rows[0], rows[-1] + 1) if adjacent else rows, width


def _words(chunks: Values, width: int) -> Iterator[tuple[np.dtype[Any], NDArray[Any]]]:
    """Machine words that together make up the low `width` bytes of each value, as numpy has no integers of,
    say, 3 bytes: yields (type of the word, view of that word in all values)."""
    at = 0
    for word in _PLANES[width]:
        yield word, chunks.view(word)[:, at // word.itemsize :: MAX_WIDTH // word.itemsize]
        at += word.itemsize
