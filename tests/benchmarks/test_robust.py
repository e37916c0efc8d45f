"""Robust aggregation of contributions."""

from __future__ import annotations

import pytest
import torch

from anabranch.train.numerics.exact import sum_of_squares
from benchmarks.byzantine.robust import centred_clip, coordinate_median


def owners(count: int, elements: int = 5000) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [1.0 + 0.1 * torch.randn(elements, generator=draw, dtype=torch.float64) for _ in range(count)]


def test_equal_contributions_give_their_sum() -> None:
    """Owners that agree on the gradient of a unit get the plain sum, whatever their numbers of units."""
    units = [1, 2, 4]
    parts = [torch.full((7,), float(n)) for n in units]
    for result in (coordinate_median(parts, units), centred_clip(parts, units, torch.zeros(7))):
        assert torch.allclose(result, torch.full((7,), 7.0, dtype=torch.float64))


@pytest.mark.parametrize("factor", [-50.0, 1e30])
def test_one_liar_moves_the_result_little(factor: float) -> None:
    """A liar among six moves neither rule's result by more than the honest owners differ."""
    honest = owners(6)
    lied = [honest[0] * factor, *honest[1:]]
    for rule in (coordinate_median, lambda parts, n: centred_clip(parts, n, torch.ones(5000))):
        moved = (rule(lied, [1] * 6) - rule(honest, [1] * 6)) / 6.0
        assert sum_of_squares(moved) <= 2.0 * max(sum_of_squares(part - 1.0) for part in honest)
