"""`anabranch plan`: what it recommends, that the run file holds, and what it refuses."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.main import main
from anabranch.cli.plan import load_fleet
from anabranch.config import load_run_file, relays_by_stage
from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.machine_spec import staged
from anabranch.sim.cluster.scenario import fleet_of, load_scenario, parse_scenario
from anabranch.sim.planning.estimate import estimate, of_any_assignment
from anabranch.sim.planning.search import Plan, improve, named_fleet, search
from anabranch.sim.planning.wire_choice import (
    CANDIDATES,
    DELAYED_TOKENS,
    ROUNDED_TOKENS,
    chosen,
    reasons,
    weighed,
)
from benchmarks.placement.plan import plans

WAN10 = find_profile("wan10")

ROOT = Path(__file__).resolve().parents[3]
FLEET = """
[anabranch]
version = 1
[model]
size = "llama-tiny"
rows = 8
sequence = 128
microbatches = 4
[fleet]
achieved = 0.01
[[machines]]
role = "data"
device = "t4"
region = "London"
price_per_hour = 0.5
[[machines]]
name = "quick"
count = 2
device = "v100"
region = "London"
price_per_hour = 1.0
[[machines]]
count = 3
device = "t4"
region = "Sydney"
[run]
iterations = 3
warm_up = 1
"""


def fleet_file(folder: Path, text: str = FLEET) -> str:
    path = folder / "fleet.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_named_machines_are_where_and_what_they_are(tmp_path: Path) -> None:
    scenario = load_scenario(fleet_file(tmp_path), {"model.stages": 2})
    fleet = fleet_of(scenario, WAN10, 0)
    assert list(fleet.hosts) == ["d0", "quick-0", "quick-1", "r1.1", "r2.1", "r1.2"]
    assert [fleet.hosts[name].region for name in fleet.hosts] == ["London"] * 3 + ["Sydney"] * 3
    assert {host.machine.device.name for host in fleet.stage(0)} == {"t4"}
    assert len(fleet.stage(1)) == 3 and len(fleet.stage(2)) == 2


def test_measured_seconds_stand_before_a_devices_figures(tmp_path: Path) -> None:
    text = FLEET + '\n[[machines]]\nname = "mine"\nspeed = 2.0\nforward_s = 3.0\nweight_gradient_s = 1.0\n'
    fleet = fleet_of(load_scenario(fleet_file(tmp_path, text), {"model.stages": 1}), WAN10, 0)
    mine, other = fleet.hosts["mine"].machine, fleet.hosts["r1.2"].machine
    gradient_s = mine.microbatch_s(1) - 2.0
    assert gradient_s == pytest.approx(other.microbatch_s(1) / 2.0, rel=1.0)  # from its figures
    assert 0.0 < gradient_s < 0.1


def test_the_estimate_is_no_less_than_the_bound_and_near_the_simulated_time(tmp_path: Path) -> None:
    scenario = load_scenario("wan10", {"run.iterations": 3, "run.warm_up": 1, "model.microbatches": 12})
    fleet = fleet_of(scenario, WAN10, 0)
    found = estimate(fleet)
    assert found.iteration_s >= found.bound_s > 0.0
    assert found.iteration_s >= found.way_s + found.reduce_s + found.computing_s - 1e-9
    longer = fleet_of(replace(scenario, model=replace(scenario.model, microbatches=48)), WAN10, 0)
    assert estimate(longer).computing_s == pytest.approx(4 * found.computing_s, rel=0.05)


def test_an_exchange_of_machines_never_makes_an_estimate_worse(tmp_path: Path) -> None:
    scenario = named_fleet(load_fleet(fleet_file(tmp_path), None, None), WAN10)
    worst = plans(scenario, WAN10, [2])[-1]
    better = improve(worst, WAN10)
    assert better.estimated.iteration_s <= worst.estimated.iteration_s
    assert sorted(part.name for part in better.scenario.machines) == sorted(
        part.name for part in scenario.machines
    )


def test_a_deal_is_estimated_as_the_fleet_that_has_it_is() -> None:
    """Whatever machines are at a stage, and whoever is left out."""
    scenario = named_fleet(load_scenario("wan10-mixed", {"fleet.relays": 7, "model.stages": 2}), WAN10)
    rng, relays = random.Random(0), [part for part in scenario.machines if part.role == "relay"]
    estimates = of_any_assignment(scenario, WAN10)
    for _ in range(10):
        some = rng.sample(relays, 5)
        deal = {part.name: 1 + at % 2 for at, part in enumerate(some)}
        data = [part for part in scenario.machines if part.role == "data"]
        machines = (*data, *(replace(part, stage=deal[part.name]) for part in some))
        alone = estimate(fleet_of(replace(scenario, machines=machines), WAN10, 0))
        found = replace(estimates.of(deal), bound_s=alone.bound_s)
        assert asdict(found) == pytest.approx(asdict(alone)), "no bound is above these"


def test_a_deal_that_does_not_fit_takes_for_ever() -> None:
    scenario = named_fleet(load_fleet("forty", "llama-1b", None), WAN10)
    one = replace(scenario, model=replace(scenario.model, stages=1, rows=64))
    estimates = of_any_assignment(one, WAN10)
    relays = [part.name for part in one.machines if part.role == "relay"]
    assert math.isinf(estimates.seconds(dict.fromkeys(relays, 1))), "the state is more than a T4 holds"
    two = of_any_assignment(replace(scenario, model=replace(scenario.model, stages=2)), WAN10)
    assert math.isinf(two.seconds(dict.fromkeys(relays, 1))), "nobody serves stage 2"


def test_a_quick_machine_with_few_places_gets_less_than_its_share(tmp_path: Path) -> None:
    """And the slow ones' places are full when nothing is left to deal."""
    quick = FLEET.replace('device = "v100"', 'device = "v100"\ncapacity = 1')
    alike = {"model.stages": 1, "model.microbatches": 64, "model.rows": 1}
    few, many = (
        estimate(fleet_of(load_scenario(fleet_file(tmp_path, text), alike), WAN10, 0))
        for text in (quick, FLEET)
    )
    assert few.computing_s == pytest.approx(many.computing_s), "if each had its share"
    assert few.places_s > 2.0 * few.computing_s
    assert many.places_s == pytest.approx(many.computing_s, rel=0.1)


