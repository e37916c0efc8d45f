"""Policy `static` of the flow lab: paths by the objective of DT-FM (NeurIPS 2022), from the whole graph.

Microbatches are matched with the places of the next stage so that the most expensive link used is as cheap as
possible (a bottleneck matching), stage by stage. With given stages the data-parallel part of DT-FM's
objective is constant. Of all bottleneck matchings the augmenting-path search here prefers cheap links:
scipy's maximum flow takes any, which costs 6 to 20 % more on the families A-F: too easy a yardstick.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from anabranch.flow.graph.problem import Flow, Instance, Path

#: Ids of the source and the sink of a matching. No node has them: ids of nodes are printable.
_SOURCE, _SINK = "\0source", "\0sink"
_Hop = tuple[str, str]


def arrange(instance: Instance) -> Flow:
    """Flow of the policy `static`: stage by stage, as many microbatches as possible are matched with the
    places of the next stage, so that the most expensive link used is as cheap as possible; from the last
    stage each goes to the cheapest data node where it may end. Microbatches without a link or room at some
    stage, or without a link to such a data node, are left out."""
    paths: list[Path] = [(node.id,) for node in instance.data_nodes for _ in range(node.microbatches)]
    rooms = [
        {relay.id: relay.capacity for relay in instance.relays if relay.stage == stage}
        for stage in range(1, instance.stages + 1)
    ]
    paths = paths[: min(sum(room.values()) for room in rooms)]
    for room in rooms:
        paths = _extend(instance, paths, room)
    return Flow(tuple(_arrive(instance, paths)))


def _extend(instance: Instance, paths: list[Path], room: dict[str, int]) -> list[Path]:
    """Extend each path by one stage, by a bottleneck matching; those that find no place are left out. room:
    relay of that stage -> free places."""
    units = Counter(path[-1] for path in paths)
    hops = {hop: cost for hop, cost in instance.links.items() if hop[0] in units and hop[1] in room}
    most = _transport(units, room, list(hops)).total()

    def up_to(worst: float) -> list[_Hop]:
        return [hop for hop, cost in hops.items() if cost <= worst]

    costs = sorted(set(hops.values()))
    least = bisect_left(costs, True, key=lambda worst: _transport(units, room, up_to(worst)).total() == most)
    cheap = up_to(costs[least]) if costs else []
    amounts = _transport(units, room, sorted(cheap, key=lambda hop: (hops[hop], hop)))
    extended = []
    for path in paths:
        end = next((end for start, end in amounts if start == path[-1] and amounts[start, end]), None)
        if end is not None:
            amounts[path[-1], end] -= 1
            extended.append((*path, end))
    return extended


def _transport(units: Counter[str], room: dict[str, int], hops: Sequence[_Hop]) -> Counter[_Hop]:
    """Maximum flow to the next stage (Edmonds and Karp) that prefers the first of `hops`: microbatches on
    each hop. units: node -> microbatches at it. room: node of the next stage -> free places."""
    residual: dict[str, dict[str, int]] = {_SOURCE: dict(units), _SINK: {}}
    residual |= {start: {} for start in units} | {end: {_SINK: free} for end, free in room.items()}
    for start, end in hops:
        residual[start][end], residual[end][start] = units[start], 0
    while True:
        origin = {_SOURCE: ""}
        queue = [_SOURCE]
        for node in queue:
            if node == _SINK:
                break
            reached = [other for other, left in residual[node].items() if left and other not in origin]
            origin |= dict.fromkeys(reached, node)
            queue += reached
        if _SINK not in origin:
            return Counter({(start, end): residual[end][start] for start, end in hops})
        path, node = [], _SINK
        while node != _SOURCE:
            path.append((origin[node], node))
            node = origin[node]
        amount = min(residual[start][end] for start, end in path)
        for start, end in path:
            residual[start][end] -= amount
            residual[end][start] = residual[end].get(start, 0) + amount


def _arrive(instance: Instance, paths: list[Path]) -> list[Path]:
    """Paths from source to end: each of `paths`, extended by the cheapest data node where it may end; those
    without one are left out."""
    whole = []
    for path in paths:
        ends = [end for end in instance.successors[path[-1]] if instance.returns == "any" or end == path[0]]
        if ends:
            whole.append((*path, min(ends, key=lambda end: (instance.links[path[-1], end], end))))
    return whole
