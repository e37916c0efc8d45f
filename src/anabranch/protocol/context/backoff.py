"""Exponential back-off with jitter, and with a limit on the number of tries."""

from __future__ import annotations

from anabranch.counter_rng import CounterRng

#: Jitter: each wait is shortened by a random share of up to this much, so that retries of several peers do
#: not coincide.
SPREAD = 0.25
#: Exponent at which a wait stops doubling; it only keeps the power from overflowing.
DOUBLINGS_MAX = 30


class Backoff:
    """Back-off: a sequence of waits (s) that double from `first_s` to `most_s`, with jitter. Constructor
    argument `tries`: greatest number of tries (None: no limit); attribute `tries`: number of tries since the
    last `reset`."""

    def __init__(self, rng: CounterRng, first_s: float, most_s: float, tries: int | None = None) -> None:
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self._limit = tries
        self.tries = 0

    def next(self) -> float | None:
        """Count a try and return the seconds to wait before it; None, and nothing is counted, once the limit
        of tries is reached."""
        if self._limit is not None and self.tries >= self._limit:
            return None
        planned_s = min(self._most_s, self._first_s * 2.0 ** min(self.tries, DOUBLINGS_MAX))
        self.tries += 1
        return planned_s * self._rng.uniform(1.0 - SPREAD, 1.0)

    def reset(self) -> None:
        """Restart at the first wait, after a success."""
        self.tries = 0
