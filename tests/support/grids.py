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


def first_of(values: Iterable[Any], stay: int = 1) -> list[Any]:
    """Values of one parameter (seeds, say), or tuples of several: the first `stay` as they are, the others
    marked `soak`."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=[pytest.mark.soak] * (n >= stay)) for n, each in enumerate(sets)]
