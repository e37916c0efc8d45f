"""Estimators of latency, bandwidth, compute time and link cost from samples that ordinary traffic gives.

Every estimate is a robust quantile of a few recent samples, so that a pause of a machine does not move it.
`now` (s) is passed in and never falls. An implausible sample (negative, zero, NaN, infinite) is ignored.
"""

from __future__ import annotations

import math
from array import array

from anabranch.flow.graph.problem import link_cost

#: Samples kept of one quantity. A choice, like the constants below; tests/protocol/telemetry checks how
#: quickly the estimates follow a change, and how little outliers matter.
WINDOW = 64
#: Time (s) without a sample after which only the newest KEPT ones still count: a few new ones outvote them.
AGE_S = 1800.0
KEPT = 4
#: A lasting change: all but one of the CHANGE newest samples lie outside the central quantiles (1/TAIL at
#: either end) of the earlier ones, and off their median by more than CHANGE_SHARE of it, on the same side.
CHANGE = 8
TAIL = 6
CHANGE_SHARE = 0.2
#: Round trips kept: a true rise of a latency is followed within as many.
LATENCY_WINDOW = 32
#: Quantile of the round trips taken as the latency without queueing.
UNQUEUED = 0.1
#: Transfers that overlap in time are measured together, up to this number.
TOGETHER = 4
#: Least share of a transfer's duration that counts as transfer, whatever the latency.
LEAST_SHARE = 0.1
#: Padding that delays a round trip by less than these seconds, or this share of it, gives no estimate.
PADDING_LEAST_S, PADDING_SHARE = 0.005, 0.25
#: Relative change of an estimate, and estimates in a row, that change a published value.
MARGIN, IN_A_ROW = 0.25, 3
#: Prior bandwidth of a link (bits per second), in effect unlimited: latency and compute time are known before
#: the first activation. The flow takes the median of the peer's other links as soon as one is measured, for
#: the first costs set the scale of prices.
PRIOR_BPS = 1e12
#: Least change of a link cost (s) that is published. A choice.
FLOOR_S = 0.002


def plausible(value: float) -> bool:
    """True if `value` can be a duration, a size or a rate: positive and not absurdly small or large."""
    return 1e-18 < value < 1e18


class Samples:
    """Newest samples of one measured quantity, with robust quantiles of them. window: number of samples
    stored. kept: number of older samples that still count once one comes after AGE_S without any. follow:
    True if a lasting change of the quantity drops the samples before it."""

    # A large swarm has many links, and a simulator those of all peers: slots and arrays keep them small.
    __slots__ = ("_answer", "_asked", "_follow", "_kept", "_last", "_values", "_weights", "_window")

    def __init__(self, window: int = WINDOW, kept: int = KEPT, follow: bool = True) -> None:
        self._values = array("d")
        self._weights: array[float] | None = None
        """None while every sample has weight 1."""
        self._window, self._kept, self._follow = window, kept, follow
        self._last = -math.inf
        self._asked: tuple[float, float] | None = None
        """Arguments of the cached answer of `quantile`; None: no answer is cached."""
        self._answer: float | None = None

    def add(self, value: float, now: float, weight: float = 1.0) -> None:
        if not plausible(value):
            return
        self._asked = None
        if now - self._last > AGE_S:
            self._drop(len(self._values) - self._kept)
        self._last = now
        self._allow(weight)
        self._values.append(value)
        if self._weights is not None:
            self._weights.append(weight)
        self._drop(len(self._values) - self._window)
        if self._follow:
            self._follow_change()

    def replace(self, value: float, weight: float) -> None:
        """Replace the newest sample, of which there must be one, and its weight."""
        self._values[-1] = value
        self._allow(weight)
        if self._weights is not None:
            self._weights[-1] = weight
        self._asked = None

    def _allow(self, weight: float) -> None:
        """Start to store a weight per sample as soon as one differs from 1."""
        if self._weights is None and weight != 1.0:
            self._weights = array("d", [1.0]) * len(self._values)

    def quantile(self, share: float, heaviest: float = math.inf) -> float | None:
        """Weighted quantile: the smallest sample so that samples up to it have at least `share` of all
        weight; None without a sample. heaviest: cap on the weight of a sample."""
        asked = (share, heaviest)
        if asked != self._asked:
            self._asked, self._answer = asked, self._quantile(share, heaviest)
        return self._answer

    def _quantile(self, share: float, heaviest: float) -> float | None:
        weights = self._weights
        if weights is None:
            values = sorted(self._values)
            return values[max(1, math.ceil(share * len(values))) - 1] if values else None
        ordered = sorted([(value, min(w, heaviest)) for value, w in zip(self._values, weights, strict=True)])
        below, wanted = 0.0, share * sum([weight for _, weight in ordered])
        for value, weight in ordered:
            below += weight
            if below >= wanted:
                return value
        return ordered[-1][0] if ordered else None

    def median(self) -> float | None:
        """Median of the samples; None without a sample."""
        return self.quantile(0.5)

    def _follow_change(self) -> None:
        """Drop all but the CHANGE newest samples if these show a lasting change of the quantity."""
        values = self._values
        old, new = sorted(values[:-CHANGE]), values[-CHANGE:]
        if not old:
            return
        tail, middle = (len(old) - 1) // TAIL, old[(len(old) - 1) // 2]
        low = min(old[tail], (1.0 - CHANGE_SHARE) * middle)
        high = max(old[-1 - tail], (1.0 + CHANGE_SHARE) * middle)
        if max(sum(value < low for value in new), sum(value > high for value in new)) >= CHANGE - 1:
            self._drop(len(old))

    def _drop(self, count: int) -> None:
        """Drop the `count` oldest samples."""
        if count > 0:
            del self._values[:count]
            if self._weights is not None:
                del self._weights[:count]


