"""Drift of machine and link speeds, as if other work took a changing share of them.

A factor is exp(-|x|), where x is an Ornstein-Uhlenbeck process with mean 0, the scenario's standard deviation
and correlation time `drift.period_s`. Speeds never exceed those of the profile, so that the lower bound of
the undisturbed fleet holds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

from anabranch.sim.kernel.clock import Clock

#: Steps per correlation time (a choice).
STEPS = 10


@dataclass
class Drift:
    """Drifting speeds of a fleet's machines and links, from `begin` on. speed, links: standard deviations of
    the logarithm for machines and links (0: no drift). period_s: correlation time. seed: draws the
    changes."""

    speed: float = 0.0
    links: float = 0.0
    period_s: float = 600.0
    seed: int = 0
    _factors: dict[tuple[str, ...], float] = field(default_factory=dict)

    def slowness(self, host: str) -> float:
        """Present factor on the duration of a host's tasks, 1 or more; 1 without drift."""
        return 1.0 / self._factors.get((host,), 1.0)

    def rate(self, one: str, other: str) -> float:
        """Present factor on the bandwidth between two regions, or inside one (twice the same), at most 1; 1
        without drift."""
        return self._factors.get((min(one, other), max(one, other)), 1.0)

    def begin(
        self, clock: Clock, hosts: Iterable[str], regions: Iterable[str], changed: Callable[[], None]
    ) -> None:
        """Begin the drift of the speeds of these hosts and of the links of these regions; it goes on for
        ever. `changed` is called after each change, the first of which is now. Without deviations nothing
        changes, and `changed` is never called."""
        spread: dict[tuple[str, ...], float] = {}
        if self.speed:
            spread |= dict.fromkeys(((host,) for host in sorted(hosts)), self.speed)
        if self.links:
            spread |= dict.fromkeys(combinations_with_replacement(sorted(regions), 2), self.links)
        if not spread:
            return
        rng = random.Random(f"drift {self.seed}")
        logs = {key: rng.gauss(0.0, deviation) for key, deviation in spread.items()}
        kept = math.exp(-1.0 / STEPS)

        def step() -> None:
            for key, deviation in spread.items():
                logs[key] = kept * logs[key] + math.sqrt(1.0 - kept * kept) * rng.gauss(0.0, deviation)
                self._factors[key] = math.exp(-abs(logs[key]))
            changed()
            clock.after(self.period_s / STEPS, step)

        step()
