"""Links and access lines as the simulator knows them: latency, bandwidth and loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

#: Round trips until a connection can be used: TCP's, TLS 1.3's, and the challenge's.
SETUP_TRIPS = 3
#: Payload of a TCP segment on an Ethernet path (bytes), for the throughput that loss leaves.
SEGMENT_BYTES = 1460
#: Seconds after a round trip until a lost control message is resent: Linux's least retransmission timeout.
RETRANSMIT_S = 0.2


@dataclass(frozen=True)
class SharedLink:
    """Link from one host to another, without other traffic.

    latency_s: one-way delay. bandwidth_bps: bits per second. loss: share of lost packets. burst_trips: round
    trips over which TCP paces a burst, once the connection has measured that its link carries such bursts (0:
    not paced).
    """

    latency_s: float
    bandwidth_bps: float
    loss: float = 0.0
    burst_trips: float = 0.0

    @cached_property
    def rate_bps(self) -> float:
        """Throughput of one connection (bits per second): the bandwidth; with loss at most MSS/RTT *
        sqrt(3/2)/sqrt(loss) (Mathis et al., CCR 27(3), 1997)."""
        if not self.loss or not self.latency_s:
            return self.bandwidth_bps
        window_bits = 8.0 * SEGMENT_BYTES * math.sqrt(1.5 / self.loss)
        return min(self.bandwidth_bps, window_bits / (2.0 * self.latency_s))

    def seconds(self, size_bytes: float) -> float:
        """Seconds from the departure of the first byte to the arrival of the last, without other traffic."""
        return self.latency_s + 8.0 * size_bytes / self.rate_bps

    def retransmit_s(self) -> float:
        """Seconds that each loss of a control message costs: a round trip and the least retransmission
        timeout."""
        return 2.0 * self.latency_s + RETRANSMIT_S


def spliced(near: SharedLink, far: SharedLink) -> SharedLink:
    """Link through a carrier, which passes on each chunk as it comes: the latencies of both of its links, and
    the rate of the slower one. Each of the two is a connection of its own, so each is bound by its own loss,
    and paced by its own round trip: a burst takes the time of the longer one."""
    latency_s = near.latency_s + far.latency_s
    longer = max(near.latency_s, far.latency_s) / latency_s if latency_s else 0.0
    rate_bps = min(near.rate_bps, far.rate_bps)
    return SharedLink(latency_s, rate_bps, burst_trips=longer * near.burst_trips)


@dataclass(frozen=True)
class Line:
    """Access line of a host: bits per second up and down, shared by all its traffic."""

    up_bps: float = math.inf
    down_bps: float = math.inf
