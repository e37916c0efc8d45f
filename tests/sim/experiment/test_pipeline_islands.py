"""Simulated rounds of pipeline islands: bytes and computing seconds of a round, memory of machines."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import NO_ENTRY, Commit, Entry, StageCommit, encode_entry
from anabranch.sim.cluster.device_model import Machine, shipped_devices
from anabranch.sim.cluster.scenario import Scenario, load_scenario
from anabranch.sim.experiment.run import Outcome, simulate
from anabranch.sim.experiment.timeline import TimelineRecorder

STAGES, CREWS, STEPS, SHARE = 3, 2, 5, 8
"""Relay stages, islands, inner steps of an island in a round, and microbatches of each of them."""
#: Bytes a value of contributions and results: 4 or 8 bits, and 2 bytes of scale for each 64 values.
INT4, INT8 = 34 / 64, 66 / 64


def scenario_of(**changes: object) -> Scenario:
    every = {
        "model.stages": STAGES,
        "model.microbatches": SHARE * CREWS,
        "fleet.relays": STAGES * CREWS,
        "fleet.device": ["rtx4090"],
        "fleet.speed": [1.0],
        "fleet.spare": "never",
        "round.slots": CREWS,
        "round.steps": STEPS,
        "network.up_bps": [5e8],
        "network.down_bps": [5e8],
        "wire.activations": "int8",
        "churn.crash": 0.0,
        "run.heartbeat_s": 60.0,
        "run.iterations": 4,
        **changes,
    }
    return load_scenario("volunteers", every)


@cache
def simulated() -> Outcome:
    return simulate(scenario_of(), find_profile("wan10"), "auction", 0)


def test_a_round_is_right_and_counts_the_tokens_of_its_inner_steps() -> None:
    outcome = simulated()
    assert not outcome.failure
    assert [row.microbatches for row in outcome.rows[-2:]] == [CREWS * STEPS * SHARE] * 2
    assert all(row.wasted_s == 0.0 for row in outcome.rows)


def test_payload_bytes_of_a_round_are_those_of_cuts_and_exchange() -> None:
    work = scenario_of().work
    cut = work.activation_bytes + work.gradient_bytes
    assert work.activation_bytes < 0.6 * work.gradient_bytes, "the codec of activations is for them alone"
    cuts = CREWS * STEPS * SHARE * (STAGES + 1) * cut
    parameters = sum(map(work.parameters, range(STAGES + 1)))
    exchanged = (CREWS - 1) * parameters * (INT4 + INT8)
    assert simulated().rows[-1].payload_bytes == pytest.approx(cuts + exchanged, rel=0.02)


def test_relays_are_busy_with_the_tasks_of_inner_steps() -> None:
    scenario = scenario_of()
    machine = Machine(shipped_devices()["rtx4090"], scenario.work, scenario.fleet.achieved)
    inner, seconds = (tasks.InnerForward, tasks.InnerBackward), 0.0
    for stage in range(1, STAGES + 1):
        of_microbatch = sum(machine.inner_task_s(stage, task) for task in inner)
        synchronous = machine.seconds(stage, tasks.Forward) + machine.seconds(stage, tasks.InputGradient)
        assert synchronous < of_microbatch <= 1.1 * machine.microbatch_s(stage)
        seconds += STEPS * (SHARE * of_microbatch + machine.seconds(stage, tasks.InnerStep))
        seconds += sum(machine.slot_s(stage, task) for task in (tasks.Forward, tasks.InputGradient))
        seconds += machine.slot_s(stage, tasks.WeightGradient)
        exchange = (tasks.Freeze, tasks.SumPart, tasks.Assemble, tasks.Apply)
        seconds += sum(machine.seconds(stage, task, CREWS) for task in exchange)
    assert simulated().rows[-1].busy_s == pytest.approx(CREWS * seconds, rel=0.02)


def test_machines_that_are_too_small_for_an_island_are_refused() -> None:
    large = {"model.size": "llama-8b", "model.microbatches": 32, "fleet.relays": 32, "fleet.data_nodes": 2}
    scenario_of(**large, **{"model.stages": 16, "round.slots": 0})
    with pytest.raises(UserError, match="40 bytes a parameter for the committed weights, outer momentum"):
        scenario_of(**large, **{"model.stages": 8})
    with pytest.raises(UserError, match=r"embedding and head of llama-8b in 1 islands need 42 GB of a data"):
        scenario_of(**large, **{"model.stages": 16})
    scenario_of(**large, **{"model.stages": 16, "fleet.device": ["h100"]})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model.stages": 1}, "with 2 and more"),
        ({"round.late": "wait"}, "is for islands of one machine"),
        ({"fleet.park": 1.0}, "fleet.park = 0"),
        ({"model.microbatches": 15}, "to be a multiple of it"),
    ],
)
def test_what_pipeline_islands_do_not_have_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        scenario_of(**changes)


def test_a_slot_that_does_not_count_has_no_path() -> None:
    """The last member of the stage had been named in its place."""
    stages = (
        StageCommit("", "", {}, ("d",), ("",), (-1, -1, 0, 0)),
        StageCommit("", "", {}, ("a", "b"), ("", ""), (-1, 0)),
    )
    commit = Commit(
        run="run", epoch=1, term=1, t=3, previous_base="", manifest="", verdict="step", tokens=9,
        loss_sums=(), stages=stages, norm=0.0, clip_factor=1.0, learning_rate=0.7, bias_correction1=1.0,
        bias_correction2=1.0, adam_step=2,
    )  # fmt: skip
    simulation = SimpleNamespace(world=SimpleNamespace(log=[encode_entry(Entry(0, 1, NO_ENTRY, commit))]))
    recorder = object.__new__(TimelineRecorder)
    recorder._simulation = cast(Any, simulation)
    assert recorder.paths(3) == [[], ["d", "a", "d"]]
