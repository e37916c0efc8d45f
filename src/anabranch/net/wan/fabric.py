"""What happens to a frame between two hosts, in given time: no device, no clock.

A frame passes the sender's uplink, the pair's link and the receiver's downlink. Each is a server of one rate
with a bounded queue in front; between the second and the third lie loss, delay, duplicates and reordering.
The first two serve in the order of sending, so their times follow by arithmetic at once; the downlink serves
in the order of arrival, which only the time itself brings.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from anabranch.net.wan.frames import Cut, destination, is_ipv4, take
from anabranch.net.wan.shape import Host, Pair

#: A queue holds at least this much, however slow its server: a TCP's first burst and some.
QUEUE_FLOOR_BYTES = 32 * 1024
#: All frames on the way together; what comes beyond is dropped. Only links without a rate can reach it.
HELD_BYTES = 1 << 29


@dataclass
class Counters:
    """Packets and bytes of one ordered pair. At rest sent + duplicated = delivered + lost + dropped + cut +
    refused."""

    sent: int = 0
    sent_bytes: int = 0
    delivered: int = 0
    delivered_bytes: int = 0
    lost: int = 0
    """By the pair's loss."""
    dropped: int = 0
    """By a full queue."""
    cut: int = 0
    """By a partition."""
    duplicated: int = 0
    reordered: int = 0
    refused: int = 0
    """By the receiving device."""


class Server:
    """A rate and the bounded queue before it."""

    __slots__ = ("free_s", "last_s", "limit_bytes", "seconds_per_byte")

    def __init__(self, rate_bps: float, queue_s: float) -> None:
        #: When all that waits would be through, were it served at the present rate.
        self.free_s = 0.0
        #: When the last of it leaves: after a change to a quicker rate the later of the two.
        self.last_s = 0.0
        self.seconds_per_byte = 0.0
        self.shape(0.0, rate_bps, queue_s)

    def shape(self, now: float, rate_bps: float, queue_s: float) -> None:
        """Change rate and queue. What waits leaves as it would have; it fills the queue no longer than it
        would at the better of the two rates."""
        seconds_per_byte = 8 / rate_bps  # 0 where the rate is inf
        if seconds_per_byte < self.seconds_per_byte and self.free_s > now:
            self.free_s = now + (self.free_s - now) * seconds_per_byte / self.seconds_per_byte
        self.seconds_per_byte = seconds_per_byte
        self.limit_bytes = max(QUEUE_FLOOR_BYTES, rate_bps * queue_s / 8) if queue_s else QUEUE_FLOOR_BYTES

    def room_bytes(self, at: float) -> float:
        """Free bytes of the queue at a time."""
        if not self.seconds_per_byte or self.free_s <= at:
            return self.limit_bytes if self.seconds_per_byte else math.inf
        return self.limit_bytes - (self.free_s - at) / self.seconds_per_byte

    def serve(self, at: float, size: int) -> float:
        """When the last bit of so many bytes that come at a time has left."""
        self.free_s = max(self.free_s, at) + size * self.seconds_per_byte
        self.last_s = max(self.last_s, self.free_s)
        return self.last_s


class Path:
    """One ordered pair. receiver: the receiving host's number."""

    __slots__ = ("counters", "gap", "last_s", "receiver", "sender", "server", "shape")

    def __init__(self, sender: int, receiver: int, shape: Pair) -> None:
        self.sender, self.receiver = sender, receiver
        self.shape = shape
        self.counters = Counters()
        self.server = Server(shape.rate_bps * shape.speed, shape.queue_s)
        #: Packets that pass before the next one is lost.
        self.gap: float = math.inf
        #: When the latest frame arrives: no later one arrives before it.
        self.last_s = 0.0


