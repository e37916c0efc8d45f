"""Packing of small numbers times powers of two: lossless, compact, and safe with any bytes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.net.errors import FrameError
from anabranch.net.scaled_packing import BLOCK, pack, pays, size_bounds, unpack

BLOCKS = st.lists(
    st.tuples(st.integers(0, 63), st.lists(st.integers(-(2**62), 2**62), min_size=BLOCK, max_size=BLOCK)),
    max_size=3,
)


@given(BLOCKS, st.integers(0, BLOCK - 1))
def test_every_value_comes_back(blocks: list[tuple[int, list[int]]], short: int) -> None:
    cut = [((value >> shift) << shift) for shift, values in blocks for value in values]
    values = np.array(cut[: max(0, len(cut) - short)], dtype=np.int64)
    packed = pack(values)
    least, most = size_bounds(len(values))
    assert least <= len(packed) <= most
    assert np.array_equal(unpack(packed, len(values)), values)


def test_the_extremes_come_back() -> None:
    for value in (-(2**63), 2**63 - 1, -1, 0, 1, 7, 8, -8, -9, 1 << 62):
        values = np.full(70, value, dtype=np.int64)
        assert np.array_equal(unpack(pack(values), 70), values)


@pytest.mark.parametrize(("bits", "size"), [(4, 0.53125), (8, 1.03125)])
def test_a_contribution_takes_the_stated_bytes(bits: int, size: float) -> None:
    """The meter: bytes per value as `train.model.sizes.SCALED_BYTES` states them."""
    from anabranch.train.model.sizes import SCALED_BYTES

    rng = np.random.default_rng(1)
    most = (1 << (bits - 1)) - 1
    values = rng.integers(-most, most + 1, 1 << 16) << np.repeat(rng.integers(5, 40, 1 << 10), BLOCK)
    assert pays(values) and len(pack(values)) / len(values) == size == SCALED_BYTES[bits]
    assert not pays(rng.integers(-(2**40), 2**40, 1 << 12))


@given(st.binary(max_size=700), st.integers(0, 200))
def test_any_bytes_are_unpacked_or_refused(data: bytes, count: int) -> None:
    with contextlib.suppress(FrameError):
        assert len(unpack(np.frombuffer(data, np.uint8), count)) == count
