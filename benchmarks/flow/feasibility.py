"""Feasibility of flows, and demands of instances."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from anabranch.flow.graph.problem import DataNode, Flow, Instance, Path


def violations(flow: Flow, instance: Instance) -> list[str]:
    """A sentence for each broken rule (shape, links, demand, capacity, return); empty if feasible."""
    wrong = [sentence for path in flow.paths for sentence in _bad_path(instance, path)]
    departed = Counter(path[0] for path in flow.paths if path)
    wrong += [
        f"{name} sends {count} microbatches of {instance.data[name].microbatches}"
        for name, count in departed.items()
        if name in instance.data and count > instance.data[name].microbatches
    ]
    through = Counter(node for path in flow.paths for node in path[1:-1])
    wrong += [
        f"{name} serves {count} microbatches with capacity {instance.relay[name].capacity}"
        for name, count in through.items()
        if name in instance.relay and count > instance.relay[name].capacity
    ]
    return wrong


def _bad_path(instance: Instance, path: Path) -> list[str]:
    label = "→".join(path)
    if len(path) != instance.stages + 2:
        return [f"{label} has {len(path)} nodes, not {instance.stages + 2}"]
    wrong = [
        f"{label} uses {a}→{b}, which is no link" for a, b in pairwise(path) if (a, b) not in instance.links
    ]
    wanted = [*range(instance.stages + 1), 0]
    if [instance.stage.get(node) for node in path] != wanted:
        wrong.append(f"{label} does not pass the stages in order")
    if instance.returns == "own" and path[0] != path[-1]:
        wrong.append(f"{label} does not return to its own data node")
    return wrong


def with_demand(instance: Instance, total: int) -> Instance:
    """The same graph with `total` microbatches, spread evenly; the first data nodes get the rest."""
    each, rest = divmod(total, len(instance.data_nodes))
    nodes = [DataNode(node.id, each + (at < rest)) for at, node in enumerate(instance.data_nodes)]
    return replace(instance, data_nodes=tuple(nodes))
