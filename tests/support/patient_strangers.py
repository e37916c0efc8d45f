"""Process of a stranger with many keys of one ticket, which send what the budgets of messages permit."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from anabranch.background import background
from anabranch.net.chunk_queue import ChunkQueue
from anabranch.net.errors import NetError
from anabranch.net.framing import MAX_CHUNK_BYTES, Blob
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.ticket import Ticket, parse_ticket
from anabranch.node.chaos.guests.stranger_attacks import NICENESS, GuestTransport
from anabranch.node.local_swarm.peer_process import enter
from anabranch.protocol.messages import Backward, Claim, Fence, encode
from anabranch.protocol.messages.table import ALLOWANCES, Rate

#: Keys, and seconds between two turns of one.
KEYS, EVERY_S = 8, 0.05
#: Claim of no step that is open: it is ignored, and not refused.
CLAIM = encode(Claim(Fence(0, 1, 0, "0" * 64, 1), 1, (0,)))
#: Gradient of a byte, of a step that is far ahead, so it is dropped, and not refused.
GRADIENT = encode(Backward(Fence(1, 1, 300, "0" * 64, 1), 0)), Blob("uint8", (1,), b"x")
#: Claims, or gradients, a second of each key; the budget of its type is a little more.
PER_S = 0.9 * ALLOWANCES[Rate.WORK].per_s
#: Messages after each of which the process prints `sent NUMBER`.
TOLD = 10_000

_sent = 0


def gradients(count: int) -> bytes:
    """Frames of so many gradients in one piece: each in TLS records of its own would be cut."""
    queue = ChunkQueue(MAX_CHUNK_BYTES)
    for _ in range(count):
        queue.put(*GRADIENT, 0)
    frames: list[bytes | memoryview] = []
    while queue:
        frames += queue.next_pieces()
    return b"".join(frames)


def _send(link: Link, count: int, payloads: bytes) -> int:
    """Send `count` messages if the line takes them; returns how many. payloads: frames of as many gradients;
    b"": claims."""
    if payloads and link.bulk.writable:
        link.bulk.write((payloads,))
        return count
    if payloads or not link.control.writable:
        return 0
    for _ in range(count):
        link.send(CLAIM)
    return count


async def _patient(ticket: Ticket, payloads: bytes) -> None:
    global _sent
    grant, there = ticket.grant, ticket.first_peer
    while True:
        gate = Gate(grant.run, grant.owner, lambda hello: None)
        transport = GuestTransport(Identity.generate(), 1, gate, lambda link: None)
        try:
            link = await transport.dial(there.peer_id, there.host, there.port, ticket)
        except NetError:
            await asyncio.sleep(1.0)
            continue
        link.start(lambda message, blob: None, lambda reason: None)
        print("begun", flush=True)
        while link.closed_reason is None:
            await asyncio.sleep(EVERY_S)
            before, _sent = _sent, _sent + _send(link, int(PER_S * EVERY_S), payloads)
            if before // TOLD < _sent // TOLD:
                print("sent", _sent, flush=True)
        print("closed", link.closed_reason, flush=True)
        await transport.close()


def run_patient_strangers(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be KEYS such strangers, until the process is killed; they send GRADIENTs if that is the deed.
    Parameters as for `run_guest`."""
    enter(name, log, namespace, environment)
    deed, text, _, _, host, *_ = arguments
    payloads = gradients(int(PER_S * EVERY_S)) if "gradients" in deed else b""
    os.nice(NICENESS)
    ticket = parse_ticket(text, now_s=time.time())
    GuestTransport.host = host

    async def attack() -> None:
        for _ in range(KEYS):
            background(_patient(ticket, payloads))
        await asyncio.Event().wait()

    asyncio.run(attack())
    sys.exit(0)
