"""Link table of the leader: latency and bandwidth between members, as the members report them with every
step.

Members measure links to neighbours only, and a joiner has measured none. An unmeasured link is taken to be
like those between the same regions; if none of these is measured, like the median of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from anabranch.protocol.telemetry.estimators import plausible

#: Measurements are clamped to this factor below and above the median of all. A choice: real links of one
#: swarm lie within it, false reports need not.
FAR = 1000.0
#: Number of removed members whose links are kept in case they come back. A choice.
GONE_KEPT = 64


@dataclass(frozen=True)
class LinkEstimate:
    """Estimated latency (s) and bandwidth (bits per second) of one direction of a link."""

    latency_s: float
    bandwidth_bps: float

    def seconds(self, size_bytes: float) -> float:
        """Estimated seconds of a transfer, latency included."""
        return self.latency_s + 8.0 * size_bytes / self.bandwidth_bps


class LinkMeasurements:
    """Leader's table of link measurements (latency, bandwidth) that members reported, by sender and receiver
    of the link. knows(peer): True if the peer is a member."""

    def __init__(self, knows: Callable[[str], bool] = lambda peer: True) -> None:
        self._knows = knows
        self._latency_s: dict[str, dict[str, float]] = {}
        self._bandwidth_bps: dict[str, dict[str, float]] = {}
        self._gone: dict[str, None] = {}

    def told(self, peer: str, links: Mapping[str, tuple[float, float]]) -> None:
        """Enter a report of `peer` about its links: receiver -> (round trip in s, bits per second sent to it;
        0: not known). Implausible numbers, and receivers that are no members, are left out. Its earlier
        reports about other receivers still count, since it may have changed stages and come back."""
        latencies, rates = self._latency_s.setdefault(peer, {}), self._bandwidth_bps.setdefault(peer, {})
        for other, (trip_s, bandwidth_bps) in links.items():
            if not self._knows(other):
                continue
            if plausible(trip_s):
                latencies[other] = trip_s / 2.0
            if plausible(bandwidth_bps):
                rates[other] = bandwidth_bps

    def gone(self, peer: str) -> None:
        """Note that `peer` was removed from the run; its measurements are kept, in case it rejoins, until
        GONE_KEPT further peers were removed; if it is a member by then, they stay."""
        self._gone.pop(peer, None)
        self._gone[peer] = None
        while len(self._gone) > GONE_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            if not self._knows(oldest):
                self.removed(oldest)

    def removed(self, peer: str) -> None:
        """Delete all measurements of links from and to `peer`."""
        for table in (self._latency_s, self._bandwidth_bps):
            table.pop(peer, None)
            for measured in table.values():
                measured.pop(peer, None)

    def measured(self, one: str, other: str) -> bool:
        """True if peer `one` or peer `other` reported a latency of the link between them."""
        return other in self._latency_s.get(one, ()) or one in self._latency_s.get(other, ())

    def rates(self, peer: str) -> Iterator[Collection[float]]:
        """Measured rates (bits per second) of a peer's links, for estimates of its access line: yields those
        of the links from `peer`, then those of the links to it."""
        yield self._bandwidth_bps.get(peer, {}).values()
        yield [measured[peer] for measured in self._bandwidth_bps.values() if peer in measured]

    def latencies(self, regions: Mapping[str, str]) -> Callable[[str, str], float] | None:
        """Make the function (sender, receiver) -> estimated latency (s), for the peers in `regions` (peer ->
        region); None while none between them is measured."""
        measured = _among(self._latency_s, regions)
        return _estimator(measured, regions, same_region=min) if measured else None

    def between(self, regions: Mapping[str, str]) -> Callable[[str, str], LinkEstimate] | None:
        """Make the function (sender, receiver) -> estimate of the link, for the peers in `regions` (peer ->
        region); None while not one latency or not one bandwidth between them is measured. An unmeasured link
        is not taken to be quicker than the quickest that its sender has, if two or more of these are
        measured."""
        latencies, rates = _among(self._latency_s, regions), _among(self._bandwidth_bps, regions)
        if not latencies or not rates:
            return None
        latency_s = _estimator(latencies, regions, same_region=min)
        bandwidth_bps = _estimator(rates, regions, same_region=max)
        sent_bps: dict[str, list[float]] = defaultdict(list)
        for (sender, _), value in rates.items():
            sent_bps[sender].append(value)

        def link(sender: str, receiver: str) -> LinkEstimate:
            found_bps, own = bandwidth_bps(sender, receiver), sent_bps.get(sender, ())
            if (sender, receiver) not in rates and len(own) > 1:
                # The sender's uplink bounds all that it sends.
                found_bps = min(found_bps, max(*own, found_bps / FAR))
            return LinkEstimate(latency_s(sender, receiver), found_bps)

        return link


def _among(
    table: Mapping[str, Mapping[str, float]], peers: Collection[str]
) -> dict[tuple[str, str], float]:
    """(Sender, receiver) -> measured value, of links between these peers."""
    return {
        (sender, receiver): value
        for sender, measured in table.items()
        if sender in peers
        for receiver, value in measured.items()
        if receiver in peers
    }


def _estimator(
    table: Mapping[tuple[str, str], float],
    regions: Mapping[str, str],
    same_region: Callable[[list[float]], float],
) -> Callable[[str, str], float]:
    """Make the function (sender, receiver) -> measured value of the link, or of its other direction; else the
    median of the links between these two regions; else, for peers of one region, the choice of `same_region`
    from all measured values; else their median. table: (sender, receiver) -> measured value, at least one;
    values far from the median are clamped (FAR). regions: peer -> region ("": not known)."""
    usual = median(table.values())
    table = {pair: min(max(value, usual / FAR), usual * FAR) for pair, value in table.items()}
    by_regions: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for (one, other), value in table.items():
        if regions[one] and regions[other]:
            by_regions[tuple(sorted((regions[one], regions[other])))].append(value)
    likely = {pair: median(values) for pair, values in by_regions.items()}
    nearest = same_region([*table.values()])

    def estimate(sender: str, receiver: str) -> float:
        found = table.get((sender, receiver), table.get((receiver, sender)))
        if found is not None:
            return found
        pair = tuple(sorted((regions.get(sender, ""), regions.get(receiver, ""))))
        one, other = pair
        return likely.get(pair, nearest if one and one == other else usual)

    return estimate
