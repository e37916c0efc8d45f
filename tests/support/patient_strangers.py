"""Process of a stranger with many keys of one ticket, which send what the budgets of messages permit."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from anabranch.background import background
from anabranch.net.errors import NetError
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.ticket import Ticket, parse_ticket
from anabranch.node.chaos.guests.stranger_attacks import NICENESS, GuestTransport
from anabranch.node.local_swarm.peer_process import enter
from anabranch.protocol.messages import Claim, Fence, encode
from anabranch.protocol.messages.table import ALLOWANCES, Rate

#: Keys, and seconds between two turns of one.
KEYS, EVERY_S = 8, 0.05
#: Claim of no step that is open: it is ignored, and not refused.
CLAIM = encode(Claim(Fence(0, 1, 0, "0" * 64, 1), 1, (0,)))
#: Claims a second of each key; the budget of its type is a little more.
PER_S = 0.9 * ALLOWANCES[Rate.WORK].per_s
#: Messages after each of which the process prints `sent NUMBER`.
TOLD = 10_000

_sent = 0


async def _patient(ticket: Ticket) -> None:
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
            if link.control.writable:
                for _ in range(int(PER_S * EVERY_S)):
                    link.send(CLAIM)
                    _sent += 1
                    if _sent % TOLD == 0:
                        print("sent", _sent, flush=True)
        print("closed", link.closed_reason, flush=True)
        await transport.close()


def run_patient_strangers(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be KEYS such strangers, until the process is killed. Parameters as for `run_guest`."""
    enter(name, log, namespace, environment)
    _, text, _, _, host, *_ = arguments
    os.nice(NICENESS)
    ticket = parse_ticket(text, now_s=time.time())
    GuestTransport.host = host

    async def attack() -> None:
        for _ in range(KEYS):
            background(_patient(ticket))
        await asyncio.Event().wait()

    asyncio.run(attack())
    sys.exit(0)
