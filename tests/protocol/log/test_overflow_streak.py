"""Steps that overflows skipped in a row: who is doubted, and how long."""

from __future__ import annotations

from anabranch.protocol.log.overflow_streak import OverflowStreak
from anabranch.protocol.log.records import Commit, Rollback, Witness


def commit(t: int, finder: str = "") -> Commit:
    """Step t, skipped if a relay of stage 2 found an overflow."""
    verdict = "skip" if finder else "step"
    witness = Witness(finder, 2, 0, "weight") if finder else None
    numbers = 0.0, 1.0, 0.0, 1.0, 1.0
    return Commit("run", 1, 1, t, "", "", verdict, 0, (), (), *numbers, adam_step=t, witness=witness)


def told(*found: tuple[int, str], back_to: int = 0) -> OverflowStreak:
    """Streak after these (iteration, finder), and a rollback."""
    streak = OverflowStreak()
    for t, finder in found:
        streak = streak.after(commit(t, finder))
    return streak.after(Rollback(back_to, 0, "", ()))


def test_the_doubt_outlives_the_rollback_and_the_steps_that_are_taken_again() -> None:
    """The next relay that finds the overflows confirms the first; else both would lose their seats."""
    streak = told((4, ""), *((t, "a") for t in (5, 6, 7)), back_to=3)
    assert streak == OverflowStreak(doubted={2: ("a", 7)})
    streak = streak.after(commit(4)).after(commit(5))
    assert streak.doubted == {2: ("a", 7)}
    for t in (6, 7, 8):
        streak = streak.after(commit(t, "b"))
    assert streak.finders == {(2, "b")} and streak.doubted == {2: ("a", 7)}


def test_the_doubt_ends_where_the_step_was_taken() -> None:
    streak = told(*((t, "a") for t in (5, 6, 7)), back_to=6).after(commit(7))
    assert streak == OverflowStreak()
    for t in (8, 9, 10):
        streak = streak.after(commit(t, "b"))
    assert streak.doubted == {2: ("b", 10)}


def test_two_finders_and_unseen_ones_are_not_doubted() -> None:
    assert told((5, "a"), (6, "a"), (7, "b")).doubted == {}
    assert OverflowStreak.unseen(2).after(commit(7, "b")).doubted == {}
    assert OverflowStreak.unseen(0).finders == frozenset()
