"""`anabranch simulate`: what it says, what it refuses, and that nobody beats the clairvoyant bound."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.config import RunConfig, config_from_dict, with_changes
from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile, shipped_profiles
from anabranch.protocol import messages as msg
from anabranch.protocol.coordinator.reduce_attempts import STALL_FLOOR_S
from anabranch.protocol.interface import tasks
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.cluster.churn import crashes
from anabranch.sim.cluster.device_model import GRADIENT_BYTES, SUM_BYTES, Workload
from anabranch.sim.cluster.scenario import fleet_of, load_scenario, shipped_scenarios
from anabranch.sim.experiment import run
from anabranch.sim.experiment.modelled_world import ModelledWorld
from anabranch.sim.experiment.modelled_world import settings_of as modelled_settings
from anabranch.sim.experiment.run import KNOWN_POLICIES, Simulation, simulate
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.metrics.iteration_metrics import estimate
from anabranch.sim.metrics.lower_bound import LowerBound
from anabranch.train.model.sizes import SUM_WIRE_BYTES, block_parameters, model_config, named_size
from anabranch.train.stage.protocol_inputs import settings_of
from support.grids import every_value
from support.swarms.small_scenario import SMALL_CHURN, small

WAN10 = find_profile("wan10")


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("policy", "crash", "seed"), every_value(KNOWN_POLICIES, (0.0, 0.4), range(2)))
def test_nobody_beats_the_clairvoyant_bound(policy: str, crash: float, seed: int) -> None:
    outcome = simulate(small({"churn.crash": crash}), WAN10, policy, seed)
    assert not outcome.failure
    assert len(outcome.rows) == 5
    for row in outcome.rows:
        assert row.seconds >= row.bound_s > 0.0, row
        assert row.computed_s > row.wasted_s >= row.died_s - 1e-9 >= -1e-9
    assert crash == 0.0 or sum(row.crashes for row in outcome.rows) > 0
    assert outcome.rollbacks == 0  # the last replica that has a stage's state is spared
    assert (crash == 0.0) == (sum(row.died_s for row in outcome.rows) == 0.0)
    assert crash > 0.0 or sum(row.wasted_s for row in outcome.rows) == 0.0


@pytest.mark.costly
@pytest.mark.parametrize("seed", [0, 1])
def test_overlapping_iterations_are_quicker_and_keep_their_bound(seed: int) -> None:
    """The mean of iterations with others beside them; without a codec the lines count, too."""
    means = {}
    for delay in (0, 1):
        outcome = simulate(small({"run.delay": delay, "run.iterations": 12}), WAN10, "auction", seed)
        assert not outcome.failure
        rows = outcome.rows[4:-1]
        means[delay] = sum(row.seconds for row in rows) / len(rows)
    assert rows[0].bound_s <= means[1] < means[0]


def test_the_bound_of_overlapping_iterations_is_worked_out_by_hand() -> None:
    """Single replicas, no reduce: the slowest stage's computing, or the bits on the line of a relay."""
    changes = {"fleet.relays": 2, "fleet.data_nodes": 1}
    fleet = fleet_of(small(changes), WAN10, 0)
    computing = 8 * max(h.machine.microbatch_s(h.stage) for h in fleet.hosts.values() if h.stage)
    assert LowerBound(fleet).overlapped_s({}, {}) == pytest.approx(computing, rel=1e-9)
    assert LowerBound(fleet).overlapped_s({"r1.0": 0.5, "r2.0": 0.5}, {}) == pytest.approx(2 * computing)
    thin = fleet_of(small(changes | {"network.up_bps": [1e6]}), WAN10, 0)
    bits = 8.0 * 8 * (thin.scenario.work.activation_bytes + thin.scenario.work.gradient_bytes)
    assert LowerBound(thin).overlapped_s({}, {}) == pytest.approx(bits / 1e6)


def test_whole_models_do_not_overlap() -> None:
    with pytest.raises(UserError, match=r"run\.delay = 1"):
        small({"run.delay": 1, "model.stages": 0})


