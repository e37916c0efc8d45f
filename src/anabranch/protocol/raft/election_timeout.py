"""Election timeout of a voter, adapted to measured gaps between a leader's messages and to round trips."""

from __future__ import annotations

from collections import deque

#: Gaps and round trips kept. A choice: about a minute of heartbeats.
WINDOW = 64
#: Quantile of the gaps and round trips that the timeout covers. A choice: one long silence (a frozen machine)
#: does not raise it.
SHARE = 0.9


class ElectionTimeout:
    """Election timeout of one voter (`patience_s`, in seconds): three usual gaps between a leader's messages,
    each a heartbeat at least, plus two usual round trips."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self._round_trips: deque[float] = deque(maxlen=WINDOW)
        self.patience_s = self._computed_s()

    def add_gap(self, seconds: float) -> None:
        """Add a sample: seconds between two messages of one leader."""
        self._gaps.append(seconds)
        self.patience_s = self._computed_s()

    def add_round_trip(self, seconds: float) -> None:
        """Add a sample: seconds from a request to its reply."""
        self._round_trips.append(seconds)
        self.patience_s = self._computed_s()

    def _computed_s(self) -> float:
        return 3.0 * max(self._heartbeat_s, _usual(self._gaps)) + 2.0 * _usual(self._round_trips)


def _usual(seconds: deque[float]) -> float:
    ordered = sorted(seconds)
    return ordered[int(SHARE * (len(ordered) - 1))] if ordered else 0.0