class Latency(Samples):
    """Latency of a link, from round trips (s) of small messages.

    Queueing behind payloads only adds to a round trip, so the estimate is a low quantile of recent round
    trips. It follows a fall of the latency within 4 samples, a rise within LATENCY_WINDOW.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(LATENCY_WINDOW, kept=0, follow=False)

    def round_trip_s(self) -> float | None:
        """Round-trip time of the link without queueing (s); None without a sample."""
        return self.quantile(UNQUEUED)


class Bandwidth:
    """Bandwidth of one direction of a link, from the durations of payload transfers.

    Transfers that overlap in time wait for each other, so they are measured together: the sum of their bytes
    over the seconds in which the link was busy. last: time of the latest sample (s); -inf: none.
    """

    __slots__ = ("_began", "_bytes", "_s_per_byte", "_together", "last")

    def __init__(self) -> None:
        self._s_per_byte = Samples()
        self._began = 0.0
        self.last = -math.inf
        self._bytes = 0.0
        self._together = 0

    def add(self, size_bytes: float, seconds: float, now: float, latency_s: float = 0.0) -> None:
        """Add a transfer of `size_bytes` that ended at `now`. seconds: its duration, queueing and `latency_s`
        included (a round trip, if an acknowledgement reports the end)."""
        if not (plausible(size_bytes) and plausible(seconds)):
            return
        queued = now - seconds < self.last
        joins = queued and (self._together < TOGETHER or now <= self.last)
        if joins:
            began, size_bytes = self._began, self._bytes + size_bytes
        elif queued:  # the latency passed while the transfer before was still arriving
            began = self.last
        else:
            began = now - max(seconds - _known(latency_s), LEAST_SHARE * seconds)
        s_per_byte = (now - began) / size_bytes
        if not plausible(s_per_byte):
            return
        if joins:
            self._s_per_byte.replace(s_per_byte, size_bytes)
        else:
            self._s_per_byte.add(s_per_byte, now, size_bytes)
        self._together = self._together + 1 if joins else 1
        self._began, self.last, self._bytes = began, now, size_bytes

    def bps(self, size_bytes: float) -> float | None:
        """Bits per second of transfers of `size_bytes`; None without a sample. Measured transfers smaller
        than `size_bytes` weigh less in proportion, since latency dominates their duration."""
        s_per_byte = self._s_per_byte.quantile(0.5, size_bytes)
        return None if s_per_byte is None else 8.0 / s_per_byte

    def latest(self) -> tuple[float, float]:
        """Bytes and seconds of the last transfer, with those that overlapped with it; zeros: none yet."""
        return (self._bytes, self.last - self._began) if self._bytes else (0.0, 0.0)


class PaddedEstimate:
    """Bandwidth of one direction of an idle link, estimated from round trips of messages with padding.

    Round trips jitter, so the estimate is made for slow links only, where the transfer of the padding is a
    good part of the round trip. tried: True if a probe was answered.
    """

    __slots__ = ("_round_trips", "_size_bytes", "tried")

    def __init__(self) -> None:
        self._round_trips = Latency()
        self._size_bytes = 0.0
        self.tried = False

    def add(self, size_bytes: float, trip_s: float, now: float) -> None:
        """Add a sample: round trip (s) of a probe with `size_bytes` of padding, answered by a short reply."""
        self._size_bytes, self.tried = size_bytes, True
        self._round_trips.add(trip_s, now)

    def bps(self, round_trip_s: float) -> float | None:
        """Bits per second: padding over the seconds by which it lengthens a round trip. None without a
        sample, or if the link is too fast for this method. round_trip_s: round trip of small messages (s)."""
        least = self._round_trips.round_trip_s()
        if least is None or least - round_trip_s < max(PADDING_LEAST_S, PADDING_SHARE * round_trip_s):
            return None
        return 8.0 * self._size_bytes / (least - round_trip_s)


class StableEstimate:
    """Hysteresis filter of a moving estimate: decides when the published value follows it.

    The published value changes only after IN_A_ROW estimates in a row that lie on one side of it by more than
    the share MARGIN of it and by more than `floor`; then it is the last of these estimates. For WINDOW
    estimates after the first value, and after each change by more than MARGIN, a quarter of MARGIN is enough:
    the quantity may still have been moving.
    """

    __slots__ = ("_beyond", "_floor", "_unsettled", "published")

    def __init__(self, floor: float = 0.0) -> None:
        self.published: float | None = None
        self._floor = floor
        self._unsettled = WINDOW
        self._beyond = 0  # number of estimates in a row above (or, negative, below) the published value

    def offer(self, estimate: float) -> float | None:
        """Add an estimate. One that is not `plausible` (not positive, or absurd) is ignored, and does not end
        a row. Returns the value published from now on, by the rule of the class; None before the first
        plausible estimate."""
        if not plausible(estimate):
            return self.published
        if self.published is None:
            self.published = estimate
            return estimate
        off = estimate - self.published
        margin = MARGIN / 4.0 if self._unsettled > 0 else MARGIN
        self._unsettled -= 1
        if abs(off) <= max(margin * self.published, self._floor):
            self._beyond = 0
            return self.published
        if off * self._beyond <= 0.0:
            self._beyond = 0
        self._beyond += 1 if off > 0.0 else -1
        if abs(self._beyond) >= IN_A_ROW:
            if abs(off) > MARGIN * self.published:
                self._unsettled = WINDOW
            self.published, self._beyond = estimate, 0
        return self.published


class LinkCost:
    """Cost d_ij of the link from this peer i to a peer j: latency, transfer and compute time (s).

    out: bandwidth towards j, from payload transfers. padded: the same, from padded messages on the idle link.
    back_bps: bandwidth from j to this peer (bits per second), as j measured and reported it; None: unknown.
    """

    __slots__ = ("_published", "back_bps", "latency", "out", "padded")

    def __init__(self) -> None:
        self.latency = Latency()
        self.out = Bandwidth()
        self.padded = PaddedEstimate()
        self.back_bps: float | None = None
        self._published = StableEstimate(FLOOR_S)

    def seconds(
        self,
        activation_bytes: float,
        mine_s: float | None = None,
        theirs_s: float | None = None,
        like_bps: float | None = None,
    ) -> float:
        """Cost d_ij in seconds (GWTF): latency and transfer of an activation on the link, plus compute at its
        ends, averaged over both directions. Without compute seconds it is the link's part of the cost.

        mine_s, theirs_s: compute seconds per microbatch at this peer and at j; unknown or implausible ones
        count as 0. A direction without a measured bandwidth takes that of the other direction; a link without
        any takes `like_bps` (bits per second), and without that its transfers take no time.
        """
        latency_s = (self.latency.round_trip_s() or 0.0) / 2.0
        reported = _known(self.back_bps)
        out = self.out_bps(activation_bytes) or reported or like_bps or PRIOR_BPS
        compute_s = (_known(mine_s), _known(theirs_s))
        return link_cost(compute_s, (latency_s, latency_s), (out, reported or out), activation_bytes)

    def line_s(self, activation_bytes: float) -> float:
        """Seconds to transfer an activation in the link's slower direction, without latency; 0: not known."""
        known = (self.out_bps(activation_bytes), _known(self.back_bps))
        return max((8.0 * activation_bytes / bps for bps in known if bps), default=0.0)

    def out_bps(self, activation_bytes: float) -> float | None:
        """Bandwidth towards the other peer (bits per second) for payloads of `activation_bytes`, from
        transfers or else from padded messages; None: not known."""
        measured = self.out.bps(activation_bytes)
        if measured is not None or not self.padded.tried:
            return measured
        return self.padded.bps(self.latency.round_trip_s() or 0.0)

    def published_s(self, cost_s: float) -> float:
        """Link cost d_ij (s) for the flow agents, after the hysteresis filter, for which each call counts as
        one estimate. cost_s: as it is now (`seconds`)."""
        return self._published.offer(cost_s) or cost_s


def _known(value: float | None) -> float:
    return value if value is not None and plausible(value) else 0.0
