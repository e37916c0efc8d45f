"""Rounds of a run as functions of its run file: which iterations are rounds, and how far each one leads.

An *iteration* is what the log commits: a synchronous step, or a round of `round.steps` inner steps. `run.steps`,
the learning rate and the intervals of evaluations count *optimizer steps*, of which a round has `round.steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.config.schema import RunConfig


@dataclass(frozen=True)
class Course:
    """Synchronous iterations 1 to `start`, then rounds of `inner` optimizer steps; inner = 0: no rounds."""

    start: int = 0
    inner: int = 0

    def is_round(self, t: int) -> bool:
        return self.inner > 0 and t > self.start

    def progress(self, t: int) -> int:
        """Optimizer steps up to the end of iteration t."""
        return self.start + (t - self.start) * self.inner if self.is_round(t) else t

    def passes(self, t: int, every: int) -> bool:
        """True if iteration t passes a multiple of `every` optimizer steps."""
        return self.progress(t) // every > self.progress(t - 1) // every

    def iterations(self, steps: int) -> int:
        """Iterations of a run of `steps` optimizer steps."""
        if not self.inner or steps <= self.start:
            return steps
        return self.start - (self.start - steps) // self.inner


def course_of(run: RunConfig) -> Course:
    """Course of a run file."""
    if not run.round.slots:
        return Course()
    return Course(max(1, int(run.run.steps * run.round.start)), run.round.steps)


def iterations(run: RunConfig) -> int:
    """Iterations that a run file's run.steps take."""
    return course_of(run).iterations(run.run.steps)


def inner_microbatches(run: RunConfig) -> int:
    """Microbatches of one inner step of one island."""
    return run.batch.microbatches // run.round.slots


Slots = Mapping[int, tuple[int, int]]
"""Slot -> (inner steps that count of it so far, inner steps in this round)."""
