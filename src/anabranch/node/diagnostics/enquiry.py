"""Enquiry of a run's leader by a machine that does not join."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from anabranch.addresses import direct_addresses, parse_addresses
from anabranch.net.errors import DialError
from anabranch.net.handshake import Credential
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.observe.wording import ID_DIGITS
from anabranch.protocol.messages import About, Elsewhere, Enquire, MessageError, Reached, decode, encode

#: Seconds for the leader's answers; it may try this machine's addresses for ten.
ANSWER_S = 15.0


@dataclass(frozen=True)
class Enquiry:
    """Answers of a run's leader. leader, addresses: of the peer that answered. link: to it, open, for the
    caller to close. about: what the run is. reached: which of this machine's addresses the leader could dial;
    None if this machine named none."""

    leader: str
    addresses: str
    link: Link
    about: About
    reached: Reached | None


async def enquire(
    transport: TcpTransport, leader: str, addresses: str, credential: Credential, own: str = ""
) -> Enquiry:
    """Ask the run's leader what the run is, and to dial this machine back at its addresses `own`, without
    joining. leader, addresses: of a peer that knows the leader. The link is left open. Raises ValueError for
    `addresses` that cannot be parsed, NetError if nobody answers, within the times of a dial and ANSWER_S for
    each peer that has to be asked."""
    asked: set[str] = set()
    while True:
        link = await transport.dial_any(leader, parse_addresses(addresses), credential)
        try:
            found = await asyncio.wait_for(_answers(link, own), ANSWER_S)
        except asyncio.TimeoutError:
            found = f"no answer within {ANSWER_S:g} s"
        asked.add(leader)
        if isinstance(found, Elsewhere) and found.address and found.leader not in asked:
            link.close("another peer leads")
            leader, addresses = found.leader, found.address
            continue
        if isinstance(found, tuple):
            return Enquiry(leader, addresses, link, *found)
        link.close("no answer")
        why = found if isinstance(found, str) else "it knows of no leader"
        raise DialError(f"{leader[:ID_DIGITS]} was reached and did not tell about the run: {why}")


async def _answers(link: Link, own: str) -> tuple[About, Reached | None] | Elsewhere | str:
    """Answers to an enquiry over `link`, which is started here: what the run is, and which of this machine's
    addresses `own` the leader could dial (None: none was to be tried). Or a redirect to the leader, or the
    reason why there is no answer."""
    inbox: asyncio.Queue[bytes | str] = asyncio.Queue()
    link.start(lambda data, blob: inbox.put_nowait(data), inbox.put_nowait)
    link.send(encode(Enquire(own)))
    about: About | None = None
    reached: Reached | None = None
    while about is None or (direct_addresses(own) and reached is None):
        data = await inbox.get()
        if isinstance(data, str):
            return f"it closed the connection ({data})"
        try:
            message = decode(data)
        except MessageError as error:
            return str(error)
        if isinstance(message, Elsewhere):
            return message
        about = message if isinstance(message, About) else about
        reached = message if isinstance(message, Reached) else reached
    return about, reached
