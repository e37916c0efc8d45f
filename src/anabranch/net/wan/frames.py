"""Frames of a TUN device: a virtio header of 10 bytes, then an IPv4 packet.

With segmentation offload the kernel passes a burst of TCP segments as one frame of up to 64 KiB, which makes
a router in Python fast enough. The header gives the size of the segments; `first_packets` keeps whole
segments, so that a full queue drops packets, not bursts."""

from __future__ import annotations

import struct

#: flags, GSO type, header bytes, segment payload bytes, start and offset of the checksum to fill in.
_VNET = struct.Struct("=BBHHHH")
VNET_BYTES = _VNET.size
#: Largest frame in bytes.
FRAME_BYTES = VNET_BYTES + 65535

_TCPV4 = 1
_NOT_LAST = 0xFF & ~0x09  # FIN and PSH belong to the last segment


def is_ipv4(frame: bytes) -> bool:
    return len(frame) >= VNET_BYTES + 20 and frame[VNET_BYTES] >> 4 == 4


def destination(frame: bytes) -> bytes:
    """IPv4 destination address of a frame, four bytes."""
    return frame[VNET_BYTES + 16 : VNET_BYTES + 20]


class Segmentation:
    """Packets into which the kernel would cut `frame`, which it left whole (TCP segmentation offload).

    packets: their number. header: bytes of IP and TCP headers in each. payload: bytes of payload in each but
    the last. header and payload are 0 for a frame that the kernel would not cut.
    """

    __slots__ = ("header", "packets", "payload")

    def __init__(self, frame: bytes) -> None:
        self.packets, self.header, self.payload = 1, 0, 0
        if frame[1] & 0x7F == _TCPV4:
            self.payload = _VNET.unpack_from(frame)[3]
            network = (frame[VNET_BYTES] & 15) * 4
            self.header = network + (frame[VNET_BYTES + network + 12] >> 4) * 4
            payload = len(frame) - VNET_BYTES - self.header
            self.packets = max(1, -(-payload // self.payload))

    def wire_bytes(self, frame: bytes) -> int:
        """Bytes of all IP packets into which `frame` would be cut, headers included."""
        return len(frame) - VNET_BYTES + (self.packets - 1) * self.header

    def packets_in(self, room_bytes: float) -> int:
        """Number of packets, from the first on, that fit into `room_bytes`, which the whole frame exceeds."""
        return max(0, int(room_bytes // (self.header + self.payload))) if self.payload else 0


def first_packets(frame: bytes, segments: Segmentation, count: int) -> bytes:
    """Frame of the first `count` packets of `frame`, fewer than all, with correct headers. segments: the
    packets of `frame`."""
    begin = VNET_BYTES + segments.header
    body = frame[begin : begin + count * segments.payload]
    head = bytearray(frame[VNET_BYTES:begin])
    network = (head[0] & 15) * 4
    struct.pack_into("!H", head, 2, len(head) + len(body))
    head[10:12] = b"\0\0"
    struct.pack_into("!H", head, 10, ~_sum(head[:network]) & 0xFFFF)
    head[network + 13] &= _NOT_LAST
    # The device adds the checksum of the payload: the field holds the one of the pseudo header.
    pseudo = head[12:20] + struct.pack("!HH", 6, len(head) - network + len(body))
    struct.pack_into("!H", head, network + 16, _sum(pseudo))
    flags, kind, _, payload, start, offset = _VNET.unpack_from(frame)
    if count == 1:
        kind = payload = 0
    return _VNET.pack(flags, kind, len(head), payload, start, offset) + head + body


def _sum(data: bytes | bytearray) -> int:
    """Internet checksum (RFC 1071), not complemented. `data` has an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
