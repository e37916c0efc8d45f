"""The fairest shares against every cut, every path and every whole flow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

from anabranch.flow.graph.fair_shares import fairest
from anabranch.flow.graph.oracle import OracleError, linear_bound, solve
from anabranch.flow.graph.problem import DataNode, Flow, Instance, Relay
from benchmarks.flow.families import FAMILIES
from benchmarks.flow.feasibility import violations, with_demand
from support.flow_graphs import all_paths, instances


def greatest(instance: Instance, sources: tuple[str, ...]) -> int:
    """Units that these data nodes can admit together, by another library."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for name in sources:
        graph.add_edge("source", ("out", name), capacity=instance.data[name].microbatches)
    for name in instance.data:
        graph.add_edge(("in", name), "sink")
    for relay in instance.relays:
        graph.add_edge(("in", relay.id), ("out", relay.id), capacity=relay.capacity)
    for start, end in instance.links:
        graph.add_edge(("out", start), ("in", end), capacity=10**6)
    return int(networkx.maximum_flow_value(graph, "source", "sink"))


def by_every_cut(instance: Instance) -> dict[str, float]:
    """Fair shares of one commodity: only the joint capacity of sets of data nodes bounds their shares."""
    demands = {node.id: node.microbatches for node in instance.data_nodes if node.microbatches}
    sets = [some for size in range(1, len(demands) + 1) for some in itertools.combinations(demands, size)]
    most = {some: greatest(instance, some) for some in sets}
    shares: dict[str, float] = {}
    while len(shares) < len(demands):
        level: dict[tuple[str, ...], float] = {}
        for some in sets:
            free = [name for name in some if name not in shares]
            spent = sum(shares[name] * demands[name] for name in some if name in shares)
            if free:
                level[some] = (most[some] - spent) / sum(demands[name] for name in free)
        tightest = min(level, key=level.__getitem__)
        shares |= {name: level[tightest] for name in tightest if name not in shares}
    return shares


@given(instance=instances(returns=("any",)))
@settings(max_examples=60, deadline=None)
def test_one_commodity_is_as_fair_as_every_cut_allows(instance: Instance) -> None:
    fair = fairest(instance)
    assert fair.shares == pytest.approx(by_every_cut(instance), abs=1e-5)
    assert fair.flow == pytest.approx(solve(instance).flow, abs=1e-4)


def whole_flows(instance: Instance) -> Iterator[Flow]:
    """Every feasible set of paths."""
    paths = all_paths(instance)
    for count in range(instance.demand + 1):
        some = False
        for chosen in itertools.combinations_with_replacement(paths, count):
            flow = Flow(chosen)
            if not violations(flow, instance):
                some = True
                yield flow
        if not some:
            return


@given(instance=instances(returns=("own",)))
@settings(max_examples=60, deadline=None)
def test_no_whole_flow_is_fairer(instance: Instance) -> None:
    instance = with_demand(instance, min(4, instance.demand))
    if len(all_paths(instance)) > 12:
        return
    names = [node.id for node in instance.data_nodes if node.microbatches]
    fair = fairest(instance)
    bound = sorted(fair.shares.values())
    for flow in whole_flows(instance):
        admitted = Counter(path[0] for path in flow.paths)
        shares = sorted(admitted[name] / instance.data[name].microbatches for name in names)
        difference = [share - limit for share, limit in zip(shares, bound, strict=True)]
        first = next((gap for gap in difference if abs(gap) > 1e-5), 0.0)
        assert first <= 0, f"{flow} has shares {shares}, fairer than {bound}"


