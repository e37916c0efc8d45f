"""Parts of a grid that stay in the suite: every pair of values, in few cells, the same in every process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from support.grids import every_pair, every_value, first_of

GRIDS = [(2, 2, 2), (7, 5, 2, 2), (3, 2, 2), (5, 2, 2), (4, 3), (1, 6, 1, 2), (3, 3, 3, 3)]


def kept(sets: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [each.values for each in sets if not each.marks]


def grid(sizes: Sequence[int], strength: int) -> list[Any]:
    of_strength = {1: every_value, 2: every_pair}[strength]
    return of_strength(*([f"{n}.{k}" for k in range(size)] for n, size in enumerate(sizes)))


@pytest.mark.parametrize("sizes", GRIDS)
@pytest.mark.parametrize("strength", [1, 2])
def test_every_combination_of_the_strength_stays(sizes: tuple[int, ...], strength: int) -> None:
    cells = grid(sizes, strength)
    combinations = {part for cell in cells for part in itertools.combinations(cell.values, strength)}
    assert {part for cell in kept(cells) for part in itertools.combinations(cell, strength)} == combinations


@pytest.mark.parametrize("sizes", GRIDS)
def test_soak_has_all_cells_once(sizes: tuple[int, ...]) -> None:
    cells = [cell.values for cell in grid(sizes, 2)]
    assert len(set(cells)) == len(cells)
    assert cells == list(itertools.product(*([f"{n}.{k}" for k in range(s)] for n, s in enumerate(sizes))))


def test_few_cells_stay() -> None:
    """No array of each value is smaller than the longest dimension, none of pairs than the two longest."""
    assert len(kept(grid((7, 5, 2, 2), 1))) == 7
    assert len(kept(grid((7, 5, 2, 2), 2))) == 35
    assert len(kept(grid((3, 2, 2), 2))) == 6
    assert len(kept(grid((3, 3, 3, 3), 2))) <= 11  # the smallest has 9


def test_values_are_used_equally_often_and_not_in_step() -> None:
    cells = kept(grid((7, 5, 2, 2), 1))
    assert sorted(Counter(cell[2] for cell in cells).values()) == [3, 4]
    assert len({cell[2:] for cell in cells}) == 4


def test_the_first_of_a_list_stay() -> None:
    assert kept(first_of(range(4), 2)) == [(0,), (1,)]
    assert kept(first_of([(1, "a"), (2, "b")])) == [(1, "a")]
    assert len(first_of(range(4))) == 4
