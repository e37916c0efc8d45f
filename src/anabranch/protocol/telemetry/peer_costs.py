"""Pass times and link costs as one peer knows them: measured by itself, or reported by its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container
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


def averaged(usual_s: float, took_s: float) -> float:
    """Usual time after one more measurement `took_s`, which weighs a fifth; usual_s: the one before, 0 if
    none."""
    return took_s if usual_s == 0.0 else 0.8 * usual_s + 0.2 * took_s


@dataclass(slots=True)
class Neighbour:
    """Record of a neighbour, here any peer with which this one has exchanged heartbeats: its reported pass
    times and price, and the measured link to it.

    forward_s, backward_s: seconds per microbatch that it reported (0: not known). price: reported cost of
    sending a microbatch from that peer to the end of the pipeline (s; infinite: not known).
    """

    link: LinkCost = field(default_factory=LinkCost)
    forward_s: float = 0.0
    backward_s: float = 0.0
    price: float = math.inf
    gradient_s: float = 0.0
    """Mean seconds, mostly of the last few, from sending it a microbatch to its gradient; 0: not known."""
    missed: int = 0
    """Iterations in a row in which it took microbatches and did not give one back in time."""
    missed_t: int = -1
    """Last of these iterations."""
    often: int = 0
    """Such iterations, in a row or not, until it kept none for AVOIDED_FACTOR times as long as the last of
    them had it avoided."""
    unclaimed: int = 0
    """Iterations in which it gave microbatches back and did not claim them."""
    avoided_until: int = 0
    """Iteration from which it gets microbatches again."""
    _least_bps: float = LEAST_BPS
    """Bandwidth (bits per second) assumed for time-outs before the link is measured."""
    _queued_bytes: float = 0.0
    _queued_at: float = 0.0
    _hop_s: float = 0.0
    _line_s: float = 0.0
    _measured_bytes: int | None = None
    """Bytes of an activation if the link was measured since `_hop_s` was computed, else None."""

    @property
    def hop_s(self) -> float:
        """Latency and transfer seconds of an activation on the link to this neighbour, mean of both
        directions; 0: not known."""
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
        """Note a new measurement of the link; `hop_s` and `line_s` are computed anew when next read."""
        self._measured_bytes = activation_bytes

    @property
    def pass_s(self) -> float:
        """Compute seconds of a pass at the neighbour, its part of a link cost: mean of reported forward and
        backward; the forward alone if no backward is known; 0: neither."""
        return (self.forward_s + self.backward_s) / 2.0 if self.backward_s else self.forward_s

    @property
    def work_s(self) -> float:
        """Compute seconds of one microbatch at the neighbour: forward, backward and weight gradients. Seconds
        of weight gradients are not reported; they are taken to equal a forward, or half a forward at a head,
        whose forward contains the loss's gradient."""
        weights_s = self.forward_s if self.backward_s else self.forward_s / 2.0
        return self.forward_s + self.backward_s + weights_s

    def hand(self, size_bytes: int, now: float) -> float:
        """Note that a payload is sent to the neighbour. Returns the estimated bytes now in transit to it,
        this payload included."""
        bps = max(self.link.out_bps(size_bytes) or LEAST_BPS, CRAWL_BPS)
        left_bytes = self._queued_bytes - bps * (now - self._queued_at) / 8.0
        self._queued_bytes, self._queued_at = max(0.0, left_bytes) + size_bytes, now
        return self._queued_bytes

    def most_s(self, ahead_bytes: float, size_bytes: int) -> float:
        """Longest plausible time (s) until `ahead_bytes` in transit have arrived: at a quarter (SLOWER) of
        the bandwidth measured for payloads of `size_bytes` (at least CRAWL_BPS), or before a measurement of
        LEAST_BPS, or less after `lost_payloads`."""
        measured_bps = self.link.out_bps(size_bytes)
        usual_bps = self._least_bps if measured_bps is None else max(measured_bps, CRAWL_BPS)
        return 8.0 * ahead_bytes / (usual_bps / SLOWER)

    def lost_payloads(self) -> None:
        """Note that payloads did not come in time: before a measurement the next ones get twice as long, down
        to the least bandwidth that is believed."""
        self._least_bps = max(CRAWL_BPS, self._least_bps / 2.0)

    def broke(self) -> None:
        """Note that the connection to the neighbour broke, so that nothing is in transit on it."""
        self._queued_bytes = 0.0

    def told_speed(self, forward_s: float, backward_s: float, bandwidth_bps: float, price: float) -> None:
        """Enter the neighbour's report (`Pong`) of its pass times, the bandwidth it measured towards this
        peer, and its price; implausible numbers count as not known."""
        self.forward_s = forward_s if plausible(forward_s) else 0.0
        self.backward_s = backward_s if plausible(backward_s) else 0.0
        self.price = price if 0.0 <= price < math.inf else math.inf
        self.link.back_bps = bandwidth_bps if plausible(bandwidth_bps) else None


