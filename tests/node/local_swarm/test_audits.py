"""Audits in swarms of real processes: honest relays pass, a relay that negates its gradient sum is convicted,
and the steps that it spoilt are taken again."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.node.lifecycle.tickets import history_of, new_ticket
from anabranch.node.local_swarm.local_swarm import processes_of
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Audit, Note, PeerJoined, PeerRemoved, Rollback
from support.local_swarms import created, small_run, swarm_of
from support.lying_relays import LIAR, plan_a_lie, run_lying_peer, swarm_with_a_liar


def test_honest_relays_pass_every_audit(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    run = small_run(texts, audit__share=1.0)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.to_the_end()
    audits = [audit for audit in swarm.of(Audit) if audit.verdict != "expired"]  # before a second one served
    assert len(audits) >= 3 and {audit.verdict for audit in audits} == {"same"}, swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 4, report.lines()


def test_an_auditor_convicts_alone(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Stage 1 has two replicas. Without the auditor no third one could tell which of them lies."""
    run = small_run(texts, run__steps=6, audit__share=1.0, routing__policy="static", fleet__minimum=2)
    directory = created(tmp_path / "run", run)
    plan_a_lie(directory)
    with swarm_of(directory, run, supervisor, leader_only=True, target=run_lying_peer) as swarm:
        ticket = new_ticket(directory.path, "auditor", 1, 3600.0).text
        swarm.join("auditor", ticket, ["--stage", "1"], command="audit")
        swarm.until(lambda events: any(isinstance(e, Note) and "auditing stage 1" in e.text for e in events))
        for name, stage in processes_of(run).items():
            if stage:
                swarm.join(name, swarm.ticket(), ["--stage", str(stage)])
        swarm.to_the_end()
    auditor, liar = swarm.peer_id("auditor"), swarm.peer_id(LIAR)
    found = [audit for audit in swarm.of(Audit) if audit.verdict == "different"]
    assert {audit.subject for audit in found} == {liar}, swarm.story()
    assert auditor in {audit.auditor for audit in found}, swarm.story()  # the other replica may be drawn, too
    assert set(history_of(directory).revoked.reasons) == {liar} and swarm.of(Rollback), swarm.story()
    assert {step.stage for step in swarm.of(PeerJoined) if step.role == "auditor"} == {1}
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 6, report.lines()


@pytest.mark.slow
def test_a_relay_that_negates_its_sum_is_convicted(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    with swarm_with_a_liar(tmp_path / "run", texts, supervisor) as swarm:
        swarm.to_the_end()
    found = [audit for audit in swarm.of(Audit) if audit.verdict == "different"]
    assert {audit.what for audit in found} <= {"part 0 of the sum", "part 1 of the sum", "part 2 of the sum"}
    assert len({audit.auditor for audit in found}) >= 2 and swarm.of(Rollback), swarm.story()
    assert any(event.subject == found[0].subject for event in swarm.of(PeerRemoved)), swarm.story()
    report = verify(swarm.directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 8, report.lines()


@pytest.mark.slow
def test_liars_that_own_nothing_and_that_vanish_spoil_no_step(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """A relay sends false activations on and claims nothing: hardly anything is drawn for an audit, but its
    receipt contradicts the owner's. A relay of stage 2 dies with a false sum, before it gave its receipt; two
    others are left there, so that no auditor of stage 1 moves to it."""
    changes = {"run__steps": 8, "audit__share": 0.001, "routing__policy": "static"}
    run = small_run(texts, **changes, fleet__relays_per_stage=[3, 3])
    directory = created(tmp_path / "run", run)
    plan_a_lie(directory, LIAR, "Forward", withholds=["Claim"])
    plan_a_lie(directory, "relay-2.1", "Freeze", dies_with="Prepared")
    with swarm_of(directory, run, supervisor, target=run_lying_peer) as swarm:
        swarm.to_the_end()
    liar, vanished = swarm.peer_id(LIAR), swarm.peer_id("relay-2.1")
    assert set(history_of(directory).revoked.reasons) == {liar} and swarm.of(Rollback), swarm.story()
    assert {event.subject for event in swarm.of(PeerRemoved)} == {liar, vanished}, swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 8, report.lines()


@pytest.mark.slow
def test_a_relay_that_is_far_off_is_convicted_though_nothing_is_drawn(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The relay sends its gradient sum times -50 in one step. Two others of its stage are honest."""
    changes = {"run__steps": 8, "audit__share": 1e-6, "routing__policy": "static", "fleet__minimum": 3}
    run = small_run(texts, **changes, fleet__relays_per_stage=[3, 3])
    directory = created(tmp_path / "run", run)
    plan_a_lie(directory, factor=-50)
    with swarm_of(directory, run, supervisor, target=run_lying_peer) as swarm:
        swarm.to_the_end()
    liar = swarm.peer_id(LIAR)
    assert [note for note in swarm.of(Note) if f"the work of {liar[:8]}" in note.text and "norm" in note.text]
    assert {audit.subject for audit in swarm.of(Audit) if audit.verdict == "different"} == {liar}
    assert set(history_of(directory).revoked.reasons) == {liar} and swarm.of(Rollback), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 8, report.lines()
