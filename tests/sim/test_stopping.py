"""The owner stops the run: it ends soon, with a checkpoint of its last step, whatever was going on."""

from __future__ import annotations

import random

import pytest
from small_swarm import MadeUpBatches, small_model, small_run

from anabranch.protocol import events as ev
from anabranch.sim.training import training_world

#: Virtual seconds within which a stopped run ends. A checkpoint that nobody can complete any more must not
#: be waited for.
SOON_S = 40.0


@pytest.mark.parametrize("seed", range(12))
def test_a_stopped_run_ends_soon_with_its_last_state(seed: int) -> None:
    draw = random.Random(seed)
    run = small_run(minimum=2, steps=1000, checkpoint_every=draw.choice([1, 2]))
    world = training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 2, seed, capacity=4)
    leader = world.nodes["d0"]
    # A relay dies while a checkpoint may be on its way from it; the run is stopped a little later.
    world.clock.at(2.0 + draw.random(), lambda: world.crash("r2.0"))
    stop_at = 3.0 + draw.random()
    world.clock.at(stop_at, lambda: leader.handle(ev.Stopping("enough")))
    while leader.stopped is None and world.clock.now < stop_at + SOON_S:
        world.clock.step()
    assert leader.stopped == ("enough", True)
    assert max(world.checkpoints) == world.history().t
