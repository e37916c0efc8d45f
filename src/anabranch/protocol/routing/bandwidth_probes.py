"""Bandwidth probes of links that carry no traffic: small ones with padding, and trials with a whole payload.

A padded message and its short answer take a round trip and the transfer of the padding. The padding is no
more than a connection sends at once after a silence, so slow start adds nothing. A probe is sent only over a
link to an adjacent stage that was not measured for long, one link a heartbeat, and never while this peer has
a microbatch to send or has just sent a payload.

So little padding only tells links of a few Mbit/s. Where stages are assigned by links (`fleet.deal =
"links"`), every link is tried once, one after the other, with a payload like an activation: before the run
begins nothing else is on its way. Where replicas stand by (`fleet.spare = "links"`) the leader needs each
relay's line rate: the relay tries a few links while it has nothing to send, after all small probes, and none
that those showed to be too slow.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.standbys import searchable
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Burst, GotBurst, Measured
from anabranch.protocol.telemetry.peer_costs import LEAST_BPS

#: Padding of a small probe: below ten segments of 1,460 bytes, the initial window of TCP (RFC 6928).
PADDING_BYTES = 12_000
#: Size of an activation below which small probes are not sent: the activation itself tells as much.
ACTIVATION_MIN_BYTES = 4 * PADDING_BYTES
#: Number of first probes of a link, one a heartbeat; then one after this many seconds without traffic on it.
#: Plain choices.
FIRST = 4
AGAIN_S = 600.0
#: Seconds without a payload from this peer before a probe, so that neither delays the other. A plain choice.
QUIET_S = 0.5
#: Most bytes of a trial; least heartbeats to wait for its answer; checks in a heartbeat for the next link to
#: try.
TRIAL_BYTES, TRIAL_HEARTBEATS, LOOKS = 4 << 20, 8, 4
#: Measured links that suffice for a relay's line rate: the line, not the far end, limits most of them.
LINE_TRIALS = 3


def trial_bytes(settings: Settings) -> int:
    """Payload size (bytes) of a bandwidth trial: that of an activation, or of a block's gradient sums if
    larger, but at most TRIAL_BYTES."""
    return min(TRIAL_BYTES, max(settings.activation_bytes, settings.block_bytes))


@functools.lru_cache(maxsize=1)
def _zeros(size_bytes: int) -> bytes:
    """Payload of a trial, one object for all: in a simulation every relay may have one under way."""
    return bytes(size_bytes)


@dataclass(frozen=True)
class _Sent:
    """Last probe sent over a link. trial: True if it was a trial, which has a whole payload; False if it had
    only padding."""

    number: int
    at: float
    trial: bool


class BandwidthProbes:
    """Sender of this peer's bandwidth probes: it chooses links, sends probes, enters the results in
    `ctx.costs`, and reports the link rates to the leader."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._at = 0.0
        self._number = 0
        self._sent: dict[str, _Sent] = {}
        self._count: dict[str, int] = {}
        self._trying = ""
        """Peer whose answer to a trial, or to the small probe before it, is awaited."""
        self._tried: set[str] = set()
        self._probed: set[str] = set()
        """Peers that have answered a small probe."""
        self._probe_at = 0.0
        self._line_known = False

    def deadline(self) -> float:
        if self.ctx.run.deals:
            return self._at if self._trying or self._untried() else math.inf
        return self._at if self._probing or self._line_unknown() else math.inf

    @property
    def _probing(self) -> bool:
        """True if this run sends small probes (messages with padding). They are pointless where activations
        are small, and heartbeats would wait behind them."""
        return self.ctx.costs.activation_bytes >= ACTIVATION_MIN_BYTES

    def link_down(self, peer: str) -> None:
        sent = self._sent.pop(peer, None)
        if sent is not None and sent.trial:  # not answered; one that was is not repeated over the next link
            self._tried.discard(peer)
        self._count.pop(peer, None)
        self._probed.discard(peer)
        if peer == self._trying:
            self._trying = ""

    def tick(self) -> None:
        ctx = self.ctx
        if ctx.clock.now < self.deadline():
            return
        if self._trying and ctx.clock.now >= self._sent_at(self._trying, 0.0) + self._patience_s():
            self._tried.add(self._trying)
            self._trying = ""
        if ctx.run.deals:
            self._at = ctx.clock.now + ctx.run.settings.heartbeat_s / LOOKS
            self._try(self._known())
            return
        line_unknown = self._line_unknown()
        self._at = ctx.clock.now + ctx.run.settings.heartbeat_s / (LOOKS if line_unknown else 1)
        line_unknown = line_unknown and not self._tell()
        if ctx.outbox.backlog or ctx.clock.now - ctx.outbox.payload_at < QUIET_S or self._trying:
            return
        idle = [peer for peer in ctx.links.up if self._wanted(peer)] if self._probing else []
        fresh = [peer for peer in idle if peer not in self._count]
        if fresh or (idle and ctx.clock.now >= self._probe_at):
            self._probe_at = ctx.clock.now + ctx.run.settings.heartbeat_s
            self._probe(min(fresh or idle, key=lambda peer: (self._sent_at(peer, 0.0), peer)))
        elif line_unknown:
            self._try(self._quick(self._known()))

    def _probe(self, peer: str) -> None:
        self._count[peer] = self._count.get(peer, 0) + 1
        self.ctx.outbox.send(peer, Burst(self._next(peer, False), bytes(PADDING_BYTES)))

    def _next(self, peer: str, trial: bool) -> int:
        """Record a new probe to `peer`, and return its number."""
        self._number += 1
        self._sent[peer] = _Sent(self._number, self.ctx.clock.now, trial)
        return self._number

    def _sent_at(self, peer: str, never: float) -> float:
        return self._sent[peer].at if peer in self._sent else never

    def answered(self, peer: str, message: GotBurst) -> None:
        ctx, sent = self.ctx, self._sent.get(peer)
        if sent is None or sent.number != message.number:
            return
        if not sent.trial:
            self._probed.add(peer)
            ctx.costs.probed(peer, PADDING_BYTES, ctx.clock.now - sent.at, ctx.clock.now)
        else:
            seconds, alone = ctx.clock.now - sent.at, not ctx.run.deals
            ctx.costs.tried(peer, trial_bytes(ctx.run.settings), seconds, ctx.clock.now, alone)
            del self._sent[peer]
        if peer == self._trying:
            self._trying, self._at = "", ctx.clock.now

    # --- trials --------------------------------------------------------------------------------

    def _known(self) -> list[str]:
        """Peers not tried yet whose links can be tried with a payload, because their latency is known; those
        with greater ids than this one first, so that the peers do not all try the link to the same peer at
        once."""
        ctx = self.ctx
        known = [p for p in self._untried() if ctx.costs.of(p).link.latency.round_trip_s() is not None]
        return sorted(known, key=lambda peer: (peer < ctx.me, peer))

    def _quick(self, known: list[str]) -> list[str]:
        """Peers of `known` from which to choose the next trial (with a payload). If this run sends no small
        probes: all. Else the first one whose link is fast enough by its small probe, or none: a missing small
        probe is sent now, and peers with slower links are never tried."""
        ctx, size_bytes = self.ctx, trial_bytes(self.ctx.run.settings)
        for peer in known if self._probing else ():
            if peer not in self._probed:
                self._trying = peer
                self._probe(peer)
                return []
            told_bps = ctx.costs.of(peer).link.out_bps(size_bytes) or math.inf
            if 8.0 * size_bytes <= told_bps * TRIAL_HEARTBEATS * ctx.run.settings.heartbeat_s:
                return [peer]
            self._tried.add(peer)
        return known if not self._probing else []

    def _try(self, known: list[str]) -> None:
        if known and not self._trying:
            ctx, size_bytes = self.ctx, trial_bytes(self.ctx.run.settings)
            self._trying = peer = known[0]
            self._tried.add(peer)
            ctx.costs.of(peer).hand(size_bytes, ctx.clock.now)
            ctx.outbox.send(peer, Burst(self._next(peer, True), b""), _zeros(size_bytes))

    def _patience_s(self) -> float:
        """Longest wait (s) for the answer to a trial. It is longer once the run has begun: if the wait ended
        too early, the next trial would share the line with this one."""
        settings = self.ctx.run.settings
        least_s = TRIAL_HEARTBEATS * settings.heartbeat_s
        return least_s if self.ctx.run.deals else max(least_s, 8.0 * trial_bytes(settings) / LEAST_BPS)

    def _line_unknown(self) -> bool:
        """True if the leader needs the rate of this peer's access line and this peer did not report it yet:
        to choose standbys, for the shares of a reduce by the averaging program, or to spread the exchange of
        contributions in rounds over the lines."""
        ctx = self.ctx
        rounds, program = ctx.run.settings.rounds.inner > 0, ctx.run.settings.spread == "program"
        concerned = ctx.run.stage or rounds or program
        if self._line_known or not concerned or ctx.me not in ctx.run.membership.members:
            return False
        if rounds and not ctx.run.in_rounds:
            return False  # the exchange of a synchronous step takes the whole line for long
        asked = rounds or ((program or ctx.run.settings.spare == "links") and searchable(ctx))
        self._line_known = not asked or not trial_bytes(ctx.run.settings)
        return not self._line_known

    def _tell(self) -> bool:
        """Report this peer's link rates to the leader if enough are measured or tried; True once reported."""
        ctx = self.ctx
        tried = self._tried and not self._trying and (len(self._tried) >= LINE_TRIALS or not self._untried())
        if tried or ctx.costs.links_measured >= LINE_TRIALS:
            self._line_known, self._trying = True, ""
            ctx.outbox.send(ctx.log.leader, Measured(ctx.costs.links(ctx.run.membership.members)))
        return self._line_known

    def _untried(self) -> list[str]:
        ctx = self.ctx
        if not trial_bytes(ctx.run.settings):
            return []
        return [
            peer for peer in ctx.links.up if peer in ctx.run.membership.members and peer not in self._tried
        ]

    def _wanted(self, peer: str) -> bool:
        """True if a small probe of the link to `peer` is due: `peer` serves an adjacent stage, and the link
        was not measured for a long time."""
        ctx = self.ctx
        member = ctx.run.membership.members.get(peer)
        if ctx.run.near.crowded and peer not in ctx.run.near.all(ctx.run.stage):
            return False
        if member is None or member.stage not in (ctx.run.previous_stage(), ctx.run.next_stage()):
            return False
        link = ctx.costs.of(peer).link
        if link.latency.round_trip_s() is None or ctx.clock.now - link.out.last < AGAIN_S:
            return False
        since = ctx.clock.now - self._sent_at(peer, -math.inf)
        return since >= (ctx.run.settings.heartbeat_s if self._count.get(peer, 0) < FIRST else AGAIN_S)
