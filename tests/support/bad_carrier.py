"""Dedicated carrier that harms what it carries as soon as it has an order to: a file beside its log.

Orders, after which it still serves its own links and new circuits honestly, but for the bytes of others:

    swallow         it forwards no byte
    swallow bulk    it forwards no byte of a link's second connection, on which payloads travel
    delay SECONDS   it forwards all bytes in order, so much later
    flip COUNT      it changes a byte in every COUNTth piece that it forwards
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from anabranch.net.circuit import Carrier, Circuit
from anabranch.net.lane import Lane
from anabranch.node.local_swarm.peer_process import run_peer

#: File with a carrier's order, beside the log of its process.
ORDER_FILE = "order.txt"


def run_bad_carrier(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """As `run_peer`, for `anabranch relay`, with the order beside `log` once there is one."""
    obey(Path(log).with_name(ORDER_FILE))
    run_peer(name, arguments, log, namespace, environment)


def obey(order: Path) -> None:
    """Let all carriers of this process obey the order in a file."""
    bulk: set[Lane] = set()
    late: dict[Lane, deque[bytes]] = {}
    flipped = [0]
    connect, forwarded = Carrier._connect, Lane._forwarded

    def connected(carrier: Carrier, circuit: Circuit) -> None:
        pair = circuit.opener.peer, circuit.target
        if sum((each.opener.peer, each.target) == pair for each in carrier.circuits) % 2:
            bulk.update((circuit.near, circuit.far))
        connect(carrier, circuit)

    def harmed(lane: Lane, other: Lane, count: int) -> None:
        harm, _, how = order.read_text().partition(" ") if order.exists() else ("", "", "")
        if harm == "flip":
            flipped[0] += 1
            if not flipped[0] % int(how):
                lane._buffer[count // 2] ^= 1
        if not harm or harm == "flip" or (how == "bulk" and lane not in bulk):
            forwarded(lane, other, count)
            return
        lane.bytes_received += count  # so that it does not end the circuit as idle
        if harm == "delay":
            late.setdefault(lane, deque()).append(bytes(lane._buffer[:count]))
            asyncio.get_running_loop().call_later(float(how), forward, lane, other)

    def forward(lane: Lane, other: Lane) -> None:
        data = late[lane].popleft()
        if not other.transport.is_closing():
            other.write((data,))

    Carrier._connect = connected  # type: ignore[method-assign]
    Lane._forwarded = harmed  # type: ignore[method-assign]
