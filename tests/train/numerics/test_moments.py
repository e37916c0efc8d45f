"""Moments of the contributions to a sum."""

from __future__ import annotations

import pytest
import torch

from anabranch.train.numerics.exact import BLOCK
from anabranch.train.numerics.moments import moments


def test_moments_of_integers_and_floats() -> None:
    """Moments of exact sums (units of 2^-48) are those of their values, also across blocks."""
    draw = torch.Generator().manual_seed(1)
    parts = [1.0 + 0.1 * torch.randn(BLOCK + 5, generator=draw, dtype=torch.float64) for _ in range(3)]
    exact = [part.mul(2.0**48).round().to(torch.int64) for part in parts]
    total = torch.stack(parts).sum(0)
    for part, *found in zip(parts, moments(parts), moments(exact), strict=True):
        for square, dot in found:
            assert square == pytest.approx(float(part @ part), rel=1e-12)
            assert dot == pytest.approx(float(part @ total), rel=1e-12)


def test_the_parts_are_left_as_they_are() -> None:
    parts = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 4.0], dtype=torch.float64)]
    assert moments(parts) == ((5.0, 16.0), (25.0, 36.0))
    assert [part.tolist() for part in parts] == [[1.0, 2.0], [3.0, 4.0]]


def test_no_contributions_and_empty_ones() -> None:
    assert moments([]) == ()
    assert moments([torch.empty(0, dtype=torch.int64)] * 2) == ((0.0, 0.0),) * 2
