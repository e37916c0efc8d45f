"""Counter of the external changes (nodes, costs, capacities, demands) that a node of the auction knows of."""

from __future__ import annotations

import math

from anabranch.flow.auction.timing import QUIET_S


class Changes:
    """Count of external changes (nodes, costs, capacities, demands) anywhere in the swarm, as one node knows
    it. last_at: time (s) of the newest, or of the start of bidding; infinite before both."""

    def __init__(self) -> None:
        self.count = 0
        self.last_at = math.inf
        self._series_at = math.inf

    def start(self, now: float) -> None:
        self.last_at = self._series_at = now

    def note(self, count: int, now: float) -> None:
        if now >= self.last_at + QUIET_S:
            self._series_at = now
        self.count = count
        self.last_at = now

    @property
    def unceasing(self) -> bool:
        """True if the newest series of changes, each less than `QUIET_S` (s) after the one before, lasted for
        `QUIET_S` or longer (churn). Also true before the start, until a change is noted."""
        return self.last_at >= self._series_at + QUIET_S
