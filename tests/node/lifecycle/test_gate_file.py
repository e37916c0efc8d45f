"""The owner's commands on a stopped run: tickets issued, listed and revoked, peers expelled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.net.handshake import Hello
from anabranch.net.identity import Identity
from anabranch.net.ticket import ROLES, MembershipCertificate, PeerAddress, issue_ticket, parse_ticket
from anabranch.node.lifecycle import control_file, gate_file
from anabranch.node.lifecycle.join import door_of
from anabranch.node.lifecycle.tickets import expel, new_ticket
from anabranch.node.operator.owner_actions import LeaderOwner
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.log.records import AnyRecord, Entry, Member, Members, encode_entry, entry_hash
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.workers.integer_world import genesis_of

ADA, BOB, EVE, MALLORY = "a1" * 32, "b2" * 32, "e5" * 32, "d4" * 32


def write_log(path: Path, records: Sequence[AnyRecord]) -> None:
    previous = Position().previous
    with path.open("wb") as file:
        for index, record in enumerate(records):
            line = encode_entry(Entry(index=index, term=1, previous=previous, record=record))
            file.write(line + b"\n")
            previous = entry_hash(line)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A stopped run of which the log has four members besides the founder."""
    directory = RunDirectory.create(tmp_path / "run")
    owner = Identity.load_or_create(directory.peer("data-0") / "key")
    door = [PeerAddress(owner.peer_id, "192.0.2.1", 7700)]
    texts = {
        role: issue_ticket(owner, run="lab-1", role=role, expires_at_s=int(time.time()) + 60, peers=door).text
        for role in ROLES
    }
    (directory.path / "tickets.json").write_text(json.dumps(texts))
    lab = new_ticket(directory.path, "relay", 2, 7 * 86400.0, "lab").grant.ticket_key
    members = (
        Member(owner.peer_id, 0, 1, "class", 1, "data-0"),
        Member(ADA, 1, 1, "class", 1, "ada", ticket=lab),
        Member(BOB, 1, 1, "class", 1, "bob"),
        Member(EVE, 1, 1, "class", 1, BOB[:12], ticket=lab),
        Member(MALLORY, 1, 1, "class", 1, EVE),
    )
    genesis = genesis_of(Settings("lab-1", 1, 1, 4, 3), owner.peer_id)
    write_log(directory.log, [genesis, Members(1, joined=members)])
    return directory.path


