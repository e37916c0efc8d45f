"""Audits in swarms of real processes: honest relays pass, a relay that negates its gradient sum is convicted,
and the steps that it spoilt are taken again. Proof files and the ledger tell both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.api.model_card import read_ledger
from anabranch.audit.proof import PROVED, verify_proof
from anabranch.audit.verify import verify
from anabranch.cli.ledger import table
from anabranch.errors import UserError
from anabranch.net.identity import Identity, IdentitySigner
from anabranch.node.lifecycle.tickets import history_of, new_ticket
from anabranch.node.local_swarm.local_swarm import processes_of
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Audit, Note, PeerJoined, PeerRemoved, Rollback
from support.hash_counts import hash_counts, run_hash_counting_peer
from support.local_swarms import Swarm, created, small_run, swarm_of
from support.lying_relays import LIAR, plan_a_lie, run_lying_peer, swarm_with_a_liar

ANYBODY = IdentitySigner(Identity.generate())


@pytest.fixture(scope="module")
def convicted(tmp_path_factory: pytest.TempPathFactory, texts: Path, supervisor: Supervisor) -> Swarm:
    """Ended swarm in which LIAR negated its gradient sum. Its run directory is read only."""
    with swarm_with_a_liar(tmp_path_factory.mktemp("convicted") / "run", texts, supervisor) as swarm:
        swarm.to_the_end()
    return swarm


def test_honest_relays_pass_every_audit_and_the_ledger_has_all_their_work(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Each payload is hashed once at each end, for its receipt and for its frame."""
    run = small_run(texts, audit__share=1.0)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, target=run_hash_counting_peer) as swarm:
        swarm.to_the_end()
    hashed, needed = hash_counts(swarm)
    assert 300 < hashed <= 1.05 * needed, (hashed, needed)
    audits = [audit for audit in swarm.of(Audit) if audit.verdict != "expired"]  # before a second one served
    assert len(audits) >= 3 and {audit.verdict for audit in audits} == {"same"}, swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 4, report.lines()
    found = read_ledger(directory.path)
    assert found.steps == 4 and found.stage_units == {0: 48, 1: 24, 2: 24}
    names = {each.sources[0].name for each in found.people()}
    assert names <= {"data-0", "relay-1.0", "relay-1.1", "relay-2.0", "relay-2.1"}, table(found, {})
    relays = [row for row in found.rows if row.sources[0].stage]
    assert sum(row.total for row in relays) == sum(row.signed for row in relays) == 48
    assert sum(row.verdicts["same"] for row in found.rows) == len(audits)
    assert sum(row.audited for row in found.rows) > 0 and not list(directory.path.glob("proofs/*"))


def start_auditor(swarm: Swarm) -> None:
    """Let an auditor of stage 1 join, and wait until it has the stage's state."""
    ticket = new_ticket(swarm.directory.path, "auditor", 1, 3600.0).text
    swarm.join("auditor", ticket, ["--stage", "1"], command="audit")
    swarm.until(lambda events: any(isinstance(e, Note) and "auditing stage 1" in e.text for e in events))


