"""Virtual time: a heap of things to happen, in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Things at the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._count, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is planned."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True
