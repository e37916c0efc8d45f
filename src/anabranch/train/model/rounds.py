"""Rounds of a run file (`protocol.interface.rounds`). Imports no torch."""

from __future__ import annotations

from anabranch.config import RunConfig
from anabranch.protocol.interface.rounds import NO_ROUNDS, Rounds


def rounds_of(run: RunConfig) -> Rounds:
    """Rounds of a run file."""
    part = run.round
    if not part.slots:
        return NO_ROUNDS
    start = max(1, int(run.run.steps * part.start))
    return Rounds(start, part.steps, part.slots, part.late == "drop", part.grace)


def iterations(run: RunConfig) -> int:
    """Iterations that a run file's run.steps take."""
    return rounds_of(run).iterations(run.run.steps)


def inner_microbatches(run: RunConfig) -> int:
    """Microbatches of one inner step of one island."""
    return run.batch.microbatches // max(1, run.round.slots)
