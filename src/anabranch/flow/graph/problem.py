"""The flow problem (graph of stages, capacities of relays, demands of data nodes) and its solutions.

The goal is to give as many microbatches as possible a path, at the least total cost. A path leaves a data
node, passes one relay of each stage 1..S and ends at a data node (any, or its own). A microbatch in a plan is
also called a unit. Links are directed and listed forward. The cost of a link is `d_ij` (GWTF, arXiv
2509.21221): seconds of a microbatch between two nodes, mean of forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

Return = Literal["any", "own"]
#: The S + 2 node ids from the data node of departure to the data node of arrival.
Path = tuple[str, ...]


@dataclass(frozen=True)
class DataNode:
    """A node of stage 0. microbatches: how many it wants to send. Any number of paths may end at it, with
    return "own" only its own."""

    id: str
    microbatches: int


@dataclass(frozen=True)
class Relay:
    """A node of stage 1..S. capacity: most microbatches whose paths may pass through it."""

    id: str
    stage: int
    capacity: int


@dataclass(frozen=True)
class Instance:
    """A flow problem. stages: number of relay stages, S. returns: "any" if a path may end at any data node,
    "own" if only at the one where it began. `links` maps (from, to) to `d_ij` in seconds (or any other one
    unit), at least 0."""

    stages: int
    returns: Return
    data_nodes: tuple[DataNode, ...]
    relays: tuple[Relay, ...]
    links: dict[tuple[str, str], float]

    @cached_property
    def data(self) -> dict[str, DataNode]:
        return {node.id: node for node in self.data_nodes}

    @cached_property
    def relay(self) -> dict[str, Relay]:
        return {node.id: node for node in self.relays}

    @cached_property
    def stage(self) -> dict[str, int]:
        """Node -> stage; 0 for data nodes."""
        return {node.id: 0 for node in self.data_nodes} | {node.id: node.stage for node in self.relays}

    @property
    def demand(self) -> int:
        return sum(node.microbatches for node in self.data_nodes)

    @cached_property
    def successors(self) -> dict[str, list[str]]:
        """Node -> next hops, in the order of `links`."""
        found: dict[str, list[str]] = {node: [] for node in self.stage}
        for start, end in self.links:
            found[start].append(end)
        return found

    @cached_property
    def predecessors(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {node: [] for node in self.stage}
        for start, end in self.links:
            found[end].append(start)
        return found

    @cached_property
    def cost_max(self) -> float:
        """The greatest link cost; 0 without links."""
        return max(self.links.values(), default=0.0)

    def path_cost(self, path: Path) -> float:
        return math.fsum(self.links[hop] for hop in pairwise(path))

    def without(self, nodes: Iterable[str]) -> Instance:
        """New instance of the same problem without the relays `nodes` and their links."""
        gone = frozenset(nodes)
        return replace(
            self,
            relays=tuple(relay for relay in self.relays if relay.id not in gone),
            links={hop: cost for hop, cost in self.links.items() if not gone.intersection(hop)},
        )


@dataclass(frozen=True)
class Flow:
    """A solution of the flow problem: one path for each microbatch that has one."""

    paths: tuple[Path, ...] = ()

    @property
    def value(self) -> int:
        return len(self.paths)

    def cost(self, instance: Instance) -> float:
        return math.fsum(instance.path_cost(path) for path in self.paths)

    def max_path_cost(self, instance: Instance) -> float:
        return max((instance.path_cost(path) for path in self.paths), default=0.0)


def link_cost(
    compute_s: tuple[float, float],
    latency_s: tuple[float, float],
    bandwidth_bps: tuple[float, float],
    size_bytes: float,
) -> float:
    """Link cost `d_ij` of GWTF in seconds: half of the compute times, mean latency, transfer time at the mean
    bandwidth. compute_s: of nodes i and j. latency_s, bandwidth_bps: from i to j and from j to i. size_bytes:
    of one activation."""
    transfer = 2 * size_bytes / (sum(bandwidth_bps) / 8)
    return sum(compute_s) / 2 + sum(latency_s) / 2 + transfer


def paths_from_link_flows(instance: Instance, amounts: dict[tuple[str, str], int]) -> list[Path]:
    """Paths from data node to data node, one for each microbatch, into which a flow of one commodity splits.
    amounts: microbatches on each link; as many must arrive at a relay as leave it."""
    left = {hop: amount for hop, amount in amounts.items() if amount > 0}
    onward: dict[str, list[str]] = {}
    for start, end in sorted(left):
        onward.setdefault(start, []).append(end)
    paths: list[Path] = []
    for source in instance.data:
        while any(left[source, end] for end in onward.get(source, ())):
            path = [source]
            while len(path) < instance.stages + 2:
                here = path[-1]
                end = next(end for end in onward[here] if left[here, end])
                left[here, end] -= 1
                path.append(end)
            paths.append(tuple(path))
    return paths
