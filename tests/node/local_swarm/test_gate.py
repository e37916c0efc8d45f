"""A run's gate with real processes: quota of a ticket, and its revocation while the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.net.errors import Refused
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket, issue_certificate
from anabranch.node.lifecycle import gate_file
from anabranch.node.lifecycle.tickets import history_of, new_ticket
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import PeerJoined, PeerRemoved
from anabranch.protocol.log.records import Member
from support.local_swarms import PATIENCE_S, Swarm, created, small_run, swarm_of
from support.unhurried_peer import run_unhurried_peer


def until(swarm: Swarm, reached: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    patience = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < patience, swarm.story()
        time.sleep(0.1)


def last_words(swarm: Swarm, name: str) -> str:
    """Output of a process that is to end by itself."""
    process = swarm.processes[name]
    until(swarm, lambda: not process.running)
    return process.log.read_text(errors="replace")


def named(directory: RunDirectory, name: str) -> Member | None:
    """Member with this name that serves, by the log."""
    membership = history_of(directory).membership
    serving = [membership.members[peer] for peer in membership.active_from]
    return next((member for member in serving if member.name == name), None)


def doors_are_shut(directory: RunDirectory, ticket: Ticket) -> None:
    """Every member refuses a new key with the revoked ticket, and a certificate that descends from it."""
    history = history_of(directory)
    assert history.genesis is not None
    run, owner = history.genesis.run, Identity.load_or_create(directory.peer("data-0") / "key")
    mallory = Identity.generate()
    certificate = issue_certificate(
        owner, run=run, peer_id=mallory.peer_id, role="relay",
        expires_at_s=int(time.time()) + 3600, ticket=ticket.grant.ticket_key,
    )  # fmt: skip

    async def knock() -> list[str]:
        gate = Gate(run, owner.peer_id, lambda hello: None)
        transport, said = TcpTransport(mallory, 1, gate, lambda link: None), []
        for member in history.membership.members.values():
            host, _, port = member.address.rpartition(":")
            for credential in (ticket, certificate):
                with pytest.raises(Refused) as refusal:
                    await transport.dial(member.id, host, int(port), credential)
                said.append(str(refusal.value))
        await transport.close()
        return said

    said = asyncio.run(knock())
    assert len(said) == 6 and all("revoked this peer's ticket: the course is over" in words for words in said)


def test_quota_revocation_and_the_run_goes_on(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """The second relay of a quota-1 ticket is refused; the first is removed when the ticket is revoked, and
    cannot come back, under its key or another. Every step is committed all the same."""
    run = small_run(texts, run__steps=100_000, fleet__relays_per_stage=[1, 1], checkpoint__every=1000)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, target=run_unhurried_peer) as swarm:
        until(swarm, lambda: history_of(directory).t > 0)
        guest = new_ticket(directory.path, "relay", 1, 3600.0, "lab")
        assert (directory.path / gate_file.FILE).stat().st_mode & 0o077 == 0
        assert guest.text not in (directory.path / gate_file.FILE).read_text()
        swarm.join("guest", guest.text, ["--stage", "1"])
        until(swarm, lambda: named(directory, "guest") is not None)
        member = named(directory, "guest")
        assert member is not None and member.ticket == guest.grant.ticket_key

        swarm.join("second", guest.text, ["--stage", "1"])
        assert "your ticket has a quota of 1" in last_words(swarm, "second")

        assert main(["ticket", "revoke", "lab", str(directory.path), "--reason", "the course is over"]) == 0
        until(swarm, lambda: member.id not in history_of(directory).membership.members)
        assert "revoked this peer's ticket: the course is over" in last_words(swarm, "guest")
        for name in ("guest", "third"):
            swarm.join(name, guest.text, ["--stage", "1"])
            assert "revoked this peer's ticket: the course is over" in last_words(swarm, name)
        doors_are_shut(directory, guest)
        since = history_of(directory).t
        until(swarm, lambda: history_of(directory).t > since + 2)
    assert guest.grant.ticket_key in history_of(directory).revoked
    [removed] = [e for e in events_of(directory.events, PeerRemoved) if e.subject == member.id]
    assert "the course is over" in removed.reason
    joined = [e.name for e in events_of(directory.events, PeerJoined)]
    assert sorted(joined) == ["data-0", "guest", "relay-1.0", "relay-2.0"]
