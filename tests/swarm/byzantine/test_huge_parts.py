"""Parts of sums of floats (`run.reduction = "fast"`) that overflow together, each of them in range alone: all
of the stage seemed to withhold their reports, and the honest ones were expelled with the liars."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from support.small_training import small_run
from support.swarms.small_swarm import MadeUpBatches, small_model
from support.swarms.training_world import training_world
from swarm.byzantine.test_review_stalls import go_on, removed, rollbacks


@pytest.mark.parametrize(
    ("liars", "dtype", "value"), [(["r1.2", "r1.3"], "fp32", 3e38), (["r1.3"], "fp64", 1e152)]
)
def test_only_who_sent_them_is_expelled(liars: list[str], dtype: str, value: float) -> None:
    run = small_run(reduction="fast", dtype=dtype)
    run = replace(run, run=replace(run.run, steps=4))
    world = training_world(run, small_model(run), MadeUpBatches(run), [4, 1], seed=1)
    Invariants(world)
    world.liars.update(liars)
    world.strict = False
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id in liars and isinstance(said, msg.ReducePart) and said.fence.t >= 2:
            assert isinstance(payload, torch.Tensor)
            payload = torch.full_like(payload, value)
        carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    assert go_on(world, 200.0) == 4 and rollbacks(world) == []
    assert sorted(removed(world)) == liars and all("no gradient" in w for w in removed(world).values())
