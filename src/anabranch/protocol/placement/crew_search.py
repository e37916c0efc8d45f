"""Search for crews that are quick together: machines near each other, and alike in speed.

The microbatches of an inner step pass down and up through the crew, as many at a time as its machines can
hold. So an inner step takes a round trip for the first microbatch, and for each further one the time of the
slowest machine, or a share of the round trip if too few are under way. Lines do not count: measured rates of
links that were busy are wrong by more than they would bring. Not here: who is in a crew before
(`rounds.plan`), measurements (`telemetry.link_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from types import MappingProxyType

from anabranch.protocol.log.records import Crew

#: Least gain of an exchange, as a share of two crews' speed. A choice: smaller ones are within what is
#: estimated.
GAIN = 0.002
#: Most exchanges of two machines that one search tries, which bounds its time: about 2 s of a slow core for
#: crews of 16 machines. A choice.
TRIALS_MAX = 20_000


@dataclass(frozen=True)
class CrewTimes:
    """Estimates of the seconds of an inner step of a crew.

    count: microbatches of an inner step. microbatch_s: relay -> seconds that it computes for one, forward and
    backward. capacity: relay -> microbatches that it can hold of one crew. latency_s(sender, receiver): of a
    link.
    """

    count: int
    microbatch_s: Mapping[str, float]
    capacity: Mapping[str, int]
    latency_s: Callable[[str, str], float]

    def seconds(self, crew: Crew, taken: Mapping[str, float] = MappingProxyType({})) -> float:
        """Estimated seconds of an inner step. taken: relay -> share of its time, less than 1, that another
        crew takes (absent: none)."""
        relays = crew[:-1]
        trip_s = sum(map(self.microbatch_s.__getitem__, relays))
        for one, other in pairwise((crew[-1], *crew)):
            trip_s += self.latency_s(one, other) + self.latency_s(other, one)
        slowest_s = max(self.microbatch_s[peer] / (1.0 - taken.get(peer, 0.0)) for peer in relays)
        under_way = min(self.count, *(max(1, self.capacity[peer]) for peer in relays))
        return trip_s + (self.count - 1) * max(slowest_s, trip_s / under_way)

    def together(self, crews: Sequence[Crew]) -> dict[Crew, float]:
        """Estimated seconds of an inner step of each of these crews, which work at one time. A relay of two
        crews gives each as much of its time as that needs, but at most half where both need more."""
        alone = {crew: self.seconds(crew) for crew in crews}
        taken = dict[Crew, dict[str, float]]()
        for crew, other in permutations(crews, 2):
            for peer in set(crew[:-1]).intersection(other[:-1]):
                needed = self.count * self.microbatch_s[peer] / alone[other]
                taken.setdefault(crew, {})[peer] = min(0.5, needed)
        return alone | {crew: self.seconds(crew, shares) for crew, shares in taken.items()}


def quicker(crews: Sequence[Crew], times: CrewTimes) -> list[Crew]:
    """Crews of the same machines that together take more inner steps per second: two crews exchange their
    machines of one stage as long as that pays. Not the optimum: in the result no single exchange pays, or
    TRIALS_MAX were tried."""
    found, trials = list(crews), 0
    speeds = [1.0 / times.seconds(crew) for crew in found]
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(found)), 2):
            for place in range(len(found[a])):
                if found[a][place] == found[b][place]:
                    continue
                if trials >= TRIALS_MAX:
                    return found
                trials += 1
                one, other = _exchanged(found[a], found[b], place), _exchanged(found[b], found[a], place)
                now = 1.0 / times.seconds(one), 1.0 / times.seconds(other)
                if sum(now) > (speeds[a] + speeds[b]) * (1.0 + GAIN):
                    found[a], found[b], (speeds[a], speeds[b]) = one, other, now
                    improved = True
    return found


def _exchanged(crew: Crew, other: Crew, place: int) -> Crew:
    """Copy of `crew` with the machine of `other` at the position `place`."""
    return (*crew[:place], other[place], *crew[place + 1 :])
