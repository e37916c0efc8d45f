"""Tickets of a run, issued by the founder's process when it starts or by the owner's commands; revocation."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from anabranch.addresses import parse_addresses
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, load_run_file
from anabranch.errors import UserError
from anabranch.net.errors import TicketError
from anabranch.net.identity import Identity
from anabranch.net.ticket import AUDITOR, OPEN, ROLES, PeerAddress, Ticket, issue_ticket, parse_ticket
from anabranch.node.lifecycle import control_file, gate_file
from anabranch.node.lifecycle.create_run import LEADER_NAME, CreatedRun
from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.log.hash_chain import LogError

FILE = "tickets.json"
#: Roles of tickets for runs with audits only, and why.
_AUDITED = {
    OPEN: "an open ticket lets anyone in",
    AUDITOR: "an auditor computes again what audits draw",
}


def issue_tickets(founded: CreatedRun, addresses: str, renew: bool = False) -> dict[str, Ticket]:
    """Tickets by role, written to tickets.json, which only its owner can read. A ticket that is there already
    stays if it still works: it names these addresses of the founder, half of a ticket's time is left, and the
    gate's record has it, not revoked. Others are issued anew and entered in the gate's record. renew: True to
    issue all of them anew. Raises UserError for a damaged gate's record."""
    run_dir, now_s = founded.directory.path, time.time()
    lifetime_s = founded.run.network.ticket_hours * 3600
    me, parsed = founded.identity.peer_id, parse_addresses(addresses)
    peers = tuple(PeerAddress(me, each.host, each.port, each.carrier or each.kind) for each in parsed)
    former = {} if renew else _former(run_dir)
    tickets = {}
    with gate_file.changed(run_dir) as record:
        for role in ROLES:
            ticket = former.get(role)
            if ticket is None or not _works(ticket, founded, peers, now_s + lifetime_s / 2, record):
                ticket = issue_ticket(
                    founded.identity,
                    run=founded.genesis.run,
                    role=role,
                    expires_at_s=int(now_s + lifetime_s),
                    peers=peers,
                )
                record.add(record.free_name(role), ticket.grant)
            tickets[role] = ticket
    handle = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "w", encoding="utf-8") as file:
        json.dump({role: ticket.text for role, ticket in tickets.items()}, file, indent=2)
    return tickets


def _former(run_dir: Path) -> dict[str, Ticket]:
    """Tickets in tickets.json, by role; none if any of them cannot be read."""
    try:
        texts = json.loads((run_dir / FILE).read_text("utf-8"))
        return {role: parse_ticket(texts[role], now_s=0) for role in ROLES}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, TicketError):
        return {}


def _works(
    ticket: Ticket,
    founded: CreatedRun,
    peers: tuple[PeerAddress, ...],
    until_s: float,
    record: gate_file.GateRecord,
) -> bool:
    grant = ticket.grant
    ours = grant.run == founded.genesis.run and grant.owner == founded.identity.peer_id
    issued = record.ticket(grant.ticket_key)
    return (
        ours
        and ticket.peers == peers
        and grant.expires_at_s >= until_s
        and issued is not None
        and not issued.revoked_at_s
    )


def _check_audited(role: str, run: RunConfig) -> None:
    """Raise UserError if tickets of a role that needs audits cannot be issued for a run."""
    if not run.audit.share:
        raise UserError(f"{_AUDITED[role]}, so the run needs audits: set audit.share in a new run's file")
    if role == OPEN and run.round.slots:
        raise UserError(
            "in rounds of islands only an auditor checks the work of guests: issue relay tickets, or set "
            "round.slots = 0 in a new run's file"
        )


