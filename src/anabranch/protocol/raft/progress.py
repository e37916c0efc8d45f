"""Replication progress: how much of the log each follower and learner has, as the leader knows it."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.protocol.raft.raft_log import RaftLog

#: Rounds whose send time is kept to measure round trips. A choice: later replies say nothing new.
ROUNDS_KEPT = 64


@dataclass
class Progress:
    """Leader's view of one follower's or learner's log. match_index: number of its entries that agree with
    the leader's log and are durable; while `probing` only a guess, which is lowered by `step_back` entries,
    twice as many each time. next_index: index of the first entry not sent yet. heard_at: time of its last
    reply (s). round: latest broadcast that it answered. beyond_reach: True if its log ends before the first
    entry that the leader still keeps, so that it cannot catch up."""

    match_index: int
    heard_at: float
    probing: bool = True
    beyond_reach: bool = False
    step_back: int = 1
    next_index: int = 0
    round: int = 0

    @property
    def matched(self) -> int:
        """Number of this peer's entries that certainly agree with the leader's log and are on this peer's
        disk."""
        return 0 if self.probing else self.match_index

    def accepted(self, length: int) -> None:
        """Note that the follower's first `length` entries agree and are durable, which ends probing."""
        self.match_index = length if self.probing else max(self.match_index, length)
        self.probing, self.beyond_reach, self.step_back = False, False, 1

    def rejected(self, length: int, start: int) -> bool:
        """Note that the follower refused the sent entries, because they do not follow its log of `length`
        entries. start: index of the first entry that the leader keeps. Returns True if the leader should at
        once send earlier entries."""
        if length < start:
            self.beyond_reach = True  # probed again with the next heartbeat
            return False
        if not self.probing or self.match_index <= start:
            return False
        self.match_index = max(0, min(length, self.match_index - self.step_back))
        self.step_back *= 2
        return True


class ProgressTracker:
    """Leader's view of all other voters and learners. round: running number of the leader's broadcasts."""

    def __init__(self) -> None:
        self.of: dict[str, Progress] = {}
        """Voter or learner -> its progress."""
        self.round = 0
        self._sent_at: dict[int, float] = {}

    def next_round(self, now: float) -> None:
        """Begin the next broadcast, at time `now`."""
        self.round += 1
        self._sent_at[self.round] = now
        self._sent_at.pop(self.round - ROUNDS_KEPT, None)

    def replied(self, known: Progress, number: int, now: float) -> float | None:
        """Note that follower `known` answered broadcast `number`, and was heard at `now`.

        Returns the round trip (s); None if it had answered that broadcast or a later one before, or if the
        broadcast is older than the last ROUNDS_KEPT.
        """
        known.heard_at = now
        new = number > known.round and number in self._sent_at
        known.round = max(known.round, number)
        return now - self._sent_at[number] if new else None

    def to_send(self, voter: str, log: RaftLog) -> tuple[int, str, tuple[bytes, ...]]:
        """Next AppendEntries for `voter`: index of its first entry, hash of the one before it, entries."""
        known = self.of[voter]
        known.match_index = max(known.match_index, log.start.index)
        previous = log.hash_before(known.match_index)
        assert previous is not None
        lines = log.entries_from(known.match_index) if known.match_index < log.length else ()
        known.next_index = known.match_index + len(lines)
        return known.match_index, previous, lines

    def matched(self, voter: str) -> int:
        """Number of log entries of `voter` that certainly agree with the leader's (0: not tracked)."""
        known = self.of.get(voter)
        return known.matched if known is not None else 0
