"""Pipeline islands: workers of all stages, driven by hand through rounds, have the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.config import RunConfig
from anabranch.protocol.log.records import Slot
from anabranch.train.reference.reference import Reference
from support.small_islands import IslandSwarm, Round, first_round, island_run, reference_round
from support.small_training import MadeUpBatches, small_model, with_section


def beginning(run: RunConfig, seed: int = 0, data_nodes: int = 1) -> tuple[IslandSwarm, Reference, int]:
    """Workers and reference before the first round, and its number; the synchronous step was skipped."""
    swarm = IslandSwarm(run, seed, data_nodes)
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    t = first_round(run)
    for skipped in range(1, t):
        swarm.skip(skipped)
        reference.skip(reference.share(skipped, []))
    return swarm, reference, t


def check(swarm: IslandSwarm, reference: Reference, t: int, plans: dict[int, Slot]) -> Round:
    """Take a round by workers and reference, and compare all that the log would have."""
    found = swarm.round(t, plans)
    expected = reference_round(reference, t, plans)
    assert not expected.skipped
    assert found.losses == expected.losses
    assert found.squares == expected.squares
    assert found.digests == expected.digests
    assert found.fingerprints == reference.fingerprints()
    return found


CODECS: list[dict[str, Any]] = [
    {},
    {"activations": "int8", "gradients": "int8"},
    {"activations": "int8", "gradients": "int8", "gradient_rounding": "stochastic"},
]


@pytest.mark.parametrize("wire", CODECS, ids=["none", "int8", "stochastic"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", False), ("llama", True), ("gpt", True)], ids=["llama", "tied", "gpt"]
)
def test_a_round_has_the_references_bits(
    architecture: str, tied: bool, stages: int, wire: dict[str, Any]
) -> None:
    run = with_section(island_run(architecture, stages, tied), "wire", **wire)
    swarm, reference, t = beginning(run, seed=stages)
    check(swarm, reference, t, {0: Slot(0, 3), 1: Slot(0, 2)})
    check(swarm, reference, t + 1, {0: Slot(3, 1), 1: Slot(2, 4)})