def requests(run_dir: Path) -> list[dict[str, object]]:
    path = run_dir / control_file.FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_new_ticket_names_the_runs_address_and_its_quota(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--role", "data", "--quota", "5", "--expires", "12h", "--name", "school"]
    assert main(["ticket", "new", str(run_dir), *arguments]) == 0
    ticket = parse_ticket(capsys.readouterr().out.removeprefix("anabranch join "), now_s=time.time())
    grant = ticket.grant
    assert (grant.run, grant.role, grant.quota, ticket.first_peer.host) == ("lab-1", "data", 5, "192.0.2.1")
    assert 12 * 3600 - 60 < grant.expires_at_s - time.time() <= 12 * 3600
    assert (run_dir / gate_file.FILE).stat().st_mode & 0o777 == 0o600
    written = (run_dir / gate_file.FILE).read_text()
    assert grant.ticket_key in written and ticket.text not in written

    assert main(["ticket", "list", str(run_dir), "--json"]) == 0
    lab, school = json.loads(capsys.readouterr().out)["tickets"]
    assert lab["name"] == "lab" and lab["members"] == [ADA, EVE]
    assert school["name"] == "school" and school["quota"] == 5 and school["members"] == []
    assert main(["ticket", "list", str(run_dir)]) == 0
    listed = capsys.readouterr().out
    assert "2 of 2 expires in 7d" in listed and "0 of 5 expires in 12h" in listed


def test_a_ticket_is_revoked_by_name_or_key_and_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = gate_file.read(run_dir).tickets[0].key
    assert main(["ticket", "revoke", "lab", str(run_dir), "--reason", "the course is over"]) == 0
    assert "members that came with it: 2" in capsys.readouterr().out
    assert main(["ticket", "revoke", key[:8], str(run_dir), "--reason", "again"]) == 0
    assert gate_file.read(run_dir).revocations() == {key: "the course is over"}
    wanted = {"action": "revoke", "steps": 0, "target": key, "reason": "the course is over"}
    assert requests(run_dir) == [wanted, wanted]
    assert main(["ticket", "list", str(run_dir)]) == 0
    assert "revoked" in capsys.readouterr().out


def test_peers_are_expelled_by_id_or_by_a_name_that_only_one_has(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody who calls itself as another's id begins gets nobody else expelled, and keeps nobody by calling
    itself by the whole id."""
    assert main(["expel", "ada", str(run_dir)]) == 0
    assert "its ticket lab still lets others in" in capsys.readouterr().out
    assert main(["expel", BOB[:12], str(run_dir)]) == 2
    assert "2 peers are named" in capsys.readouterr().err
    assert LeaderOwner(run_dir).ask("expel", EVE) == ""
    assert set(gate_file.read(run_dir).revocations()) == {ADA, EVE}
    with pytest.raises(UserError, match="stop the run instead"):
        expel(run_dir, "data-0", "by mistake")
    for nobody in ("", "../data-0", "*", "f" * 64, "\ud800"):
        assert "no member" in LeaderOwner(run_dir).ask("expel", nobody)
    assert main(["expel", "lab", str(run_dir)]) == 0
    assert [request["target"] for request in requests(run_dir)][:2] == [ADA, EVE]
    assert gate_file.read(run_dir).tickets[0].revoked_at_s


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "RUN", "--expires", "soon"], "write a number and m, h, d or w"),
        (["new", "RUN", "--expires", "0d"], "at least a minute"),
        (["new", "RUN", "--quota", "-1"], "--quota -1"),
        (["new", "RUN", "--name", "lab"], "there is a ticket named 'lab' already"),
        (["new", "RUN", "--name", "a\x1b[2J"], "printable"),
        (["revoke", "nobody", "RUN"], "no ticket, or more than one"),
        (["revoke", "lab", "RUN", "--reason", "\x1b]0;"], "--reason"),
    ],
)
def test_bad_input(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    before = (run_dir / gate_file.FILE).read_bytes()
    assert main(["ticket", *(str(run_dir) if word == "RUN" else word for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error
    assert (run_dir / gate_file.FILE).read_bytes() == before


def test_tickets_nested_without_end_are_none(run_dir: Path) -> None:
    """In a directory that somebody else made."""
    (run_dir / "tickets.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="was not started yet"):
        new_ticket(run_dir, "relay", 1, 60.0)


def test_a_damaged_file_or_one_of_another_version_is_refused(run_dir: Path) -> None:
    for content in ("{", '{"version": 2, "tickets": [], "expelled": []}'):
        (run_dir / gate_file.FILE).write_text(content)
        with pytest.raises(UserError, match=gate_file.FILE):
            gate_file.read(run_dir)


def test_a_run_that_was_never_started_has_no_tickets(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "new")
    with pytest.raises(UserError, match="not started yet"):
        new_ticket(directory.path, "relay", 0, 3600.0)


def test_revocations_of_a_stopped_run_are_asked_for_when_it_is_led(run_dir: Path) -> None:
    """First those in the record, then what is appended; lines that are no requests are skipped."""
    key = gate_file.read(run_dir).tickets[0].key
    assert main(["ticket", "revoke", "lab", str(run_dir), "--reason", "the course is over"]) == 0
    asked: list[ev.Event] = []

    class Live:
        handle = asked.append

    async def scenario() -> None:
        task = asyncio.create_task(control_file.follow(Live(), run_dir))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert asked == [ev.Wished("revoke", 0, key, "the course is over")]
        with (run_dir / control_file.FILE).open("a") as file:
            file.write('{"action": "revoke", "target": "everybody"}\n{"action": "revoke"}\n')
        assert main(["expel", "bob", str(run_dir)]) == 0
        while len(asked) < 2:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20.0))
    assert asked[1:] == [ev.Wished("revoke", 0, BOB, "no reason given")]


def test_the_door_of_a_resumed_run_is_shut_before_the_log_has_the_revocation(run_dir: Path) -> None:
    key = gate_file.read(run_dir).tickets[0].key
    assert main(["ticket", "revoke", "lab", str(run_dir)]) == 0
    assert main(["expel", "bob", str(run_dir)]) == 0
    peer = Peer("d0", 1, "d0", Settings("lab-1", 1, 1, 4, 3))
    door = door_of(peer, gate_file.read(run_dir).revocations())

    def knocks(who: str, ticket: str) -> str | None:
        shown = MembershipCertificate("lab-1", who, "relay", 1 << 40, "d0", ticket)
        return door(Hello(who, 1, "lab-1", "control", b"", shown))

    assert "revoked this peer's ticket" in (knocks(EVE, key) or "")
    assert "expelled this peer" in (knocks(BOB, "") or "")
    assert knocks(ADA, "") is None
    peer.ctx.run.revoked.add({ADA: "by the log"})
    assert "by the log" in (knocks(ADA, "") or "")