def test_the_bound_of_a_fleet_without_company_is_worked_out_by_hand() -> None:
    """Single replicas, no reduce: the slowest stage's computing after its first input."""
    fleet = fleet_of(small({"fleet.relays": 2, "fleet.data_nodes": 1}), WAN10, 0)
    one, two, data = (fleet.hosts[name] for name in ("r1.0", "r2.0", "d0"))
    size = fleet.scenario.work.activation_bytes
    embed = data.machine.seconds(0, tasks.Embed)
    forward = one.machine.seconds(1, tasks.Forward)
    reach_1 = embed + fleet.link("d0", "r1.0").seconds(size)
    reach_2 = reach_1 + forward + fleet.link("r1.0", "r2.0").seconds(size)
    by_hand = max(reach_1 + 8 * one.machine.microbatch_s(1), reach_2 + 8 * two.machine.microbatch_s(2))
    by_hand = max(by_hand, 8 * data.machine.microbatch_s(0))
    assert LowerBound(fleet).bound_s({}, {}) == pytest.approx(by_hand, rel=1e-9)
    half = LowerBound(fleet).bound_s({"r1.0": 0.5, "r2.0": 0.5}, {})
    assert half == pytest.approx(max(16 * one.machine.microbatch_s(1), by_hand), rel=1e-9)


def test_sums_go_over_lines_packed_and_lie_in_memory_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[type, set[float]] = {}
    plain = ModelledWorld.payload_bytes

    def noted(world: ModelledWorld, sender: Node, message: msg.AnyMessage) -> float:
        size = plain(world, sender, message)
        sizes.setdefault(type(message), set()).add(size)
        return size

    monkeypatch.setattr(ModelledWorld, "payload_bytes", noted)
    scenario = small()
    assert not simulate(scenario, WAN10, "auction", 0).failure
    elements = {scenario.work.parameters(stage) for stage in range(scenario.model.stages + 1)}
    replicas = (2, 3)
    for kind, each in ((msg.ReducePart, SUM_WIRE_BYTES), (msg.ReducedPart, GRADIENT_BYTES)):
        assert sizes[kind] <= {each * n / parts for n in elements for parts in replicas}
    assert SUM_WIRE_BYTES < SUM_BYTES


def test_a_simulated_leader_reckons_with_the_bytes_of_a_live_one() -> None:
    sections = {"model": {"size": "llama-160m"}, "pipeline": {"stages": 6}, "fleet": {"relays": 6}}
    run = config_from_dict({"anabranch": {"version": 1}, **sections})
    work = Workload(named_size("llama-160m"), 6, 2, 512)
    live = settings_of(run, "run", model_config(run.model, 32_000))
    assert live.block_bytes == work.block_bytes == (SUM_WIRE_BYTES + 4) * block_parameters(work.model)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_simulated_snapshots_are_as_frequent_as_live_ones(delay: int, copies: int) -> None:
    """A copied state has the predicted weights, too."""
    changes = {
        "model.size": "llama-160m", "pipeline.stages": 6, "fleet.relays": 6, "batch.rows": 2,
        "batch.sequence": 512, "iteration.delay": delay, "snapshots.copies": copies,
    }  # fmt: skip
    run = with_changes(RunConfig(), changes)
    model = {"size": "llama-160m", "stages": 6, "rows": 2, "sequence": 512}
    parts: dict[str, Any] = {f"model.{key}": value for key, value in model.items()}
    parts |= {"model.microbatches": run.batch.microbatches, "run.delay": delay, "run.snapshot_copies": copies}
    fleet = fleet_of(load_scenario("wan10", parts | {"fleet.capacity": [8]}), WAN10, 0)
    live = settings_of(run, "run", model_config(run.model, 32_000)).snapshot_every
    assert modelled_settings(fleet, "auction").snapshot_every == live
    assert (live == 0) == (copies == 0) and live < 100
    if copies:
        kept = load_scenario("wan10", parts | {"run.snapshot_every": 3})
        assert modelled_settings(fleet_of(kept, WAN10, 0), "auction").snapshot_every == 3


def test_two_equal_replicas_share_the_first_iteration() -> None:
    """Its sender knows no speeds by heartbeats yet, but those that the replicas joined with: the first to
    grant its credits does not get all microbatches."""
    scenario = small({"model.stages": 1, "fleet.data_nodes": 1, "fleet.relays": 2, "model.microbatches": 48})
    rows = simulate(scenario, WAN10, "auction", 0).rows
    assert rows[0].seconds < 1.3 * rows[-1].seconds


