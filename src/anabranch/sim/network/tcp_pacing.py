"""Pacing of a connection like TCP's, in virtual time."""

from __future__ import annotations

import math

from anabranch.sim.network.shared_link import SEGMENT_BYTES, SharedLink

#: Initial window of a new connection (RFC 6928); in slow start each acknowledged byte adds one to the window.
FIRST_WINDOW_BYTES = 10 * SEGMENT_BYTES
#: Shortest time over which a burst is paced (s); avoids a division by zero.
LEAST_BURST_S = 1e-9


class PacedConnection:
    """Connection paced like TCP's: it sends at the rate that it has measured, which is low at first.

    The measured amount (bits per round trip) grows by the bits carried in each round trip in which the sender
    offered more than that amount. A sender that offers little at a time never fills its link: its
    measurements are application-limited, and never lower the amount (Cardwell et al., BBR, ACM Queue 14(5),
    2016).
    """

    __slots__ = ("_carried_bits", "_given_bits", "_learnt_bits", "_looked_at", "_most_bits", "_since",
                 "burst_s", "learns", "trip_s")  # fmt: skip

    def __init__(self, link: SharedLink) -> None:
        self.trip_s = 2.0 * link.latency_s
        self.burst_s = max(link.burst_trips * self.trip_s, LEAST_BURST_S)
        self._given_bits = self._carried_bits = 0.0
        self._learnt_bits = self._most_bits = 8.0 * FIRST_WINDOW_BYTES
        self._since = self._looked_at = -math.inf
        self.learns = False
        """True if a measurement is planned at the end of this round trip."""

    @property
    def rate_bps(self) -> float:
        return min(self._learnt_bits, self._most_bits) / self.burst_s

    @property
    def knows(self) -> bool:
        """True if the measured amount per round trip is not less than the most bits that were offered within
        one; then there is nothing to learn."""
        return self._learnt_bits >= self._most_bits

    def offer(self, bits: float, now: float) -> None:
        """Record bits that the sender wants to send. Those of one round trip add up, and the greatest sum so
        far bounds the rate (`rate_bps`): more was never tried. If a round trip has passed since the last
        measurement, another one is made first."""
        if now - self._looked_at >= self.trip_s:
            self.measure(now)
        if now - self._since > self.trip_s:
            self._since, self._given_bits = now, 0.0
        self._given_bits += bits
        if self.knows:
            self._carried_bits = 0.0
        self._most_bits = max(self._most_bits, self._given_bits)

    def carry(self, bits: float) -> None:
        """Record bits that the connection has sent."""
        self._carried_bits += bits

    def measure(self, now: float) -> None:
        """End a measurement: the bits sent since the last one have arrived, and add to the amount per round
        trip. The amount stays if it is known to be enough (`knows`)."""
        self._looked_at = now
        if not self.knows:
            self._learnt_bits += self._carried_bits
        self._carried_bits = 0.0
