"""Rounded vectors in bytes: the same bits come back, and wrong bytes are refused or other values."""

from __future__ import annotations

import pytest
import torch

from anabranch.train.numerics import block_float
from anabranch.train.numerics.block_float import from_bytes, rounded, rounded_sums, to_bytes
from anabranch.train.numerics.exact import reduced
from support.small_training import bits_equal


def spread(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of very different magnitudes, with blocks of zeros and of few units."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-50, 14, (count,), generator=generator)
    values[64:128] = 0.0
    values[128:192] = 2.0**-48 * torch.randint(-3, 4, (len(values[128:192]),), generator=generator)
    return values.to(dtype)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_have_the_same_values(
    count: int, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_float, "BLOCKS_AT_ONCE", 3)
    values = rounded(spread(count, count, dtype), bits) + 0.0  # no zero below zero
    data = to_bytes(values)
    assert data.dtype == torch.uint8
    assert len(data) == 65 * -(-count // 64)
    assert bits_equal(from_bytes(data, count, dtype), values)


@pytest.mark.parametrize("bits", [4, 8])
def test_results_of_rounds_come_back_to_the_bit(bits: int) -> None:
    """They are rounded as sums of integers, from which the values in floats are made."""
    sums = (spread(5000, 7).double() * 2.0**48).round().to(torch.int64)
    values = reduced(rounded_sums(sums, bits), torch.float32)
    assert bits_equal(from_bytes(to_bytes(values), 5000, torch.float32), values)


def test_wrong_bytes_are_refused_by_their_number_alone() -> None:
    data = to_bytes(rounded(spread(100, 1), 8))
    with pytest.raises(ValueError, match="100 values"):
        from_bytes(data[:-1], 100, torch.float32)
    with pytest.raises(ValueError, match="200 values"):
        from_bytes(data, 200, torch.float32)
    with pytest.raises(ValueError, match="int8"):
        from_bytes(data.view(torch.int8), 100, torch.float32)
    assert len(from_bytes(torch.full_like(data, 127), 100, torch.float32)) == 100
