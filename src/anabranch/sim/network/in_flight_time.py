"""Time in which hosts had payloads in flight that they sent."""

from __future__ import annotations

from anabranch.sim.kernel.clock import Clock


class InFlightTime:
    """Time in which each host had a payload in flight that it sent. seconds: host -> virtual seconds so far,
    without a time that has not ended."""

    def __init__(self, clock: Clock) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._now: dict[str, tuple[int, float]] = {}

    def begin(self, host: str) -> None:
        count, since = self._now.get(host, (0, 0.0))
        self._now[host] = (count + 1, since if count else self._clock.now)

    def end(self, host: str, count: int = 1) -> None:
        """Record that `count` payloads sent by `host`, which had begun, have arrived or are lost."""
        before, since = self._now[host]
        if before == count:
            self.seconds[host] = self.seconds.get(host, 0.0) + self._clock.now - since
        self._now[host] = (before - count, since)
