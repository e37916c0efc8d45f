"""Replay of a run's steps in log order, shown to observers; by one process (others: `parallel_replay.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.log.records import STRANDED, Commit
from anabranch.protocol.rounds.plan import late_slots, slots_of
from anabranch.train.reference.reference import Reference, Share, StepRecord, Witness

Order = Callable[[int], Iterable[int]]
"""Iteration -> its microbatches, in the order in which their gradients are added."""


class Stepper(Protocol):
    """Interface to take (`step`) or skip (`skip`) the next iteration of a replay, which brings `reference` to
    the state after it; computed by one process or several."""

    reference: Reference

    def step(self, t: int) -> StepRecord: ...

    def skip(self, t: int) -> StepRecord: ...

    def witnesses(self, t: int, index: int) -> frozenset[Witness]:
        """All overflows of microbatch, or slot, `index` of the next iteration t; empty if there is no such
        one. Effects and errors are those of `Reference.witnesses`."""
        ...


class SequentialStepper:
    """Stepper that computes in this process alone. order: iteration -> its microbatches in the order in which
    they are added (see `Order`)."""

    def __init__(self, reference: Reference, order: Order) -> None:
        self.reference = reference
        self._order = order

    def step(self, t: int) -> StepRecord:
        share = self.reference.share(t, self.reference.batch(t, self._order))
        self.reference.remember_late(t, sorted(self.reference.late))
        return self.reference.step(share)

    def skip(self, t: int) -> StepRecord:
        self.reference.remember_late(t, sorted(self.reference.late))
        return self.reference.skip(Share(t, []))

    def witnesses(self, t: int, index: int) -> frozenset[Witness]:
        return self.reference.witnesses(t, index)


class Observer(Protocol):
    """Listener of a replay, whose methods are called in log order: `stepped` after an iteration that the log
    took, `skipped` after one that it skipped. commit: as logged. record: as computed now."""

    def stepped(self, commit: Commit, record: StepRecord) -> None: ...

    def skipped(self, commit: Commit, record: StepRecord, witnesses: frozenset[Witness] | None) -> None:
        """Called after an iteration that the log skipped. witnesses: overflows that the replay found in the
        microbatch that the log names (none are sought in a round that nobody could fill); None if it lacks
        that one's data, which are private."""
        ...

    def evaluated(self, t: int, windows: Sequence[tuple[float, int]]) -> None:
        """Called when the replay has evaluated the state after iteration t on held-out windows, as the log
        did. windows: (loss sum, tokens) of each."""
        ...

    def reached(self, t: int, reference: Reference) -> None:
        """Called when the replay has reached the state after iteration t, which `reference` has, after
        `evaluated`; t = 0 is the initial state."""
        ...


def replay(
    history: LogReplay,
    stepper: Stepper,
    observers: Sequence[Observer],
    advance: Callable[[float], None] = lambda amount: None,
    last: int = 1 << 62,
    gaps: Mapping[int, Commit | None] = MappingProxyType({}),
    restore: Callable[[Commit], None] = lambda commit: None,
) -> None:
    """Replay the log from the state of the stepper's reference up to iteration `last`. Iterations are taken,
    skipped and evaluated as in the log. Observers are called for the state from which it begins, for every
    iteration that is taken or skipped, and for each restored state. advance: called with the number of
    iterations done since its last call. gaps: iteration that cannot be taken -> commit after which the replay
    goes on, with the state that `restore` loads; None: it ends before the gap."""
    reference = stepper.reference

    def arrive(t: int) -> None:
        if t in history.evaluations:
            windows = reference.evaluate(len(history.evaluations[t].loss_sums))
            for observer in observers:
                observer.evaluated(t, windows)
        for observer in observers:
            observer.reached(t, reference)

    arrive(begun := reference.t)
    for commit in history.commits:
        if not begun < commit.t <= last or commit.t <= reference.t:
            continue
        if commit.t in gaps:
            if (after := gaps[commit.t]) is None:
                return
            restore(after)
            arrive(after.t)
            advance(1.0 + after.t - commit.t)
            continue
        plan, following = history.plans.get(commit.t, ()), history.plans.get(commit.t + 1, ())
        reference.slots, reference.late = slots_of(plan, commit), late_slots(plan, following)
        if commit.verdict == "skip":
            found: frozenset[Witness] | None = frozenset()
            if (seen := commit.witness) is not None and seen.tensor != STRANDED:
                slot = reference.slots.get(seen.index)
                known = slot is None or reference.knows(commit.t, seen.index, slot)
                found = stepper.witnesses(commit.t, seen.index) if known else None
            record = stepper.skip(commit.t)
            for observer in observers:
                observer.skipped(commit, record, found)
        else:
            record = stepper.step(commit.t)
            for observer in observers:
                observer.stepped(commit, record)
        arrive(commit.t)
        advance(1.0)
