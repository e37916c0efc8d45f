"""Parameters of which the suite takes a part, and `make soak` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def half_grid(*dimensions: Iterable[Any]) -> list[Any]:
    """All combinations, a parameter set each; those whose indices add up to an odd number are marked `soak`.

    Of three or more dimensions every pair of values of any two is in the half that stays.
    """
    numbered = [list(enumerate(values)) for values in dimensions]
    return [
        pytest.param(
            *(value for _, value in each), marks=[pytest.mark.soak] * (sum(index for index, _ in each) % 2)
        )
        for each in itertools.product(*numbered)
    ]


def thin_grid(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All combinations, a parameter set each; one for each value of `first` stays and the others are marked
    `soak`. The values of `others` that stay are the digits of a number that counts up with `first`."""
    return _counted([(value,) for value in first], *others)


def pair_grid(first: Iterable[Any], second: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All combinations, a parameter set each; one for each pair of values of `first` and `second` stays and
    the others are marked `soak`. The values of `others` that stay are the digits of a number that counts up
    with the pairs: every pair of values of any two dimensions stays, if `second` has one value more than
    `others` have combinations, and `first` has as many."""
    return _counted(list(itertools.product(first, second)), *others)


def third_of(cells: Iterable[Any]) -> list[Any]:
    """The same parameter sets; of those that no mark leaves out every third stays, and the others are marked
    `soak`."""
    counter, sets = itertools.count(), list[Any]()
    for cell in cells:
        goes = not cell.marks and next(counter) % 3
        sets.append(pytest.param(*cell.values, marks=[pytest.mark.soak] if goes else cell.marks))
    return sets


def _counted(heads: list[tuple[Any, ...]], *others: Iterable[Any]) -> list[Any]:
    """Parameter sets of all combinations; for each of `heads` one stays, with the digits of its number."""
    cells, dimensions = [], [list(values) for values in others]
    for number, head in enumerate(heads):
        digits = []
        for values in dimensions:
            number, digit = divmod(number, len(values))
            digits.append(digit)
        for cell in itertools.product(*map(enumerate, dimensions)):
            stays = [index for index, _ in cell] == digits
            cells.append(
                pytest.param(*head, *(each for _, each in cell), marks=[pytest.mark.soak] * (not stays))
            )
    return cells


def first_of(values: Iterable[Any], stay: int = 1) -> list[Any]:
    """Values of one parameter (seeds, say), or tuples of several: the first `stay` as they are, the others
    marked `soak`."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=[pytest.mark.soak] * (n >= stay)) for n, each in enumerate(sets)]
