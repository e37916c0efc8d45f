"""Churn traces, drift, and the scenario that a run's event log becomes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.config import RunConfig, render_run_file, with_changes
from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile, load_profile
from anabranch.observe import events as log
from anabranch.observe.event_log import EventLog
from anabranch.sim.cluster.churn_trace import (
    JOIN,
    LEAVE,
    Change,
    SpotModel,
    Trace,
    parse_trace,
    render_trace,
    spot_trace,
)
from anabranch.sim.cluster.from_recording import recorded, render_scenario
from anabranch.sim.cluster.scenario import Scenario, fleet_of, load_scenario
from anabranch.sim.experiment.run import Simulation, simulate
from anabranch.sim.experiment.timeline import TimelineRecorder
from anabranch.sim.kernel.clock import Clock
from anabranch.sim.network.drift import Drift
from support.swarms.small_scenario import SMALL


def traced(folder: Path, *changes: Change, **more: Any) -> Scenario:
    path = folder / "churn.json"
    path.write_text(render_trace(Trace("made up", changes)), "utf-8")
    return load_scenario("wan10", SMALL | {"churn.trace": str(path)} | more)


@pytest.mark.parametrize("policy", ["auction", "restart", "swarm-tuned"])
def test_a_trace_says_who_leaves_and_who_comes_when(policy: str, tmp_path: Path) -> None:
    changes = (Change(7.5, "r1.0", LEAVE), Change(8.0, "r1.0", JOIN), Change(8.5, "r1.2", JOIN))
    outcome = simulate(traced(tmp_path, *changes, **{"run.iterations": 7}), find_profile("wan10"), policy, 0)
    assert not outcome.failure
    assert sum(row.crashes for row in outcome.rows) == 1
    assert all(row.seconds >= row.bound_s for row in outcome.rows)
    # Four relays are there until one leaves; in the end all five.
    assert outcome.rows[0].alive_s == pytest.approx(4 * outcome.rows[0].seconds)
    assert outcome.rows[-1].alive_s == pytest.approx(5 * outcome.rows[-1].seconds)


def test_the_timeline_shows_who_was_away_as_long_as_the_trace_says(tmp_path: Path) -> None:
    changes = (Change(7.5, "r1.0", LEAVE), Change(8.0, "r1.0", JOIN), Change(8.5, "r1.2", JOIN))
    simulation = Simulation(fleet_of(traced(tmp_path, *changes), find_profile("wan10"), 0), "auction", 0)
    spans = TimelineRecorder(simulation)
    rows = simulation.run().rows
    away: dict[tuple[str, str], float] = defaultdict(float)
    for span in (span for row in rows for span in spans.of(row.t)):
        away[span.node, span.kind] += span.end_s - span.begin_s
    assert away["r1.0", "gone"] == pytest.approx(0.5)
    assert away["r1.2", "gone"] == pytest.approx(8.5)
    assert away["r1.0", "joining"] > 0.0 and away["r2.0", "gone"] == 0.0


def test_who_is_spared_stays_and_does_not_come_twice(tmp_path: Path) -> None:
    changes = [Change(7.5, f"r2.{n}", LEAVE) for n in range(2)]
    changes += [Change(8.5, f"r2.{n}", JOIN) for n in range(2)]
    simulation = Simulation(fleet_of(traced(tmp_path, *changes), find_profile("wan10"), 0), "auction", 0)
    outcome = simulation.run()
    assert not outcome.failure
    assert len(simulation.crashed) == 1 and sum(row.spared for row in outcome.rows) == 1
    incarnations = sorted(simulation.world.nodes[f"r2.{n}"].member.incarnation for n in range(2))
    assert incarnations == [1, 2]


def test_a_generated_trace_has_bursts_by_region_and_the_rates_of_its_model() -> None:
    regions = {f"m{n:02}": f"region {n % 8}" for n in range(64)}
    trace = spot_trace(regions, 320.0, 1)
    assert trace == spot_trace(regions, 320.0, 1) == parse_trace(render_trace(trace), "again")
    left = [change for change in trace.changes if change.event == LEAVE]
    spot = SpotModel()
    expected = 64 * 320 * (spot.bursts_per_hour * spot.share + spot.lone_per_hour)
    assert len(left) == pytest.approx(expected, rel=0.1)
    together = [{c.machine for c in left if c.at_s == at} for at in {c.at_s for c in left}]
    bursts = [names for names in together if len(names) > 1]
    assert len(bursts) > 100
    assert all(len({regions[name] for name in names}) == 1 for names in bursts)
    assert spot_trace(regions, 1.0, 1, SpotModel(bursts_per_hour=0.0, lone_per_hour=0.0)).changes == ()


def test_machines_at_home_go_in_the_evening_of_their_region() -> None:
    at_home = SpotModel(
        bursts_per_hour=0.0, lone_per_hour=0.0, return_s=60.0, evening_per_hour=2.0, begin_h=12.0
    )
    regions = {f"m{n}": ("London", "Tokyo", "Oregon", "attic")[n % 4] for n in range(40)}
    left = [change for change in spot_trace(regions, 24.0, 0, at_home).changes if change.event == LEAVE]
    assert len(left) == pytest.approx(40 * 5 * 2.0, rel=0.15)
    hours: dict[str, list[float]] = defaultdict(list)
    for change in left:
        hours[regions[change.machine]].append((12.0 + change.at_s / 3600.0) % 24.0)
    assert min(hours["attic"]) >= 18.0 and max(hours["attic"]) < 23.0
    assert min(hours["London"]) >= 18.0 and max(hours["London"]) < 23.5
    assert min(hours["Tokyo"]) > 8.0 and max(hours["Tokyo"]) < 14.0, "nine hours before London"
    # Nothing else is drawn otherwise for it.
    calm, later = (spot_trace(regions, 24.0, 0, replace(SpotModel(), begin_h=begin)) for begin in (0.0, 3.0))
    assert calm.changes == later.changes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "x: not a churn trace of version 1: Input data was truncated"),
        ('{"version": 1}', "Object missing required field `source`"),
        ('{"version": 2, "source": "s", "changes": []}', "version 1: Invalid enum value 2 - at `$.version`"),
        ('{"version": 1, "source": " ", "changes": []}', "at `$.source`"),
        ('{"version": 1, "source": "s", "changes": 3}', "Expected `array`, got `int` - at `$.changes`"),
        ('{"version": 1, "source": "s", "changes": [{}]}', "required field `at_s` - at `$.changes[0]`"),
        (
            '{"version": 1, "source": "s", "changes": [{"at_s": -1, "machine": "a", "event": "join"}]}',
            "Expected `float` >= 0.0 - at `$.changes[0].at_s`",
        ),
        (
            '{"version": 1, "source": "s", "changes": [{"at_s": 4e7, "machine": "a", "event": "join"}]}',
            "Expected `float` <= 32000000.0 - at `$.changes[0].at_s`",
        ),
        (
            '{"version": 1, "source": "s", "changes": [{"at_s": 1, "machine": "a", "event": "die"}]}',
            "Invalid enum value 'die' - at `$.changes[0].event`",
        ),
        (
            '{"version": 1, "source": "s", "changes": [{"at_s": 1, "machine": "", "event": "join"}]}',
            "Expected `str` of length >= 1 - at `$.changes[0].machine`",
        ),
    ],
)
def test_wrong_traces_are_refused_by_place(text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_trace(text, "x")
    assert says in str(refused.value)


def test_traces_that_do_not_go_with_their_scenario_are_refused(tmp_path: Path) -> None:
    for changes, says in (
        ([Change(2.0, "r1.0", LEAVE), Change(1.0, "r1.0", JOIN)], "earlier than the one before"),
        ([Change(1.0, "r1.0", LEAVE), Change(2.0, "r1.0", LEAVE)], "r1.0 has done that already"),
        ([Change(1.0, "d0", LEAVE)], "changes[0].machine: 'd0' is no relay; there are r1.0"),
    ):
        with pytest.raises(UserError) as refused:
            fleet_of(traced(tmp_path, *changes), find_profile("wan10"), 0)
        assert says in str(refused.value)
    with pytest.raises(UserError, match=r"churn\.crash and churn\.trace both say who crashes"):
        traced(tmp_path, **{"churn.crash": 0.1})
    with pytest.raises(UserError, match=r"churn\.trace: no/such\.json: cannot be read"):
        fleet_of(load_scenario("wan10", {"churn.trace": "no/such.json"}), find_profile("wan10"), 0)


def test_the_command_writes_a_trace_that_simulate_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "spot.json"
    assert main(["trace", "wan10", "--hours", "32", "--out", str(out)]) == 0
    assert "departures among 16 relays in 32 h" in capsys.readouterr().out
    assert fleet_of(load_scenario("wan10", {"churn.trace": str(out)}), find_profile("wan10"), 0).trace.changes
    assert main(["trace", "wan10"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert main(["trace", "wan10", "--share", "2"]) == 2
    assert "--share 2: it must be at least 0 and at most 1" in capsys.readouterr().err
    assert main(["trace", "wan10", "--begin", "25"]) == 2
    assert "--begin 25: it must be at least 0 and at most 24" in capsys.readouterr().err
    evening = ["--bursts", "0", "--evening", "2", "--begin", "18"]
    assert main(["trace", "volunteers", "--hours", "3", *evening]) == 0
    assert "evening_per_hour 2, begin_h 18" in json.loads(capsys.readouterr().out)["source"]


def test_drift_has_the_spread_and_memory_that_it_is_said_to_have() -> None:
    clock, drift, seen = Clock(), Drift(0.3, 0.0, 100.0, 1), list[float]()
    drift.begin(clock, ["a"], ["x", "y"], lambda: seen.append(drift.slowness("a")))
    while clock.now < 200_000.0:
        clock.step()
    assert min(seen) >= 1.0 and drift.rate("x", "y") == 1.0
    logs = [math.log(value) for value in seen]
    assert sum(x * x for x in logs) / len(logs) == pytest.approx(0.09, rel=0.1)


@pytest.mark.parametrize("policy", ["auction", "swarm-tuned"])
def test_what_drifts_takes_longer_and_never_less_than_the_bound(policy: str) -> None:
    still = simulate(load_scenario("wan10", SMALL), find_profile("wan10"), policy, 0)
    drifting = {"drift.speed": 0.8, "drift.links": 0.8, "drift.period_s": 5.0}
    moved = simulate(load_scenario("wan10", SMALL | drifting), find_profile("wan10"), policy, 0)
    assert not still.failure and not moved.failure
    assert sum(row.seconds for row in moved.rows) > 1.2 * sum(row.seconds for row in still.rows)
    assert all(row.seconds >= row.bound_s for row in moved.rows)


# --- a run that was -----------------------------------------------------------------------------------

CONFIG = with_changes(
    RunConfig(), {"pipeline.stages": 1, "fleet.relays": 2, "fleet.data_nodes": 1, "batch.microbatches": 4}
)


def a_log() -> list[log.Event]:
    """Event log of a data node and two relays: the second is killed and comes back, a third comes late."""

    def joined(peer: str, stage: int, at: float) -> log.Event:
        role, region = ("relay", "Ohio") if stage else ("data", "")
        return log.PeerJoined(
            time=at, subject=peer, name=f"name-{peer}", region=region, role=role, stage=stage,
            numerics_class="c", capacity=7,
        )  # fmt: skip

    events = [joined("d", 0, 100.0), joined("a", 1, 100.0), joined("b", 1, 101.0)]
    events.append(
        log.Vitals(time=102.0, peer="d", stage=0, trips={"a": 0.1, "b": 0.1}, rates={"a": 5e7, "b": 7e7})
    )
    events.append(log.Vitals(time=102.0, peer="a", stage=1, trips={"b": 0.02}, rates={"b": 2e8}))
    for t in range(1, 5):
        owners = {0: dict.fromkeys(range(8), "d"), 1: {0: "a", 1: "a", 2: "a", 3: "b"}}
        events.append(
            log.Step(
                time=100.0 + 10 * t, t=t, loss=1.0, tokens=512, grad_norm=1.0, clip_factor=1.0,
                learning_rate=1e-3, seconds=10.0 if t > 1 else 8.0, manifest_hash="", owners=owners,
            )
        )  # fmt: skip
        for peer, stage, units in (("d", 0, 4), ("a", 1, 3), ("b", 1, 1)):
            events.append(
                log.Timing(
                    time=100.5 + 10 * t, peer=peer, t=t, stage=stage, forward_s=0.3 * units,
                    input_gradient_s=0.4 * units * (stage > 0), weight_gradient_s=0.1 * units, reduce_s=0.06,
                    apply_s=0.05,
                )
            )  # fmt: skip
    events.append(
        log.Suspected(time=125.0, peer="d", subject="b", reason="silence", silence_s=3.0, patience_s=2.0)
    )
    events.append(log.PeerRemoved(time=126.0, subject="b", stage=1, reason="gone"))
    events += [joined("b", 1, 130.0), joined("c", 1, 135.0)]
    events.append(log.Timing(time=136.0, peer="c", t=4, stage=1))
    return events


def test_an_event_log_becomes_a_scenario() -> None:
    found = recorded(a_log(), CONFIG, "mine")
    data, first, second, third = found.scenario.machines
    assert (data.role, data.region, data.stage) == ("data", "name-d", 0)
    assert (first.name, first.region, first.stage, first.capacity) == ("name-a", "Ohio", 1, 7)
    assert data.forward_s == pytest.approx(0.3) and data.weight_gradient_s == pytest.approx(0.1)
    for relay in (first, second):
        seconds = (relay.forward_s, relay.input_gradient_s, relay.weight_gradient_s)
        assert seconds == pytest.approx((0.3, 0.4, 0.1))
    assert (first.reduce_s, first.apply_s) == (0.06, 0.05)
    assert found.trace.changes == (
        Change(20.0, "name-b", LEAVE), Change(28.0, "name-b", JOIN), Change(33.0, "name-c", JOIN)
    )  # fmt: skip
    assert found.trace.absent == {"name-c"} and third.name == "name-c"
    assert found.profile["pairs"] == {"Ohio-name-d": {"latency_ms": 50.0, "bandwidth_mbps": 60.0}}
    assert found.profile["same_region"] == {"latency_ms": 10.0, "bandwidth_mbps": 200.0}
    assert found.scenario.model.size == "llama-tiny" and found.scenario.model.microbatches == 4
    assert found.iteration_s == 10.0


def test_what_a_run_decides_by_itself_is_in_its_scenario() -> None:
    changes = {"fleet.recompute": 1.0, "fleet.rebalance": 3, "fleet.spread": "never", "fleet.spare": "links"}
    more = {"routing.policy": "greedy", "iteration.delay": 1, "wire.activations": "int8"}
    more |= {"snapshots.every": 7, "snapshots.copies": 3}
    found = recorded(a_log(), with_changes(CONFIG, {**changes, **more}), "mine")
    assert (found.scenario.run.delay, found.scenario.wire.activations) == (1, "int8")
    assert (found.scenario.run.snapshot_every, found.scenario.run.snapshot_copies) == (7, 3)
    fleet = found.scenario.fleet
    assert (fleet.recompute, fleet.rebalance, fleet.spread, fleet.spare) == (1.0, 3, "never", "links")
    assert found.policy == "greedy"


def test_the_command_simulates_a_run_that_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory.create(tmp_path / "mine")
    directory.run_file.write_text(
        render_run_file(with_changes(CONFIG, {"routing.policy": "greedy"})), "utf-8"
    )
    with EventLog(directory.events) as events:
        for event in a_log():
            events.write(event)
    assert main(["simulate", "--from", str(directory.path), "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    assert "the run itself: 10.00 s per iteration, 3 joins and losses" in told
    assert told.startswith("mine: llama-tiny, 4 microbatches of ") and "greedy" in told.splitlines()[1]
    out = directory.path / "simulated"
    load_profile(out / "network.json")
    scenario = load_scenario(str(out / "scenario.toml"))
    assert len(scenario.machines) == 4 and scenario.churn.trace == str(out / "churn.json")
    moved = directory.path.rename(tmp_path / "moved") / "simulated"
    assert load_scenario(str(moved / "scenario.toml")).churn.trace == str(moved / "churn.json")
    assert main(["simulate"]) == 2
    assert "give either a scenario or --from RUN_DIR" in capsys.readouterr().err
    assert main(["simulate", "--from", str(tmp_path / "none")]) == 2


def test_what_cannot_become_a_scenario_is_refused() -> None:
    with pytest.raises(UserError, match="fewer than two steps"):
        recorded([], CONFIG, "mine")
    with pytest.raises(UserError, match=r"model\.dim is the run's own"):
        recorded(a_log(), with_changes(CONFIG, {"model.dim": 64}), "mine")
    with pytest.raises(UserError, match=r"compute\.dtype = 'fp64' is none of fp32, bf16"):
        recorded(a_log(), with_changes(CONFIG, {"compute.dtype": "fp64"}), "mine")


def test_a_written_scenario_is_read_as_it_was(tmp_path: Path) -> None:
    scenario = recorded(a_log(), CONFIG, "mine").scenario
    path = tmp_path / "mine.toml"
    path.write_text(render_scenario(scenario), "utf-8")
    assert load_scenario(str(path)) == scenario
