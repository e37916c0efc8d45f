"""Delay of a run: which iterations begin before the step before them is committed.

A *delayed* iteration t opens once step t - 2 is applied, and computes on weights that are predicted one step
ahead from the state after step t - 2. Its step is applied to the state after step t - 1, as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Fewest synchronous steps: the prediction repeats the update of a step that was taken.
LEAST_START = 2


@dataclass(frozen=True)
class Delay:
    """Choice of the delayed iterations: those after `start` (0: none); the others are synchronous."""

    start: int = 0

    def has(self, t: int) -> bool:
        """True if iteration t is delayed."""
        return 0 < self.start < t


#: A run without delayed iterations.
NO_DELAY = Delay()
