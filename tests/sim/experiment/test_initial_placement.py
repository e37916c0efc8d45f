"""A scenario whose relays the leader of a run deals to the stages by links."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.churn_trace import JOIN, Change, Trace
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Fleet, Scenario, fleet_of, load_scenario
from anabranch.sim.experiment.initial_placement import assigned_by_links, placed
from anabranch.sim.experiment.run import simulate

CHANGES: dict[str, Any] = {
    "model.size": "llama-160m",
    "model.stages": 2,
    "model.microbatches": 8,
    "fleet.relays": 6,
    "fleet.data_nodes": 1,
    "fleet.speed": [0.5, 1.0],
    "run.iterations": 3,
    "run.warm_up": 1,
    "fleet.deal": "links",
}
#: Two places, each with a relay of either stage when they come in turn.
FAR = ("London", "Sydney")


def scenario(**changes: Any) -> Scenario:
    return load_scenario("wan10", CHANGES | {key.replace("__", "."): value for key, value in changes.items()})


def two_places(stage: int = 0) -> Scenario:
    relays = [
        MachinePart(name=f"{region[0]}{n}", region=region, stage=stage and 1 + at)
        for n in range(2)
        for at, region in enumerate(FAR)
    ]
    data = MachinePart(role="data", region="Oregon", name="d")
    return replace(scenario(), machines=(data, *relays))


def stages(fleet: Fleet) -> dict[str, int]:
    return {host.id: host.stage for host in fleet.hosts.values() if host.stage}


def test_pairs_of_one_place_serve_one_stage() -> None:
    given = stages(placed(two_places(), find_profile("wan10"), 0))
    assert given["L0"] == given["L1"] != given["S0"] == given["S1"]


def test_machines_whose_stage_is_named_stay_there() -> None:
    one = two_places()
    crossed = replace(
        one,
        machines=tuple(
            replace(part, stage=1 + at % 2) if part.role == "relay" else part
            for at, part in enumerate(sorted(one.machines, key=lambda part: part.name))
        ),
    )
    fleet = placed(crossed, find_profile("wan10"), 0)
    assert stages(fleet) == {part.name: part.stage for part in crossed.machines if part.role == "relay"}
    # Where some are, only the others may go elsewhere.
    some = replace(one, machines=tuple(replace(p, stage=2) if p.name == "L0" else p for p in one.machines))
    given = stages(placed(some, find_profile("wan10"), 0))
    assert given["L0"] == 2 and sorted(given.values()) == [1, 1, 2, 2]


def test_the_same_machines_are_there_and_each_seed_has_its_deal() -> None:
    each = scenario(fleet__capacity=[2, 3])
    for seed in range(2):
        before, after = fleet_of(each, find_profile("wan10"), seed), placed(each, find_profile("wan10"), seed)
        assert before.hosts.keys() == after.hosts.keys()
        for name, host in before.hosts.items():
            assert replace(after.hosts[name], stage=host.stage) == host
        assert stages(after) == stages(placed(each, find_profile("wan10"), seed))
        assert min(len(after.stage(stage)) for stage in (1, 2)) >= 2


def test_capacity_follows_the_stage() -> None:
    """Stages of unequal size: what a relay's memory holds depends on which it serves."""
    each = scenario(model__stages=5, fleet__relays=10)
    fleet = fleet_of(each, find_profile("wan10"), 0)
    turned = {name: 1 + stage % 5 for name, stage in stages(fleet).items()}
    for host in fleet_of(each, find_profile("wan10"), 0, turned).hosts.values():
        if host.stage:
            assert host.stage == turned[host.id]
            assert host.resident == min(1024, host.machine.capacity(host.stage))


def test_all_policies_and_the_bound_are_of_the_placement() -> None:
    fleet = placed(two_places(), find_profile("wan10"), 0)
    named = replace(two_places(), fleet=replace(two_places().fleet, deal="arrival"))
    named = replace(
        named,
        machines=tuple(replace(part, stage=stages(fleet).get(part.name, 0)) for part in named.machines),
    )
    for policy in ("auction", "swarm-tuned"):
        dealt, told = (simulate(each, find_profile("wan10"), policy, 0) for each in (two_places(), named))
        assert not dealt.failure and not told.failure
        assert [row.seconds for row in dealt.rows] == [row.seconds for row in told.rows]
        assert [row.bound_s for row in dealt.rows] == [row.bound_s for row in told.rows]


def test_who_is_absent_at_first_is_not_dealt() -> None:
    fleet = fleet_of(scenario(), find_profile("wan10"), 0)
    away = replace(fleet, trace=Trace("a test", (Change(50.0, "r1.0", JOIN),)))
    given = assigned_by_links(away, 0)
    assert "r1.0" not in given and len(given) == 5


def test_another_deal_is_refused() -> None:
    with pytest.raises(UserError, match=r"fleet\.deal: 'best' is none of arrival, links"):
        scenario(fleet__deal="best")


def test_drift_and_churn_do_not_touch_the_deal() -> None:
    quiet, rough = scenario(), scenario(churn__crash=0.3, drift__speed=0.3, drift__links=0.3)
    assert stages(placed(quiet, find_profile("wan10"), 1)) == stages(placed(rough, find_profile("wan10"), 1))
    counts = [len(placed(quiet, find_profile("wan10"), 1).stage(stage)) for stage in (1, 2)]
    assert all(abs(one - other) <= 2 for one, other in pairwise(counts))


def test_a_run_that_does_not_begin_is_the_scenarios_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.sim.experiment.initial_placement.PATIENCE_HEARTBEATS", 0.01)
    with pytest.raises(UserError, match=r"fleet\.deal = 'links': the run has not begun after"):
        placed(scenario(), find_profile("wan10"), 0)
