"""Model of the network between hosts: arrival time of each frame, or its loss. No device, no clock.

A frame passes the sender's uplink, the link between the two hosts and the receiver's downlink. Each has a
rate and a bounded queue; between link and downlink lies the delay. Uplink and link transmit in the order of
sending: their times are computed at once. The downlink transmits in the order of arrival, known later."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from itertools import count

from anabranch.net.wan.frames import Segmentation, destination, first_packets, is_ipv4
from anabranch.net.wan.profile import Link
from anabranch.net.wan.shape import Host

#: Capacity of a queue in seconds of traffic; further packets are dropped. A plain choice: a round trip.
QUEUE_S = 0.1
#: Smallest capacity of a queue, however low its rate: holds the first burst of a TCP connection.
QUEUE_FLOOR_BYTES = 32 * 1024
#: Most bytes of frames in flight; further frames are dropped. Only links without a rate can reach it.
IN_FLIGHT_BYTES = 1 << 29


class Transmitter:
    """Model of a line that transmits at a fixed rate (bit/s), behind a bounded queue."""

    def __init__(self, rate_bps: float) -> None:
        self._seconds_per_byte = 8 / rate_bps  # 0 where the rate is inf
        self._capacity_bytes = max(QUEUE_FLOOR_BYTES, rate_bps * QUEUE_S / 8)
        #: Time at which the queue is empty.
        self._free_s = 0.0

    @property
    def unlimited(self) -> bool:
        return not self._seconds_per_byte

    def transmit(self, at: float, frame: bytes) -> tuple[float, bytes] | None:
        """Queue a frame at time `at` (s). Returns the time at which its last bit leaves, and the part of the
        frame that found room in the queue (whole packets, from the first on); None if no part did."""
        if self.unlimited:
            return at, frame
        room_bytes = self._capacity_bytes - max(0.0, self._free_s - at) / self._seconds_per_byte
        segments = Segmentation(frame)
        if segments.wire_bytes(frame) > room_bytes:
            fitting = segments.packets_in(room_bytes)
            if not fitting:
                return None
            frame = first_packets(frame, segments, fitting)
            segments = Segmentation(frame)
        self._free_s = max(self._free_s, at) + segments.wire_bytes(frame) * self._seconds_per_byte
        return self._free_s, frame


class Fabric:
    """All links between hosts, which are numbered from 0.

    addresses: IPv4 address of each host, four bytes. links: by (sender, receiver); between a pair without one
    frames pass with no delay and no limit, but for the two hosts' access lines.
    """

    def __init__(
        self, addresses: list[bytes], hosts: list[Host], links: Mapping[tuple[int, int], Link]
    ) -> None:
        self._number_of = {address: number for number, address in enumerate(addresses)}
        self._uplinks = [Transmitter(host.uplink_bps) for host in hosts]
        self._downlinks = [Transmitter(host.downlink_bps) for host in hosts]
        self._delays_s = {pair: link.delay_s for pair, link in links.items()}
        self._links = {pair: Transmitter(link.rate_bps) for pair, link in links.items()}
        #: Frames in flight: (time, order of entry, receiver, frame, True if it has passed the downlink).
        self._in_flight: list[tuple[float, int, int, bytes, bool]] = []
        self._order = count()
        self._in_flight_bytes = 0

    def submit(self, now: float, sender: int, frame: bytes) -> None:
        """Take a frame that the host `sender` (its number) sent at the time `now` (s); `due` returns it
        later. The frame is dropped if it is not IPv4, is for no other host, or finds no room in a queue; of a
        frame of several packets those that find none are dropped."""
        receiver = self._number_of.get(destination(frame)) if is_ipv4(frame) else None
        if receiver is None or receiver == sender:
            return
        at = now
        link = self._links.get((sender, receiver))
        for transmitter in (self._uplinks[sender], link):
            if transmitter is not None:
                sent = transmitter.transmit(at, frame)
                if sent is None:
                    return
                at, frame = sent
        self._push(at + self._delays_s.get((sender, receiver), 0.0), receiver, frame, passed=False)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Remove and return the frames that have arrived by the time `now` (s), in order, as (receiver,
        frame). A frame for a downlink with a rate arrives when it has left the downlink."""
        while self._in_flight and self._in_flight[0][0] <= now:
            at, _, receiver, frame, passed = heapq.heappop(self._in_flight)
            self._in_flight_bytes -= len(frame)
            downlink = self._downlinks[receiver]
            if passed or downlink.unlimited:
                yield receiver, frame
            elif (sent := downlink.transmit(at, frame)) is not None:
                self._push(sent[0], receiver, sent[1], passed=True)

    @property
    def next_s(self) -> float:
        """Time (s) at which `due` has something to do next; inf if no frame is in flight."""
        return self._in_flight[0][0] if self._in_flight else math.inf

    def _push(self, at: float, receiver: int, frame: bytes, passed: bool) -> None:
        if self._in_flight_bytes + len(frame) <= IN_FLIGHT_BYTES:
            self._in_flight_bytes += len(frame)
            heapq.heappush(self._in_flight, (at, next(self._order), receiver, frame, passed))
