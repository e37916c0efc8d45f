"""Ways to a peer: each of its addresses is tried with the dialer that makes links. Not here: links, and the
choice among ways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.addresses import Address
from anabranch.net import errors
from anabranch.net.errors import DialError, NetError, Refused
from anabranch.net.handshake import Credential
from anabranch.net.tcp.transport import TcpTransport

#: Seconds that iroh gets to find a direct path, once its relay has connected two peers. A choice: a few times
#: the seconds that it took behind the NATs of `benchmarks.reach.nat_pairs`.
PUNCH_S = 3.0
#: Seconds between looks for that path.
LOOK_S = 0.1
#: Digits of a carrier's id in a sentence.
_DIGITS = 8

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
    seconds: until the peer had proved its key, or the dial had failed. reason: of a failure, "" else. repair:
    what the user can do about it, "" if that is not known."""

    address: Address
    how: str
    seconds: float
    reason: str = ""
    repair: str = ""


async def attempts(
    transport: TcpTransport, peer: str, addresses: Sequence[Address], credential: Credential
) -> list[Attempt]:
    """Outcomes, in the order of `addresses`, of dialling all addresses of a peer at once; failures are
    outcomes, too. credential: shown to carriers. The connections are closed when the peer has proved its key;
    through iroh a direct path is waited for first."""
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
    """Way of a connection to a peer at an address, for a sentence. Through iroh a connection begins at the
    relay: a direct path is waited for, up to PUNCH_S."""
    if address.kind and transport.engine is not None:
        paths, until = transport.engine.paths, time.monotonic() + PUNCH_S
        while paths.get(peer, "relay") == "relay" and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        path = paths.get(peer, "relay")
        return f"through iroh's relay {address.where}" if path == "relay" else f"through iroh, at {path}"
    return way_of(address)


def way_of(address: Address) -> str:
    """Words for the way that an address names, such as "directly, at HOST:PORT" or "through carrier ID at
    HOST:PORT"."""
    if address.kind:
        return f"through iroh ({address.where})"
    if address.carrier:
        return f"through carrier {address.carrier[:_DIGITS]} at {address.where}"
    return f"directly, at {address.where}"


def repair_of(error: NetError) -> str:
    """Repair for the failed dial of one address, in words for the user, by the kind of refusal or the step
    that failed; "" if none is known."""
    refusal = error if isinstance(error, Refused) else error.__cause__
    if isinstance(refusal, Refused) and refusal.kind in _REFUSALS:
        return _REFUSALS[refusal.kind]
    if isinstance(error.__cause__ or error.__context__, ConnectionRefusedError):
        return _REFUSED
    return _STEPS.get(error.step, "") if isinstance(error, DialError) else ""


def told(tried: Sequence[Attempt]) -> str:
    """Outcomes of dials of one peer as a sentence: the ways that work, in the order given, then those that do
    not, and why. Without any it says that the peer named no address."""
    good = [f"{each.how} ({1000 * each.seconds:.0f} ms)" for each in tried if each.how]
    bad = [f"not at {each.address.where}: {each.reason}" for each in tried if not each.how]
    return "; ".join([*good, *bad]) or "it has named no address"
