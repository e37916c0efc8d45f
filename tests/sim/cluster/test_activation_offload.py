"""Activations parked in host memory: what the copies take, and what the places bring."""

from __future__ import annotations

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.activation_offload import OffloadedActivations
from anabranch.sim.cluster.scenario import fleet_of
from anabranch.sim.experiment.run import simulate
from support.swarms.small_scenario import small

WAN10 = find_profile("wan10")

LINK = 1e9


def test_only_who_is_beyond_the_resident_ones_is_copied_there_and_back() -> None:
    work = small().work
    parked = OffloadedActivations(work)
    one_s = work.kept_bytes(1) / LINK

    def costs(*done: tasks.Task) -> list[float]:
        return [parked.copy_s("a", 1, 2, LINK, task) / one_s for task in done]

    forwards = [tasks.Forward(1, index, train=True) for index in range(4)]
    assert costs(*forwards) == [0.0, 0.0, 1.0, 1.0]
    assert costs(tasks.Discard(1, 3), tasks.InputGradient(1, 0), tasks.InputGradient(1, 2)) == [0.0, 0.0, 1.0]
    assert costs(tasks.Forward(1, 4, train=True), tasks.Forward(1, 5, train=True)) == [0.0, 1.0]
    again, evaluated = tasks.Forward(1, 6, train=True, keep=False), tasks.Forward(1, 7, train=False)
    assert costs(again, tasks.InputGradient(1, 6, again=True), evaluated) == [0.0, 0.0, 0.0]
    assert costs(tasks.Forward(2, 0, train=True)) == [0.0]  # nothing is held of an earlier iteration


def test_a_machine_parks_as_much_as_half_of_its_host_memory_takes() -> None:
    kept = small().work.kept_bytes(1)
    short = {"fleet.capacity": [4], "fleet.park": 2.0}
    hosts = fleet_of(small(short), WAN10, 0).hosts
    assert {host.stage: (host.resident, host.parked) for host in hosts.values() if host.stage < 2} == {
        0: (hosts["d0"].capacity, 0),
        1: (4, 8),
    }
    hosts = fleet_of(small(short | {"fleet.host_memory_bytes": 6.0 * kept}), WAN10, 0).hosts
    assert hosts["r1.0"].parked == 3 and hosts["r1.0"].capacity == 7


def test_parked_activations_make_room_where_memory_is_short() -> None:
    short = {"fleet.capacity": [1], "model.microbatches": 12, "run.iterations": 2}
    kept, parked = (simulate(small(short | {"fleet.park": n}), WAN10, "auction", 0) for n in (0.0, 4.0))
    assert not kept.failure and not parked.failure
    took = [sum(row.seconds for row in outcome.rows) for outcome in (kept, parked)]
    assert took[1] < 0.9 * took[0]
