"""Proof files and the ledger of a run of real processes: a relay that negates its gradient sum."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.api.model_card import read_ledger
from anabranch.audit.proof import PROVED, verify_proof
from anabranch.cli.ledger import table
from anabranch.net.identity import Identity, IdentitySigner
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Audit
from support.local_swarms import created, small_run, swarm_of
from support.lying_relays import LIAR, swarm_with_a_liar

ANYBODY = IdentitySigner(Identity.generate())


def test_the_ledger_of_an_honest_run_has_all_its_work(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=2, audit__share=1.0)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.to_the_end()
    found = read_ledger(directory.path)
    assert found.steps == 2 and found.stage_units == {0: 24, 1: 12, 2: 12}
    names = {each.sources[0].name for each in found.people()}
    assert names <= {"data-0", "relay-1.0", "relay-1.1", "relay-2.0", "relay-2.1"}, table(found, {})
    relays = [row for row in found.rows if row.sources[0].stage]
    assert sum(row.total for row in relays) == sum(row.signed for row in relays) == 24
    audits = [audit for audit in swarm.of(Audit) if audit.verdict != "expired"]  # before a second one served
    assert sum(row.verdicts["same"] for row in found.rows) == len(audits) > 0
    assert sum(row.audited for row in found.rows) > 0 and not list(directory.path.glob("proofs/*"))


@pytest.mark.slow
def test_what_the_leader_writes_of_a_liar_is_a_proof(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Edited to blame another peer or step, the file proves nothing."""
    with swarm_with_a_liar(tmp_path / "run", texts, supervisor) as swarm:
        swarm.to_the_end()
        culprit = swarm.peer_id(LIAR)
    directory = swarm.directory
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
    content = json.loads(files[0].read_text())
    for changes in ({"step": content["step"] + 1}, {"subject": results[0].proof.auditor}):
        files[0].write_text(json.dumps(content | changes))
        doctored = verify_proof(directory.path, files[0], ANYBODY)
        assert doctored.outcome != PROVED and "than the file says" in doctored.unknown[0], doctored.lines()
    found = read_ledger(directory.path)
    states = {each.sources[0].name: each.state for each in found.people()}
    assert states[LIAR] == "convicted" and set(states.values()) == {"", "convicted"}, states
    assert found.rolled_back > 0 and found.steps == 8
