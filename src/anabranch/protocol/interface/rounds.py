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

    slots: most islands at one time. drops: True if a round ends without its late slots: those that are not
    ready when `grace` times the time that three quarters of the slots took has passed beyond that time.
    carries: True if a machine carries state of its slot from round to round. merges: True if the contribution
    of a late slot is merged in the next round. overlap: inner steps of the next round that a machine takes
    after its contribution, before the round's result is applied. proportional: True if it takes fewer or more
    of them as its slot has fewer or more steps than `inner` in the round. first: optimizer steps of the first
    round, which double from round to round up to `inner` (0: all rounds have `inner`). last: last round,
    after which iterations are synchronous again (0: rounds until the end). pipeline: True if a slot is filled
    by a crew, one machine of each relay stage and a data node, through which its microbatches pass; False if
    one machine holds the whole model. private: True if a machine takes the inner steps of a slot on data of
    its own.
    """

    start: int = 0
    inner: int = 0
    slots: int = 0
    drops: bool = True
    grace: float = 0.5
    carries: bool = False
    merges: bool = False
    overlap: int = 0
    first: int = 0
    last: int = 0
    pipeline: bool = False
    proportional: bool = False
    private: bool = False

    def has(self, t: int) -> bool:
        """True if iteration t is a round."""
        return self.inner > 0 and t > self.start and not 0 < self.last < t

    def length(self, t: int) -> int:
        """Optimizer steps that round t stands for."""
        doublings = min(max(0, t - self.start - 1), self.inner.bit_length())
        return min(self.inner, self.first << doublings) if self.first else self.inner

    def _short(self) -> list[int]:
        """Lengths, in optimizer steps, of the first rounds, which have fewer than `inner`."""
        lengths, steps = list[int](), self.first
        while 0 < steps < self.inner:
            lengths.append(steps)
            steps *= 2
        return lengths

    def progress(self, t: int) -> int:
        """Optimizer steps up to the end of iteration t."""
        if not self.inner or t <= self.start:
            return t
        rounds = (min(t, self.last) if self.last else t) - self.start
        short = self._short()[:rounds]
        return t - rounds + sum(short) + (rounds - len(short)) * self.inner

    def passes(self, t: int, every: int) -> bool:
        """True if iteration t reaches or passes a multiple of `every` optimizer steps, or is 0."""
        return self.progress(t) // every > self.progress(t - 1) // every if t else True

    @property
    def least(self) -> int:
        """Fewest inner steps of a slot in a round: one more than its machine may have taken ahead
        (`overlap`), or 1 where steps ahead are proportional."""
        return 1 if self.proportional else 1 + self.overlap

    def ahead(self, steps: int) -> int:
        """Inner steps of the next round that a machine takes ahead, while its contribution is exchanged, if
        its slot has `steps` inner steps in this round; 0 without `overlap`."""
        return self.overlap * steps // self.inner if self.proportional else self.overlap

    @property
    def keeps(self) -> bool:
        """True if a slot of a round may carry something from the round before."""
        return self.carries or self.merges

    @property
    def most_steps(self) -> int:
        """Upper bound on the inner steps of a slot in one round: slots share the steps by speed, which counts
        as at most MOST_RATE times the median."""
        return max(self.least, math.ceil(self.inner * min(self.slots, 2 * MOST_RATE)))

    def iterations(self, steps: int) -> int:
        """Number of iterations of a run of `steps` optimizer steps; the last round counts whole."""
        if not self.inner or steps <= self.start:
            return steps
        left, rounds = steps - self.start, 0
        for length in self._short():
            if left > 0:
                left, rounds = left - length, rounds + 1
        end = self.start + rounds - min(0, -left // self.inner)
        return end if not 0 < self.last < end else self.last + steps - self.progress(self.last)


#: A run without rounds.
NO_ROUNDS = Rounds()
