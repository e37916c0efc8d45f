"""Random instances of the flow problem: families A-F of the benchmarks, and graphs that are partly known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from anabranch.counter_rng import CounterRng
from anabranch.flow.graph.problem import DataNode, Instance, Relay, Return
from benchmarks.flow.feasibility import with_demand


@dataclass(frozen=True)
class Family:
    """Family of random instances: complete between stages; capacities and link costs are uniform integers."""

    stages: int
    replicas: int
    capacity: tuple[int, int]
    cost: tuple[int, int]
    data_nodes: int = 1

    def draw(self, seed: int, demand_over_maximum: float = 1.0, returns: Return = "any") -> Instance:
        """Draw an instance; its demand is the given multiple of the maximum flow, rounded up."""
        rng = CounterRng(seed)

        def uniform(bounds: tuple[int, int]) -> int:
            return bounds[0] + rng.below(bounds[1] - bounds[0] + 1)

        data = tuple(DataNode(f"d{at}", 0) for at in range(self.data_nodes))
        levels = [
            [Relay(f"s{stage}r{at}", stage, uniform(self.capacity)) for at in range(self.replicas)]
            for stage in range(1, self.stages + 1)
        ]
        names = [[node.id for node in data], *([node.id for node in level] for level in levels)]
        links = {
            (start, end): float(uniform(self.cost))
            for here, there in zip(names, names[1:] + names[:1], strict=True)
            for start in here
            for end in there
        }
        relays = tuple(node for level in levels for node in level)
        # Between complete stages the narrowest stage is a minimum cut.
        maximum = min(sum(node.capacity for node in level) for level in levels)
        instance = Instance(self.stages, returns, data, relays, links)
        return with_demand(instance, math.ceil(maximum * demand_over_maximum))


FAMILIES: dict[str, Family] = {
    "A": Family(8, 5, (1, 3), (1, 20)),
    "B": Family(10, 4, (1, 3), (1, 20)),
    "C": Family(8, 5, (5, 15), (1, 20)),
    "D": Family(8, 5, (1, 3), (1, 100)),
    "E": Family(8, 12, (1, 3), (1, 20), data_nodes=2),
    "F": Family(11, 9, (10, 50), (1, 100)),
}


def partial_knowledge(instance: Instance, share: float, seed: int) -> Instance:
    """The graph in which every node knows only `share` of its next stage's peers, at least one."""
    rng = CounterRng(seed, stream=1)
    keep: list[tuple[str, str]] = []
    for node in instance.stage:
        known = list(instance.successors[node])
        # The last stage knows all data nodes: under "own" a unit must reach its own.
        if known and instance.stage[known[0]] != 0:
            rng.shuffle(known)
            known = known[: max(1, math.ceil(share * len(known)))]
        keep += [(node, other) for other in known]
    return replace(instance, links={hop: instance.links[hop] for hop in keep})
