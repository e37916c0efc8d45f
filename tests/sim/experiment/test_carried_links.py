"""`anabranch simulate` with relays that nobody can dial: links take the lines of carriers, which may die."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface import events as ev
from anabranch.sim.cluster.scenario import Fleet, fleet_of, parse_scenario
from anabranch.sim.experiment.run import Simulation, simulate
from anabranch.sim.kernel.simulated_peer import Node
from support.swarms.small_scenario import small

WAN10 = find_profile("wan10")
#: A leader, eight relays over two stages, and lines on which a carrier's share counts.
THIN: dict[str, Any] = {
    "fleet.data_nodes": 1,
    "fleet.relays": 8,
    "network.up_bps": [1e8],
    "network.down_bps": [1e8],
    "run.iterations": 4,
}
HIDDEN = THIN | {"network.hidden": 0.75}


def fleet(changes: dict[str, Any], seed: int = 0) -> Fleet:
    return fleet_of(small(changes), WAN10, seed)


def test_a_share_of_the_relays_is_hidden_and_nothing_else_of_the_fleet_changes() -> None:
    before: set[str] = set()
    for share, count in ((0.0, 0), (0.25, 2), (0.75, 6), (1.0, 8)):
        hosts = fleet(THIN | {"network.hidden": share}).hosts
        hidden = {name for name, host in hosts.items() if host.hidden}
        assert len(hidden) == count and before <= hidden and "d0" not in hidden
        assert {name: (h.region, h.line, h.capacity) for name, h in hosts.items()} == {
            name: (h.region, h.line, h.capacity) for name, h in fleet(THIN).hosts.items()
        }
        before = hidden
    assert before != {name for name, host in fleet(HIDDEN, 1).hosts.items() if host.hidden}


def test_processes_of_a_machine_are_hidden_together_unless_one_is_a_data_node() -> None:
    machines = [
        {"name": "d", "role": "data"},
        {"name": "served", "on": "d", "capacity": 4, "stage": 1},
        {"name": "two", "stage": 2},
        {"name": "also", "on": "two", "capacity": 4, "stage": 1},
    ]
    data = {
        "anabranch": {"version": 1},
        "model": {"size": "llama-tiny", "stages": 2},
        "machines": machines,
        "network": {"hidden": 1.0},
    }
    hosts = fleet_of(parse_scenario(data, "here.toml"), WAN10, 0).hosts
    assert {name: host.hidden for name, host in hosts.items()} == {
        "d": False, "served": False, "two": True, "also": True,
    }  # fmt: skip


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("share", [0.75, 1.0])
def test_hidden_relays_train_over_carriers_which_takes_longer(share: float) -> None:
    simulation = Simulation(fleet(THIN | {"network.hidden": share}), "auction", 0)
    hosts, between = simulation.fleet.hosts, set()

    def watch(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.LinkUp):
            link = node.links[event.peer]
            dialled = next(end for end in link.ends if end != link.dialled_by)
            assert link.via or not hosts[dialled].hidden
            assert not link.via or not hosts[link.via].hidden
            between.update(link.ends if link.via else ())

    simulation.world.watchers.append(watch)
    outcome, direct = simulation.run(), simulate(small(THIN), WAN10, "auction", 0)
    assert not outcome.failure and not direct.failure
    assert [row.t for row in outcome.rows] == [1, 2, 3, 4]
    assert between <= {name for name, host in hosts.items() if host.hidden}
    assert sum(row.seconds for row in outcome.rows) > 1.1 * sum(row.seconds for row in direct.rows)
    sent = sum(row.payload_bytes + row.message_bytes for row in outcome.rows)
    assert 0.05 * sent < sum(outcome.carried_bytes.values()) < sent
    assert not direct.carried_bytes


def test_a_carrier_that_crashes_in_an_iteration_costs_no_step() -> None:
    """The payloads that it carries at that moment are lost, and sent another way."""
    simulation = Simulation(fleet(HIDDEN), "auction", 0)
    world, dead = simulation.world, []

    def in_flight() -> list[str]:
        return [carrier for _, _, carrier in world.traffic._lanes if carrier.startswith("r")]

    def strike(node: Node, event: ev.Event) -> None:
        if not dead and simulation.leader.peer.committed >= 2 and in_flight():
            carrier = in_flight()[0]
            pairs = {link.ends for link in world._carried[carrier] if link.open}
            dead.append(carrier)
            assert simulation._crash(carrier)
            assert carrier not in in_flight() and not world.carries(carrier) and pairs

    world.watchers.append(strike)
    outcome = simulation.run()
    assert dead and not outcome.failure
    assert [row.t for row in outcome.rows] == [1, 2, 3, 4]
    assert outcome.rollbacks == 0 and sum(row.recoveries for row in outcome.rows) > 0


def test_bytes_that_were_carried_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["model.size=llama-tiny", "model.stages=2", "model.microbatches=4", "run.iterations=2",
               "fleet.relays=4", "run.warm_up=0"]  # fmt: skip
    assert main(["simulate", "wan10", "--set", *changes, "network.hidden=1.0"]) == 0
    assert "carried for others, auction: " in capsys.readouterr().out
    assert main(["simulate", "wan10", "--set", *changes]) == 0
    assert "carried" not in capsys.readouterr().out


def test_a_baseline_refuses_hidden_relays() -> None:
    with pytest.raises(UserError, match=r"network\.hidden = 0\.75: the baseline restart has no carriers"):
        simulate(small(HIDDEN), WAN10, "restart", 0)
