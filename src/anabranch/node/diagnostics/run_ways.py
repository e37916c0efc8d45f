"""Checks of the ways between this machine and the peers of a run, before it takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from anabranch import PROTOCOL_VERSION
from anabranch.addresses import Address, direct_addresses, parse_addresses
from anabranch.errors import UserError
from anabranch.net.errors import ListenError, NetError
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.iroh.engine import IrohEngine, installed
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.tcp.ways import Attempt, attempts, repair_of, told
from anabranch.net.ticket import Ticket
from anabranch.node.diagnostics.check_result import GREEN, RED, YELLOW, CheckResult
from anabranch.node.diagnostics.enquiry import Enquiry, enquire
from anabranch.node.driver.event_loop import run_async
from anabranch.node.lifecycle.addresses import relay_of, started_engine
from anabranch.observe.wording import ID_DIGITS

_ONLY_CHECKS = "this machine only checks its ways"
_FORWARD = "forward the port on the router and name the public address: --advertise my.host:port"


def ways_of_run(ticket: Ticket, host: str, port: int, own: str) -> list[CheckResult]:
    """Try each address of each peer and carrier that a ticket names; ask the run's leader for further peers,
    and try these; have the leader dial this machine back. With a ticket to watch the leader is not asked.
    Nothing is joined, and no quota used. A check is RED if no way leads to a peer that the ticket names, if
    the run cannot be asked or is of another protocol version, or if this machine cannot listen. Blocks, and
    runs an event loop of its own.

    host, port: where this machine listens meanwhile. own: addresses at which the leader is to dial it, with
    commas between; "" for none.
    """
    return run_async(_checks(ticket, host, port, own))


async def _checks(ticket: Ticket, host: str, port: int, own: str) -> list[CheckResult]:
    identity, grant = Identity.generate(), ticket.grant  # not this machine's peer, which may be running
    results: list[CheckResult] = []
    engine = await _engine(identity, ticket, results)
    gate = Gate(grant.run, grant.owner, lambda hello: _ONLY_CHECKS)
    transport = TcpTransport(identity, 1, gate, lambda link: link.close(_ONLY_CHECKS), engine=engine)
    try:
        if own:
            try:
                await transport.listen(host, port)
            except ListenError as error:
                results.append(CheckResult("dialled back", RED, str(error), "choose another --port"))
                own = ""
        for peer, addresses in ticket.addresses_of_peers.items():
            tried = await attempts(transport, peer, addresses, ticket)
            results.append(_way(peer, tried, "the run's data node" if peer == grant.owner else "", RED))
        if grant.role != "watch":
            results += await _of_run(transport, ticket, own)
        return results
    finally:
        await transport.close()


async def _engine(identity: Identity, ticket: Ticket, results: list[CheckResult]) -> IrohEngine | None:
    """Started iroh endpoint for these checks; None if the ticket names no iroh relay, or iroh is not
    installed or cannot start. Adds a check with the outcome to `results` if the ticket names a relay."""
    relay = relay_of(ticket.first_addresses)
    if relay is None:
        return None
    if not installed():
        repair = "to punch holes: pip install 'anabranch[iroh]'"
        found = f"not installed; the run uses it, with the relay {relay.relay_url}"
        results.append(CheckResult("iroh", YELLOW, found, repair))
        return None
    try:
        engine = await started_engine(identity, relay, "", True, lambda text: None)
    except UserError as error:
        results.append(CheckResult("iroh", YELLOW, str(error), "join --transport tcp does without"))
        return None
    results.append(CheckResult("iroh", GREEN, f"started; the run's relay is {relay.relay_url}"))
    return engine


def _way(peer: str, tried: Sequence[Attempt], role: str, none: str) -> CheckResult:
    """Check of the ways to one peer. tried: outcomes of the dials of its addresses. role: of the peer, for
    the user. none: verdict if no way leads there."""
    works = any(each.how for each in tried)
    repairs = list(dict.fromkeys(each.repair for each in tried if each.repair))
    found = f"{role}: {told(tried)}" if role else told(tried)
    if not works:
        found = f"no way leads there; {found}"
    repair = "" if works else "; ".join(repairs)
    return CheckResult(f"way to {peer[:ID_DIGITS]}", GREEN if works else none, found, repair)


async def _of_run(transport: TcpTransport, ticket: Ticket, own: str) -> list[CheckResult]:
    """Checks of what the run's leader answers: the run, this machine's own addresses, and the ways to members
    that keep the run's log."""
    try:
        found = await enquire(transport, ticket.first_peer.peer_id, ticket.first_addresses, ticket, own)
    except NetError as error:
        return [CheckResult("run", RED, f"it cannot be asked: {error}", repair_of(error))]
    try:
        genesis = found.about.genesis
        results = [_release(genesis.run, genesis.protocol_version)]
        if found.reached is not None:
            results.append(_dialled_back(found, own))
        known = ticket.addresses_of_peers
        for peer, text in found.about.doors:
            if peer not in known:
                tried = await attempts(transport, peer, _candidates(text, found), ticket)
                results.append(_way(peer, tried, "a member that keeps the log", YELLOW))
        return results
    finally:
        found.link.close(_ONLY_CHECKS)


def _candidates(text: str, found: Enquiry) -> list[Address]:
    """Addresses to try for a member of the run: those in `text` (none if it cannot be parsed), then each
    direct address of the leader that answered (`found`) as a carrier."""
    own: list[Address] = []
    with contextlib.suppress(ValueError):
        own = list(parse_addresses(text))
    leader = parse_addresses(direct_addresses(found.addresses))
    return own + [Address(each.host, each.port, found.leader) for each in leader]


def _release(run: str, version: int) -> CheckResult:
    if version == PROTOCOL_VERSION:
        return CheckResult("run", GREEN, f"{run} answers, with protocol version {version}")
    found = f"{run} speaks protocol version {version}, this release {PROTOCOL_VERSION}"
    return CheckResult("run", RED, found, "install the release that the run uses")


def _dialled_back(found: Enquiry, own: str) -> CheckResult:
    assert found.reached is not None
    who, reached = f"by the run's leader {found.leader[:ID_DIGITS]}", found.reached
    missed = f"; not {reached.reason}" if reached.reason else ""
    if reached.addresses:
        return CheckResult("dialled back", GREEN, f"{who}, at {reached.addresses}{missed}")
    text = f"not {who}, at {own} ({reached.reason}): others reach this machine through a carrier"
    return CheckResult("dialled back", YELLOW, text, _FORWARD)
