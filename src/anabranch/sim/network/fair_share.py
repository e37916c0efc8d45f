"""Payloads over links in virtual time, with max-min fair sharing of the hosts' access lines.

Bytes flow like a fluid. Each direction between two hosts is a lane. On a lane the most urgent payload goes
first, after the HELD_BITS of another one that it cannot overtake, and payloads of equal priority go in order,
as on a live connection (`net.chunk_queue`); lanes do not wait for each other. The rate of a lane is max-min
fair under three bounds: the bandwidth of its own direction, the sender's uplink and the receiver's downlink
(Bertsekas and Gallager, Data Networks, 1992, section 6.5: progressive filling). A lane that a carrier
forwards also takes the carrier's downlink and uplink. Rates change only when a payload begins or ends (on
paced connections also once per round trip), so the model is exact in between. Where more than MANY lanes
depend on each other, all rates are computed at intervals that grow with their number; a lane that begins in
between waits.

With `SharedLink.burst_trips` connections are paced as TCP's are, and slow at first. Not modelled: headers,
and the bandwidth of control messages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

from anabranch.sim.kernel.clock import Clock
from anabranch.sim.network.shared_link import Line, SharedLink, spliced
from anabranch.sim.network.tcp_pacing import PacedConnection

#: Relative bound on the rounding error of a sum of rates.
ROUNDING = 1e-9
#: Lanes that depend on each other from which on their rates are computed at intervals, and seconds of these
#: for each lane: a payload that begins or ends in between changes no rate until then. A choice: such crowds
#: are exchanges of hundreds of machines over lines that are full for minutes.
MANY, SETTLE_S = 1024, 1e-4


#: Bits of a payload that a more urgent one cannot overtake on a live connection, on average: what the kernel
#: takes beyond those under way (`net.tcp.sockets.UNSENT_BYTES`), and half a chunk (`net.connection_limits`).
HELD_BITS = 8.0 * ((128 << 10) + (256 << 10) / 2)


@dataclass(order=True, slots=True)
class _Payload:
    """Payload, or a part of one, on a lane. Those with the lowest (rank, priority, order) go first. rank: 1;
    0 for what nothing overtakes any more. order: number of the send. bits: still to be sent. arrived: called
    at its arrival; None for a part that is not the last."""

    rank: int
    priority: int
    order: int
    bits: float = field(compare=False)
    arrived: Callable[[], None] | None = field(compare=False)


class _Lane:
    """Direction between two hosts, over a carrier or none, while payloads are on it.

    key: sender, receiver, and carrier ("": none). wires: the sender's uplink, the receiver's downlink, and
    those of the carrier. rate_bps: current rate; most_bps: bound by the link and the pacing. since: time up
    to which the sent bits of the first payload are counted. sending, begun_at: priority of the payloads that
    the lane sends (None: none) and since when. plan: number of the planned departure; older plans are void.
    turn, level_bps: last pass that visited the lane, and rate at which it stopped rising in `Traffic._share`.
    """

    __slots__ = (
        "begun_at",
        "key",
        "level_bps",
        "link",
        "most_bps",
        "paced",
        "plan",
        "rate_bps",
        "receiver",
        "sender",
        "sending",
        "since",
        "turn",
        "waiting",
        "wires",
    )  # fmt: skip

    def __init__(self, key: tuple[str, str, str], link: SharedLink, wires: tuple[_Wire, ...]) -> None:
        self.key, self.link = key, link
        self.sender, self.receiver = key[0], key[1]
        self.wires = wires
        self.most_bps = link.rate_bps
        self.paced: PacedConnection | None = None
        self.rate_bps = self.level_bps = 0.0
        self.since = self.begun_at = 0.0
        self.sending: int | None = None
        self.plan = self.turn = 0
        self.waiting: list[_Payload] = []

    def advance(self, now: float) -> None:
        """Subtract from the first payload the bits that were sent at the current rate until `now`, and tell a
        paced connection of them. To be called before the rate or the first payload changes."""
        left_bits = self.rate_bps * (now - self.since)
        self.waiting[0].bits -= left_bits
        self.since = now
        if self.paced is not None:
            self.paced.carry(left_bits)


    def hold(self) -> None:
        """Let nothing overtake the next HELD_BITS of the first payload: the sender's kernel has them."""
        first = self.waiting[0]
        if first.bits <= HELD_BITS:
            first.rank = 0
            return
        first.bits -= HELD_BITS
        heapq.heappush(self.waiting, _Payload(0, first.priority, first.order, HELD_BITS, None))


