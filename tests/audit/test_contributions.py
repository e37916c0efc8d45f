"""Contributions on record: what a log gives each person, with rollbacks, shared names, audits
and revocations; the forms in which the command shows them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from anabranch.audit.contributions import Ledger, as_dict, ledger
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.ledger import table
from anabranch.cli.main import main
from anabranch.config import RunConfig, render_run_file
from anabranch.node.lifecycle.gate_file import GateRecord, IssuedTicket
from anabranch.observe.event_log import EventLog
from anabranch.observe.events import Audit
from anabranch.protocol.log.records import AnyRecord, Revoke, Rollback, Slot, entry_hash
from support.hand_made_logs import chained, genesis, joined, step

DATA = (["d"], [0] * 8, ())


def counted(*records: AnyRecord, audits: Sequence[Audit] = ()) -> Ledger:
    return ledger(chained([genesis(), joined(1, ("d", 0, "dora", "")), *records]), audits, 16)


def units(found: Ledger) -> dict[str, int]:
    return {each.sources[0].name: each.total for each in found.people()}


def test_units_tokens_steps_and_shares_are_those_of_the_commits() -> None:
    crew = joined(2, ("a", 1, "ada", "T1"), ("b", 1, "bob", "T2"))
    first = step(1, DATA, (["a", "b"], [0, 0, 0, 1], ["r", ""]))
    second = step(2, DATA, (["a", "b"], [0, 0, 1, 1], ["r", "r"]))
    found = counted(crew, first, second)
    dora, ada, bob = found.people()
    assert (ada.total, ada.tokens, ada.steps, ada.signed) == (5, 80, {1, 2}, 5)
    assert (bob.total, bob.tokens, bob.signed) == (3, 48, 2)
    assert found.shares(ada) == {1: 5 / 8} and found.shares(dora) == {0: 1.0}
    assert (dora.total, dora.tokens) == (16, 8 * 16)
    assert sum(each.tokens for each in (ada, bob)) == 2 * 4 * 16


def test_commits_that_a_rollback_made_void_count_for_nobody() -> None:
    crew = joined(2, ("a", 1, "ada", ""), ("b", 1, "bob", ""))
    by_a, by_b = (["a", "b"], [0] * 4, ()), (["a", "b"], [1] * 4, ())
    void = [step(2, DATA, by_a), Rollback(1, 1, "", ())]
    found = counted(crew, step(1, DATA, by_a), *void, step(2, DATA, by_b))
    assert units(found) == {"dora": 16, "ada": 4, "bob": 4}
    assert (found.steps, found.rolled_back) == (2, 1)


def test_peers_of_one_name_are_one_person_only_with_one_ticket() -> None:
    crew = joined(2, ("a", 1, "ada", "T1"), ("b", 1, "ada", "T1"), ("c", 1, "ada", "T2"), ("e", 1, "", "T2"))
    found = counted(crew, step(1, DATA, (["a", "b", "c", "e"], [0, 1, 2, 3], ())))
    ada = [each for each in found.people() if each.sources[0].name == "ada"]
    assert sorted((each.sources[0].ticket, each.total, each.peers) for each in ada) == [
        ("T1", 2, ["a", "b"]),
        ("T2", 1, ["c"]),
    ]
    by_ticket = {each.sources[0].ticket: each.total for each in found.tickets()}
    assert by_ticket == {"": 8, "T1": 2, "T2": 2}


def test_work_keeps_the_name_and_ticket_that_its_peer_had_then() -> None:
    work = (["a"], [0] * 4, ())
    found = counted(joined(2, ("a", 1, "ada", "T1")), step(1, DATA, work), joined(3, ("a", 1, "eve", "T2")),
                    step(2, DATA, work))  # fmt: skip
    assert units(found) == {"dora": 16, "ada": 4, "eve": 4}


def test_audits_count_units_once_and_convictions_need_two_auditors_and_a_revocation() -> None:
    crew = joined(2, *((peer, 1, peer, "T") for peer in ("a", "b", "c", "e")))
    part = (["a", "b", "c", "e"], [0, 0, 1, 2], ["r"] * 4)
    log = [genesis(), joined(1, ("d", 0, "dora", "")), crew, step(1, DATA, part), step(2, DATA, part),
           Rollback(1, 1, "", ()), Revoke("b", "two found it different"), Revoke("c", "rude")]  # fmt: skip
    lines = chained(log)
    one, two = entry_hash(lines[3]), entry_hash(lines[4])

    def audit(base: str, subject: str, auditor: str, verdict: str) -> Audit:
        return Audit(t=1, stage=1, base=base, subject=subject, auditor=auditor, verdict=verdict)

    audits = [audit(one, "a", "b", "same"), audit(one, "a", "c", "same"), audit(two, "a", "c", "same"),
              audit(two, "b", "a", "different"), audit(two, "b", "c", "different"),
              audit(two, "c", "a", "different"), audit(two, "e", "a", "unable")]  # fmt: skip
    found = {row.sources[0].peer: row for row in ledger(lines, audits, 16).rows}
    assert (found["a"].audited, found["a"].verdicts["same"], found["a"].state) == (2, 3, "")
    assert (found["b"].audited, found["b"].verdicts["different"], found["b"].state) == (0, 2, "convicted")
    assert (found["c"].state, found["c"].revoked) == ("revoked", "rude")
    assert (found["e"].total, found["e"].state, found["e"].verdicts["unable"]) == (0, "", 1)


def test_a_revoked_ticket_is_told_of_all_its_peers_with_and_without_work() -> None:
    crew = joined(2, ("a", 1, "ada", "T1"), ("b", 1, "bob", "T2"), ("c", 1, "cy", "T2"))
    log = [crew, step(1, DATA, (["a"], [0] * 4, ())), Revoke("T1", "over"), Revoke("c", "gone")]
    found = {each.sources[0].name: each.state for each in counted(*log).people()}
    assert found == {"dora": "", "ada": "revoked", "cy": "revoked"}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Run directory with a hand-made log: a long name, a formula for a name, a named ticket, a convict."""
    key = "ab" * 32
    directory = RunDirectory.create(tmp_path / "run")
    directory.run_file.write_text(render_run_file(RunConfig()))
    crew = joined(2, ("a" * 64, 1, "a name of many words \x1b[31m, longer than its column", key),
                  ("b" * 64, 1, "=1+1", "cd" * 32))  # fmt: skip
    part = (["a" * 64, "b" * 64], [0, 0, 0, 1], ["r", ""])
    steps = [step(t, DATA, part) for t in range(1, 2001)]
    lines = chained([genesis(), joined(1, ("d", 0, "dora", "")), crew, *steps, Revoke("b" * 64, "caught")])
    directory.log.write_bytes(b"\n".join(lines) + b"\n")
    with EventLog(directory.events) as log:
        for auditor in ("a" * 64, "d"):
            event = Audit(t=1, stage=1, base="x", subject="b" * 64, auditor=auditor, verdict="different")
            log.write(event)
    ticket = IssuedTicket(name="lab", key=key, role="relay", quota=0, issued_at_s=1, expires_at_s=2)
    (directory.path / "gate.json").write_bytes(msgspec.json.encode(GateRecord(tickets=[ticket])))
    return directory


