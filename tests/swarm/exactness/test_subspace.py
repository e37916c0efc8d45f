"""A swarm whose cuts carry a subspace takes the reference's steps to the last bit, whoever dies (I3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.config import ModelSection, RunConfig
from anabranch.protocol import messages as msg
from anabranch.sim.checks.invariants import Invariants
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, kill
from support.swarms.small_swarm import check_equal, small_run, small_world


def thin_run(architecture: str, stages: int = 2) -> RunConfig:
    run = small_run(architecture, stages, minimum=2)
    model: ModelSection = replace(run.model, subspace=4)
    return replace(run, model=model)


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
@pytest.mark.parametrize("moment", ["mid-backward", "third forward"])
def test_a_relay_dies(architecture: str, moment: str) -> None:
    run = thin_run(architecture)
    world = small_world(run, [2, 2], seed=1)
    assert world.settings.activation_bytes == 8 * (4 + 1) * 4
    when = faults.added_in_mid_backward(1) if moment == "mid-backward" else faults.received(msg.Forward, 1, 3)
    fault = Fault(world, ("r1.1", "r2.1"), when, kill())
    invariants = Invariants(world)
    world.run(until_s=600)
    history = check_equal(world, run)
    assert len(fault.delivered) == 1
    assert history.removals == 1
    assert invariants.computed
