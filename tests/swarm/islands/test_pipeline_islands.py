"""Rounds of pipeline islands in virtual time, with real tensors: the log tells one process how to compute the
same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.protocol.rounds.plan import active, counted
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import Model, World
from support.swarms.small_swarm import MadeUpBatches, small_model, small_run
from support.swarms.training_world import training_world
from swarm.islands.test_rounds import STEPS, check_replayed


def island_run(**changes: object) -> RunConfig:
    """Two stages of a block each, int8 cuts, three crews at most."""
    rounds = RoundSection(slots=3, steps=3, start=0.15)
    run = small_run(steps=STEPS)
    run = replace(run, model=replace(run.model, blocks=2), pipeline=PipelineSection(stages=2))
    run = replace(run, wire=replace(run.wire, activations="int8", gradients="int8"))
    return replace(run, round=replace(rounds, **changes))  # type: ignore[arg-type]


def world_of(run: RunConfig, seed: int = 1) -> World:
    times = Model(task_s={"InnerForward": 0.05, "InnerBackward": 0.1, "Embed": 0.002})
    world = training_world(
        run, small_model(run), MadeUpBatches(run), [3, 3], 2, seed, capacity=2, times=times
    )
    Invariants(world)
    return world


@pytest.mark.parametrize("rules", [{}, {"first_moment": "keep", "unsent": "local"}], ids=["plain", "carried"])
def test_rounds_are_replayed_by_one_process(rules: dict[str, object]) -> None:
    run = island_run(**rules)
    world = world_of(run)
    world.run(until_s=2000)
    check_replayed(run, world)
    history = world.history()
    assert sorted(history.plans) == [3, 4, 5, 6, 7] and len(active(history.plans[4])) == 3
    assert all(len(slot.crew) == 3 for slot in history.plans[4])
    carried = {slot.carried for slot in history.plans[5]}
    assert carried == ({4} if rules else {0})
    assert len(counted(history.commits[4].stages[2].owners)) == 3
