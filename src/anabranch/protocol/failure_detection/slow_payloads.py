"""Carried links whose payloads have become slow: a carrier may pass heartbeats on and delay the bytes of a
link's other connection.

A carrier that delays them a little more each time would never be late by the link's own measurements. So the
last payloads are compared with the quickest that this link was. A link that is slow from its beginning is not
found so: nobody can tell it from one with a slow line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.protocol.telemetry.peer_costs import Neighbour

#: Payloads in a row that took SLOW_S more than SLOWED times as long as the link would at its quickest, after
#: which its carrier is left. Choices: other links that begin to use a line take a good part of it, not seven
#: eighths; a payload of less than a second delays a step little.
PAYLOADS, SLOWED, SLOW_S = 2, 8.0, 1.0
#: Least number of peers to which a carrier's payloads become slow before all links through it are left. A
#: plain choice: the line of one peer may be busy.
SLOW_TO = 2


@dataclass
class SlowPayloads:
    """Payloads sent over one carried link. s_per_byte: least usual seconds of a byte so far. last_s, usual_s:
    seconds of the last payload, and as long as it takes at the quickest. slow: number of slow ones in a row.
    at: time of the last that was looked at (s)."""

    s_per_byte: float = math.inf
    last_s: float = 0.0
    usual_s: float = math.inf
    slow: int = 0
    at: float = -math.inf

    def look(self, neighbour: Neighbour, activation_bytes: int) -> float:
        """Seconds that the last payload to `neighbour` took, if the last PAYLOADS measured ones were slow;
        else 0, also without a new measurement since the last call. To be called after each measurement, or
        now and then."""
        out = neighbour.link.out
        usual_bps = out.bps(activation_bytes)
        if not activation_bytes or not usual_bps or out.last <= self.at:
            return 0.0
        size_bytes, self.last_s = out.latest()
        self.at, self.s_per_byte = out.last, min(self.s_per_byte, 8.0 / usual_bps)
        self.usual_s = size_bytes * self.s_per_byte
        self.slow = self.slow + 1 if self.last_s > SLOW_S + SLOWED * self.usual_s else 0
        return self.last_s if self.slow >= PAYLOADS else 0.0

    @property
    def slowed(self) -> bool:
        """True if the last payload took SLOWED times as long as at the quickest, though it may have been a
        short time: that is enough where the link's other end has left the carrier."""
        return self.last_s > SLOWED * self.usual_s
