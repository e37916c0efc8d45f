"""Churn: crashes and returns of relays, drawn per iteration or taken from a trace.

At 10 % churn each relay crashes with probability 0.1 per iteration, however long that is. The draws, and the
shares of the iteration after which relays crash, are the same for every policy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

from anabranch.sim.cluster.churn_trace import LEAVE, NO_TRACE, Change, Trace
from anabranch.sim.cluster.scenario_schema import ChurnPart
from anabranch.sim.kernel.clock import Clock


def crashes(seed: int, t: int, relays: Iterable[str], probability: float) -> list[tuple[float, str]]:
    """Crashes of iteration t as (elapsed share of the iteration, relay), in order of time. Each relay crashes
    with `probability`; the draws depend on `seed`, t and the relays, and not on their order."""
    rng = random.Random(f"churn {seed} {t}")
    drawn = [(rng.random(), rng.random(), relay) for relay in sorted(relays)]
    return sorted((share, relay) for chance, share, relay in drawn if chance < probability)


class Churn:
    """Churn of a simulated run: calls `crash` and `back` at the times that are drawn or in the trace. relays:
    those that the draws may crash. crash: kills a relay; returns False if the relay is spared. back: lets the
    machine of a crashed relay join again, after the scenario's `return_s` or as the trace says; also machines
    that are absent at first. The trace's changes are planned at once, drawn crashes by `opened`."""

    def __init__(
        self,
        clock: Clock,
        part: ChurnPart,
        relays: Iterable[str],
        seed: int,
        crash: Callable[[str], bool],
        back: Callable[[str], None],
        trace: Trace = NO_TRACE,
    ) -> None:
        self._clock, self._part, self._seed = clock, part, seed
        self._relays = sorted(relays)
        self._crash, self._back = crash, back
        self._away = set(trace.absent)
        for change in trace.changes:
            clock.at(change.at_s, partial(self._apply, change))

    def _apply(self, change: Change) -> None:
        """Carry out a change of the trace. A return has no effect if the relay is not away: its crash was
        spared."""
        if change.event == LEAVE:
            if self._crash(change.machine):
                self._away.add(change.machine)
        elif change.machine in self._away:
            self._away.remove(change.machine)
            self._back(change.machine)

    def opened(self, t: int, length_s: float) -> None:
        """Draw and plan the crashes of iteration t, which begins now and is expected to last `length_s`
        seconds; call it once for each iteration. None with a crash probability of 0."""
        for share, relay in crashes(self._seed, t, self._relays, self._part.crash):
            self._clock.after(share * length_s, partial(self._crash_now, relay))

    def _crash_now(self, relay: str) -> None:
        if self._crash(relay):
            self._clock.after(self._part.return_s, partial(self._back, relay))
