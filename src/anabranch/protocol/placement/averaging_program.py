"""Averaging program: the share of a gradient that each peer sums, chosen so that the exchange of a step takes
the fewest seconds that the peers' lines and links allow.

The linear program is DeDLOC's (Diskin et al., arXiv 2106.10207, section 3.2) with the peers that compute
given. w_k is the share of the gradient that peer k sums, with sum(w) = 1. In the first phase each sender
sends its sum of every share that another peer sums; in the second, who sums a share sends the result to all
receivers. A peer's uplink, downlink and slowest link bound both:

    there:  (1 - w_k) S / up_k <= T1 (a sender)     w_k (senders but k) S / down_k <= T1    w_k S / link <= T1
    back:   (1 - w_k) G / down_k <= T2 (a receiver) w_k (receivers but k) G / up_k <= T2    w_k G / link <= T2

S and G are the bits of a whole sum and of the whole result. The least T1 + T2 is sought. The paper streams
both phases at once and minimises one time; here a result leaves once all its sums came.

For given T1 and T2 each share has a lower and an upper bound of its own, so no solver is needed: the shares
exist if the bounds admit the sum 1, and the least T2 is a convex function of T1. Both are searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

#: Share of the optimum within which the seconds are found.
PRECISION = 1e-7
#: Halvings of an interval in a search for the least seconds of a phase.
HALVINGS = 40
#: Candidates of a search for the least of a convex function, which are judged at once.
CANDIDATES = 24
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Averager:
    """Peer of an exchange. up_bps, down_bps: rates of its access line (bits per second). link_in_bps,
    link_out_bps: rates of the slowest link on which it would receive sums and send results. sends: True if it
    has a sum to send. receives: True if it needs the result; a helper does not. sums: True if it may sum a
    share."""

    up_bps: float
    down_bps: float
    link_in_bps: float = math.inf
    link_out_bps: float = math.inf
    sends: bool = True
    receives: bool = True
    sums: bool = True


@dataclass(frozen=True)
class Averaging:
    """Optimum of the program: seconds of the exchange without latency, and the share (0 to 1) of the gradient
    that each peer sums."""

    seconds: float
    shares: tuple[float, ...]


class AveragingProgram:
    """Linear program of one exchange. Its only unknowns are the shares of the gradient that peers sum; it
    minimises the seconds that the exchange takes over the given lines and links. `optimum` solves it,
    `in_parts` in whole parts, and `seconds` judges any shares.

    peers: senders, receivers and helpers; at least one sends, and at least one may sum. sums_bits,
    result_bits: bits of a whole sum and of the whole result.
    """

    def __init__(self, peers: Sequence[Averager], sums_bits: float, result_bits: float) -> None:
        senders, receivers = sum(peer.sends for peer in peers), sum(peer.receives for peer in peers)
        self._most = np.array([float(peer.sums) for peer in peers])
        self._there = _Phase(
            [sums_bits / peer.up_bps if peer.sends else 0.0 for peer in peers],
            [_each_s(senders - p.sends, sums_bits, p.down_bps, p.link_in_bps) for p in peers],
        )
        self._back = _Phase(
            [result_bits / peer.down_bps if peer.receives else 0.0 for peer in peers],
            [_each_s(receivers - p.receives, result_bits, p.up_bps, p.link_out_bps) for p in peers],
        )

    def seconds(self, shares: Sequence[float]) -> float:
        """Seconds of the exchange, without latency, with the given share at each peer."""
        return float(self._seconds(np.array([shares]))[0])

    def optimum(self) -> Averaging:
        """Shares with the shortest exchange. Among several, each share is as far between its bounds as every
        other, so equal peers get equal shares."""
        endless = np.array([math.inf])
        least_s = self._least(lambda seconds: self._admit(seconds, endless), 1)[0]
        quick_s = self._least(lambda seconds: self._admit(endless, seconds), 1)
        most_s = self._least(lambda seconds: self._admit(seconds, quick_s), 1)[0]
        low, high = least_s, max(least_s, most_s)
        while True:
            there_s = np.linspace(low, high, CANDIDATES)
            back_s = self._least(partial(self._admit, there_s), len(there_s))
            best = int(np.argmin(there_s + back_s))
            if high - low <= PRECISION * high:
                break
            low, high = there_s[max(0, best - 1)], there_s[min(best + 1, CANDIDATES - 1)]
        lows, highs = (bound[0] for bound in self._bounds(there_s[best : best + 1], back_s[best : best + 1]))
        room = float((highs - lows).sum())
        part = (1.0 - float(lows.sum())) / room if room else 0.0
        shares = tuple(map(float, lows + part * (highs - lows)))
        return Averaging(self.seconds(shares), shares)

    def in_parts(self, parts: int) -> tuple[int, ...]:
        """Number of `parts` equal parts that each peer sums: the optimum's shares, rounded down, and the rest
        one by one to the peer with which the exchange stays shortest."""
        counts = np.floor(np.array(self.optimum().shares) * parts + PRECISION)
        for _ in range(parts - int(counts.sum())):
            seconds = self._seconds((counts + np.eye(len(counts))) / parts)
            counts[np.argmin(np.where(self._most, seconds, np.inf))] += 1.0
        return tuple(map(int, counts))

    def _seconds(self, shares: Values) -> Values:
        """Seconds of the exchange for each row of shares."""
        return self._there.seconds(shares) + self._back.seconds(shares)

    def _bounds(self, there_s: Values, back_s: Values) -> tuple[Values, Values]:
        """Least and greatest share of each peer (column) for the first phase to end within `there_s` and the
        second within `back_s` seconds (one row for each pair)."""
        there, back = self._there.bounds(there_s), self._back.bounds(back_s)
        return np.maximum(there[0], back[0]), self._most * np.minimum(there[1], back[1])

    def _admit(self, there_s: Values, back_s: Values) -> NDArray[np.bool_]:
        """True in each row in which shares with the sum 1 let the phases end within `there_s` and `back_s`
        seconds."""
        lows, highs = self._bounds(there_s, back_s)
        fits = (lows <= highs).all(axis=1)
        return np.asarray(fits & (lows.sum(axis=1) <= 1.0) & (highs.sum(axis=1) >= 1.0))

    def _least(self, admitted: Callable[[Values], NDArray[np.bool_]], rows: int) -> Values:
        """For each of `rows` rows, the least seconds that `admitted` accepts. admitted: function that gets
        the seconds of all rows and returns for each if they are enough; if they are, so is more."""
        low, high = np.zeros(rows), np.full(rows, self._there.most_s + self._back.most_s)
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            fits = admitted(middle)
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return high


class _Phase:
    """Duration of one phase of the exchange by the peers' shares. alone: seconds in which each peer's own
    data passes if it sums nothing. each: seconds in which the others' data passes if it sums everything."""

    def __init__(self, alone: Sequence[float], each: Sequence[float]) -> None:
        self._alone, self._each = np.array(alone), np.array(each)
        self.most_s = float((self._alone + self._each).sum())
        """Seconds that are enough for any shares."""
        with np.errstate(divide="ignore"):
            self._of_alone, self._of_each = 1.0 / self._alone, 1.0 / self._each

    def seconds(self, shares: Values) -> Values:
        """Seconds of the slowest peer for each row of shares."""
        return np.asarray(np.maximum((1.0 - shares) * self._alone, shares * self._each).max(axis=1))

    def bounds(self, seconds: Values) -> tuple[Values, Values]:
        """Least and greatest share with which each peer (column) is done within the `seconds` of a row."""
        column = seconds[:, None]
        return np.maximum(0.0, 1.0 - column * self._of_alone), np.minimum(1.0, column * self._of_each)


def _each_s(others: int, bits: float, line_bps: float, link_bps: float) -> float:
    """Seconds in which a line carries `bits` for each of `others` peers, each over a link of its own; 0
    without others."""
    return max(others * bits / line_bps, bits / link_bps) if others else 0.0


def averaging_s(lines_bps: Sequence[tuple[float, float]], sums_bits: float, result_bits: float) -> float:
    """Estimate of the shortest exchange (s) among two or more peers that all send and receive, without
    latency: each phase with the shares that are best for it, and without the part that a peer sums itself.

    lines_bps: rates of each peer's access line, up and down.
    """
    ups, downs = [up for up, _ in lines_bps], [down for _, down in lines_bps]
    others = len(lines_bps) - 1
    there_s = sums_bits * max(1.0 / min(ups), others / sum(downs))
    return there_s + result_bits * max(1.0 / min(downs), others / sum(ups))
