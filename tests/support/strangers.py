"""Process of strangers that attack a live run at the same time, each in a way of its own:
`python -m support.strangers TICKET ...`."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from anabranch.net.ticket import parse_ticket
from anabranch.node.chaos.guests.stranger_attacks import ATTACKS, NICENESS, attack


async def main() -> None:
    os.nice(NICENESS)
    tickets = [parse_ticket(text, now_s=time.time()) for text in sys.argv[1:]]
    await asyncio.gather(*(attack(ticket, deed) for ticket, deed in zip(tickets, ATTACKS, strict=False)))


if __name__ == "__main__":
    asyncio.run(main())
