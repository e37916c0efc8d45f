"""Pass times and link costs as one peer knows them: measured by itself, or reported by its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.protocol.telemetry.estimators import LinkCost, Samples, plausible

#: Bandwidth (bits per second) assumed for time-outs before a link is measured, and the factor by which a link
#: may be slower than measured: a payload counts as under way for that long. Choices.
LEAST_BPS, SLOWER = 1e6, 4.0
#: Least bandwidth (bits per second) and greatest ratio below the median of reported ones that are believed,
#: so that a peer cannot make others wait for ever by a false report. Choices.
CRAWL_BPS, THINNER = 1e5, 64.0
#: A peer that kept microbatches too long in the n-th iteration in a row gets none for this factor to the n
#: iterations; n counts up to the second number. Choices: three trials in a hundred iterations.
AVOIDED_FACTOR, AVOIDED_MAX = 4, 4


@dataclass(slots=True)
class Neighbour:
    """Peer of an adjacent stage: its reported pass times and price, and the measured link to it.

    forward_s, backward_s: reported seconds per microbatch (0: not known). price: reported cost of a
    microbatch from that peer to the end of the pipeline (s; infinite: not known).
    """

    link: LinkCost = field(default_factory=LinkCost)
    forward_s: float = 0.0
    backward_s: float = 0.0
    price: float = math.inf
    missed: int = 0
    """Iterations in a row in which it took microbatches and did not give one back in time."""
    missed_t: int = -1
    """Last of these iterations."""
    unclaimed: int = 0
    """Iterations in which it gave microbatches back and did not claim them."""
    avoided_until: int = 0
    """Iteration from which it gets microbatches again."""
    _queued_bytes: float = 0.0
    _queued_at: float = 0.0
    _hop_s: float = 0.0
    _line_s: float = 0.0
    _measured_bytes: int | None = None
    """Bytes of an activation if the link was measured since `_hop_s` was computed, else None."""

    @property
    def hop_s(self) -> float:
        """Latency and transfer seconds of an activation on the link, mean of both directions; 0: not
        known."""
        self._compute()
        return self._hop_s

    @property
    def line_s(self) -> float:
        """Transfer seconds of an activation in the link's slower direction; 0: not known."""
        self._compute()
        return self._line_s

    def _compute(self) -> None:
        if self._measured_bytes is not None:
            self._hop_s = self.link.seconds(self._measured_bytes)
            self._line_s = self.link.line_s(self._measured_bytes)
            self._measured_bytes = None

    def measured(self, activation_bytes: int) -> None:
        """Note that the link was measured; `hop_s` and `line_s` are computed when they are asked for."""
        self._measured_bytes = activation_bytes

    @property
    def pass_s(self) -> float:
        """Mean of reported forward and backward seconds (`c` of d_ij); the forward alone if no backward is
        known."""
        return (self.forward_s + self.backward_s) / 2.0 if self.backward_s else self.forward_s

    @property
    def work_s(self) -> float:
        """Compute seconds of one microbatch: forward, backward and weight gradients. The last are not
        reported and taken to be as long as a forward; at a head, whose forward contains the loss's gradient,
        half."""
        weights_s = self.forward_s if self.backward_s else self.forward_s / 2.0
        return self.forward_s + self.backward_s + weights_s

    def hand(self, size_bytes: int, now: float) -> float:
        """Note that a payload is sent on the link. Returns the estimated bytes under way, this payload
        included."""
        bps = max(self.link.out_bps(size_bytes) or LEAST_BPS, CRAWL_BPS)
        left_bytes = self._queued_bytes - bps * (now - self._queued_at) / 8.0
        self._queued_bytes, self._queued_at = max(0.0, left_bytes) + size_bytes, now
        return self._queued_bytes

    def most_s(self, ahead_bytes: float, size_bytes: int) -> float:
        """Longest plausible time (s) to send `ahead_bytes` over the link, in payloads of `size_bytes`."""
        measured_bps = self.link.out_bps(size_bytes)
        slowest_bps = LEAST_BPS if measured_bps is None else max(measured_bps, CRAWL_BPS) / SLOWER
        return 8.0 * ahead_bytes / slowest_bps

    def broke(self) -> None:
        """Note that the connection broke: nothing is under way on the link."""
        self._queued_bytes = 0.0

    def told_speed(self, forward_s: float, backward_s: float, bandwidth_bps: float, price: float) -> None:
        """Take a report of the neighbour about itself (`Pong`); implausible numbers count as not known."""
        self.forward_s = forward_s if plausible(forward_s) else 0.0
        self.backward_s = backward_s if plausible(backward_s) else 0.0
        self.price = price if 0.0 <= price < math.inf else math.inf
        self.link.back_bps = bandwidth_bps if plausible(bandwidth_bps) else None


