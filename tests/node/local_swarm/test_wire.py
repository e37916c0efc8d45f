"""Codecs, coarse sums and delayed iterations in swarms of real processes: a relay dies in mid-backward,
audits compute payloads again, a proof is checked; a single process finds no bit that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anabranch.audit.proof import PROVED, verify_proof
from anabranch.audit.verify import verify
from anabranch.net.identity import Identity, IdentitySigner
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Audit, PeerRemoved
from support.local_swarms import check_exact, created, small_run, steps_of, swarm_of
from support.lying_relays import swarm_with_a_liar

WIRE = {
    "wire__activations": "int8",
    "wire__gradients": "int8",
    "wire__gradient_rounding": "stochastic",
    "wire__reduce": "coarse",
}


def cuts(codec: str) -> dict[str, str]:
    """Activations and input gradients in one codec, and exact sums."""
    return {"wire__activations": codec, "wire__gradients": codec}


@pytest.mark.parametrize(
    "changes",
    # The others, and each in virtual time: tests/sim/fuzz/test_codec_grid.py, exactness/test_subspace.py.
    [WIRE]
    + [
        pytest.param(changes, marks=pytest.mark.soak)
        for changes in (
            WIRE | {"model__subspace": 5, "model__tied": False},
            *map(cuts, ("bf16", "fp16", "int8", "int4")),
            {"wire__reduce": "coarse"},
        )
    ],
    ids=["all", "subspace", "bf16", "fp16", "int8", "int4", "coarse sums"],
)
def test_a_relay_that_dies_in_mid_backward(
    tmp_path: Path, texts: Path, supervisor: Supervisor, changes: dict[str, Any]
) -> None:
    """Others compute its microbatches again from the kept payloads (I3, R4)."""
    run = small_run(
        texts,
        run__steps=6,
        batch__microbatches=16,
        pipeline__blocks_per_stage=[3, 1],
        fleet__minimum=2,
        **changes,
    )
    directory = created(tmp_path / "run", run)
    plan = {"relay-1.1": {"at": "mid_backward", "iteration": 3, "added": 1}}
    with swarm_of(directory, run, supervisor, plan) as swarm:
        swarm.to_the_end()
    assert steps_of(swarm.seen) == list(range(1, 7)), swarm.story()
    assert swarm.processes["relay-1.1"].status == -9  # by its own hand, as planned
    assert any(event.subject == swarm.peer_id("relay-1.1") for event in swarm.of(PeerRemoved))
    check_exact(directory, 6)


@pytest.mark.parametrize(
    ("at", "wire"), [("mid_backward", {}), pytest.param("ahead", WIRE, marks=pytest.mark.soak)]
)
def test_a_relay_that_dies_with_two_iterations_in_flight(
    tmp_path: Path, texts: Path, supervisor: Supervisor, at: str, wire: dict[str, Any]
) -> None:
    """In the backward pass of the first of them, or of the second (I3, R1, R5). On a busy machine the second
    is seldom that far before the first is over, so there are many steps in which it may be."""
    steps = 6 if at == "mid_backward" else 40
    delayed = {"iteration__delay": 1, "iteration__delay_from": 2 / steps, "fleet__minimum": 2}
    run = small_run(texts, run__steps=steps, batch__microbatches=16, **delayed, **wire)
    directory = created(tmp_path / "run", run)
    plan = {"relay-1.1": {"at": at, "iteration": 4, "added": 1}}
    with swarm_of(directory, run, supervisor, plan) as swarm:
        swarm.to_the_end()
    assert steps_of(swarm.seen) == list(range(1, steps + 1)), swarm.story()
    assert swarm.processes["relay-1.1"].status == -9  # by its own hand, as planned
    assert any(event.subject == swarm.peer_id("relay-1.1") for event in swarm.of(PeerRemoved))
    check_exact(directory, steps)


@pytest.mark.costly
@pytest.mark.slow
def test_audits_and_proofs_of_encoded_work(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Payloads in a liar's receipt are what the work gives; only the parts of its sum are false."""
    with swarm_with_a_liar(tmp_path / "run", texts, supervisor, **WIRE) as swarm:
        swarm.to_the_end()
    directory = swarm.directory
    assert {audit.verdict for audit in swarm.of(Audit)} >= {"same", "different"}, swarm.story()
    files = sorted(directory.path.glob("proofs/step-*.json"))
    assert len(files) >= 2, swarm.story()
    for path in files:
        result = verify_proof(directory.path, path, IdentitySigner(Identity.generate()))
        assert result.outcome == PROVED and result.right > 0, result.lines()
        assert all(each.startswith("part ") for each in result.false), result.lines()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits" and report.steps == 8, report.lines()
