"""Process of a crowd: one ticket, many keys, each from an address block of its own, that do the same deed:
`python -m support.crowd DEED TICKET COUNT NUMERICS_CLASS`.

It prints `linked` once all keys are linked, then every WAIT_S seconds how many messages of each kind came,
and `said` once all have said what they have to say.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from anabranch import PROTOCOL_VERSION
from anabranch.net.errors import NetError
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.ticket import Ticket, parse_ticket
from anabranch.node.chaos.guests.stranger_attacks import NICENESS, GuestDialer, GuestTransport
from anabranch.protocol import messages as msg
from anabranch.protocol.log.records import Member
from anabranch.protocol.messages import decode, encode

#: Keys that dial at the same time, and seconds between two looks. Plain choices.
DIALLING, WAIT_S = 20, 0.5
#: Addresses, together as long as a joiner may state them.
ADDRESSES = ",".join(f"{'a' * 60}.{'b' * 45}{number}.example:9" for number in range(8))
#: Entries of a message that is nearly as long as it may be, and takes a dozen times that once it is decoded.
ENTRIES = 70_000


def join(number: int, numerics_class: str) -> Iterator[msg.Message]:
    """Ask for a seat, with texts as long as they may be, which are twice as long in the log."""
    text = '"' * 128
    member = Member("", 1, 1, numerics_class, 4, text, text, ADDRESSES, 0.01, '"' * 48, 0.01)
    yield msg.JoinRequest(member, 1, PROTOCOL_VERSION, "", "")


def early(number: int, numerics_class: str) -> Iterator[msg.Message]:
    """Send long messages about iterations that are not open yet, on bases that never come."""
    for t in range(1, 200):
        ways = {index + (1 << 20): (1 << 32) + index for index in range(ENTRIES)}
        yield msg.CallBack(msg.Fence(1, 1, 1 + t % 2, "made up", 1), ways, 1)


DEEDS = {"join": join, "early": early}


async def come(ticket: Ticket, number: int) -> Link:
    """Link of a new key with the ticket's peer."""
    grant, there = ticket.grant, ticket.first_peer
    gate = Gate(grant.run, grant.owner, lambda hello: None)
    while True:
        transport = GuestTransport(Identity.generate(), 1, gate, lambda link: None)
        transport.dialer = GuestDialer(transport, f"127.{1 + number // 200}.{number % 200}.1")
        try:
            return await transport.dial(there.peer_id, there.host, there.port, ticket)
        except NetError:
            await asyncio.sleep(WAIT_S)


async def main(deed: str, ticket: Ticket, count: int, numerics_class: str) -> None:
    os.nice(NICENESS)
    came, turn = Counter[str](), asyncio.Semaphore(DIALLING)
    links: list[Link] = []

    def follow(link: Link) -> None:
        def hear(data: bytes, payload: object) -> None:
            message = decode(data)
            came[type(message).__name__] += 1
            if isinstance(message, msg.Ping):
                link.send(encode(msg.Pong(message.number, 0.0, 0.0)))

        link.start(hear, lambda reason: came.update(["closed"]))

    async def one(number: int) -> None:
        async with turn:
            links.append(link := await come(ticket, number))
        follow(link)

    async def say(number: int, link: Link) -> None:
        for message in DEEDS[deed](number, numerics_class):
            while link.closed_reason is None and not link.control.writable:
                await asyncio.sleep(0.01)
            if link.closed_reason is not None:
                return
            link.send(encode(message))
            await asyncio.sleep(0)

    await asyncio.gather(*map(one, range(count)))
    print("linked", flush=True)
    saying = [asyncio.ensure_future(say(number, link)) for number, link in enumerate(links)]
    while True:
        await asyncio.sleep(WAIT_S)
        print(*(f"{kind}={number}" for kind, number in sorted(came.items())), flush=True)
        if all(task.done() for task in saying):
            print("said", flush=True)


if __name__ == "__main__":
    wanted, shown, number, known = sys.argv[1:]
    asyncio.run(main(wanted, parse_ticket(shown, now_s=time.time()), int(number), known))
