"""Streak of steps that overflows skipped in a row, and whose word they are, as the log tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.protocol.log.records import Commit, Rollback, overflowed

#: Skipped steps in a row after which the run stops, unless they may be one relay's word. A choice.
SKIPS_IN_A_ROW = 3
#: Stage and peer in place of the finders of steps that were skipped before a peer joined.
UNKNOWN_FINDER = 0, ""


@dataclass(frozen=True)
class OverflowStreak:
    """Steps in a row that overflows skipped, up to some record of the log. skips: their number. finders:
    (stage, peer) of each of their witnesses. doubted: stage -> (relay that alone found the overflows of
    SKIPS_IN_A_ROW or more steps in a row, last of these iterations). A second relay of the stage that alone
    finds as many is not entered: its word is taken. A step that is taken at that iteration or later ends the
    doubt; a rollback does not."""

    skips: int = 0
    finders: frozenset[tuple[int, str]] = frozenset()
    doubted: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def unseen(cls, skips: int) -> OverflowStreak:
        """Streak of `skips` steps whose records a peer has not seen, so that their finders are not known to
        it."""
        return cls(skips, frozenset({UNKNOWN_FINDER} if skips else ()))

    def after(self, record: Commit | Rollback) -> OverflowStreak:
        """New streak after the next commit or rollback: one more skip for an overflow, else none any more."""
        if isinstance(record, Rollback):
            return OverflowStreak(doubted=self.doubted)
        if record.witness is None or not overflowed(record):
            past = record.t if record.verdict == "step" else -1
            return OverflowStreak(doubted={stage: v for stage, v in self.doubted.items() if v[1] > past})
        stage, peer = finder = record.witness.stage, record.witness.peer
        skips, finders, doubted = self.skips + 1, self.finders | {finder}, self.doubted
        if stage and skips >= SKIPS_IN_A_ROW and len(finders) == 1 and doubted.get(stage, (peer,))[0] == peer:
            doubted = {**doubted, stage: (peer, record.t)}
        return OverflowStreak(skips, finders, doubted)