@pytest.mark.costly
def test_paced_connections_are_slow_at_first_and_crashes_break_nothing() -> None:
    """They cost the first iteration more than a later one, in which bursts take their share of a trip."""
    calm, paced = ({"network.burst_trips": trips, "run.iterations": 8} for trips in (0.0, 0.5))
    quick, slow = simulate(small(calm), WAN10, "auction", 0), simulate(small(paced), WAN10, "auction", 0)
    assert not quick.failure and not slow.failure
    more = [after.seconds - before.seconds for before, after in zip(quick.rows, slow.rows, strict=True)]
    assert more[0] > 2.0 * more[-1] > 0.0, more
    crashes = simulate(small(paced | {"churn.crash": 0.3}), WAN10, "auction", 1)
    assert not crashes.failure and sum(row.crashes for row in crashes.rows) > 0


def test_the_same_seed_gives_the_same_rows_and_another_does_not() -> None:
    scenario = small({"churn.crash": 0.3})
    first, again = (simulate(scenario, WAN10, "auction", 3) for _ in range(2))
    assert first == again
    assert simulate(scenario, WAN10, "auction", 4).rows != first.rows


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("crash", [0.0, 0.3])
def test_a_forward_computed_again_makes_room_where_memory_is_short(crash: float) -> None:
    """Whole numbers check that each step counts each microbatch once."""
    short = {"fleet.capacity": [1], "churn.crash": crash, "model.microbatches": 16}
    kept, again = (
        simulate(small(short | {"fleet.recompute": more}), WAN10, "auction", 0) for more in (0.0, 4.0)
    )
    assert not kept.failure and not again.failure
    computed = [sum(row.computed_s for row in outcome.rows) for outcome in (kept, again)]
    took = [sum(row.seconds for row in outcome.rows) for outcome in (kept, again)]
    assert crash or computed[1] > computed[0], "some forwards are computed twice"
    assert took[1] < 0.9 * took[0]


def test_a_connection_takes_three_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Simulation(fleet_of(small(), WAN10, 0), "auction", 0).world
    dialled: dict[str, float] = {}
    dial = world.dial

    def told(node: Node, peer: str, address: str = "") -> None:
        dialled.setdefault(node.id, world.clock.now)
        dial(node, peer, address)

    monkeypatch.setattr(world, "dial", told)
    joined: dict[str, float] = {}
    while len(joined) < len(world.nodes) - 1:
        assert world.clock.step()
        for name, node in world.nodes.items():
            if "d0" in node.links:
                joined.setdefault(name, world.clock.now)
    for name, at in joined.items():
        assert at - dialled[name] == pytest.approx(6 * world.fleet.link(name, "d0").latency_s, abs=1e-9), name


def test_crashes_are_drawn_alike_for_everybody_and_as_often_as_said() -> None:
    relays = [f"r{n}" for n in range(16)]
    drawn = [crashes(1, t, reversed(relays), 0.1) for t in range(2000)]
    assert drawn == [crashes(1, t, relays, 0.1) for t in range(2000)]
    assert sum(map(len, drawn)) / 2000 / 16 == pytest.approx(0.1, abs=0.01)
    assert all(0.0 <= share < 1.0 for each in drawn for share, _ in each)


