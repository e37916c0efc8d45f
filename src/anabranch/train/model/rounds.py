"""Rounds and delay of a run file (`protocol.interface`). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from anabranch.config import RunConfig
from anabranch.protocol.interface.delay import LEAST_START, NO_DELAY, Delay
from anabranch.protocol.interface.rounds import NO_ROUNDS, Rounds


def rounds_of(run: RunConfig) -> Rounds:
    """Rounds of islands that a run file sets: iterations before them, inner steps, slots, deadline, what
    slots carry; NO_ROUNDS for a run file without rounds."""
    part = run.round
    if not part.slots:
        return NO_ROUNDS
    start = max(1, int(run.run.steps * part.start))
    carries = part.unsent != "drop" or part.first_moment == "keep"
    late = part.late
    rounds = Rounds(
        start, part.steps, part.slots, late != "wait", part.grace, carries, late == "carry", part.overlap,
        part.first_steps, pipeline=not run.pipeline.whole, proportional=part.ahead == "keep",
        private=run.data.private,
    )  # fmt: skip
    if not part.end:
        return rounds
    return replace(rounds, last=rounds.iterations(max(start + 1, int(run.run.steps * (1.0 - part.end)))))


def delay_of(run: RunConfig) -> Delay:
    """Delayed iterations that a run file sets: those after Delay.start; NO_DELAY for a synchronous run."""
    part = run.iteration
    if not part.delay:
        return NO_DELAY
    return Delay(max(LEAST_START, int(run.run.steps * part.delay_from)))


def iterations(run: RunConfig) -> int:
    """Number of iterations in which a run takes its run.steps optimizer steps: one for each synchronous step,
    and one for each round of islands, which counts as round.steps steps (the first rounds as fewer, if
    round.first_steps is set)."""
    return rounds_of(run).iterations(run.run.steps)


def steps_on_corpus(run: RunConfig) -> int:
    """Optimizer steps of a run that read its own corpus: all of them, or the synchronous ones where machines
    have data of their own."""
    rounds = rounds_of(run)
    if not run.data.private:
        return run.run.steps
    last = rounds.last or iterations(run)
    return rounds.start + max(0, iterations(run) - max(last, rounds.start))


def inner_microbatches(run: RunConfig) -> int:
    """Microbatches of one inner step of one island: those of a batch, divided by the number of slots; all of
    them in a run without rounds."""
    return run.batch.microbatches // max(1, run.round.slots)