@pytest.mark.costly
def test_an_auditor_convicts_alone(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Stage 1 has two replicas. Without the auditor no third one could tell which of them lies."""
    run = small_run(texts, run__steps=6, audit__share=1.0, routing__policy="static", fleet__minimum=2)
    directory = created(tmp_path / "run", run)
    plan_a_lie(directory)
    with swarm_of(directory, run, supervisor, leader_only=True, target=run_lying_peer) as swarm:
        start_auditor(swarm)
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


@pytest.mark.costly
@pytest.mark.slow
def test_a_relay_that_negates_its_sum_is_convicted(convicted: Swarm) -> None:
    swarm = convicted
    found = [audit for audit in swarm.of(Audit) if audit.verdict == "different"]
    assert {audit.what for audit in found} <= {"part 0 of the sum", "part 1 of the sum", "part 2 of the sum"}
    assert len({audit.auditor for audit in found}) >= 2 and swarm.of(Rollback), swarm.story()
    assert any(event.subject == found[0].subject for event in swarm.of(PeerRemoved)), swarm.story()
    report = verify(swarm.directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 8, report.lines()


@pytest.mark.costly
@pytest.mark.slow
def test_what_the_leader_writes_of_a_liar_is_a_proof(convicted: Swarm, tmp_path: Path) -> None:
    """Edited to blame another peer or step, the file proves nothing."""
    swarm, directory = convicted, convicted.directory
    culprit = swarm.peer_id(LIAR)
    files = sorted(directory.path.glob("proofs/step-*.json"))
    assert len(files) >= 2, swarm.story()
    results = [verify_proof(directory.path, path, ANYBODY) for path in files]
    assert len({result.proof.step for result in results}) == 1
    for result in results:
        assert result.proof.subject == culprit, result.lines()
        assert result.outcome == PROVED, result.lines()
        assert {each.split(" has hash ")[0] for each in result.false} <= {
            f"part {part} of the sum of its gradients" for part in range(3)
        }
    content, edited = json.loads(files[0].read_text()), tmp_path / files[0].name
    for changes in ({"step": content["step"] + 1}, {"subject": results[0].proof.auditor}):
        edited.write_text(json.dumps(content | changes))
        doctored = verify_proof(directory.path, edited, ANYBODY)
        assert doctored.outcome != PROVED and "than the file says" in doctored.unknown[0], doctored.lines()
    found = read_ledger(directory.path)
    states = {each.sources[0].name: each.state for each in found.people()}
    assert states[LIAR] == "convicted" and set(states.values()) == {"", "convicted"}, states
    assert found.rolled_back > 0 and found.steps == 8


@pytest.mark.soak  # in virtual time: swarm/byzantine/test_audit.py
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


@pytest.mark.costly
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


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True], ids=["rounds", "steps"])
def test_a_machine_that_sends_false_contributions_of_whole_models_is_convicted(
    tmp_path: Path, texts: Path, supervisor: Supervisor, synchronous: bool
) -> None:
    """In rounds the auditor convicts alone. It is no quicker than each of the three islands whose work it
    computes again, so it cannot audit all rounds; the run's end waits for the last ones."""
    islands = {"round__slots": 3, "round__steps": 3, "round__start": 0.1, "round__late": "wait"}
    changes = {"run__steps": 8} if synchronous else {"run__steps": 20, **islands}
    run = small_run(
        texts,
        **{"audit__share": 1.0, "routing__policy": "static", "pipeline__stages": 0, "model__blocks": 2},
        **{"fleet__relays_per_stage": [3], "checkpoint__every": 4, **changes},
    )
    directory = created(tmp_path / "run", run)
    plan_a_lie(directory, since=8)
    with swarm_of(directory, run, supervisor, leader_only=True, target=run_lying_peer) as swarm:
        start_auditor(swarm)
        if not synchronous:
            with pytest.raises(UserError, match="in rounds of islands only an auditor"):
                new_ticket(directory.path, "open", 1, 3600.0)
        for name, stage in processes_of(run).items():
            if stage:
                swarm.join(name, swarm.ticket(), ["--stage", str(stage)])
        swarm.to_the_end()
    auditor, liar = swarm.peer_id("auditor"), swarm.peer_id(LIAR)
    found = [audit for audit in swarm.of(Audit) if audit.verdict == "different"]
    assert {audit.subject for audit in found} == {liar}, swarm.story()
    assert synchronous or {audit.auditor for audit in found} == {auditor}, swarm.story()
    assert set(history_of(directory).revoked.reasons) == {liar} and swarm.of(Rollback), swarm.story()
    assert [audit for audit in swarm.of(Audit) if audit.verdict == "same"], swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()
    files = sorted(directory.path.glob("proofs/step-*.json"))
    results = [verify_proof(directory.path, path, ANYBODY) for path in files]
    assert results and {result.proof.subject for result in results} == {liar}
    assert {result.outcome for result in results} == {PROVED}, [result.lines() for result in results]
    assert all("of the sum of its gradients" in each for result in results for each in result.false)
    # Tokens and loss are right; its own sums are of the false parts.
    unknown = [each for result in results for each in result.unknown]
    assert all(result.right for result in results) and all("it added up" in each for each in unknown)
