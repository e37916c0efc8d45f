"""Time of one peer: time of the event being handled, monotonic time without the process's sleep, timers of
its parts."""

from __future__ import annotations

import math
from typing import Final

#: Slack (s) within which a wake-up counts as punctual: two clocks round differently when times are added up.
ROUNDING_S: Final = 1e-6


class Clock:
    """Time (s, monotonic; see `OwnTime`) of the event being handled; `Peer.handle` advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, now: float) -> None:
        self.now = now


class Timer:
    """Base of the parts of a peer that act at a planned time."""

    def deadline(self) -> float:
        """Monotonic time (s) of the next call of `tick`; infinite for never."""
        return math.inf

    def tick(self) -> None:
        """Do the work that is due. Called at the deadline, and possibly before it."""


class OwnTime:
    """Monotonic time of one peer: its driver's clock without jumps and without the process's own sleep.

    While a process is stopped (laptop lid, SIGSTOP, swapping) or its clock is set, the absence of messages
    proves nothing. Own time stands still meanwhile, and every timer with it. `now` never falls. A wake-up
    that is late by at most `grace_s` does not count as sleep.
    """

    def __init__(self, grace_s: float) -> None:
        self.now = 0.0
        self._grace_s = grace_s
        self._ahead = 0.0
        self._last = -math.inf
        self._awaited = math.inf
        self._awaited_own = -math.inf

    def take(self, clock: float) -> float:
        """Advance to the driver's time `clock` (s) of an event; returns this peer's own time of it. Ends the
        wait for a planned wake-up (`awaits`), which has to be planned anew."""
        if clock < self._last:
            self._ahead -= self._last - clock
        else:
            late = clock - (self._awaited if self._awaited > self._last else self._last)
            if late > self._grace_s:
                self._ahead += late
        own = clock - self._ahead
        if self._awaited_own > own and clock >= self._awaited - ROUNDING_S:
            own = self._awaited_own
        self._last, self._awaited = clock, math.inf
        if own > self.now:
            self.now = own
        return self.now

    def awaits(self, own: float) -> float:
        """Store own time `own` of the next wake-up, and return the driver's time of it. If the next event
        comes much later than that, the process slept."""
        self._awaited_own = own
        self._awaited = own + self._ahead
        return self._awaited