def new_ticket(run_dir: Path, role: str, quota: int, lifetime_s: float, name: str = "") -> Ticket:
    """Issue a further ticket of a run that was started, with the addresses of the founder in tickets.json,
    and enter it in the gate's record; tickets.json stays. quota: peers that may be members with it at one
    time (0: any number). lifetime_s: seconds until it expires. name: "" for the role, with a number if a
    ticket has that name. Raises UserError if there is no run directory, the run was never led from it, the
    gate's record is damaged, or the name is in use or ill-formed (`GateRecord.add`); for an open or an
    auditor's ticket of a run without audits, or an open one of a run with rounds. Raises TicketError for an
    unknown role, and a quota or time out of range."""
    directory = RunDirectory.open(run_dir)
    former = _former(run_dir)
    key = directory.peers_path / LEADER_NAME / "key"
    if not former or not key.exists():
        raise UserError(f"{run_dir}: the run was not started yet; start it, then issue tickets")
    if role in _AUDITED:
        _check_audited(role, load_run_file(directory.run_file))
    owner, latest = Identity.load_or_create(key), former["relay"]
    ticket = issue_ticket(
        owner,
        run=latest.grant.run,
        role=role,
        expires_at_s=int(time.time() + lifetime_s),
        quota=quota,
        peers=latest.peers,
    )
    with gate_file.changed(run_dir) as record:
        record.add(name or record.free_name(role), ticket.grant)
    return ticket


def history_of(directory: RunDirectory) -> LogReplay:
    """State of the run by the commit log in its directory, without a line that is being written; that of an
    empty log if there is no log. Raises UserError for a damaged log."""
    try:
        return fold(directory.log.read_bytes().rpartition(b"\n")[0].splitlines())
    except FileNotFoundError:
        return LogReplay()
    except LogError as error:
        raise UserError(f"{directory.log}: {error}; restore the file from a copy") from None


def revoke_ticket(run_dir: Path, name_or_key: str, reason: str) -> gate_file.IssuedTicket:
    """Revoke a ticket: at once if the run is going, else when it is led the next time. A ticket that is
    revoked already keeps its first time and reason, and is requested again. name_or_key: its name, or at
    least the first KEY_CHARS characters of its key. Raises UserError if no ticket, or more than one, has it,
    or there is no run."""
    RunDirectory.open(run_dir)
    with gate_file.changed(run_dir) as record:
        ticket = record.ticket(name_or_key)
        if ticket is None:
            raise UserError(
                f"no ticket, or more than one, is named {name_or_key!r}: `anabranch ticket list {run_dir}` "
                f"shows names and keys (at least {gate_file.KEY_CHARS} characters of a key are needed)"
            )
        if not ticket.revoked_at_s:
            ticket.revoked_at_s, ticket.reason = int(time.time()), reason
    control_file.request_revocation(run_dir, ticket.key, ticket.reason)
    return ticket


def expel(run_dir: Path, id_or_name: str, reason: str) -> gate_file.ExpelledPeer:
    """Expel a peer: at once if the run is going, else when it is led the next time. A peer that is expelled
    already keeps its first time and reason.

    id_or_name: at least KEY_CHARS characters with which the id of a present or former member begins, or the
    name of a member. A whole id is that peer, whatever others call themselves. Raises UserError if no such
    peer, or more than one, exists, or if it is the owner's own.
    """
    history = history_of(RunDirectory.open(run_dir))
    members = history.membership.members
    named = {peer for peer, member in members.items() if id_or_name and member.name == id_or_name}
    if len(id_or_name) >= gate_file.KEY_CHARS:
        named |= {peer for peer in history.membership.ever() if peer.startswith(id_or_name)}
    # Another may call itself by the whole id of this one, so that nobody could expel it.
    found = [id_or_name] if id_or_name in history.membership.ever() else sorted(named)
    if len(found) != 1:
        several = f"{len(found)} peers are" if found else "no ticket and no member is"
        raise UserError(
            f"{several} named {id_or_name!r}: give at least {gate_file.KEY_CHARS} characters of the peer's "
            "id, which the event log shows"
        )
    [peer] = found
    if history.genesis is not None and peer == history.genesis.leader:
        raise UserError("this is the run's own data node: stop the run instead")
    name = members[peer].name if peer in members else ""
    with gate_file.changed(run_dir) as record:
        known = [one for one in record.expelled if one.id == peer]
        expelled = known[0] if known else gate_file.ExpelledPeer(
            id=peer, name=name, expelled_at_s=int(time.time()), reason=reason
        )  # fmt: skip
        record.expelled += [] if known else [expelled]
    control_file.request_revocation(run_dir, peer, expelled.reason)
    return expelled