class Fabric:
    """All ways between hosts, which are numbers from 0. addresses: each host's, as four bytes.

    Not told of a pair's shape it takes the plain one: no delay, no rate.
    """

    def __init__(
        self, addresses: list[bytes], hosts: list[Host], pairs: Mapping[tuple[int, int], Pair], seed: int
    ) -> None:
        numbers = range(len(addresses))
        self.paths = {
            (a, b): Path(a, b, pairs.get((a, b), Pair())) for a in numbers for b in numbers if a != b
        }
        self._by_address = [{addresses[b]: self.paths[a, b] for b in numbers if a != b} for a in numbers]
        self._uplinks = [Server(h.uplink_bps * h.speed, h.queue_s) for h in hosts]
        self._downlinks = [Server(h.downlink_bps * h.speed, h.queue_s) for h in hosts]
        # time, order of entry, path, frame, its packets and wire bytes, whether it has passed the downlink.
        self._waiting: list[tuple[float, int, Path, bytes, int, int, bool]] = []
        self._entries = 0
        self._held_bytes = 0
        self._random = random.Random(seed)
        for path in self.paths.values():
            path.gap = self._next_loss(path.shape.loss)

    def shape_host(self, now: float, host: int, shape: Host) -> None:
        self._uplinks[host].shape(now, shape.uplink_bps * shape.speed, shape.queue_s)
        self._downlinks[host].shape(now, shape.downlink_bps * shape.speed, shape.queue_s)

    def shape_pair(self, now: float, sender: int, receiver: int, shape: Pair) -> None:
        path = self.paths[sender, receiver]
        path.server.shape(now, shape.rate_bps * shape.speed, shape.queue_s)
        path.gap = self._next_loss(shape.loss)
        path.shape = shape

    def submit(self, now: float, sender: int, frame: bytes) -> None:
        """A host has sent a frame. What is not IPv4, or goes to no host, vanishes."""
        path = self._by_address[sender].get(destination(frame)) if is_ipv4(frame) else None
        if path is None:
            return
        shape, count = path.shape, path.counters
        cut = Cut(frame)
        count.sent += cut.packets
        count.sent_bytes += cut.wire_bytes(frame)
        if shape.cut:
            count.cut += cut.packets
            return
        at = now
        for server in (self._uplinks[sender], path.server):
            admitted = _admit(server, at, frame, cut, count)
            if admitted is None:
                return
            if admitted is not frame:
                frame, cut = admitted, Cut(admitted)
            at = server.serve(at, cut.wire_bytes(frame))
        if path.gap >= cut.packets:
            path.gap -= cut.packets
            self._send(path, at, frame, cut)
            return
        for piece in self._survivors(path, frame, cut):
            self._send(path, at, piece, Cut(piece))

    def due(self, now: float) -> Iterator[tuple[float, Path, bytes]]:
        """Frames to hand to receivers now, in order, and when they were due. Those of a downlink with a rate
        appear when they have passed it."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= now:
            at, _, path, frame, packets, size, passed = heapq.heappop(waiting)
            self._held_bytes -= len(frame)
            count = path.counters
            if path.shape.cut:
                count.cut += packets
                continue
            downlink = self._downlinks[path.receiver]
            if downlink.seconds_per_byte and not passed:
                cut = Cut(frame)
                admitted = _admit(downlink, at, frame, cut, count)
                if admitted is not None:
                    cut = Cut(admitted)
                    at = downlink.serve(at, cut.wire_bytes(admitted))
                    self._push(at, path, admitted, cut, passed=True)
                continue
            count.delivered += packets
            count.delivered_bytes += size
            yield at, path, frame

    @property
    def next_s(self) -> float:
        """When something is due next; inf: nothing is on the way."""
        return self._waiting[0][0] if self._waiting else math.inf

    def _survivors(self, path: Path, frame: bytes, cut: Cut) -> Iterator[bytes]:
        """What loss leaves of a frame, in order."""
        first = 0
        while path.gap < cut.packets - first:
            passing = int(path.gap)
            if passing:
                yield take(frame, cut, first, passing)
            first += passing + 1
            path.counters.lost += 1
            path.gap = self._next_loss(path.shape.loss)
        path.gap -= cut.packets - first
        if first < cut.packets:
            yield take(frame, cut, first, cut.packets - first)

    def _next_loss(self, loss: float) -> float:
        """How many packets pass before one is lost, each being lost with this probability."""
        if loss <= 0:
            return math.inf
        if loss >= 1:
            return 0
        return int(math.log(1 - self._random.random()) / math.log1p(-loss))

    def _send(self, path: Path, at: float, frame: bytes, cut: Cut) -> None:
        """Put on the way what has left the link's server at a time."""
        shape = path.shape
        if not shape.duplicate and not shape.reorder:
            self._push(self._in_order(path, at), path, frame, cut)
            return
        for number in range(cut.packets):
            packet = take(frame, cut, number, 1)
            one = Cut(packet)
            if self._random.random() < shape.reorder:
                path.counters.reordered += 1
                arrival = at + self._delay(shape) + self._random.random() * shape.reorder_s
            else:
                arrival = self._in_order(path, at)
            self._push(arrival, path, packet, one)
            if self._random.random() < shape.duplicate:
                path.counters.duplicated += 1
                self._push(arrival, path, packet, one)

    def _delay(self, shape: Pair) -> float:
        return shape.delay_s + (self._random.random() * shape.jitter_s if shape.jitter_s else 0.0)

    def _in_order(self, path: Path, at: float) -> float:
        path.last_s = max(path.last_s, at + self._delay(path.shape))
        return path.last_s

    def _push(self, at: float, path: Path, frame: bytes, cut: Cut, passed: bool = False) -> None:
        if self._held_bytes + len(frame) > HELD_BYTES:
            path.counters.dropped += cut.packets
            return
        self._held_bytes += len(frame)
        self._entries += 1
        entry = (at, self._entries, path, frame, cut.packets, cut.wire_bytes(frame), passed)
        heapq.heappush(self._waiting, entry)


def _admit(server: Server, at: float, frame: bytes, cut: Cut, count: Counters) -> bytes | None:
    """What of a frame finds room in the queue; the rest counts as dropped."""
    room = server.room_bytes(at)
    if cut.wire_bytes(frame) <= room:
        return frame
    fitting = cut.packets_in(room)
    count.dropped += cut.packets - fitting
    return take(frame, cut, 0, fitting) if fitting else None