@dataclass
class PeerCosts:
    """Pass times of this peer and of its neighbours, and the links between them.

    activation_bytes: size of an activation on the wire. forward_s, backward_s: median seconds of this peer's
    own passes (0: none yet). changes: rises when pass times of this peer or of a neighbour change.
    """

    activation_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    neighbours: dict[str, Neighbour] = field(default_factory=dict)
    changes: int = 0
    usual_s: float = 0.0
    """Usual time (s) from the sending of a microbatch to its gradient, in the latest iteration; 0: not
    known."""
    _bandwidths: Samples = field(default_factory=Samples)
    """Bandwidths (bits per second) of all links together."""
    _forwards: Samples = field(default_factory=Samples)
    _backwards: Samples = field(default_factory=Samples)

    def of(self, peer: str) -> Neighbour:
        """Neighbour entry of `peer`, created on first use."""
        known = self.neighbours.get(peer)
        if known is None:
            known = self.neighbours[peer] = Neighbour()
        return known

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Drop the entries of peers for which `gone` returns True."""
        for peer in [peer for peer in self.neighbours if gone(peer)]:
            del self.neighbours[peer]
            self.changes += 1

    # --- peers that do not deliver -------------------------------------------------------------

    def missed(self, peer: str, t: int) -> None:
        """Note that a peer kept a microbatch of iteration t far too long: it gets none for a while, longer
        each time. One pause holds up several microbatches, so an iteration counts once."""
        neighbour = self.of(peer)
        if neighbour.missed_t == t:
            return
        neighbour.missed_t = t
        neighbour.missed = min(neighbour.missed + 1, AVOIDED_MAX)
        neighbour.avoided_until = max(neighbour.avoided_until, t + AVOIDED_FACTOR**neighbour.missed)

    def withheld(self, peer: str, t: int) -> None:
        """Note that a peer gave microbatches of iteration t back and does not claim them: it gets none for a
        while, longer each time."""
        neighbour = self.of(peer)
        if not self.avoided(peer, t):
            neighbour.unclaimed = min(neighbour.unclaimed + 1, AVOIDED_MAX)
            neighbour.avoided_until = t + AVOIDED_FACTOR**neighbour.unclaimed

    def returned(self, peer: str, usual_s: float) -> None:
        """Note that a peer gave a microbatch back. usual_s: usual time (s) until then in this iteration."""
        self.usual_s = usual_s
        if peer in self.neighbours:
            self.neighbours[peer].missed = 0

    def avoided(self, peer: str, t: int) -> bool:
        """True if a peer gets no microbatches of iteration t, as long as others can take them."""
        known = self.neighbours.get(peer)
        return known is not None and t < known.avoided_until

    # --- measurements --------------------------------------------------------------------------

    def told(
        self, peer: str, forward_s: float, backward_s: float, bandwidth_bps: float, price: float
    ) -> None:
        """Take a report of `peer` about itself (`Neighbour.told_speed`)."""
        neighbour = self.of(peer)
        before = neighbour.forward_s, neighbour.backward_s
        neighbour.told_speed(forward_s, backward_s, bandwidth_bps, price)
        self.changes += before != (neighbour.forward_s, neighbour.backward_s)

    def computed(self, kind: str, seconds: float, now: float) -> None:
        """Add the compute time of a task of this peer. kind: name of the task's class."""
        before = self.forward_s, self.backward_s
        if kind in ("Forward", "Head"):
            self._forwards.add(seconds, now)
            self.forward_s = self._forwards.median() or 0.0
        elif kind == "InputGradient":
            self._backwards.add(seconds, now)
            self.backward_s = self._backwards.median() or 0.0
        self.changes += before != (self.forward_s, self.backward_s)

    def answered(self, peer: str, trip_s: float, now: float) -> None:
        """Add the round trip (s) of a heartbeat."""
        neighbour = self.of(peer)
        neighbour.link.latency.add(trip_s, now)
        neighbour.measured(self.activation_bytes)

    def probed(self, peer: str, size_bytes: int, trip_s: float, now: float) -> None:
        """Add the round trip (s) of a bandwidth probe with `size_bytes` of padding."""
        neighbour = self.of(peer)
        neighbour.link.padded.add(size_bytes, trip_s, now)
        neighbour.measured(self.activation_bytes)

    def delivered(self, peer: str, seconds: float, now: float) -> None:
        """Add the seconds from sending an activation or gradient to its acknowledgement."""
        self.tried(peer, self.activation_bytes, seconds, now, alone=False)

    def tried(self, peer: str, size_bytes: int, seconds: float, now: float, alone: bool) -> None:
        """Add the seconds from sending a payload to its acknowledgement. alone: True if the measurement says
        nothing about links that are not measured yet."""
        self.sums_arrived(peer, size_bytes, seconds, now)
        neighbour = self.of(peer)
        if not alone:
            self._bandwidths.add(neighbour.link.out.bps(size_bytes) or 0.0, now)
        neighbour.measured(self.activation_bytes)

    def sums_arrived(self, peer: str, size_bytes: float, seconds: float, now: float) -> None:
        """Add the seconds from sending a reduce part to its acknowledgement (only the link to `peer`
        counts)."""
        link = self.of(peer).link
        link.out.add(size_bytes, seconds, now, link.latency.round_trip_s() or 0.0)

    # --- estimates -----------------------------------------------------------------------------

    def hand(self, peer: str, now: float) -> float:
        """Note that an activation or gradient is sent to `peer` (`Neighbour.hand`)."""
        return self.of(peer).hand(self.activation_bytes, now)

    def most_s(self, peer: str, ahead_bytes: float) -> float:
        """Time (s) after which `ahead_bytes` under way to `peer` count as lost though the link did not
        break."""
        return self.of(peer).most_s(ahead_bytes, self.activation_bytes)

    def coming_s(self, peer: str, size_bytes: float) -> float:
        """Longest plausible time (s) to receive `size_bytes` from `peer`, by the bandwidth which that peer
        reported, else by the least that any neighbour reported."""
        rates = (each.link.back_bps for each in self.neighbours.values())
        reported = sorted(bps for bps in rates if bps is not None)
        if not reported:
            return 8.0 * size_bytes / LEAST_BPS
        slowest_bps = max(CRAWL_BPS, reported[(len(reported) - 1) // 2] / THINNER)
        reported_bps = self.of(peer).link.back_bps or reported[0]
        return 8.0 * size_bytes / (max(reported_bps, slowest_bps) / SLOWER)

    def reduce_s(self, size_bytes: float) -> float:
        """Estimated time (s) of a reduce in which this peer sends `size_bytes`."""
        return 8.0 * size_bytes / max(self._bandwidths.median() or LEAST_BPS, CRAWL_BPS)

    def _own_pass_s(self) -> float:
        """Mean of this peer's forward and backward seconds, or the one that is known; 0: neither."""
        known = [seconds for seconds in (self.forward_s, self.backward_s) if seconds]
        return sum(known) / len(known) if known else 0.0

    def pass_s(self, peer: str, me: str) -> float:
        """Mean of forward and backward seconds at `peer`; 0: not known. me: id of this peer."""
        if peer == me:
            return self._own_pass_s()
        known = self.neighbours.get(peer)
        return known.pass_s if known is not None and known.backward_s else 0.0

    def link_cost_s(self, peer: str) -> float | None:
        """Link cost d_ij to `peer` through the hysteresis filter (s); None until that peer has answered a
        heartbeat."""
        neighbour = self.of(peer)
        if neighbour.link.latency.round_trip_s() is None:
            return None
        usual_bps = self._bandwidths.median()
        return neighbour.link.publish_s(
            self.activation_bytes, self._own_pass_s(), neighbour.pass_s, usual_bps
        )

    def links(self) -> dict[str, tuple[float, float]]:
        """Measured links: peer -> (round trip in s, bits per second sent there; 0: not known)."""
        found = {}
        for peer, neighbour in self.neighbours.items():
            trip_s = neighbour.link.latency.round_trip_s()
            if trip_s is not None:
                found[peer] = (trip_s, neighbour.link.out_bps(self.activation_bytes) or 0.0)
        return found

    @property
    def links_measured(self) -> int:
        """Number of links whose latency is known and on which a payload was timed."""
        links = (neighbour.link for neighbour in self.neighbours.values())
        return sum(link.out.last > -math.inf and link.latency.round_trip_s() is not None for link in links)

    def bandwidth_known(self) -> bool:
        """True if the transfer time of an activation can be estimated (always, if it has no bytes)."""
        return not self.activation_bytes or self._bandwidths.median() is not None
