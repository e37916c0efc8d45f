"""Replication progress: how much of the log each follower and learner has, as the leader knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Leader's view of one follower's or learner's log. match_index: number of its entries that agree with
    the leader's log and are durable; while `probing` only a guess, which is lowered by `step_back` entries,
    twice as many each time. next_index: index of the first entry not sent yet. heard_at: time (s) of its last
    reply, or at first when the leader began to send to it. round: latest broadcast that it answered.
    beyond_reach: True if its log ends before the first entry that the leader still keeps, so that it cannot
    catch up."""

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
        entries. start: index of the first entry that the leader keeps. True if the leader should at once send
        earlier entries; False if it cannot (`beyond_reach`), has none, or knows already up to where the logs
        agree."""
        if length < start:
            self.beyond_reach = True  # probed again with the next heartbeat
            return False
        if not self.probing or self.match_index <= start:
            return False
        self.match_index = max(0, min(length, self.match_index - self.step_back))
        self.step_back *= 2
        return True
