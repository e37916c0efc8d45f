"""Network faults of a simulated world: black holes, slow links, duplicated and reordered messages.

A black hole loses or delays everything from one peer to another while their connection stays open, as TCP's
does: messages arrive in order once the hole is gone, or never. The peers only observe silence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

#: Seconds after which an unanswered dial fails.
DIAL_S = 10.0


@dataclass(frozen=True)
class LinkDisorder:
    """Duplication and reordering of messages. duplicated: probability that a message arrives twice. shaken_s:
    greatest extra delay (s), drawn for each copy, so that messages overtake each other. peers: only on links
    of these peers (None: on all)."""

    duplicated: float
    shaken_s: float
    peers: frozenset[str] | None = None


class NetworkFaults:
    """Current network faults of a world. Times are virtual seconds. slow: set of two peers -> factor on the
    delays between them, in both directions. disorders: current duplications and reorderings. gone: peers
    whose machine vanished. Messages are held back for ordered pairs (from, to)."""

    def __init__(self, draw: random.Random) -> None:
        self.slow: dict[frozenset[str], float] = {}
        self.disorders: list[LinkDisorder] = []
        self.gone: set[str] = set()
        self._draw = draw
        self._holes: dict[tuple[str, str], float] = {}

    def swallow(self, pairs: Iterable[tuple[str, str]], until: float) -> None:
        """Hold back all messages that the first peer of each pair sends to the second from now on, until the
        time `until` (infinite: for ever); those in flight arrive. A later time that was set before stays."""
        for pair in pairs:
            self._holes[pair] = max(until, self._holes.get(pair, 0.0))

    def open_at(self, sender: str, receiver: str, now: float) -> float:
        """Earliest time, `now` or later, at which a message can pass from sender to receiver; infinite:
        never."""
        if sender in self.gone or receiver in self.gone:
            return math.inf
        return max(now, self._holes.get((sender, receiver), 0.0)) if self._holes else now

    def factor(self, *ends: str) -> float:
        """Factor on the delays between the two peers `ends`; 1 without a fault."""
        return self.slow.get(frozenset(ends), 1.0) if self.slow else 1.0

    def arrivals(self, ends: frozenset[str], planned: float) -> list[float]:
        """Arrival times of a message between two peers that is due at `planned`, once for each copy: two at
        most, however many disorders concern the peers. Empty if none does: the message then arrives once and
        in order."""
        here = [d for d in self.disorders if d.peers is None or not d.peers.isdisjoint(ends)]
        copies = max((2 if self._draw.random() < each.duplicated else 1 for each in here), default=0)
        shaken_s = max((each.shaken_s for each in here), default=0.0)
        return [planned + self._draw.uniform(0.0, shaken_s) for _ in range(copies)]

    def dialled_at(self, one: str, other: str, now: float, trip_s: float) -> float:
        """Time at which a connection that `one` dials to `other` at `now` is established; infinite: the dial
        times out before. trip_s: seconds to connect without faults."""
        at = max(self.open_at(one, other, now), self.open_at(other, one, now)) + trip_s
        return at if at - now <= max(DIAL_S, trip_s) else math.inf
