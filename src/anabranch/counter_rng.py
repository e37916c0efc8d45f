"""Counter-based pseudo-random numbers from a seed: a run that draws from them replays exactly."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import TypeVar

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15

Item = TypeVar("Item")


class CounterRng:
    """SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the n-th draw is a hash of seed, stream and n.

    stream: agents of one run share the seed and have a stream each.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._state = _mix((_mix(seed & _MASK) + stream * _STEP) & _MASK)

    def bits(self) -> int:
        """Draw 64 random bits; each call is the next draw."""
        self._state = (self._state + _STEP) & _MASK
        return _mix(self._state)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Draw a number in [low, high)."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def below(self, bound: int) -> int:
        """Draw an integer in 0..bound-1; the bias is below bound / 2^64."""
        return (self.bits() * bound) >> 64

    def shuffle(self, items: MutableSequence[Item]) -> None:
        """Shuffle `items` in place (Fisher and Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
