"""The auction: maximum flow at nearly the least cost in few messages, whatever the links and the graph do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.flow.graph.oracle import solve
from anabranch.flow.graph.problem import DataNode, Instance, Relay
from anabranch.sim.routing_lab.agent_world import Weather
from benchmarks.flow.families import FAMILIES, Family, partial_knowledge
from benchmarks.flow.feasibility import with_demand
from support.flow_graphs import Trouble, instances, troubles, weathers
from support.flow_worlds import few, settle, watch, world_of


def bound(instance: Instance) -> float:
    """Greatest cost of a unit above the optimum: 2 epsilon (2S + 1), epsilon at most a fifth of a link."""
    return 2 * instance.cost_max / 5 * (2 * instance.stages + 1)


@few
@example(
    # Prices fall again only after the last lull of those who would need to hear it.
    instance=Instance(
        3,
        "any",
        (DataNode("d0", 2), DataNode("d1", 4)),
        (
            Relay("s1r0", 1, 1),
            Relay("s1r1", 1, 3),
            Relay("s2r0", 2, 3),
            Relay("s2r1", 2, 2),
            Relay("s3r0", 3, 1),
        ),
        {
            ("d0", "s1r0"): 0.0,
            ("d1", "s1r0"): 0.0,
            ("d1", "s1r1"): 0.0,
            ("s1r0", "s2r0"): 0.0,
            ("s1r0", "s2r1"): 0.0,
            ("s1r1", "s2r0"): 0.0,
            ("s1r1", "s2r1"): 0.0,
            ("s2r0", "s3r0"): 2.4e-232,
            ("s2r1", "s3r0"): 892041502.7244838,
            ("s3r0", "d1"): 651043999.8151293,
        },
    ),
    weather=Weather(),
    seed=2,
)
@example(
    # A price falls between a letter and its repetition.
    instance=Instance(
        2,
        "any",
        (DataNode("d0", 1), DataNode("d1", 2)),
        (Relay("s1r0", 1, 3), Relay("s1r1", 1, 1), Relay("s2r0", 2, 3), Relay("s2r1", 2, 2)),
        {
            ("d0", "s1r1"): 1000000000.0,
            ("d1", "s1r0"): 5e-324,
            ("d1", "s1r1"): 1000000000.0,
            ("s1r0", "s2r0"): 278504007.7724832,
            ("s1r0", "s2r1"): 0.5,
            ("s1r1", "s2r1"): 1.1125369292536007e-308,
            ("s2r0", "d1"): 2.220446049250313e-16,
            ("s2r1", "d0"): 275316917.71437645,
            ("s2r1", "d1"): 59769893.88669353,
        },
    ),
    weather=Weather(loss=0.3, duplicate=0.2),
    seed=43307,
)
@given(instance=instances(returns=("any",)), weather=weathers, seed=st.integers(0, 2**32))
def test_finds_the_maximum_flow_within_the_bound(instance: Instance, weather: Weather, seed: int) -> None:
    world = world_of(instance, seed, weather)
    watch(world)
    flow, best = settle(world), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= best.cost + flow.value * bound(instance) + 1e-6


@few
@example(
    # The crash is noticed by a next hop before that has seen the link open.
    instance=Instance(
        2,
        "any",
        (DataNode("d0", 2), DataNode("d1", 3)),
        (Relay("s1r0", 1, 0), Relay("s2r0", 2, 3), Relay("s2r1", 2, 2), Relay("s2r2", 2, 1)),
        {
            ("d0", "s1r0"): 8.0,
            ("d1", "s1r0"): 2.0,
            ("s1r0", "s2r0"): 12.0,
            ("s1r0", "s2r1"): 10.0,
            ("s1r0", "s2r2"): 18.0,
            ("s2r0", "d0"): 20.0,
            ("s2r0", "d1"): 6.0,
            ("s2r1", "d0"): 18.0,
            ("s2r1", "d1"): 8.0,
            ("s2r2", "d0"): 2.0,
            ("s2r2", "d1"): 0.0,
        },
    ),
    weather=Weather(loss=0.3, duplicate=0.2),
    seed=28564636,
    planned=[Trouble(at_s=0.02, kind="crash", pick=1000, amount=3)],
)
@example(
    # Costs that are lost in the rounding of the greatest, and a unit too many.
    instance=Instance(
        2,
        "any",
        (DataNode("d0", 3), DataNode("d1", 2)),
        (Relay("s1r0", 1, 3), Relay("s1r1", 1, 2), Relay("s2r0", 2, 3), Relay("s2r1", 2, 1)),
        {
            ("d0", "s1r0"): 0.0,
            ("d0", "s1r1"): 1e-05,
            ("d1", "s1r0"): 0.0,
            ("d1", "s1r1"): 10000000.0,
            ("s1r0", "s2r0"): 1.401298464324817e-45,
            ("s1r0", "s2r1"): 1.1125369292536007e-308,
            ("s1r1", "s2r0"): 2.220446049250313e-16,
            ("s1r1", "s2r1"): 2.2250738585e-313,
            ("s2r0", "d0"): 1.1754943508222875e-38,
            ("s2r0", "d1"): 1.175494351e-38,
            ("s2r1", "d0"): 2.225073858507e-311,
            ("s2r1", "d1"): 999999999.0,
        },
    ),
    weather=Weather(loss=0.3, duplicate=0.2, reorder=0.3),
    seed=56279,
    planned=[
        Trouble(at_s=1.5, kind="cost", pick=224, amount=1),
        Trouble(at_s=5.794945193395482e-290, kind="cost", pick=2, amount=3),
    ],
)
@given(instance=instances(returns=("any",)), weather=weathers, seed=st.integers(0, 2**32), planned=troubles)
def test_stays_feasible_and_leaves_no_ghost_in_trouble(
    instance: Instance, weather: Weather, seed: int, planned: list[Trouble]
) -> None:
    world = world_of(instance, seed, weather)
    watch(world)
    for trouble in planned:
        world.at(trouble.at_s, lambda trouble=trouble: trouble.strike(world))  # type: ignore[misc]
    settle(world)


@pytest.mark.parametrize("over", [1.0, 1.5])
@pytest.mark.parametrize("family", ["A", "B", "C", "D"])
def test_is_close_to_the_optimum_in_few_messages(family: str, over: float) -> None:
    instance = FAMILIES[family].draw(1, over)
    world = world_of(instance, 1)
    flow, best = settle(world), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= 1.02 * best.cost
    assert world.counts.total <= 60 * world.neighbour_links


@pytest.mark.parametrize("seed", [1, 8, 9])
def test_two_sources_turn_away_what_is_too_much_at_one_price(seed: int) -> None:
    """Or the one that turns away at the lower price leaves the cheaper ways to the other."""
    instance = Family(3, 6, (1, 3), (1, 20), data_nodes=2).draw(seed, 1.5)
    flow, best = settle(world_of(instance, seed)), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= 1.01 * best.cost


@pytest.mark.parametrize("seed", [36, 76])
def test_a_source_without_excess_tells_what_its_dearest_unit_costs(seed: int) -> None:
    """Or another turns units away that would have cost less than those."""
    instance = Family(3, 6, (1, 3), (1, 20), data_nodes=2).draw(seed, 1.5)
    flow, best = settle(world_of(instance, seed)), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= 1.01 * best.cost


@pytest.mark.parametrize("dear", [1e4, 1e12])
def test_a_single_dear_link_does_not_coarsen_the_rest(dear: float) -> None:
    """Epsilon follows the costs that a node has to choose from, not the greatest there is."""
    drawn = FAMILIES["A"].draw(4)
    links = {hop: dear if number == 7 else cost for number, (hop, cost) in enumerate(drawn.links.items())}
    instance = replace(drawn, links=links)
    flow, best = settle(world_of(instance, 2)), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= 1.02 * best.cost


def test_an_epsilon_is_never_lost_in_rounding() -> None:
    """The relay has next hops that cost next to nothing; its two units both go to the one that takes one."""
    links = {("d0", "r"): 1.0, ("r", "a"): 1e-45, ("r", "b"): 1e-39, ("r", "c"): 8e8}
    links |= {("a", "d0"): 1e-45, ("b", "d0"): 32.0, ("c", "d0"): 9e8}
    relays = (Relay("r", 1, 2), *(Relay(name, 2, 1) for name in "abc"))
    world = world_of(Instance(2, "any", (DataNode("d0", 2),), relays, links))
    assert settle(world).value == 2
    assert world.counts.total < 100


def test_bad_links_cost_messages_but_no_flow() -> None:
    instance = FAMILIES["A"].draw(4)
    world = world_of(instance, 4, Weather(loss=0.05, duplicate=0.05, reorder=0.2))
    flow, best = settle(world), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= 1.03 * best.cost


def test_finds_what_a_third_of_the_links_allows() -> None:
    instance = partial_knowledge(FAMILIES["E"].draw(0), 1 / 3, 0)
    flow, best = settle(world_of(instance)), solve(instance)
    assert flow.value == best.flow
    assert flow.cost(instance) <= 1.03 * best.cost


def test_rests_on_static_costs() -> None:
    world = world_of(FAMILIES["B"].draw(2), 2)
    paths = sorted(settle(world).paths)
    world.restart_counts()
    world.run(world.now + 2_000, stop_when_quiet=False)
    assert sorted(world.flow().paths) == paths
    assert world.counts.total == 0


def test_a_crash_that_others_can_bear_is_repaired_near_it() -> None:
    instance = FAMILIES["E"].draw(0)
    world = world_of(instance)
    used = {path[5] for path in settle(world).paths}
    cold = world.counts.total
    spare = solve(instance).flow
    relay = next(name for name in sorted(used) if solve(instance.without([name])).flow == spare)
    world.restart_counts()
    world.crash([relay])
    flow = settle(world)
    left = instance.without([relay])
    assert flow.value == spare
    assert flow.cost(left) <= 1.03 * solve(left).cost
    assert world.counts.total <= 0.3 * cold


def test_a_relay_that_joins_where_it_was_narrow_is_used() -> None:
    instance = FAMILIES["A"].draw(2, 1.5)
    world = world_of(instance, 2)
    before = settle(world)
    narrow = min(
        range(1, instance.stages + 1),
        key=lambda stage: sum(relay.capacity for relay in instance.relays if relay.stage == stage),
    )
    relay = next(relay.id for relay in instance.relays if relay.stage == narrow)
    world.crash([relay])
    assert settle(world).value < before.value
    world.join(relay)
    assert settle(world).value == before.value


@pytest.mark.parametrize("capacity", [0, 1])
def test_a_capacity_that_falls_and_rises_again(capacity: int) -> None:
    instance = FAMILIES["A"].draw(3)
    world = world_of(instance, 3)
    before = settle(world)
    relay = before.paths[0][4]
    world.change_capacity(relay, capacity)
    assert settle(world).value == solve(world.instance).flow
    world.change_capacity(relay, instance.relay[relay].capacity)
    assert settle(world).value == before.value


def test_where_there_is_no_room_further_on_a_relay_tells_no_price_for_dispatch() -> None:
    """Two replicas lead to one with room for two units, which both are the first one's. What turning one away
    costs says nothing of the way over the second."""
    relays = (Relay("a", 1, 2), Relay("b", 1, 2), Relay("c", 2, 2))
    links = {("d", "a"): 1.0, ("d", "b"): 2.0, ("a", "c"): 1.0, ("b", "c"): 1.0, ("c", "d"): 1.0}
    world = world_of(Instance(2, "any", (DataNode("d", 4),), relays, links))
    assert settle(world).value == 2
    assert world.agents["b"].price() == math.inf
    assert world.agents["c"].price() == 1.0
    world.change_demand("d", 1)
    settle(world)
    assert world.agents["b"].price() < 10.0


def test_a_demand_that_grows_is_met() -> None:
    instance = with_demand(FAMILIES["A"].draw(5), 2)
    world = world_of(instance, 5)
    assert settle(world).value == 2
    world.change_demand("d0", 6)
    assert settle(world).value == solve(world.instance).flow