def test_the_command_prints_a_table_json_and_csv(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(directory.path)
    assert main(["ledger", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines) and max(map(len, lines)) <= 99
    assert lines[0] == "2,000 committed steps, 24,000 units of work"
    assert [line.split()[-1] for line in lines if "convicted" in line] == ["convicted"]
    assert any("lab" in line and "1:75%" in line and "1..2000" in line for line in lines), lines

    assert main(["ledger", path, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    named = next(person for person in printed["people"] if person["ticket_name"] == "lab")
    assert (named["units"], named["stages"]) == (6_000, {"1": {"units": 6_000, "share": 0.75}})
    assert (named["first_step"], named["last_step"], named["signed_units"]) == (1, 2_000, 6_000)

    assert main(["ledger", path, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    liar = next(row for row in rows if row["peer"] == "b" * 64)
    told = (liar["name"], liar["convicted"], liar["different"], liar["revoked"])
    assert told == ("'=1+1", "1", "2", "caught")


def test_a_damaged_log_is_named(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, *rest = directory.log.read_bytes().split(b"\n")
    directory.log.write_bytes(b"\n".join([first, *rest]))
    assert main(["ledger", str(directory.path)]) == 2
    assert "log.jsonl is damaged" in capsys.readouterr().err


def test_a_run_without_a_step_has_an_empty_table() -> None:
    found = ledger(chained([genesis()]), [], 16)
    assert table(found, {}) == ["0 committed steps, 0 units of work"]
    assert as_dict(found, {})["people"] == []


def test_a_slot_counts_for_the_inner_steps_that_it_took() -> None:
    """In a round the units of a slot are the microbatches of its inner steps: a machine that takes one short
    step a round has not worked as much as one that takes seven."""
    crew = joined(2, ("a", 1, "ada", ""), ("b", 1, "bob", ""))
    plan = (Slot(0, 7, "a"), Slot(0, 1, "b"))
    planning = msgspec.structs.replace(step(1, DATA, (["a"], [0] * 4, ())), slots=plan)
    ended = step(2, (["d"], [0] * 4, ()), (["a", "b"], [0, 1], ()))
    lines = chained([genesis(), joined(1, ("d", 0, "dora", "")), crew, planning, ended])
    found = {row.sources[0].peer: row for row in ledger(lines, [], 16, 3).rows}
    assert found["a"].total == 4 + 7 * 3 and found["b"].total == 1 * 3
    assert found["b"].tokens == 3 * 16
    assert found["d"].total == 8 + 2 * (7 + 1) * 3


def test_a_plan_of_negative_steps_counts_nothing() -> None:
    """A leader may log anything; the table of everybody else's work is made."""
    crew = joined(2, ("a", 1, "ada", ""), ("b", 1, "bob", ""))
    planning = msgspec.structs.replace(step(1, DATA), slots=(Slot(0, 2, "a"), Slot(0, -2, "b")))
    ended = step(2, (["d"], [-1] * 4, ()), (["a", "b"], [0, 1], ()))
    lines = chained([genesis(), joined(1, ("d", 0, "dora", "")), crew, planning, ended])
    accounts = ledger(lines, [], 16, 3)
    found = {row.sources[0].peer: row.total for row in accounts.rows}
    assert found["a"] == 2 * 3 and not found["b"]
    assert table(accounts, {})


def test_a_log_with_units_of_nobody_is_summed_without_them() -> None:
    found = counted(joined(2, ("a", 1, "ada", "")), step(1, DATA, (["a"], [0, 7, 0, 0], ())))
    assert units(found) == {"dora": 8, "ada": 3}