@given(instance=instances(returns=("own",)))
@settings(max_examples=60, deadline=None)
def test_the_least_share_and_the_cost_agree_with_a_program_over_paths(instance: Instance) -> None:
    paths, fair = all_paths(instance), fairest(instance)
    demands = {node.id: node.microbatches for node in instance.data_nodes if node.microbatches}
    if not demands or len(paths) > 200:
        return
    limits = {relay.id: relay.capacity for relay in instance.relays}
    limits |= {node.id: node.microbatches for node in instance.data_nodes}
    room = [[float(name in path) for path in paths] + [0.0] for name in limits]
    floor = [[-float(path[0] == name) for path in paths] + [float(demands[name])] for name in demands]
    result = linprog(
        [0.0] * len(paths) + [-1.0],
        A_ub=np.array(room + floor),
        b_ub=[*limits.values(), *([0.0] * len(demands))],
        bounds=[(0, None)] * len(paths) + [(0, 1)],
    )
    assert min(fair.shares.values(), default=1.0) == pytest.approx(-result.fun, abs=1e-5)
    if not paths:
        return
    kept = [-fair.shares[name] * demands[name] + 1e-5 for name in demands]
    cheapest = linprog(
        [instance.path_cost(path) for path in paths],
        A_ub=np.array([row[:-1] for row in room + floor]),
        b_ub=[*limits.values(), *kept],
    )
    assert cheapest.x is not None
    assert fair.cost == pytest.approx(cheapest.fun, rel=1e-4, abs=1e-4 * max(1.0, instance.cost_max))


def competing(returns: str) -> Instance:
    """Both data nodes reach `a`, only d0 reaches `b`; d0 asks for twice as much."""
    relays = (Relay("a", 1, 1), Relay("b", 1, 1))
    nodes = (DataNode("d0", 2), DataNode("d1", 1))
    links = {("d0", "a"): 1.0, ("d0", "b"): 1.0, ("d1", "a"): 2.0}
    links |= {("a", "d0"): 1.0, ("b", "d0"): 1.0, ("a", "d1"): 1.0}
    return Instance(1, returns, nodes, relays, links)  # type: ignore[arg-type]


@pytest.mark.parametrize("returns", ["any", "own"])
def test_shares_are_per_demand(returns: str) -> None:
    fair = fairest(competing(returns))
    assert fair.shares == pytest.approx({"d0": 2 / 3, "d1": 2 / 3}, abs=1e-5)
    assert fair.flow == pytest.approx(2.0, abs=1e-5)


def test_fairness_may_cost_flow_and_need_not() -> None:
    """d2's way passes two relays that d0 and d1 could each use for a unit of their own."""
    nodes = tuple(DataNode(name, 1) for name in ("d0", "d1", "d2"))
    relays = (Relay("a", 1, 1), Relay("b", 2, 1), Relay("c", 1, 1), Relay("d", 2, 1))
    hops = [("d0", "a"), ("a", "d"), ("d", "d0"), ("d1", "c"), ("c", "b"), ("b", "d1")]
    hops += [("d2", "a"), ("a", "b"), ("b", "d2")]
    instance = Instance(2, "own", nodes, relays, dict.fromkeys(hops, 1.0))
    assert fairest(instance).shares == pytest.approx(dict.fromkeys(("d0", "d1", "d2"), 0.5), abs=1e-5)
    assert fairest(instance).flow == pytest.approx(1.5, abs=1e-5)
    fair = fairest(instance, linear_bound(instance).flow)
    assert fair.shares == pytest.approx({"d0": 1.0, "d1": 1.0, "d2": 0.0}, abs=1e-5)
    with pytest.raises(OracleError):
        fairest(instance, 2.5)


def test_between_complete_stages_all_have_one_share() -> None:
    instance = replace(FAMILIES["A"], data_nodes=3).draw(0, 1.5, "own")
    bound, fair = linear_bound(instance), fairest(instance)
    share = bound.flow / instance.demand
    assert fair.shares == pytest.approx(dict.fromkeys(instance.data, share), abs=1e-5)
    assert fair.flow == pytest.approx(bound.flow, abs=1e-4)
    assert fair.cost >= bound.cost - 1e-3


def test_without_demand_nothing_is_unfair() -> None:
    fair = fairest(with_demand(FAMILIES["A"].draw(0), 0))
    assert (fair.shares, fair.flow, fair.cost) == ({}, 0.0, 0.0)