@dataclass
class PeerCosts:
    """Costs as one peer knows them: pass times of this peer and of its neighbours, and the links to these.

    activation_bytes: size of an activation on the wire. forward_s, backward_s: median seconds of this peer's
    own passes (0: none yet). changes: counter, incremented when a pass time of this peer or of a neighbour
    changes, or a neighbour's record is dropped.
    """

    activation_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    neighbours: dict[str, Neighbour] = field(default_factory=dict)
    changes: int = 0
    usual_s: float = 0.0
    """Usual time (s) from sending a microbatch to its gradient, in the latest iteration; 0: not known."""
    _bandwidths: Samples = field(default_factory=Samples)
    """Bandwidths (bits per second) of all links together."""
    _forwards: Samples = field(default_factory=Samples)
    _backwards: Samples = field(default_factory=Samples)

    def of(self, peer: str) -> Neighbour:
        """Record of the neighbour `peer`, created on first use."""
        known = self.neighbours.get(peer)
        if known is None:
            known = self.neighbours[peer] = Neighbour()
        return known

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Drop the records of peers for which `gone` returns True."""
        for peer in [peer for peer in self.neighbours if gone(peer)]:
            del self.neighbours[peer]
            self.changes += 1

    def drop(self, peer: str) -> None:
        """Drop the record of `peer`, if there is one."""
        if self.neighbours.pop(peer, None) is not None:
            self.changes += 1

    # --- peers that do not deliver -------------------------------------------------------------

    def missed(self, peer: str, t: int) -> None:
        """Note that `peer` kept a microbatch of iteration t far too long: it gets no more for some
        iterations, each time for longer, also if it gave others back between. One pause holds up several
        microbatches, so an iteration counts once."""
        neighbour = self.of(peer)
        if neighbour.missed_t == t:
            return
        if t >= neighbour.missed_t + AVOIDED_FACTOR ** (neighbour.often + 1):
            neighbour.often = 0
        neighbour.missed_t = t
        neighbour.missed = min(neighbour.missed + 1, AVOIDED_MAX)
        neighbour.often = min(neighbour.often + 1, AVOIDED_MAX)
        neighbour.avoided_until = max(neighbour.avoided_until, t + AVOIDED_FACTOR**neighbour.often)

    def withheld(self, peer: str, t: int) -> None:
        """Note that a peer gave the gradients of microbatches of iteration t back and does not claim them: it
        gets none, while others can take them, for AVOIDED_FACTOR iterations, the next time for their square,
        and so on up to AVOIDED_MAX factors; the count never falls. Ignored while it gets none already."""
        neighbour = self.of(peer)
        if not self.avoided(peer, t):
            neighbour.unclaimed = min(neighbour.unclaimed + 1, AVOIDED_MAX)
            neighbour.avoided_until = t + AVOIDED_FACTOR**neighbour.unclaimed

    def returned(self, peer: str, took_s: float, usual_s: float) -> None:
        """Note that `peer` sent a microbatch's gradient back `took_s` seconds after the microbatch was sent,
        which ends its series of missed iterations. usual_s: usual time (s) of this in this iteration, over
        all peers; stored."""
        self.usual_s = usual_s
        if known := self.neighbours.get(peer):
            known.missed = 0
            known.gradient_s = averaged(known.gradient_s, took_s)

    def avoided(self, peer: str, t: int) -> int:
        """Above 0 if `peer` gets no microbatches of iteration t while others can take them, because of
        earlier ones that it kept too long (`missed`) or did not claim (`withheld`): 1 plus the greater one of
        two numbers: iterations in which it kept one since it last gave a gradient back, and times that it was
        found not to have claimed some."""
        known = self.neighbours.get(peer)
        if known is None or t >= known.avoided_until:
            return 0
        return 1 + max(known.missed, known.unclaimed)

    # --- measurements --------------------------------------------------------------------------

    def told(
        self, peer: str, forward_s: float, backward_s: float, bandwidth_bps: float, price: float
    ) -> None:
        """Enter the report of `peer` about itself (`Pong`): pass times, bandwidth that it measured towards
        this peer, and price (cost from there to the end of the pipeline)."""
        neighbour = self.of(peer)
        before = neighbour.forward_s, neighbour.backward_s
        neighbour.told_speed(forward_s, backward_s, bandwidth_bps, price)
        self.changes += before != (neighbour.forward_s, neighbour.backward_s)

    def computed(self, kind: str, seconds: float, now: float) -> None:
        """Add a sample: compute seconds of a task at this peer. kind: class name of the task; only Forward,
        Head and InputGradient count."""
        before = self.forward_s, self.backward_s
        if kind in ("Forward", "Head"):
            self._forwards.add(seconds, now)
            self.forward_s = self._forwards.median() or 0.0
        elif kind == "InputGradient":
            self._backwards.add(seconds, now)
            self.backward_s = self._backwards.median() or 0.0
        self.changes += before != (self.forward_s, self.backward_s)

    def answered(self, peer: str, trip_s: float, now: float) -> None:
        """Add a sample: round trip (s) of a heartbeat to `peer`."""
        neighbour = self.of(peer)
        neighbour.link.latency.add(trip_s, now)
        neighbour.measured(self.activation_bytes)

    def probed(self, peer: str, size_bytes: int, trip_s: float, now: float) -> None:
        """Add a sample: round trip (s) of a bandwidth probe to `peer` with `size_bytes` of padding."""
        neighbour = self.of(peer)
        neighbour.link.padded.add(size_bytes, trip_s, now)
        neighbour.measured(self.activation_bytes)

    def delivered(self, peer: str, seconds: float, now: float) -> None:
        """Add a sample of the bandwidth to `peer`: seconds from sending an activation or gradient to its
        acknowledgement. It also moves the estimate that is used for links not measured yet."""
        self.tried(peer, self.activation_bytes, seconds, now, alone=False)

    def tried(self, peer: str, size_bytes: int, seconds: float, now: float, alone: bool) -> None:
        """Add a sample of the bandwidth to `peer`: seconds from sending a probe's payload to its
        acknowledgement. alone: True if only this link's estimate is to change, not the estimate for links
        that are not measured yet."""
        self.sums_arrived(peer, size_bytes, seconds, now)
        neighbour = self.of(peer)
        if not alone:
            self._bandwidths.add(neighbour.link.out.bps(size_bytes) or 0.0, now)
        neighbour.measured(self.activation_bytes)

    def sums_arrived(self, peer: str, size_bytes: float, seconds: float, now: float) -> None:
        """Add a sample: seconds from sending a part of a gradient sum to `peer` to its acknowledgement. It
        counts for the link to `peer` only."""
        link = self.of(peer).link
        link.out.add(size_bytes, seconds, now, link.latency.round_trip_s() or 0.0)

    # --- estimates -----------------------------------------------------------------------------

    def hand(self, peer: str, now: float) -> float:
        """Note that an activation or gradient is sent to `peer`; returns estimated bytes in transit to it."""
        return self.of(peer).hand(self.activation_bytes, now)

    def most_s(self, peer: str, ahead_bytes: float) -> float:
        """Longest plausible time (s) until `ahead_bytes` in transit to `peer` have arrived, at a quarter
        (SLOWER) of the bandwidth measured (at least CRAWL_BPS); before a measurement of LEAST_BPS, or less
        where payloads did not come in time."""
        return self.of(peer).most_s(ahead_bytes, self.activation_bytes)

    def coming_s(self, peer: str, size_bytes: float) -> float:
        """Longest plausible time (s) until `size_bytes` from `peer` have arrived, at a quarter (SLOWER) of
        the bandwidth that `peer` reported, else of the lowest that any neighbour reported, or at LEAST_BPS if
        none did. Reports far below the median (THINNER) are not believed."""
        return self._coming_s(peer, size_bytes, self._reported_bps())

    def soonest(self, peers: Collection[str], size_bytes: float) -> str:
        """First of `peers` (at least one) from which `size_bytes` have arrived soonest, by `coming_s`."""
        reported = self._reported_bps()
        return min(peers, key=lambda peer: self._coming_s(peer, size_bytes, reported))

    def _reported_bps(self) -> list[float]:
        """Bandwidths that neighbours reported towards this peer, sorted."""
        rates = [each.link.back_bps for each in self.neighbours.values()]
        return sorted([bps for bps in rates if bps is not None])

    def _coming_s(self, peer: str, size_bytes: float, reported: list[float]) -> float:
        """As `coming_s`. reported: result of `_reported_bps`."""
        if not reported:
            return 8.0 * size_bytes / LEAST_BPS
        slowest_bps = max(CRAWL_BPS, reported[(len(reported) - 1) // 2] / THINNER)
        reported_bps = self.of(peer).link.back_bps or reported[0]
        return 8.0 * size_bytes / (max(reported_bps, slowest_bps) / SLOWER)

    def reduce_s(self, size_bytes: float) -> float:
        """Estimated time (s) of an all-reduce in which this peer sends `size_bytes`, at the median bandwidth
        of its links, or before a measurement at LEAST_BPS."""
        return 8.0 * size_bytes / max(self._bandwidths.median() or LEAST_BPS, CRAWL_BPS)

    def _own_pass_s(self) -> float:
        """Mean of this peer's forward and backward seconds, or the one that is known; 0: neither."""
        known = [seconds for seconds in (self.forward_s, self.backward_s) if seconds]
        return sum(known) / len(known) if known else 0.0

    def pass_s(self, peer: str, me: str) -> float:
        """Compute seconds of a pass at `peer`, mean of forward and backward; 0 unless it reported a backward
        time. If `peer` is `me`, this peer itself: mean of its own measured times, or the one that is
        known."""
        if peer == me:
            return self._own_pass_s()
        known = self.neighbours.get(peer)
        return known.pass_s if known is not None and known.backward_s else 0.0

    def link_cost_s(self, peer: str) -> float | None:
        """Published link cost d_ij to `peer` (s), after the hysteresis filter, for which each call counts as
        one estimate; None until that peer has answered a heartbeat. Unknown pass times count as 0; an
        unmeasured bandwidth as the median of this peer's links, and if none is measured transfers take no
        time."""
        neighbour = self.of(peer)
        if neighbour.link.latency.round_trip_s() is None:
            return None
        known = self._own_pass_s(), neighbour.pass_s, self._bandwidths.median()
        return neighbour.link.published_s(neighbour.link.seconds(self.activation_bytes, *known))

    def links(self, members: Container[str]) -> dict[str, tuple[float, float]]:
        """Links of this peer to `members` with a measured round trip, as it reports them: other peer ->
        (round trip in s, bits per second sent to it; 0: not known)."""
        found = {}
        for peer, neighbour in self.neighbours.items():
            if peer not in members:
                continue
            trip_s = neighbour.link.latency.round_trip_s()
            if trip_s is not None:
                found[peer] = (trip_s, neighbour.link.out_bps(self.activation_bytes) or 0.0)
        return found

    @property
    def links_measured(self) -> int:
        """Number of links with a known latency and a measured payload transfer."""
        links = (neighbour.link for neighbour in self.neighbours.values())
        return sum(link.out.last > -math.inf and link.latency.round_trip_s() is not None for link in links)

    def bandwidth_known(self) -> bool:
        """True if this peer can estimate an activation's transfer time (always, if that has no bytes)."""
        return not self.activation_bytes or self._bandwidths.median() is not None
