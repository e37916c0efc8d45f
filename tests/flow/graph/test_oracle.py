"""The oracle against another solver and against every possible flow."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings

from anabranch.flow.graph.oracle import linear_bound, solve, solve_integer
from anabranch.flow.graph.problem import Flow, Instance
from anabranch.flow.policies.static import arrange
from benchmarks.flow.families import FAMILIES
from benchmarks.flow.feasibility import violations, with_demand
from support.flow_graphs import all_paths, instances


def by_networkx(instance: Instance) -> tuple[int, float]:
    """Maximum flow and its least cost by the network simplex of another library (whole-number costs)."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for node in instance.data_nodes:
        graph.add_edge("source", ("out", node.id), capacity=node.microbatches, weight=0)
        graph.add_edge(("in", node.id), "sink", weight=0)
    for relay in instance.relays:
        graph.add_edge(("in", relay.id), ("out", relay.id), capacity=relay.capacity, weight=0)
    for (start, end), cost in instance.links.items():
        graph.add_edge(("out", start), ("in", end), weight=int(cost), capacity=10**6)
    flow = networkx.max_flow_min_cost(graph, "source", "sink")
    return sum(flow["source"].values()), float(networkx.cost_of_flow(graph, flow))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_agrees_with_another_solver(family: str, factor: float) -> None:
    instance = FAMILIES[family].draw(7, factor)
    best = solve(instance)
    assert best.paths is not None and not violations(best.paths, instance)
    assert (best.flow, best.cost) == by_networkx(instance)


def by_trying_all(instance: Instance, most: int) -> tuple[int, float]:
    """Greatest flow up to `most` units and its least cost, by trying every set of paths."""
    paths = all_paths(instance)
    best = (0, 0.0)
    for count in range(1, most + 1):
        costs = [
            flow.cost(instance)
            for chosen in itertools.combinations_with_replacement(paths, count)
            if not violations(flow := Flow(chosen), instance)
        ]
        if not costs:
            break
        best = (count, min(costs))
    return best


@given(instance=instances())
@settings(max_examples=60, deadline=None)
def test_is_the_best_of_all_flows(instance: Instance) -> None:
    instance = with_demand(instance, min(3, instance.demand))
    best = solve(instance)
    flow, cost = by_trying_all(instance, 3) if len(all_paths(instance)) < 40 else (best.flow, best.cost)
    assert best.exact and best.paths is not None
    assert not violations(best.paths, instance)
    assert best.flow == flow
    assert best.cost == pytest.approx(cost, rel=1e-6, abs=1e-6)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("returns", ["any", "own"])
def test_the_unit_of_cost_does_not_matter(returns: str) -> None:
    whole = replace(FAMILIES["E"].draw(2), returns=returns)
    cost = pytest.approx(solve(whole).cost)
    for unit in (1e-12, 1e-8, 1e9):
        other = replace(whole, links={hop: each * unit for hop, each in whole.links.items()})
        assert solve(other).cost / unit == cost, unit


def test_own_lies_between_the_bound_and_any() -> None:
    """Returning to one's own data node cannot be cheaper than to any, nor beat the linear program."""
    own = FAMILIES["E"].draw(2, 1.0, "own")
    exact, bound, merged = solve_integer(own), linear_bound(own), solve(FAMILIES["E"].draw(2, 1.0, "any"))
    assert exact.flow == merged.flow == bound.flow
    assert merged.cost <= bound.cost <= exact.cost + 1e-6
    assert exact.cost <= 1.05 * bound.cost


@given(instance=instances())
@settings(max_examples=60, deadline=None)
def test_the_static_arrangement_is_feasible(instance: Instance) -> None:
    flow = arrange(instance)
    assert not violations(flow, instance)
    assert flow.value <= solve(instance).flow


def test_the_static_arrangement_keeps_the_worst_link_cheap() -> None:
    instance = FAMILIES["A"].draw(0)
    flow = arrange(instance)
    assert flow.value == instance.demand
    worst = [max(instance.links[path[at], path[at + 1]] for path in flow.paths) for at in range(8)]
    optimal = solve(instance).paths
    assert optimal is not None
    assert max(worst) <= max(instance.links[p[at], p[at + 1]] for p in optimal.paths for at in range(8))
