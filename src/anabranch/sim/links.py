"""Links in virtual time: latency and bandwidth of each direction, and hosts whose lines are shared fairly.

Bytes flow like a fluid. Between two hosts each direction is a lane on which the most urgent payload goes
first and those of one urgency go in order, as on a live connection (`net.outbox`); lanes never wait for each
other. What a lane gets is max-min fair under three bounds: the bandwidth of its own direction, the sender's
uplink and the receiver's downlink (Bertsekas and Gallager, Data Networks, 1992, section 6.5: progressive
filling). Rates change at the moments at which a payload begins or ends, so between them all is exact.

Not modelled: slow start, headers, and the room that small messages take.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from anabranch.sim.clock import Clock

#: Round trips until a connection can be used: TCP's, TLS 1.3's, and that of the challenge.
SETUP_TRIPS = 3
#: Payload of a TCP segment on an Ethernet path (bytes), for the throughput that loss leaves.
SEGMENT_BYTES = 1460
#: A lost small message is sent again after a round trip and this (s), Linux's least retransmission timeout.
RETRANSMIT_S = 0.2


@dataclass(frozen=True)
class Way:
    """One direction of a link. loss: share of packets that are lost."""

    latency_s: float
    bandwidth_bps: float
    loss: float = 0.0

    @cached_property
    def rate_bps(self) -> float:
        """What a connection reaches: where packets are lost at most MSS/RTT · sqrt(3/2)/sqrt(loss) (Mathis et
        al., CCR 27(3), 1997)."""
        if not self.loss or not self.latency_s:
            return self.bandwidth_bps
        window_bits = 8.0 * SEGMENT_BYTES * math.sqrt(1.5 / self.loss)
        return min(self.bandwidth_bps, window_bits / (2.0 * self.latency_s))

    def seconds(self, size_bytes: float) -> float:
        """From the first byte's departure to the last one's arrival, with the way to itself."""
        return self.latency_s + 8.0 * size_bytes / self.rate_bps

    def retransmit_s(self) -> float:
        return 2.0 * self.latency_s + RETRANSMIT_S


@dataclass(frozen=True)
class Line:
    """A host's own connection: bits per second up and down, shared by all that it sends and gets."""

    up_bps: float = math.inf
    down_bps: float = math.inf


@dataclass(order=True, slots=True)
class _Payload:
    priority: int
    order: int
    bits: float = field(compare=False)
    arrived: Callable[[], None] = field(compare=False)


class _Lane:
    """One direction between two hosts, while something is on it."""

    __slots__ = (
        "begun_at",
        "most_bps",
        "plan",
        "rate_bps",
        "receiver",
        "sender",
        "since",
        "told",
        "waiting",
        "way",
    )

    def __init__(self, sender: str, receiver: str, way: Way) -> None:
        self.sender, self.receiver, self.way = sender, receiver, way
        self.most_bps = way.rate_bps
        self.rate_bps = 0.0
        self.since = self.begun_at = 0.0
        self.told: int | None = None
        """Priority of what has been going since begun_at."""
        self.plan = 0
        self.waiting: list[_Payload] = []

    def advance(self, now: float) -> None:
        """Take off what has left since the last change."""
        self.waiting[0].bits -= self.rate_bps * (now - self.since)
        self.since = now


class _Wire:
    """One direction of a host's line. lanes: what is on it, in the order in which they began."""

    __slots__ = ("_narrow", "lanes", "most_bps")

    def __init__(self, most_bps: float) -> None:
        self.lanes: dict[_Lane, None] = {}
        self.most_bps = most_bps
        self._narrow: bool | None = None

    @property
    def narrow(self) -> bool:
        """Whether it has no room for all that its lanes could take."""
        if self._narrow is None:
            self._narrow = sum(lane.most_bps for lane in self.lanes) > self.most_bps
        return self._narrow

    def put(self, lane: _Lane) -> None:
        self.lanes[lane] = None
        self._narrow = None

    def take(self, lane: _Lane) -> None:
        del self.lanes[lane]
        self._narrow = None


