"""Small probes of the bandwidth of links that carry no traffic: before the first activation is on its way.

A padded message and its short answer take a round trip and the transfer of the padding. The padding is no
more than a connection sends at once after a silence (ten segments, RFC 6928), so no slow start is in its
time. It is only sent over a link to an adjacent stage that nothing was measured of for long, one link a
heartbeat, and never while this peer has a microbatch to send or has just sent a payload.
"""

from __future__ import annotations

import math

from anabranch.protocol.core import Core
from anabranch.protocol.messages import Burst, GotBurst

PADDING_BYTES = 12_000
#: A smaller activation is as good as a probe.
ACTIVATION_MIN_BYTES = 4 * PADDING_BYTES
#: Probes at first, one a heartbeat; later one in so many seconds, of links that are as long without traffic.
FIRST = 4
AGAIN_S = 600.0
#: Seconds without a payload from here before a probe.
QUIET_S = 0.5


class Probes:
    """Of one peer."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._at = 0.0
        self._number = 0
        self._sent: dict[str, tuple[int, float]] = {}
        """Peer -> its last probe's number, and when it was sent."""
        self._count: dict[str, int] = {}

    def deadline(self) -> float:
        return self._at if self.core.costs.activation_bytes >= ACTIVATION_MIN_BYTES else math.inf

    def link_down(self, peer: str) -> None:
        self._sent.pop(peer, None)
        self._count.pop(peer, None)

    def tick(self) -> None:
        core = self.core
        if core.now < self.deadline():
            return
        self._at = core.now + core.settings.heartbeat_s
        if core.unsent or core.now - core.payload_at < QUIET_S:
            return
        idle = [peer for peer in core.links if self._wanted(peer)]
        if idle:
            peer = min(idle, key=lambda peer: (self._sent.get(peer, (0, 0.0))[1], peer))
            self._number += 1
            self._sent[peer] = (self._number, core.now)
            self._count[peer] = self._count.get(peer, 0) + 1
            core.send(peer, Burst(self._number, bytes(PADDING_BYTES)))

    def answered(self, peer: str, message: GotBurst) -> None:
        number, at = self._sent.get(peer, (0, 0.0))
        if number == message.number:
            self.core.costs.probed(peer, PADDING_BYTES, self.core.now - at, self.core.now)

    def _wanted(self, peer: str) -> bool:
        core = self.core
        member = core.membership.members.get(peer)
        if core.near.crowded and peer not in core.near.all(core.stage):
            return False
        if member is None or member.stage not in (core.previous_stage(), core.next_stage()):
            return False
        link = core.costs.of(peer).link
        if link.latency.round_trip_s() is None or core.now - link.out.last < AGAIN_S:
            return False
        since = core.now - self._sent[peer][1] if peer in self._sent else math.inf
        return since >= (core.settings.heartbeat_s if self._count.get(peer, 0) < FIRST else AGAIN_S)
