"""Data node that serves a stage as well: two processes of one machine, with one line and one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Scenario, fleet_of, parse_scenario
from anabranch.sim.experiment.run import simulate
from support.swarms.small_scenario import small

WAN10 = find_profile("wan10")

DATA = MachinePart(name="home", role="data", up_bps=2e7, down_bps=2e7)
RELAYS = (MachinePart(name="a", stage=1), MachinePart(name="b", stage=2))
SERVES = MachinePart(name="home-1", stage=1, on="home")


def scenario(*machines: MachinePart) -> Scenario:
    return replace(small(), machines=machines)


def test_a_further_process_has_region_and_line_of_its_machine() -> None:
    for seed in range(3):
        fleet = fleet_of(scenario(DATA, *RELAYS, SERVES), WAN10, seed)
        home, serves = fleet.hosts["home"], fleet.hosts["home-1"]
        assert (serves.region, serves.line) == (home.region, home.line)
        assert fleet.machine("home-1") == "home" and fleet.machine("a") == "a"
        assert fleet.beside() == {"home": ["home-1"], "home-1": ["home"]}


@pytest.mark.parametrize("policy", ["auction", "swarm-tuned", "restart"])
def test_a_data_node_that_serves_helps_less_than_a_machine_of_its_own(policy: str) -> None:
    """All three finish; with a second machine iterations are shortest, as line and device are not shared."""
    thick = replace(DATA, up_bps=2e9, down_bps=2e9)
    apart = replace(SERVES, on="", region=fleet_of(scenario(thick, *RELAYS), WAN10, 0).hosts["home"].region)
    runs = [scenario(thick, *RELAYS, one) for one in (SERVES, apart)]
    both, own = (simulate(each, WAN10, policy, 0) for each in runs)
    assert not both.failure and not own.failure
    assert sum(row.seconds for row in both.rows) > sum(row.seconds for row in own.rows)


def test_a_machine_that_nobody_named_is_refused() -> None:
    tables = [{"name": "home", "role": "data"}, {"stage": 1}, {"stage": 2}, {"stage": 1, "on": "away"}]
    content = {"anabranch": {"version": 1}, "model": {"stages": 2}, "machines": tables}
    with pytest.raises(UserError, match=r"machines\[3\]\.on: 'away' is the name of no machine of its own"):
        parse_scenario(content, "x.toml")