def test_the_search_finds_what_every_deal_holds() -> None:
    """Where machines are few, every deal was tried."""
    changes = {"fleet.relays": 6, "model.stages": 2, "model.microbatches": 24, "fleet.data_nodes": 1}
    scenario = named_fleet(load_scenario("wan10-mixed", changes), WAN10)
    staged_ = tuple(replace(part, stage=stage) for stage, part in staged(scenario.machines, 2))
    plan = Plan(replace(scenario, machines=staged_), estimate(fleet_of(scenario, WAN10, 0)))
    estimates = of_any_assignment(plan.scenario, WAN10)
    relays = [part.name for part in scenario.machines if part.role == "relay"]
    every = [dict(zip(relays, deal, strict=True)) for deal in product((1, 2), repeat=len(relays))]
    best_s = min(map(estimates.seconds, every))
    assert improve(plan, WAN10).estimated.iteration_s <= 1.02 * best_s


#: At one home a line of 2 Mbit/s: its whole sum goes up in every reduce.
THIN = FLEET.replace("count = 3", "count = 3\nup_bps = 2e6")


def test_who_costs_more_than_they_bring_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = plans(load_fleet(fleet_file(tmp_path, THIN), None, None), WAN10, [1])[0]
    assert sorted(part.device for part in best.left_out) == ["t4"] * 3
    assert best.with_all is not None and best.with_all.reduce_s > 2.0 * best.estimated.reduce_s
    used = [part.name for part in best.scenario.machines if part.role == "relay"]
    assert used == ["quick-0", "quick-1"] and best.replicas == (2,)
    assert best.price_per_hour == 2.5
    out = tmp_path / "run.toml"
    command = ["plan", fleet_file(tmp_path, THIN), "--stages", "1", "--simulate", "1", "--iterations", "2"]
    assert main([*command, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "llama-tiny on fleet: 2 of 5 relays, 1 data node;" in told
    assert told.count("left out: 3 × t4 Sydney: with all machines the best plan takes") == 1
    assert relays_by_stage(load_run_file(out)) == (2,)
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]
    assert found["left_out"] == {"t4 Sydney": 3} and found["replicas"] == [2]
    assert found["with_all"]["reduce_s"] > found["estimated"]["reduce_s"]


def test_where_machines_crash_a_stage_keeps_two(tmp_path: Path) -> None:
    one = THIN.replace("count = 2", "count = 1").replace("count = 3", "count = 4")
    for churn, replicas in ((None, 1), (0.1, 2)):
        scenario = load_fleet(fleet_file(tmp_path, one), None, churn)
        fewest = min(plan.replicas for plan in plans(scenario, WAN10, [1]))
        assert fewest == (replicas,)


def test_every_plan_has_each_machine_once_and_the_whole_batch(tmp_path: Path) -> None:
    found = plans(load_fleet(fleet_file(tmp_path), None, None), WAN10)
    assert {plan.scenario.model.stages for plan in found} == {1, 2, 3}
    for plan in found:
        model = plan.scenario.model
        assert model.rows * model.microbatches == 32
        assert sum(plan.replicas) + len(plan.left_out) == 5 and min(plan.replicas) >= 1
        names = [part.name for part in (*plan.scenario.machines, *plan.left_out)]
        assert len(set(names)) == 6
    times = [plan.estimated.iteration_s for plan in found]
    assert times == sorted(times)


def test_the_run_file_is_one_and_says_what_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    command = ["plan", fleet_file(tmp_path), "--stages", "2", "--simulate", "1", "--iterations", "2"]
    assert main([*command, "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    best, config = result["plans"][0], load_run_file(out)
    assert out.read_text("utf-8") == result["run_file"]
    assert config.model.size == "llama-tiny" and config.model.vocab_size == 512
    assert (config.batch.rows, config.batch.microbatches) == (best["rows"], best["microbatches"])
    assert list(relays_by_stage(config)) == best["replicas"] and config.pipeline.stages == 2
    assert config.fleet.recompute == best["recompute"]
    assert config.run.numerics == "mixed", "two kinds of machines"
    assert best["simulated_s"] == best["iteration_s"] > 0.0
    assert best["price_per_hour"] == 2.5
    tokens = 32 * 128
    assert best["tokens_per_s"] == pytest.approx(tokens / best["iteration_s"])
    assert best["price_per_billion_tokens"] == pytest.approx(
        2.5 / 3600 * best["iteration_s"] * 1e9 / tokens
    )


def test_the_run_decides_by_itself_what_it_did_where_it_was_simulated(tmp_path: Path) -> None:
    keys = 'achieved = 0.01\nspare = "links"\nspread = "never"\nrebalance = 2\ndeal = "links"'
    fleet, out = fleet_file(tmp_path, FLEET.replace("achieved = 0.01", keys)), tmp_path / "run.toml"
    assert main(["plan", fleet, "--stages", "2", "--simulate", "0", "--out", str(out)]) == 0
    run = load_run_file(out).fleet
    assert (run.spare, run.spread, run.rebalance, run.deal) == ("links", "never", 2, "links")


@pytest.mark.costly
def test_what_people_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", fleet_file(tmp_path), "--stages", "3", "--simulate", "0"]) == 0
    told = capsys.readouterr().out
    assert "llama-tiny on fleet: 5 relays, 1 data node; 32 × 128 tokens per iteration" in told
    assert "2.50 per hour" in told and "t4 Sydney" in told
    assert "currency of the fleet's price_per_hour" in told
    assert told.count("\n") < 20 and "[pipeline]" not in told, "no run file buries the table"
    assert "--wire auto" not in told, "lines are no trouble here"
    assert told.endswith("--out run.toml writes the run file of the first plan\n")
    thin = fleet_file(tmp_path, FLEET.replace("[[machines]]\n", "[[machines]]\nup_bps = 2e5\n"))
    assert main(["plan", thin, "--stages", "3", "--simulate", "0"]) == 0
    assert "--wire auto weighs codecs; " in capsys.readouterr().out
    free = fleet_file(tmp_path, FLEET.replace("price_per_hour", "# price_per_hour"))
    out = tmp_path / "run.toml"
    assert main(["plan", free, "--stages", "3", "--simulate", "0", "--out", str(out)]) == 0
    assert "per hour" not in capsys.readouterr().out, "no prices, no cost"
    assert main(["plan", free, "--stages", "3", "--simulate", "0", "--out", str(out), "--force"]) == 0
    assert sum(load_run_file(out).fleet.relays_per_stage) == 5


def test_the_first_plans_come_before_all_numbers_of_stages_are_compared(tmp_path: Path) -> None:
    """A comparison of all of them takes many minutes for a thousand machines."""
    first = next(search(load_fleet(fleet_file(tmp_path), None, None), WAN10))
    assert {plan.scenario.model.relay_stages for plan in first} == {1}


def test_the_first_table_comes_before_machines_are_exchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.cli.plan.QUIET_S", 0.0)
    told_before: list[str] = []

    def slow(plan: Plan, *_: object) -> Plan:
        told_before.append(capsys.readouterr().err)
        return plan

    monkeypatch.setattr("anabranch.sim.planning.search.improve", slow)
    monkeypatch.setattr("anabranch.sim.planning.search.without", slow)
    out = tmp_path / "run.toml"
    assert main(["plan", fleet_file(tmp_path), "--simulate", "0", "--out", str(out)]) == 0
    assert "1.  " in told_before[0] and "these are first estimates" in told_before[0]
    assert "stopped" not in capsys.readouterr().err


def test_ctrl_c_takes_the_best_plan_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in its first exchange, or in its second simulation, a search ends with a run file."""

    def interrupted(*_: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.sim.planning.search.improve", interrupted)
    out = tmp_path / "run.toml"
    arguments = ["plan", fleet_file(tmp_path), "--out", str(out), "--force"]
    assert main([*arguments, "--json"]) == 0
    told = capsys.readouterr()
    assert "stopped; " in told.err and "none simulated" in told.err
    result = json.loads(told.out)
    assert not result["complete"] and result["plans"][0]["simulated_s"] is None
    assert sum(load_run_file(out).fleet.relays_per_stage)

    monkeypatch.undo()
    rounds: list[Plan] = []

    def one(plan: Plan, *_: object) -> Plan:
        if rounds:
            raise KeyboardInterrupt
        rounds.append(plan)
        return plan

    monkeypatch.setattr("anabranch.sim.planning.search.simulated", one)
    assert main([*arguments, "--stages", "3"]) == 0
    assert "stopped; 1 of 3 plans simulated" in capsys.readouterr().err


def test_ctrl_c_before_the_first_plan_is_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anabranch.sim.planning.search.named_fleet", interrupted)
    assert main(["plan", fleet_file(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("count = 3", "count = 0"), "fleet.toml: machines[2].count = 0 is out of range: at least 1"),
        (("count = 3", "cuont = 3"), "machines[2].cuont is no key; [machines] has count, name, device"),
        (('"v100"', '"abacus"'), "machines[1].device: there is no 'abacus'; there are t4"),
        (('"Sydney"', '"Atlantis"'), "machines[2].region: 'Atlantis' is no region of the network"),
        (('role = "data"', 'role = "boss"'), "machines[0].role: 'boss' is none of relay, data"),
        (("price_per_hour = 0.5", "price_per_hour = -1"), "machines[0].price_per_hour = -1.0 is out"),
        (('"llama-tiny"', '"llama-2t"'), "model.size: there is no 'llama-2t'; there are llama-tiny"),
        (('"llama-tiny"', '"llama-8b"'), "llama-8b does not fit: in every cut into stages"),
        (("[[machines]]", "[machines]"), "not TOML"),
    ],
)
def test_wrong_fleets_are_refused_in_one_line(
    change: tuple[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in FLEET
    assert main(["plan", fleet_file(tmp_path, FLEET.replace(*change)), "--simulate", "0"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        (["--simulate", "-1"], "--simulate -1: it must be at least 0"),
        (["--iterations", "1"], "--iterations 1: it must be at least 2"),
        (["--stages", "0"], "--stages 0: it must be at least 1"),
        (["--stages", "9"], "--stages 9: at most 3"),
        (["--model", "moon"], "model.size: there is no 'moon'"),
        (["--churn", "2"], "churn.crash = 2.0 is out of range"),
        (["--out", str(tmp_path / "no" / "run.toml"), "--simulate", "0"], "there is no folder"),
        (["--out", str(tmp_path)], f"--out {tmp_path}: Is a directory"),
        (["--out", fleet_file(tmp_path)], "exists; give another name, or --force to overwrite it"),
    ):
        assert main(["plan", fleet_file(tmp_path), *options]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machines", "says"),
    [
        ([{"name": "a"}, {"name": "a"}], "machines: two of them are called 'a'"),
        ([{"stage": 3}], "machines[0].stage = 3: at most model.stages = 1"),
        ([{"role": "data", "stage": 1}], "machines[0].stage: a data node holds none"),
        ([{"role": "data"}], "machines: 0 relays, at least one for each of model.stages = 1"),
        ({}, "machines must be tables"),
    ],
)
def test_machines_that_do_not_go_together_are_refused(machines: object, says: str) -> None:
    data = {"anabranch": {"version": 1}, "model": {"stages": 1}, "machines": machines}
    with pytest.raises(UserError, match=r"x\.toml") as refused:
        parse_scenario(data, "x.toml")
    assert says in str(refused.value)


def test_a_failed_simulation_leaves_the_estimate() -> None:
    scenario = load_scenario("wan10")
    plan = Plan(scenario, estimate(fleet_of(scenario, WAN10, 0)))
    assert plan.iteration_s == plan.estimated.iteration_s


def on_lines(bps: float) -> str:
    """The fleet, in one place, with lines of so many bits a second."""
    text = FLEET.replace("Sydney", "London")
    for device in ("t4", "v100"):
        text = text.replace(f'"{device}"', f'"{device}"\nup_bps = {bps}\ndown_bps = {bps}')
    return text


@pytest.mark.costly
def test_codecs_and_delay_are_chosen_by_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On quick lines nothing is rounded, and the delay fills the times in which one relay has nothing of few
    microbatches, as it does on thin lines, where the cuts are rounded, too. Sums of one relay are needed by
    nobody: they stay exact. The run file has the keys, and says why."""
    found = []
    for bps in (1e10, 2e7):
        out = tmp_path / "run.toml"
        fleet = fleet_file(tmp_path, on_lines(bps))
        given = ["plan", fleet, "--stages", "1", "--simulate", "1", "--iterations", "2", "--wire", "auto"]
        assert main([*given, "--out", str(out), "--force"]) == 0
        run = load_run_file(out)
        found.append((run.wire.activations, run.wire.gradients, run.wire.reduce, run.iteration.delay))
        shown = capsys.readouterr().out
        assert shown.count("  chosen\n") == 1 and "int8 cuts, coarse sums" in shown
        assert "of state a relay" in shown and "subspace 16 " in shown
        text = out.read_text("utf-8")
        assert "# codecs: " in text and ("# delay: " in text) == bool(run.iteration.delay)
        assert not run.model.subspace
        note = run.run.note
        assert note in shown and note.startswith("codecs: ") and "the time to the same loss" in note
    assert found == [("none", "none", "exact", 1), ("int8", "int8", "exact", 1)]


def test_coarse_sums_are_chosen_where_the_reduce_is_what_lasts(tmp_path: Path) -> None:
    scenario = named_fleet(load_scenario(fleet_file(tmp_path, on_lines(2e7)), {"model.stages": 1}), WAN10)
    plan = Plan(scenario, estimate(fleet_of(scenario, WAN10, 0)))  # all five relays
    found = weighed(plan, WAN10, 0)  # estimated, so without the delay
    assert [each.scenario.wire for each in found] == [*CANDIDATES, CANDIDATES[-1]]
    assert chosen(found) is found[2] and "coarse sums" in reasons(found, found[2])[len(found)]
    assert found[2].iteration_s < found[1].iteration_s < found[0].iteration_s


def of_seconds(plan: Plan, seconds: float, **changes: object) -> Plan:
    """Plan whose estimate is so many seconds; changes: keys of its scenario by "section.key"."""
    scenario = plan.scenario
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        scenario = replace(scenario, **{section: replace(getattr(scenario, section), **{key: value})})
    return replace(plan, scenario=scenario, estimated=replace(plan.estimated, iteration_s=seconds))


def test_what_costs_tokens_has_to_save_more_than_they_take(tmp_path: Path) -> None:
    """A delay that saves a twentieth of the time is not worth more tokens; one that saves a sixth is.
    A subspace is another model: it is proposed where it is quicker, and not chosen."""
    scenario = named_fleet(load_scenario(fleet_file(tmp_path), {"model.stages": 1}), WAN10)
    plan = of_seconds(Plan(scenario, estimate(fleet_of(scenario, WAN10, 0))), 12.0)
    little, much = (of_seconds(plan, seconds, run__delay=1) for seconds in (11.5, 10.0))
    assert chosen([plan, little]) is plan and chosen([plan, much]) is much
    assert any(line.startswith("delay: ") for line in reasons([plan, much], much))
    slow, quick = (of_seconds(plan, seconds, model__subspace=16) for seconds in (5.0, 3.0))
    for narrow, proposed in ((slow, False), (quick, True)):
        assert chosen([plan, narrow]) is plan
        told = [line for line in reasons([plan, narrow], plan) if line.startswith("subspace: ")]
        assert bool(told) == proposed and all("model.subspace = 16" in line for line in told)


def test_two_versions_of_the_weights_take_memory() -> None:
    plain = load_scenario("wan10").work
    delayed = replace(plain, delayed=True)
    # Predicted weights (4), the second iteration's weights (4) and gradient sum (8): bytes a parameter.
    assert delayed.step_bytes(1) - plain.step_bytes(1) == 16 * plain.parameters(1)


def data_of(name: str) -> Any:
    """Data of a result."""
    return json.loads((ROOT / "docs" / "results" / "data" / f"{name}.json").read_text("utf-8"))["data"]


def test_what_is_lost_is_what_was_measured() -> None:
    """Losses in docs/results, as tokens: a loss between two synchronous runs is reached in between, on a line
    over the logarithm of their tokens."""
    kept: dict[str, Any] = {}
    for name in ("wire-loss", "delayed-loss"):
        for run in data_of(name):
            if run["job"]["seed"] == 1:
                kept[run["job"]["variant"], run["job"]["steps"]] = run["curve"][-1][1]
    doubling = kept["none", 600] - kept["synchronous", 1200]
    rounded = 2 ** ((kept["int8", 600] - kept["none", 600]) / doubling)
    ends: dict[str, dict[int, float]] = {}
    for run in data_of("delayed-loss-1024"):
        by_seed = ends.setdefault(run["job"]["variant"], {})
        seed = run["job"]["seed"]
        by_seed[seed] = min(by_seed.get(seed, math.inf), run["curve"][-1][1])
    late = [ends["delayed"][seed] - loss for seed, loss in ends["synchronous"].items()]
    delayed = 2 ** (sum(late) / len(late) / doubling)
    assert len(late) == 3
    assert round(rounded, 2) == ROUNDED_TOKENS and round(delayed, 2) == DELAYED_TOKENS


def test_a_plan_keeps_the_delay_of_its_fleet(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    fleet = fleet_file(tmp_path, f"{FLEET}delay = 1\n")
    given = ["plan", fleet, "--stages", "2", "--simulate", "1", "--iterations", "2", "--out", str(out)]
    assert main(given) == 0
    assert load_run_file(out).iteration.delay == 1


#: Eight T4s at home, none of which holds the model, and two data nodes. In a stage of a quarter of its blocks
#: there is room for a pipeline island.
AT_HOME = """
[anabranch]
version = 1
[model]
size = "llama-1b"
subspace = 128
rows = 1
sequence = 512
microbatches = 32
dtype = "fp16"
[wire]
activations = "int8"
gradients = "int8"
[[machines]]
role = "data"
count = 2
device = "a100-40gb"
[[machines]]
count = 8
device = "t4"
up_bps = 100e6
down_bps = 100e6
[run]
heartbeat_s = 10.0
"""


@pytest.mark.costly
@pytest.mark.slow
def test_pipeline_islands_where_the_model_fits_into_no_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    command = ["plan", fleet_file(tmp_path, AT_HOME), "--stages", "4", "8", "--simulate", "1"]
    assert main([*command, "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    best, config = result["plans"][0], load_run_file(out)
    assert best["slots"] == 2 and best["steps"] > 1 and not best["failures"]
    assert best["estimated"]["iteration_s"] == pytest.approx(best["simulated_s"], rel=0.25)
    tokens = best["steps"] * best["microbatches"] * best["rows"] * best["sequence"]
    assert best["tokens_per_s"] == pytest.approx(tokens / best["iteration_s"])
    assert (config.round.slots, config.round.steps) == (2, best["steps"])
    assert (config.round.first_moment, config.round.outer_momentum) == ("agree", 0.0)
    assert list(relays_by_stage(config)) == best["replicas"] == [8 // best["stages"]] * best["stages"]


def test_no_pipeline_islands_where_a_relay_holds_the_model(tmp_path: Path) -> None:
    scenario = load_fleet(fleet_file(tmp_path), None, None)
    *_, found = search(scenario, WAN10)
    assert not any(plan.scenario.round.slots for plan in found)
