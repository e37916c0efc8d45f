"""Rounds of a run: which iterations are rounds of islands, and how many optimizer steps each one stands for.

An *iteration* is what the log commits: a synchronous step, or a round. A round counts as `inner` optimizer
steps in the learning rate, in the length of the run, and between evaluations and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Highest speed that is believed, as a multiple of the median: machines report their own. A choice: an RTX
#: 4090 is eleven times as quick as a slow RTX 3060.
MOST_RATE = 16.0


@dataclass(frozen=True)
class Rounds:
    """Synchronous iterations 1 to `start`, then rounds of `inner` optimizer steps each; inner = 0: all
    iterations are synchronous.

    slots: most islands at one time. drops: True if a round ends without its late slots, which have `grace`
    times the time after which three quarters of the slots were ready. carries: True if a machine carries
    state of its slot from round to round. merges: True if the contribution of a late slot is merged in the
    next round. least: fewest inner steps of a slot in a round.
    """

    start: int = 0
    inner: int = 0
    slots: int = 0
    drops: bool = True
    grace: float = 0.5
    carries: bool = False
    merges: bool = False
    least: int = 1

    def has(self, t: int) -> bool:
        """True if iteration t is a round."""
        return self.inner > 0 and t > self.start

    def progress(self, t: int) -> int:
        """Optimizer steps up to the end of iteration t."""
        return self.start + (t - self.start) * self.inner if self.has(t) else t

    def passes(self, t: int, every: int) -> bool:
        """True if iteration t reaches a multiple of `every` optimizer steps, or passes one; also for t =
        0."""
        return self.progress(t) // every > self.progress(t - 1) // every if t else True

    @property
    def keeps(self) -> bool:
        """True if a slot of a round may carry something from the round before."""
        return self.carries or self.merges

    @property
    def most_steps(self) -> int:
        """Most inner steps of a slot: half of the machines are at least a MOST_RATE-th as quick as it is."""
        return max(self.least, math.ceil(self.inner * min(self.slots, 2 * MOST_RATE)))

    def iterations(self, steps: int) -> int:
        """Iterations of a run of `steps` optimizer steps, the last round counted whole."""
        if not self.inner or steps <= self.start:
            return steps
        return self.start - (self.start - steps) // self.inner


#: A run without rounds.
NO_ROUNDS = Rounds()
