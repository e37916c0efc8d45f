"""Ways to the peers of a run: each known address of a peer is tried with the dialer that makes a run's links.

Not here: links (`connections`), and the choice among ways (`protocol.context.carriers`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.addresses import Address, direct_addresses, parse_addresses
from anabranch.net import errors
from anabranch.net.errors import DialError, NetError, Refused
from anabranch.net.handshake import Credential
from anabranch.net.link import Link
from anabranch.net.tcp.transport import TcpTransport
from anabranch.observe.wording import ID_DIGITS
from anabranch.protocol.messages import About, Elsewhere, Enquire, MessageError, Reached, decode, encode

#: Seconds that iroh gets to find a direct path, once its relay has connected two peers. A choice: a few times
#: the seconds that it took behind the NATs of `benchmarks.reach.nat_pairs`.
PUNCH_S = 3.0
#: Seconds between looks for that path.
LOOK_S = 0.1
#: Seconds for the leader's answers; it may try this machine's addresses for ten.
ANSWER_S = 15.0

_NEW_TICKET = "ask the run's owner for a new ticket"
#: Repairs by kind of refusal, and by step of a dial.
_REFUSALS = {
    errors.SERVER_KEY: "the address is another machine's in this network, or a proxy opens TLS connections: "
    "try another network, or ask for another address",
    errors.VERSION: "install the release that the run uses",
    errors.EXPIRED: _NEW_TICKET,
    errors.TICKET: _NEW_TICKET,
    errors.NOT_AUTHORIZED: _NEW_TICKET,
    errors.BUSY: "try again in a minute",
}
_STEPS = {
    errors.NAME: "check the name, and that this machine can look names up",
    errors.TCP: "nothing came back: a firewall here or there drops it, or the machine is off; if only port "
    "443 is let out, ask for a carrier that listens there",
    errors.TLS_STEP: "no peer answers there: another program has that port, or a proxy opens TLS connections",
    errors.CIRCUIT: "the carrier is there: check that the peer runs and is connected to it",
    errors.INNER_TLS: "the carrier is there, and the peer did not answer through it: try again",
    errors.IROH: "let UDP out, and HTTPS to the iroh relay",
}
_REFUSED = "nothing listens there: check that it is running, and its port"


@dataclass(frozen=True)
class Attempt:
    """Outcome of a dial of one address of a peer. how: the way, for a sentence ("directly"); "" if it failed.
    seconds: until the peer had proved its key. reason, repair: of a failure."""

    address: Address
    how: str
    seconds: float
    reason: str = ""
    repair: str = ""


async def attempts(
    transport: TcpTransport, peer: str, addresses: Sequence[Address], credential: Credential
) -> list[Attempt]:
    """Try all addresses of a peer at once; the connections are closed when the peer has proved its key."""
    return list(await asyncio.gather(*(_attempt(transport, peer, each, credential) for each in addresses)))


async def _attempt(transport: TcpTransport, peer: str, address: Address, credential: Credential) -> Attempt:
    began = time.monotonic()
    try:
        lane = await transport.dialer.reach(peer, address, credential)
    except NetError as error:
        return Attempt(address, "", time.monotonic() - began, str(error), repair_of(error))
    took = time.monotonic() - began
    how = await _how(transport, peer, address)
    lane.transport.abort()
    return Attempt(address, how, took)


async def _how(transport: TcpTransport, peer: str, address: Address) -> str:
    """Way of a connection to a peer at an address. Through iroh it begins at the relay, and may move."""
    if address.kind and transport.engine is not None:
        paths, until = transport.engine.paths, time.monotonic() + PUNCH_S
        while paths.get(peer, "relay") == "relay" and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        path = paths.get(peer, "relay")
        return f"through iroh's relay {address.where}" if path == "relay" else f"through iroh, at {path}"
    return way_of(address)


def way_of(address: Address) -> str:
    """Way that an address names, for a sentence."""
    if address.kind:
        return f"through iroh ({address.where})"
    if address.carrier:
        return f"through carrier {address.carrier[:ID_DIGITS]} at {address.where}"
    return f"directly, at {address.where}"


def repair_of(error: NetError) -> str:
    """Repair for the failed dial of one address; "" if none is known."""
    refusal = error if isinstance(error, Refused) else error.__cause__
    if isinstance(refusal, Refused) and refusal.kind in _REFUSALS:
        return _REFUSALS[refusal.kind]
    if isinstance(error.__cause__ or error.__context__, ConnectionRefusedError):
        return _REFUSED
    return _STEPS.get(error.step, "") if isinstance(error, DialError) else ""


def told(tried: Sequence[Attempt]) -> str:
    """Attempts as a sentence: the ways that work, in order of preference, then those that do not, and why."""
    good = [f"{each.how} ({1000 * each.seconds:.0f} ms)" for each in tried if each.how]
    bad = [f"not at {each.address.where}: {each.reason}" for each in tried if not each.how]
    return "; ".join([*good, *bad]) or "it has named no address"


def through(direct: str, carrier: str) -> list[Address]:
    """Addresses of a peer that is reached through the peer `carrier`, whose addresses are `direct`."""
    return [Address(each.host, each.port, carrier) for each in parse_addresses(direct_addresses(direct))]


@dataclass(frozen=True)
class Enquiry:
    """Answers of a run's leader. leader, addresses: of the peer that answered. reached: None if this machine
    named no address."""

    leader: str
    addresses: str
    link: Link
    about: About
    reached: Reached | None


async def enquire(
    transport: TcpTransport, leader: str, addresses: str, credential: Credential, own: str = ""
) -> Enquiry:
    """Ask the run's leader what the run is, and to dial this machine back at its addresses `own`, without
    joining. leader, addresses: of a peer that knows the leader. The link is left open. Raises NetError,
    within the times of a dial and ANSWER_S for each peer that has to be asked."""
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
    """Answers to an enquiry, a redirect, or the reason why there is no answer."""
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