class _Wire:
    """Up or down direction of a host's access line.

    lanes: in order of their begin. most_bps: bandwidth. narrow: True if its lanes could take more than the
    bandwidth (None: not computed). binds: the same, but also True within the rounding error.

    During progressive filling: turn and touched, last passes that visited the line; room, bandwidth not
    assigned yet; rising, number of lanes that can take more; share_bps, share of each of them; queued_bps,
    that share or less, by which the line has its place in the queue; number, place among the lines that may
    become full.
    """

    __slots__ = ("binds", "lanes", "most_bps", "narrow", "number", "queued_bps", "rising", "room",
                 "share_bps", "touched", "turn")  # fmt: skip

    def __init__(self, most_bps: float) -> None:
        self.lanes: dict[_Lane, None] = {}
        self.most_bps = self.room = self.share_bps = self.queued_bps = most_bps
        self.narrow: bool | None = None
        self.binds = False
        self.rising = self.turn = self.touched = self.number = 0

    def is_narrow(self) -> bool:
        """True if the lanes of this line could take more than its bandwidth (cached in `narrow`)."""
        if self.narrow is None:
            wanted_bps = 0.0
            for lane in self.lanes:
                wanted_bps += lane.most_bps
            self.narrow = wanted_bps > self.most_bps
            self.binds = wanted_bps > (1.0 - ROUNDING) * self.most_bps
        return self.narrow

    def put(self, lane: _Lane) -> None:
        self.lanes[lane] = None
        self.narrow = None

    def take(self, lane: _Lane) -> None:
        del self.lanes[lane]
        self.narrow = None


_by_bound: Final = attrgetter("most_bps")
_by_turn: Final = attrgetter("turn")


