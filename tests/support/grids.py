"""Parameters of which the suite takes a part, and `make soak` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

#: Indices of the values of one parameter set, one for each dimension.
_Cell = tuple[int, ...]


def every_pair(*dimensions: Iterable[Any]) -> list[Any]:
    """All combinations, a parameter set each. Every pair of values of any two dimensions is in one that stays
    (pairwise testing); the others are marked `soak`."""
    values = [list(each) for each in dimensions]
    return _grid(values, _pairwise([len(each) for each in values]))


def every_value(*dimensions: Iterable[Any]) -> list[Any]:
    """All combinations, a parameter set each. Every value of each dimension is in one that stays; the others
    are marked `soak`."""
    values = [list(each) for each in dimensions]
    stays = set[_Cell]()
    for number in range(max(map(len, values))):
        # All dimensions count up, each with another carry, so that two of one size do not go in step.
        counts = ((number + place * (number // len(each))) % len(each) for place, each in enumerate(values))
        stays.add(tuple(counts))
    return _grid(values, stays)


def _grid(values: list[list[Any]], stays: set[_Cell]) -> list[Any]:
    return [
        pytest.param(
            *(values[number][index] for number, index in enumerate(cell)),
            marks=[] if cell in stays else [pytest.mark.soak],
        )
        for cell in itertools.product(*(range(len(each)) for each in values))
    ]


def _pairwise(sizes: list[int]) -> set[_Cell]:
    """A covering array, found greedily: the next cell is the first of those with most pairs that no cell has
    so far. The same grid has the same array in every process."""
    cells = list(itertools.product(*map(range, sizes)))
    lacking = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
    stays = set[_Cell]()
    while any(lacking.values()):
        best = max(cells, key=lambda cell: len(lacking[cell]))
        stays.add(best)
        covered = set(lacking[best])
        for pairs in lacking.values():
            pairs -= covered
    return stays


def first_of(values: Iterable[Any], stay: int = 1) -> list[Any]:
    """Values of one parameter (seeds, say), or tuples of several: the first `stay` as they are, the others
    marked `soak`."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=[pytest.mark.soak] * (n >= stay)) for n, each in enumerate(sets)]