def test_intervals_are_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert estimate([5.0]).half == 0.0


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    changes = [f"{key}={json.dumps(value)}" for key, value in SMALL_CHURN.items()]
    assert main(["simulate", "wan10", "--policy", "auction", "greedy", "--jobs", "1", "--set", *changes]) == 0
    table = capsys.readouterr().out
    assert "over bound" in table and "lower bound s" in table and "greedy" in table
    assert table.startswith("wan10: llama-tiny, ") and "\n1 seed, " in table
    twice = ["--set", changes[0], "--set", *changes[1:]]
    assert main(["simulate", "wan10", "--seeds", "2", "--jobs", "1", "--json", *twice]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["version"] == 1
    assert result["scenario"]["model"]["size"] == "llama-tiny"
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    assert result["policies"][0]["figures"]["over_bound"]["mean"] > 1.0


@pytest.mark.costly
def test_pictures_show_each_node_and_who_crashed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [f"{key}={json.dumps(value)}" for key, value in SMALL_CHURN.items()] + ["churn.crash=0.4"]
    command = ["simulate", "wan10", "--policy", "auction", "restart", "--jobs", "1", "--plot", str(tmp_path)]
    assert main([*command, "--set", *changes]) == 0
    assert capsys.readouterr().out
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [
        "map-auction.svg", "policies.svg", "throughput.svg", "timeline-auction.json", "timeline-auction.svg"
    ]  # fmt: skip
    traced = json.loads((tmp_path / "timeline-auction.json").read_text("utf-8"))["traceEvents"]
    kinds = {event.get("cat") for event in traced}
    assert {"forward", "input gradient", "weight gradient", "step"} <= kinds
    assert {"sending", "reduce", "state", "gone", "joining", "repair"} <= kinds
    words = (tmp_path / "timeline-auction.svg").read_text("utf-8")
    for word in ("sending for the reduce", "back, not yet serving", "crash", "repair: from the lost node"):
        assert f"<!-- {word}" in words, word
    computing: dict[int, float] = {}
    names = {event["pid"]: event["args"]["name"] for event in traced if event["name"] == "process_name"}
    gone = [event for event in traced if event.get("cat") == "gone"]
    for event in (event for event in traced if event.get("cat") == "repair"):
        lost = [e for e in gone if names[e["pid"]] == event["args"]["lost with"] and e["ts"] <= event["ts"]]
        assert lost, "what is repaired was with one that is gone"
        assert names[event["pid"]] != event["args"]["lost with"]
    for event in sorted((e for e in traced if e["ph"] == "X" and not e["tid"]), key=lambda e: e["ts"]):
        assert event["ts"] >= computing.get(event["pid"], 0.0) - 1.0, "a node computes one thing at a time"
        computing[event["pid"]] = event["ts"] + event["dur"]


def test_every_shipped_scenario_loads() -> None:
    fleets = {"eight-homes", "fleet1000", "fleet64", "forty"}
    assert set(shipped_scenarios()) == fleets | {"volunteers", "volunteers-8b", "wan10", "wan10-mixed"}
    for name in shipped_scenarios():
        fleet = fleet_of(load_scenario(name), WAN10, 0)
        assert all(host.capacity >= 1 for host in fleet.hosts.values())
    mixed = fleet_of(load_scenario("wan10-mixed"), WAN10, 0)
    assert len({host.capacity for host in mixed.hosts.values()}) > 2
    homes = fleet_of(load_scenario("volunteers"), WAN10, 0)
    assert len({host.line.up_bps for host in homes.hosts.values()}) > 2
    assert all(host.machine.device.name.startswith("rtx") for host in homes.hosts.values()), "of homes"


@pytest.mark.parametrize("profile", shipped_profiles())
def test_sixty_four_devices_in_every_shipped_network(profile: str) -> None:
    fleet = fleet_of(load_scenario("fleet64", {"network.profile": profile}), find_profile(profile), 0)
    assert len(fleet.hosts) == 64
    assert len(fleet.stage(1)) == 8
    inside, regions = find_profile(profile).same_region, {host.region for host in fleet.hosts.values()}
    ways = [fleet.link("d0", other) for other in fleet.hosts]
    assert regions == set(find_profile(profile).regions)
    assert (inside.delay_s, inside.rate_bps) == min((way.latency_s, way.bandwidth_bps) for way in ways)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"churn.crash": 1.5}, "wan10.toml: churn.crash = 1.5 is out of range: at least 0.0 and at most 0.9"),
        ({"churn.crahs": 0.1}, "wan10.toml: churn.crahs is no key; [churn] has crash, return_s, spare_last"),
        ({"wheather.rain": 1}, "wan10.toml: [wheather] is no section of a scenario; there are model, fleet"),
        ({"model.stages": 2.5}, "model.stages must be a whole number of at least 0 and at most 64, not 2.5"),
        ({"model.size": "llama-2t"}, "model.size: there is no 'llama-2t'; there are llama-tiny"),
        ({"model.dtype": "fp8"}, "model.dtype: 'fp8' is none of fp32, fp16"),
        ({"fleet.relays": 3}, "fleet.relays = 3: at least one for each of 6 stages"),
        ({"fleet.device": ["abacus"]}, "fleet.device: there is no 'abacus'; there are t4"),
        ({"fleet.device": []}, 'fleet.device must be a list such as ["t4"], not []'),
        ({"fleet.device": "t4"}, """fleet.device must be a list such as ["t4"], not 't4'"""),
        ({"fleet.devices": "none.json"}, "wan10.toml: fleet.devices: none.json: cannot be read: No such"),
        ({"model.microbatches": 10**400}, "model.microbatches = 1000"),
        ({"churn.crash": 10**400}, "churn.crash must be a number of at least 0.0"),
        ({"churn.crash": float("nan")}, "wan10.toml: churn.crash = nan is out of range: at least 0.0"),
        ({"network.up_bps": [float("inf")]}, "network.up_bps = inf is out of range: at least 100000.0"),
        ({"model.size": "llama-8b"}, "a stage of llama-8b does not fit into a t4, with model.stages = 6"),
        ({"network.up_bps": [1000]}, "network.up_bps = 1000.0 is out of range: at least 100000.0"),
        ({"pipeline.stages": 3}, "wan10.toml: [pipeline] is of run files, this is to be a fleet of machines"),
        ({"churn.crash": 0.1, "churn.trace": "no.json"}, "one of them (churn.crash = 0.0 leaves it to the"),
        ({"run.warm_up": 12}, "run.warm_up = 12: must be less than run.iterations = 12"),
        ({"anabranch.version": 2}, "anabranch.version must be 1"),
        ({"anabranch.version": True}, "anabranch.version must be 1"),
        ({"anabranch.verzion": 1}, "wan10.toml: anabranch.verzion is no key; [anabranch] has version"),
    ],
)
def test_wrong_scenarios_are_refused_by_file_key_and_range(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        load_scenario("wan10", change)
    assert says in str(refused.value)


#: A stage fits into the first relay and not into the second; then one in a region that is not there.
SMALL_MACHINE = """\
[anabranch]
version = 1
[model]
size = "llama-1b"
stages = 1
[[machines]]
device = "h100"
[[machines]]
device = "t4"
"""
NO_REGION = SMALL_MACHINE.replace('device = "t4"', 'device = "h100"\nregion = "Atlantis"')
#: Two relays for two stages, both of the first one; then relays that are named and counted as well.
NO_RELAY = SMALL_MACHINE.replace("stages = 1", "stages = 2").replace('device = "', 'stage = 1\ndevice = "')
NAMED = SMALL_MACHINE.replace('device = "t4"', 'role = "data"') + '[[machines]]\ndevice = "h100"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SMALL_MACHINE, "machines[1].device: a stage of llama-1b does not fit into a t4"),
        (NO_RELAY, "machines: none of the relays has stage 2 of model.stages = 2"),
        (f"{NAMED}[fleet]\nrelays = 4\n", "fleet.relays is of machines that are drawn, and [[machines]]"),
        (f"{NAMED}[network]\nup_bps = [1e8]\n", "network.up_bps is of machines that are drawn, and"),
        (NO_REGION, "machines[1].region: 'Atlantis' is no region of the network; there are Oregon"),
        (f"{SMALL_MACHINE}[network]\nprofile = 'moon'\n", "network.profile: moon: cannot be read: No such"),
        (f"{SMALL_MACHINE}[churn]\ntrace = 'no.json'\n", "churn.trace: no.json: cannot be read: No such"),
    ],
)
def test_what_a_scenario_names_is_refused_by_its_file_and_key(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    assert main(["simulate", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: {says}" in error and error.count("\n") == 1


def test_a_folder_for_pictures_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.cli.simulate.run_all", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").write_text("", "utf-8")
    assert main(["simulate", "wan10", "--plot", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"error: --plot {tmp_path / 'file'}: File exists\n"
    assert main(["simulate", "wan10", "--jobs", "-1"]) == 2
    assert "--jobs -1: it must be at least 0" in capsys.readouterr().err


def _children(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/task/{process}/children").read_text("ascii").split()
    except FileNotFoundError:
        return []


def test_an_interrupt_does_not_wait_for_the_seeds_under_way() -> None:
    """Hours of it on two processes; only the one that leads them is interrupted, as by `kill -INT`."""
    # Whoever runs the tests in the background ignores interrupts, and so would this process.
    heeds = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heeds += "from anabranch.cli.main import main; sys.exit(main())"
    long = ["simulate", "wan10", "--set", "run.iterations=100000", "--seeds", "3", "--jobs", "2"]
    leader = subprocess.Popen([sys.executable, "-c", heeds, *long], stderr=subprocess.PIPE, text=True)
    working: list[str] = []
    try:
        while len(working) < 2:
            assert leader.poll() is None
            time.sleep(0.05)
            working = _children(leader.pid)
        leader.send_signal(signal.SIGINT)
        _, said = leader.communicate(timeout=60.0)
        assert leader.returncode == 130
        assert said.endswith("\ninterrupted\n") and "Traceback" not in said
        assert not [child for child in working if Path(f"/proc/{child}").exists()]
    finally:
        leader.kill()
        for child in working:
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)


def test_wrong_command_lines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "no/such.toml"]) == 2
    error = capsys.readouterr().err
    assert "no/such.toml: cannot be read: No such file or directory; shipped scenarios: eight-homes" in error
    assert main(["simulate", "wan10", "--policy", "guess"]) == 2
    assert "--policy guess: choose one of auction" in capsys.readouterr().err
    assert main(["simulate", "wan10", "--set", "network.profile=moon.json"]) == 2
    assert "wan10.toml: network.profile: moon.json: cannot be read" in capsys.readouterr().err
    assert main(["simulate", "wan10", "--set", "churn"]) == 2
    assert "write it as section.key=value" in capsys.readouterr().err
    assert main(["simulate", "wan10", "--set", "fleet.device=[t4]"]) == 2
    assert """the shell drops quotes; write 'fleet.device=["t4"]'""" in capsys.readouterr().err


def test_a_run_directory_is_no_scenario_and_the_way_to_one_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory.create(tmp_path / "mine")
    assert main(["simulate", str(tmp_path / "mine")]) == 2
    assert f"`anabranch simulate --from {tmp_path / 'mine'}` makes" in capsys.readouterr().err


@pytest.mark.costly
def test_a_run_that_comes_to_no_end_is_told_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """A few small messages take an hour there."""
    thin = ["network.up_bps=[100000]", "network.down_bps=[100000]", "network.loss=0.2", "fleet.relays=2"]
    brief = ["model.stages=2", "model.microbatches=2", "run.iterations=1", "run.warm_up=0"]
    assert main(["simulate", "wan10", "--set", *thin, *brief]) == 1
    told = capsys.readouterr().out
    assert "nan" not in told and "0 seeds, 0 iterations counted" in told
    assert "FAILED auction, seed 0: step 1 is not there after 3600 virtual seconds: " in told
    assert "iteration 1 waits for" in told


def test_the_first_reduce_of_large_stages_is_not_taken_to_be_stuck() -> None:
    """Nobody knows yet how long a step takes: what came before the first reduce says how long it may take."""
    large = {"model.size": "llama-1b", "model.microbatches": 16, "run.iterations": 2, "run.warm_up": 1}
    simulation = Simulation(fleet_of(load_scenario("wan10", large), WAN10, 0), "auction", 0)
    assert not simulation.run().failure
    first, second = simulation.recorder.rows
    assert second.phases["reduce_s"] > 2.0 * STALL_FLOOR_S  # the least patience would be over
    assert not [fields for _, _, _, fields in simulation.world.notes if "stuck" in str(fields)]
    assert first.payload_bytes < 1.05 * second.payload_bytes  # nothing is sent again


@pytest.mark.costly
def test_dead_peers_of_a_large_simulation_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LARGE_HOSTS", 1)
    scenario = small({"churn.crash": 0.5, "run.iterations": 8})
    fleet = fleet_of(scenario, find_profile(scenario.network.profile), 0)
    simulation = Simulation(fleet, "auction", 0)
    usual = gc.get_threshold()
    try:
        assert simulation.run().failure == ""
    finally:
        gc.set_threshold(*usual)
    settings, restarted = simulation.world.settings, len(simulation.returned)
    peers = [found for found in gc.get_objects() if type(found) is Peer]
    alive = sum(peer.ctx.run.settings is settings for peer in peers)
    assert restarted >= 6
    assert alive < len(fleet.hosts) + restarted // 2, (alive, restarted)
