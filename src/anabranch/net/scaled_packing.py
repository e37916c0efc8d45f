"""Lossless packing of 64-bit integers that are small numbers times a power of two, by blocks of 64.

Used for the contributions and results of rounds (`train.numerics.block_float`) and for coarse sums
(`train.numerics.coarse_sums`), which are rounded to such values, if a sample of them shows it (`pays`).
Values are packed in blocks of 64 (the last is filled up with zeros):

    shifts  one byte for each block, in order: exponent of the power of two that divides its values, 0..63
    widths  one byte for each block, in order: 0 (all zero), or 1..5 for 4, 8, 16, 32, 64 bits a value
    blocks  those of width 1, then those of width 2, and so on, each in order

Values are little-endian two's complement; of two 4-bit values in a byte the first is in the low half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.net.errors import FrameError

BLOCK = 64
#: Bytes of a block by its width code.
BLOCK_BYTES = (0, 32, 64, 128, 256, 512)
_WORDS: dict[int, np.dtype[Any]] = {
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
}
#: Exclusive limits of the magnitudes of widths 0 to 4.
_LIMITS = np.array([1, 8, 128, 1 << 15, 1 << 31], dtype=np.int64)
#: Blocks that are looked at to decide whether this packing pays, and bytes per value below which it does:
#: `net.packing` takes 5 for gradients. Choices.
LOOKED_AT, WORTH_BYTES = 64, 2.2

Values = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def size_bounds(count: int) -> tuple[int, int]:
    """Smallest and largest packed size of `count` values, in bytes."""
    blocks = -(-count // BLOCK)
    return 2 * blocks, (2 + BLOCK_BYTES[-1]) * blocks


def pays(values: Values) -> bool:
    """True if this packing is worth while: a sample of whole blocks of `values` takes at most WORTH_BYTES a
    value in the mean. False for fewer values than a block has."""
    blocks = len(values) // BLOCK
    if not blocks:
        return False
    at = np.linspace(0, blocks - 1, min(LOOKED_AT, blocks)).astype(np.intp)
    _, widths, _ = _measured(values[: blocks * BLOCK].reshape(-1, BLOCK)[at])
    return float(np.take(BLOCK_BYTES, widths).mean()) / BLOCK <= WORTH_BYTES


def pack(values: Values) -> Bytes:
    """Pack a contiguous vector of 64-bit integers, which is not changed; returns the bytes."""
    missing = -len(values) % BLOCK
    if missing:
        values = np.concatenate((values, np.zeros(missing, np.int64)))
    shifts, widths, small = _measured(values.reshape(-1, BLOCK))
    parts: list[Bytes] = [shifts, widths]
    nibbles = small[widths == 1].astype(np.uint8)
    parts.append(((nibbles[:, 0::2] & 15) | (nibbles[:, 1::2] << 4)).reshape(-1))
    parts += [small[widths == code].astype(word).reshape(-1).view(np.uint8) for code, word in _WORDS.items()]
    return np.concatenate(parts)


def unpack(packed: Bytes, count: int) -> Values:
    """Unpack `count` values. Raises FrameError if the bytes are not exactly `count` packed values."""
    blocks = -(-count // BLOCK)
    shifts, widths = packed[:blocks], packed[blocks : 2 * blocks]
    if len(packed) < 2 * blocks or (blocks and (widths.max() >= len(BLOCK_BYTES) or shifts.max() > 63)):
        raise FrameError(f"{len(packed)} bytes are not {count} scaled values")
    if 2 * blocks + int(np.take(BLOCK_BYTES, widths).sum()) != len(packed):
        raise FrameError(f"{len(packed)} bytes are not {count} scaled values of their widths")
    table = np.zeros((blocks, BLOCK), dtype=np.int64)
    at = 2 * blocks
    for code in range(1, len(BLOCK_BYTES)):
        rows = np.flatnonzero(widths == code)
        size = len(rows) * BLOCK_BYTES[code]
        part, at = packed[at : at + size], at + size
        if code == 1:
            pairs = part.reshape(-1, BLOCK // 2)
            values = np.empty((len(rows), BLOCK), dtype=np.int64)
            values[:, 0::2], values[:, 1::2] = pairs & 15, pairs >> 4
            table[rows] = values - 16 * (values > 7)
        else:
            table[rows] = np.frombuffer(part.tobytes(), _WORDS[code]).reshape(-1, BLOCK)
    table <<= shifts.astype(np.int64)[:, None]
    return table.reshape(-1)[:count]


def _measured(table: Values) -> tuple[Bytes, Bytes, Values]:
    """For each block (row) of values: its shift (exponent of the greatest power of two that divides all; 0
    for zeros), the width code after division (0..5, see the module), and the divided values."""
    ones = np.bitwise_or.reduce(table, axis=1).view(np.uint64)
    lowest = ones & (~ones + np.uint64(1))
    # The exponent of a power of two; a block of zeros has none.
    shifts = np.where(ones == 0, 0, np.frexp(lowest.astype(np.float64))[1] - 1).astype(np.uint8)
    small = table >> shifts.astype(np.int64)[:, None]
    greatest = np.maximum(small.max(axis=1), ~small.min(axis=1))
    widths = np.searchsorted(_LIMITS, greatest, side="right").astype(np.uint8)
    widths[(widths == 0) & (ones != 0)] = 1  # values of 0 and -1
    return shifts, widths, small