class UnderWay:
    """How long something that a host sent was under way: host -> seconds."""

    def __init__(self, clock: Clock) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._now: dict[str, tuple[int, float]] = {}

    def begin(self, host: str) -> None:
        count, since = self._now.get(host, (0, 0.0))
        self._now[host] = (count + 1, since if count else self._clock.now)

    def end(self, host: str, count: int = 1) -> None:
        """So many payloads have arrived, or are lost."""
        before, since = self._now[host]
        if before == count:
            self.seconds[host] = self.seconds.get(host, 0.0) + self._clock.now - since
        self._now[host] = (before - count, since)


class Traffic:
    """All payloads under way. `way(sender, receiver)` and `line(host)` describe the network."""

    def __init__(self, clock: Clock, way: Callable[[str, str], Way], line: Callable[[str], Line]) -> None:
        self.clock = clock
        self._way, self._line = way, line
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._up: dict[str, _Wire] = {}
        self._down: dict[str, _Wire] = {}
        self._order = 0
        self._unsettled: dict[_Lane, None] = {}
        """Lanes whose rates may not be what they should: they are settled once for all that happens at an
        instant, as when a peer sends a part of its sum to each of its fellows."""
        self.watch: Callable[[str, str, float, float, int], None] | None = None
        """Called with (sender, receiver, begun, ended, priority) when a lane becomes empty, and when payloads
        of another priority begin to go."""

    def send(
        self,
        sender: str,
        receiver: str,
        size_bytes: float,
        arrived: Callable[[], None],
        priority: int = 0,
    ) -> None:
        """Put a payload on its lane; `arrived` is called when its last byte is there."""
        self._order += 1
        payload = _Payload(priority, self._order, 8.0 * size_bytes, arrived)
        lane = self._lanes.get((sender, receiver))
        if lane is not None:
            lane.advance(self.clock.now)
            heapq.heappush(lane.waiting, payload)
            self._tell(lane)
            if lane.rate_bps:
                self._plan(lane)
            return
        lane = self._lanes[sender, receiver] = _Lane(sender, receiver, self._way(sender, receiver))
        lane.since = self.clock.now
        lane.waiting.append(payload)
        self._tell(lane)
        self._wire(self._up, sender).put(lane)
        self._wire(self._down, receiver).put(lane)
        self._unsettle(lane)

    def drop(self, one: str, other: str) -> dict[str, int]:
        """The connection of two hosts is gone, and what had not left with it: sender -> payloads lost."""
        lost = {}
        for pair in ((one, other), (other, one)):
            if pair in self._lanes:
                lost[pair[0]] = len(self._lanes[pair].waiting)
                self._end(self._lanes[pair])
        return lost

    def rate_bps(self, sender: str, receiver: str) -> float:
        """What a lane gets now; 0 where nothing is under way."""
        self._settle()
        lane = self._lanes.get((sender, receiver))
        return lane.rate_bps if lane is not None else 0.0

    # --- inside --------------------------------------------------------------------------------

    def _end(self, lane: _Lane) -> None:
        """Nothing is on this lane any more: those that shared a line with it go quicker."""
        wires = self._up[lane.sender], self._down[lane.receiver]
        others = [other for wire in wires if wire.narrow for other in wire.lanes if other is not lane]
        del self._lanes[lane.sender, lane.receiver]
        for wire in wires:
            wire.take(lane)
        lane.plan += 1
        lane.waiting.clear()
        self._tell(lane)
        self._unsettled.pop(lane, None)
        self._unsettle(*others)

    def _unsettle(self, *lanes: _Lane) -> None:
        if lanes and not self._unsettled:
            self.clock.after(0.0, self._settle)
        self._unsettled.update(dict.fromkeys(lanes))

    def _settle(self) -> None:
        """Share the lines anew among the lanes that have to do with the unsettled ones."""
        while self._unsettled:
            together = self._together(next(iter(self._unsettled)))
            for lane in together:
                self._unsettled.pop(lane, None)
            self._share(together)

    def _wire(self, wires: dict[str, _Wire], host: str) -> _Wire:
        found = wires.get(host)
        if found is None:
            line = self._line(host)
            found = wires[host] = _Wire(line.up_bps if wires is self._up else line.down_bps)
        return found

    def _plan(self, lane: _Lane) -> None:
        """Plan the departure of the last byte of what goes first."""
        lane.plan += 1
        departs_s = max(0.0, lane.waiting[0].bits) / lane.rate_bps
        self.clock.after(departs_s, partial(self._departs, lane, lane.plan))

    def _departs(self, lane: _Lane, plan: int) -> None:
        if lane.plan == plan:
            self._departed(lane)

    def _departed(self, lane: _Lane) -> None:
        lane.since = self.clock.now
        payload = heapq.heappop(lane.waiting)
        self.clock.after(lane.way.latency_s, payload.arrived)
        if lane.waiting:
            self._tell(lane)
            self._plan(lane)
        else:
            self._end(lane)

    def _tell(self, lane: _Lane) -> None:
        """Of what has gone until now, if something else goes next."""
        now, goes = self.clock.now, lane.waiting[0].priority if lane.waiting else None
        if goes == lane.told:
            return
        if self.watch is not None and lane.told is not None and now > lane.begun_at:
            self.watch(lane.sender, lane.receiver, lane.begun_at, now, lane.told)
        lane.begun_at, lane.told = now, goes

    def _together(self, lane: _Lane) -> list[_Lane]:
        """The lanes whose rates may depend on this one's, over lines too narrow for all of theirs."""
        found, todo, seen = {lane: None}, [lane], set[_Wire]()
        while todo:
            here = todo.pop()
            for wire in (self._up[here.sender], self._down[here.receiver]):
                if wire.narrow and wire not in seen:
                    seen.add(wire)
                    fresh = [other for other in wire.lanes if other not in found]
                    found.update(dict.fromkeys(fresh))
                    todo += fresh
        return list(found)

    def _share(self, lanes: list[_Lane]) -> None:
        """Progressive filling: all rates rise alike; a lane stops at its bound or where a line is full."""
        if len(lanes) == 1:
            lane = lanes[0]
            most_bps = min(self._up[lane.sender].most_bps, self._down[lane.receiver].most_bps)
            self._goes(lane, min(most_bps, lane.most_bps))
            return
        room: dict[_Wire, float] = {}
        users: dict[_Wire, set[_Lane]] = {}
        ends: dict[_Lane, tuple[_Wire, _Wire]] = {}
        for lane in lanes:
            ends[lane] = self._up[lane.sender], self._down[lane.receiver]
            for wire in ends[lane]:
                if wire not in room:
                    room[wire], users[wire] = wire.most_bps, set()
                users[wire].add(lane)
        rising, rates = dict.fromkeys(lanes), {}
        while rising:
            full = {wire: room[wire] / len(using) for wire, using in users.items() if using}
            level = min(min(full.values()), min(lane.most_bps for lane in rising))
            narrow = {wire for wire, most in full.items() if most <= level}
            stop = [lane for lane in rising if lane.most_bps <= level or not narrow.isdisjoint(ends[lane])]
            for lane in stop:
                rates[lane] = level
                del rising[lane]
                for wire in ends[lane]:
                    room[wire] -= level
                    users[wire].discard(lane)
        for lane, rate in rates.items():
            self._goes(lane, rate)

    def _goes(self, lane: _Lane, rate_bps: float) -> None:
        if rate_bps != lane.rate_bps:
            lane.advance(self.clock.now)
            lane.rate_bps = rate_bps
            self._plan(lane)
