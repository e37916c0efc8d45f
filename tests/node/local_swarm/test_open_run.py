"""An open run with real processes: somebody whom nobody invited joins with the run's public line of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.net.ticket import parse_ticket
from anabranch.node.lifecycle.tickets import history_of, new_ticket
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Audit
from anabranch.protocol.coordinator.audit_cases import EXPIRED
from node.local_swarm.test_gate import last_words, named, until
from support.local_swarms import created, small_run, swarm_of
from support.unhurried_peer import run_unhurried_peer


def test_a_walk_in_serves_and_is_audited(
    tmp_path: Path, texts: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share of audits is tiny, so that all of them are of the walk-in. On a busy machine some come too
    late. A second walk-in finds no seat at its stage; when the door is closed, the first has to go and the
    run goes on."""
    run = small_run(texts, run__steps=100_000, audit__share=1e-9, checkpoint__every=1000)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, target=run_unhurried_peer) as swarm:
        until(swarm, lambda: history_of(directory).t > 0)
        assert main(["ticket", "new", str(directory.path), "--role", "open", "--name", "door"]) == 0
        line = capsys.readouterr().out.split()[-1]
        assert parse_ticket(line, now_s=0).grant.role == "open"
        swarm.join("walk-in", line, ["--stage", "1"])
        until(swarm, lambda: named(directory, "walk-in") is not None)
        member = named(directory, "walk-in")
        assert member is not None and member.walk_in is True and not member.disk

        swarm.join("second", line, ["--stage", "1"])
        assert "invited peers must outnumber" in last_words(swarm, "second")

        swarm.until(lambda _: [audit.verdict for audit in swarm.of(Audit)].count("same") >= 3)
        audits = swarm.of(Audit)
        assert {audit.subject for audit in audits} == {member.id}, swarm.story()
        assert {audit.verdict for audit in audits} <= {"same", EXPIRED}, swarm.story()

        assert main(["ticket", "revoke", "door", str(directory.path), "--reason", "closed"]) == 0
        until(swarm, lambda: member.id not in history_of(directory).membership.members)
        assert "closed" in last_words(swarm, "walk-in")
        since = history_of(directory).t
        until(swarm, lambda: history_of(directory).t > since + 2)


def test_a_run_without_audits_cannot_be_opened(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    run = small_run(texts)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        until(swarm, lambda: history_of(directory).t > 0)
        with pytest.raises(UserError, match="needs audits"):
            new_ticket(directory.path, "open", 0, 3600.0)
        with pytest.raises(UserError, match="needs audits"):
            new_ticket(directory.path, "auditor", 0, 3600.0)
        swarm.to_the_end()
