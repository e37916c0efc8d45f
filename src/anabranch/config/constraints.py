"""Constraints on single values: number ranges, choices of words, text patterns."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any


def is_64_bits(value: int) -> bool:
    """True if an integer fits 64 bits, signed or unsigned. Settings beyond that are refused: TOML cannot hold
    them, and conversion to float may overflow."""
    return -(2**63) <= value < 2**64


@dataclass(frozen=True)
class Range:
    """Interval of numbers. A bound of None is absent; an `open` bound is excluded."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """True if the interval contains `value`. False for NaN and for integers beyond 64 bits."""
        if math.isnan(value) if isinstance(value, float) else not is_64_bits(value):
            return False
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        return self.high is None or not (value > self.high or (self.open_high and value == self.high))

    def problem(self, value: Any) -> str:
        """Clause that says why `value`, an int or float, is refused; "" if it is allowed."""
        return "" if self.holds(value) else f"is {value!r}; it must be {self}"

    def __str__(self) -> str:
        ends = []
        if self.low is not None:
            ends.append(f"{'more than' if self.open_low else 'at least'} {self.low}")
        if self.high is not None:
            ends.append(f"{'less than' if self.open_high else 'at most'} {self.high}")
        return " and ".join(ends)


class OneOf:
    """Choice of words. `note` is added to the message that refuses another word."""

    def __init__(self, *choices: str, note: str = "") -> None:
        self.choices = choices
        self._note = note

    def problem(self, value: Any) -> str:
        """Clause that says why `value` is refused, "" if it is allowed."""
        if value in self.choices:
            return ""
        listed = ", ".join(f'"{choice}"' for choice in self.choices)
        return f'is "{value}"; choose one of {listed}' + (f" ({self._note})" if self._note else "")


@dataclass(frozen=True)
class Pattern:
    """Constraint on a text: the regular expression that the whole text must match, and the same in words, for
    messages."""

    expression: str
    words: str

    def problem(self, value: Any) -> str:
        """Clause that says why `value` is refused, "" if it is allowed. value: a text; its type is checked
        before (another raises TypeError)."""
        return "" if re.fullmatch(self.expression, value) else f'is "{value}"; it must be {self.words}'
