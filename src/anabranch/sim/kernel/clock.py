"""Virtual clock with an event queue in a fixed order.

Near events are in a heap. Later ones are kept unsorted in time slices until their slice begins: with a
thousand peers a single heap would compare most of its entries again and again, outside of any cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

#: Time slices per second (a choice).
SLICES: Final = 64.0


class Clock:
    """Virtual clock (`now`, in seconds) with an event queue. Simultaneous events run in the order in which
    they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: list[tuple[float, int, Callable[[], object]]] = []
        """Heap of the events before `_later_at`: (time, number, action)."""
        self._later_at = 0.0
        self._later: dict[int, list[tuple[float, int, Callable[[], object]]]] = {}
        self._slices: list[int] = []
        """Heap of the numbers of the non-empty slices."""
        self._count = 0

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Plan to call `action` at the virtual time `time` (s). A past time counts as now; an infinite one
        never comes."""
        self._count += 1
        if time < self.now:
            time = self.now
        happening = (time, self._count, action)
        if time < self._later_at:
            heappush(self._soon, happening)
            return
        if time == math.inf:
            return
        number = int(time * SLICES)
        found = self._later.get(number)
        if found is None:
            self._later[number] = [happening]
            heappush(self._slices, number)
        else:
            found.append(happening)

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Set `now` to the time of the next event and run its action; what the action raises leaves the call.
        False, and nothing happens, if no event is planned."""
        if not self._soon and not self._begin_slice():
            return False
        self.now, _, action = heappop(self._soon)
        action()
        return True

    def _begin_slice(self) -> bool:
        """Move the next time slice that has events from `_later` into the heap; False if there is none."""
        if not self._slices:
            return False
        number = heappop(self._slices)
        self._soon = self._later.pop(number)
        self._soon.sort()
        self._later_at = (number + 1) / SLICES
        return True
