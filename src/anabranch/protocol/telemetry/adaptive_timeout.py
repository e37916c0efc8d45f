"""Adaptive timeout of one peer: the silence after which it is suspected, from the gaps between its messages.

Suspicion only redirects work to other peers; it removes no member (R3).
"""

from __future__ import annotations

import bisect
from array import array
from typing import Final

#: Gaps kept per peer. A choice, like the constants below.
WINDOW: Final = 256
#: Gaps shorter than this share of a heartbeat belong to bursts of traffic and are not counted.
TELLING: Final = 0.25
#: The timeout is TIMES the 99th percentile of the gaps, plus MARGIN_S seconds.
TIMES: Final = 3.0
MARGIN_S: Final = 1.0
#: Share of the timeout after which other peers are asked whether they hear the silent one.
DOUBT: Final = 0.5


class AdaptiveTimeout:
    """Silence timeout (s) of one watched peer, adapted to the gaps between its messages; with the time of its
    last message.

    patience_s: the timeout, TIMES the 99th percentile of those gaps (at least a heartbeat), plus MARGIN_S. A
    gap longer than the timeout counts a third, and the longest gap counts only after a second one like it, so
    that one freeze of the peer does not triple its timeout.
    """

    __slots__ = ("_gaps", "_heartbeat_s", "_sorted", "last_heard", "patience_s")

    def __init__(self, now: float, heartbeat_s: float) -> None:
        self.last_heard = now
        self._heartbeat_s = heartbeat_s
        self._gaps = array("d", [heartbeat_s])
        self._sorted = array("d", [heartbeat_s])
        self.patience_s = self._computed_s()

    def heard(self, now: float) -> None:
        """Note that a message of the watched peer arrived, and adapt the timeout to the gap before it. A gap
        shorter than TELLING heartbeats does not count, one longer than the timeout counts a third."""
        gap = now - self.last_heard
        self.last_heard = now
        if gap < self._heartbeat_s * TELLING:
            return
        if gap >= self.patience_s:
            gap /= TIMES
        if len(self._gaps) == WINDOW:
            oldest = self._gaps.pop(0)
            self._sorted.pop(bisect.bisect_left(self._sorted, oldest))
        self._gaps.append(gap)
        bisect.insort(self._sorted, gap)
        self.patience_s = self._computed_s()

    def _computed_s(self) -> float:
        count = len(self._sorted)
        rank = int(0.99 * count)
        gap_s = self._sorted[rank if rank < count - 2 else max(0, count - 2)]
        return TIMES * (gap_s if gap_s > self._heartbeat_s else self._heartbeat_s) + MARGIN_S

    def doubted_at(self) -> float:
        """Time (s) from which other peers are asked about the silent peer, early enough for their answers to
        come by `suspected_at`."""
        return self.last_heard + DOUBT * self.patience_s

    def suspected_at(self) -> float:
        """Time (s) from which the peer is suspected to have failed, unless a message of it arrives before."""
        return self.last_heard + self.patience_s