class Traffic:
    """All payloads in flight between the hosts of a simulated network.

    link: (sender, receiver) -> link. line: host -> access line, of which changes after its first payload are
    not seen. machine: host -> host that has its line. watch: called with (sender, receiver, begin, end,
    priority) for each span of payloads of one priority (None: nobody).
    """

    def __init__(
        self,
        clock: Clock,
        link: Callable[[str, str], SharedLink],
        line: Callable[[str], Line],
        machine: Callable[[str], str] = str,
    ) -> None:
        self.clock = clock
        self._link, self._line, self._machine = link, line, machine
        self._lanes: dict[tuple[str, str, str], _Lane] = {}
        self._paced: dict[tuple[str, str, str], PacedConnection] = {}
        self._up: dict[str, _Wire] = {}
        self._down: dict[str, _Wire] = {}
        self._order = self._turn = 0
        self._unsettled: dict[_Lane, None] = {}
        """Lanes whose rates must be computed again, once for all changes at the same time."""
        self._settles_at = 0.0
        """Time (s) before which no rates are computed, after those of many lanes were."""
        self.watch: Callable[[str, str, float, float, int], None] | None = None

    def send(
        self,
        sender: str,
        receiver: str,
        size_bytes: float,
        arrived: Callable[[], None],
        priority: int = 0,
        via: str = "",
    ) -> None:
        """Send a payload; `arrived` is called when its last byte arrives, and never if the connection is
        dropped (`drop`) before that byte has left. priority: 0 goes first. via: host that carries it ("":
        none)."""
        self._order += 1
        payload = _Payload(1, priority, self._order, 8.0 * size_bytes, arrived)
        key = sender, receiver, via
        lane = self._lanes.get(key)
        if lane is not None:
            lane.advance(self.clock.now)
            if payload < lane.waiting[0]:
                lane.hold()
            heapq.heappush(lane.waiting, payload)
            self._report(lane)
            if lane.rate_bps:
                self._plan(lane)
            self._pace(lane, payload)
            return
        up = self._wire(self._up, self._machine(sender))
        down = self._wire(self._down, self._machine(receiver))
        if via:
            link = spliced(self._link(sender, via), self._link(via, receiver))
            lane = _Lane(key, link, (up, down) + self._wires_of_carrier(via, up, down))  # noqa: RUF005 (mypyc)
        else:
            lane = _Lane(key, self._link(sender, receiver), (up, down))
        self._lanes[key] = lane
        lane.since = self.clock.now
        lane.waiting.append(payload)
        self._pace(lane, payload)
        self._report(lane)
        for wire in lane.wires:
            wire.put(lane)
        self._unsettle(lane)

    def drop(self, one: str, other: str, via: str = "") -> dict[str, int]:
        """Drop all payloads that have not left between two hosts, in both directions, over the carrier `via`
        ("": direct), and what the connection learnt of its rate. Returns {sender: number of payloads lost},
        without senders that had none."""
        lost = {}
        for key in ((one, other, via), (other, one, via)):
            self._paced.pop(key, None)
            if key in self._lanes:
                waiting = self._lanes[key].waiting
                lost[key[0]] = sum(payload.arrived is not None for payload in waiting)
                self._end(self._lanes[key])
        return lost

    def line(self, host: str) -> Line:
        """Access line of a host as it is now, factors of `scale_line` included."""
        machine = self._machine(host)
        return Line(self._wire(self._up, machine).most_bps, self._wire(self._down, machine).most_bps)

    def scale_line(self, host: str, factor: float) -> None:
        """Multiply the bandwidth of a host's line, up and down, by `factor`, from now on; payloads in flight
        go on at the new rates."""
        for wires in (self._up, self._down):
            wire = self._wire(wires, self._machine(host))
            wire.most_bps *= factor
            wire.narrow = None
            self._unsettle(*wire.lanes)

    def carried(self) -> list[tuple[str, int]]:
        """(carrier, priority of the first payload) of each direction between two hosts that has payloads over
        a carrier now."""
        return [(key[2], lane.waiting[0].priority) for key, lane in self._lanes.items() if key[2]]

    def rates(self) -> dict[tuple[str, str, str], float]:
        """Current rate (bits per second) of each direction with payloads: (sender, receiver, carrier or "")
        -> rate. Empty between a change and the computing of the new rates."""
        return {} if self._unsettled else {key: lane.rate_bps for key, lane in self._lanes.items()}

    # --- inside --------------------------------------------------------------------------------

    def _pace(self, lane: _Lane, payload: _Payload) -> None:
        """Tell the lane's paced connection how many bits a payload offers, beyond which it learns no rate,
        and apply its rate. Nothing happens on links that are not paced."""
        link = lane.link
        if not link.burst_trips or not link.latency_s:
            return
        key = lane.key
        paced = lane.paced = self._paced.get(key) or self._paced.setdefault(key, PacedConnection(link))
        paced.offer(payload.bits, self.clock.now)
        self._apply_pacing(lane, paced)

    def _learn(self, key: tuple[str, str, str], paced: PacedConnection) -> None:
        """End a round trip in which the pacing of a lane (`key`) limited it: the connection measures, and its
        new rate is applied. Nothing happens if the lane or its connection is gone."""
        lane = self._lanes.get(key)
        paced.learns = False
        if lane is None or lane.paced is not paced:
            return
        lane.advance(self.clock.now)
        paced.measure(self.clock.now)
        self._apply_pacing(lane, paced)

    def _apply_pacing(self, lane: _Lane, paced: PacedConnection) -> None:
        """Bound the lane by the connection's rate; plan a measurement if that rate limits the lane and can
        still rise."""
        most_bps = min(lane.link.rate_bps, paced.rate_bps)
        if most_bps != lane.most_bps:
            lane.most_bps = most_bps
            for wire in lane.wires:
                wire.narrow = None
            self._unsettle(lane)
        binds = paced.rate_bps < min(lane.link.rate_bps, min(wire.most_bps for wire in lane.wires))
        if binds and not paced.knows and not paced.learns:
            paced.learns = True
            self.clock.after(paced.trip_s, partial(self._learn, lane.key, paced))

    def _end(self, lane: _Lane) -> None:
        """Remove a lane with the payloads left on it, which never arrive; the rates of lanes that share its
        full lines are computed again."""
        wires = lane.wires
        others = [other for wire in wires if wire.is_narrow() for other in wire.lanes if other is not lane]
        del self._lanes[lane.key]
        for wire in wires:
            wire.take(lane)
        lane.plan += 1
        lane.waiting.clear()
        self._report(lane)
        self._unsettled.pop(lane, None)
        self._unsettle(*others)

    def _unsettle(self, *lanes: _Lane) -> None:
        if lanes and not self._unsettled:
            self.clock.at(self._settles_at, self._settle)
        self._unsettled.update(dict.fromkeys(lanes))

    def _settle(self) -> None:
        """Compute the rates of all unsettled lanes, and of all lanes that share narrow lines with them."""
        while self._unsettled:
            coupled, full = self._coupled(next(iter(self._unsettled)))
            if len(coupled) == 1:
                del self._unsettled[coupled[0]]
            else:
                for lane in [lane for lane in self._unsettled if lane.turn == self._turn]:
                    del self._unsettled[lane]
            if len(coupled) > MANY:
                self._settles_at = max(self._settles_at, self.clock.now + SETTLE_S * len(coupled))
            self._share(coupled, full)

    def _wire(self, wires: dict[str, _Wire], host: str) -> _Wire:
        found = wires.get(host)
        if found is None:
            line = self._line(host)
            found = wires[host] = _Wire(line.up_bps if wires is self._up else line.down_bps)
        return found

    def _wires_of_carrier(self, via: str, up: _Wire, down: _Wire) -> tuple[_Wire, ...]:
        """(carrier's downlink, carrier's uplink), which carried bytes take besides the sender's uplink and
        the receiver's downlink; () if the carrier runs on the machine of one of the two, as bytes pass that
        machine's line only once. up, down: lines of sender and receiver."""
        machine = self._machine(via)
        carrier_down, carrier_up = self._wire(self._down, machine), self._wire(self._up, machine)
        return () if carrier_up is up or carrier_down is down else (carrier_down, carrier_up)

    def _plan(self, lane: _Lane) -> None:
        """Plan the departure of the last byte of the lane's first payload; earlier plans become void."""
        lane.plan += 1
        departs_s = max(0.0, lane.waiting[0].bits) / lane.rate_bps
        self.clock.after(departs_s, partial(self._departs, lane, lane.plan))

    def _departs(self, lane: _Lane, plan: int) -> None:
        """Handle the departure of the last byte of a lane's first payload, and go on with the next; nothing
        happens if the plan with this number is void."""
        if lane.plan != plan:
            return
        lane.since = self.clock.now
        payload = heapq.heappop(lane.waiting)
        if lane.paced is not None:
            lane.paced.carry(payload.bits)
        if payload.arrived is not None:
            self.clock.after(lane.link.latency_s, payload.arrived)
        if lane.waiting:
            self._report(lane)
            self._plan(lane)
        else:
            self._end(lane)

    def _report(self, lane: _Lane) -> None:
        """Tell `watch` of the span that ends now, if the lane goes on with payloads of another priority or
        has none left."""
        now, priority = self.clock.now, lane.waiting[0].priority if lane.waiting else None
        if priority == lane.sending:
            return
        if self.watch is not None and lane.sending is not None and now > lane.begun_at:
            self.watch(lane.sender, lane.receiver, lane.begun_at, now, lane.sending)
        lane.begun_at, lane.sending = now, priority

    def _coupled(self, lane: _Lane) -> tuple[list[_Lane], list[_Wire]]:
        """Lanes whose rates may depend on this lane's, because they share narrow lines; and their lines that
        may become full (`binds`), reset for progressive filling. Lanes and lines found are marked with a new
        number (`turn` = `_turn`), by which the caller and `_share` know them until the next call."""
        self._turn = lane.turn = turn = self._turn + 1
        found, todo, full, brim = [lane], [lane], [], []
        while todo:
            here = todo.pop()
            for wire in here.wires:
                if wire.turn == turn:
                    continue
                wire.turn = turn
                if wire.is_narrow():
                    full.append(wire)
                    for other in wire.lanes:
                        if other.turn != turn:
                            other.turn = turn
                            found.append(other)
                            todo.append(other)
                elif wire.binds:
                    brim.append(wire)
        for wire in full:
            wire.room, wire.rising, wire.touched = wire.most_bps, len(wire.lanes), 0
        for wire in brim:  # not all of its lanes need be among them
            rising = len([other for other in wire.lanes if other.turn == turn])
            wire.room, wire.rising, wire.touched = wire.most_bps, rising, 0
        return found, full + brim

    def _share(self, lanes: list[_Lane], wires: list[_Wire]) -> None:
        """Assign max-min fair rates by progressive filling to `lanes`. lanes, wires: what `_coupled`
        returned.

        All rates rise alike; a lane stops at its own bound, or when one of its lines is full. A lane that has
        stopped has the negative number of that pass as its `turn`.
        """
        if len(lanes) == 1:
            lane = lanes[0]
            self._set_rate(lane, min(min(wire.most_bps for wire in lane.wires), lane.most_bps))
            return
        bounded = sorted(lanes, key=_by_bound)
        queue = []
        for number, wire in enumerate(wires):
            wire.number, wire.share_bps = number, wire.room / wire.rising
            wire.queued_bps = wire.share_bps
            queue.append((wire.share_bps, number))
        heapq.heapify(queue)
        open_turn, passed, at, left = self._turn, 0, 0, len(lanes)
        while left:
            while queue and not self._is_current(wires[queue[0][1]], queue):
                pass
            while at < len(bounded) and bounded[at].turn != open_turn:
                at += 1  # it has stopped
            level = queue[0][0] if queue else math.inf
            if at < len(bounded) and bounded[at].most_bps < level:
                level = bounded[at].most_bps
            stop: list[_Lane] = []
            passed -= 1
            while queue and queue[0][0] <= level:
                wire = wires[queue[0][1]]
                if self._is_current(wire, queue):
                    heapq.heappop(queue)
                    for lane in wire.lanes:
                        if lane.turn == open_turn:
                            lane.turn = passed
                            stop.append(lane)
            while at < len(bounded) and bounded[at].most_bps <= level:
                lane = bounded[at]
                at += 1
                if lane.turn == open_turn:
                    lane.turn = passed
                    stop.append(lane)
            left -= len(stop)
            self._stop(stop, level, passed, queue)
        changed = [lane for lane in lanes if lane.level_bps != lane.rate_bps]
        for lane in sorted(changed, key=_by_turn, reverse=True):  # those that stopped first come first
            self._set_rate(lane, lane.level_bps)

    @staticmethod
    def _is_current(wire: _Wire, queue: list[tuple[float, int]]) -> bool:
        """True if the first entry of the queue in `_share`, which is of this line, has the share that the
        line's lanes have now. Else the entry is renewed, or dropped if none of the lanes still rises, and the
        caller looks again."""
        queued_bps, number = queue[0]
        if not wire.rising or wire.queued_bps != queued_bps:
            heapq.heappop(queue)
            return False
        if wire.share_bps > queued_bps:
            wire.queued_bps = wire.share_bps
            heapq.heapreplace(queue, (wire.share_bps, number))
            return False
        return True

    @staticmethod
    def _stop(stop: list[_Lane], level_bps: float, passed: int, queue: list[tuple[float, int]]) -> None:
        """Stop the lanes `stop` at a rate, in pass number `passed` of `_share`, and put into its queue the
        shares that their lines have from then on."""
        touched = []
        for lane in stop:
            lane.level_bps = level_bps
            for wire in lane.wires:
                if wire.binds:
                    wire.room -= level_bps
                    wire.rising -= 1
                    if wire.touched != passed:
                        wire.touched = passed
                        touched.append(wire)
        for wire in touched:
            if wire.rising:
                wire.share_bps = share_bps = wire.room / wire.rising
                if share_bps < wire.queued_bps:  # by rounding; else its entry is renewed once it is the first
                    wire.queued_bps = share_bps
                    heapq.heappush(queue, (share_bps, wire.number))

    def _set_rate(self, lane: _Lane, rate_bps: float) -> None:
        if rate_bps != lane.rate_bps:
            lane.advance(self.clock.now)
            lane.rate_bps = rate_bps
            self._plan(lane)
