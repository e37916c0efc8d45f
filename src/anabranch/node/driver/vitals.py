"""Measurements of a live peer for the event log: time spent in an iteration, and round trips, rates and
ways of its links. No decision of the protocol uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from anabranch import __version__
from anabranch.observe.events import Vitals
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Attempt, Backward, Forward

#: Seconds between two `Vitals` events, and largest number of links that one event describes.
EVERY_S = 4.0
TRIPS_MAX = 64


class VitalsMonitor:
    """Measures how a peer spends its iterations, and collects round trips, rates and ways of its links. ctx:
    of the peer, read here. iroh_paths: path that iroh uses to each peer that it reaches: "relay", or a UDP
    address."""

    def __init__(self, ctx: PeerContext, iroh_paths: Mapping[str, str]) -> None:
        self._ctx = ctx
        self._iroh_paths = iroh_paths
        self._stepped_at: float | None = None
        self._attempt_at: float | None = None
        self._links_s = 0.0
        self._written_at = float("-inf")

    def watch(self, event: ev.Event) -> None:
        """Take in an event of the peer for the figures of `end_iteration`: add up the estimated transfer
        times of received microbatches, and note the time at which a reduce of the peer's stage begins."""
        if not isinstance(event, ev.Received):
            return
        match event.message:
            case Forward() | Backward():
                known = self._ctx.costs.neighbours.get(event.peer)
                self._links_s += known.hop_s if known is not None else 0.0
            case Attempt(stage=stage) if stage == self._ctx.run.stage:
                self._attempt_at = time.monotonic()

    def end_iteration(self, timing: Mapping[str, Any]) -> dict[str, float]:
        """Seconds of the iteration that ends now, and begin the next: in all (span_s), in the reduce
        (reducing_s), without compute (idle_s), and of the idle ones in transfers of microbatches, as
        estimated (transfer_s); all 0 for the first. timing: the protocol's note with seconds by task."""
        now = time.monotonic()
        span = now - self._stepped_at if self._stepped_at is not None else 0.0
        reducing = min(span, now - self._attempt_at) if self._attempt_at is not None else 0.0
        idle = max(0.0, span - sum(timing["seconds"].values()))
        links, self._links_s = self._links_s, 0.0
        self._stepped_at, self._attempt_at = now, None
        transfer = min(links, max(0.0, idle - reducing))
        return {"span_s": span, "reducing_s": reducing, "transfer_s": transfer, "idle_s": idle}

    def write_if_due(self, write: Callable[[Vitals], None]) -> None:
        ctx, now = self._ctx, time.monotonic()
        if now - self._written_at < EVERY_S:
            return
        self._written_at = now
        trips: dict[str, float] = {}
        rates: dict[str, float] = {}
        for peer in list(ctx.links.up)[:TRIPS_MAX]:
            known = ctx.costs.neighbours.get(peer)
            trip = known.link.latency.round_trip_s() if known is not None else None
            if trip is not None:
                trips[peer] = round(trip, 6)
            rate = known.link.out_bps(ctx.costs.activation_bytes) if known is not None else None
            if rate is not None:
                rates[peer] = round(rate)
        me = ctx.run.membership.members.get(ctx.me)
        write(
            Vitals(
                peer=ctx.me,
                stage=ctx.run.stage,
                capacity=me.capacity if me is not None else 0,
                forward_s=ctx.costs.forward_s,
                backward_s=ctx.costs.backward_s,
                trips=trips,
                rates=rates,
                ways=self._ways(),
                program=__version__,
            )
        )

    def _ways(self) -> dict[str, str]:
        """Path of each link that is not direct, by the other peer's id: the carrier, or for iroh "relayed"
        (through its relay) or "punched" (straight over UDP). At most TRIPS_MAX links."""
        ways: dict[str, str] = {}
        for peer, via in list(self._ctx.links.carriers.items())[:TRIPS_MAX]:
            if via == "iroh":
                via = "relayed" if self._iroh_paths.get(peer, "relay") == "relay" else "punched"
            ways[peer] = via
        return ways
