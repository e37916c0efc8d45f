"""Assignments of relays to stages as other systems find them, for comparison with our own.

`arranged` is DT-FM's search (Yuan et al., NeurIPS 2022): an evolutionary search for groups with the least
data-parallel cost plus twice the pipeline cost; the order of the groups is the cheapest open tour. `swapped`
has the acceptance rule of the swap protocol of GWTF's authors: two relays of different stages change places
when the larger of their costs falls, and by chance when it does not. Both consider links alone, as published:
machines are assumed to be equal.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from anabranch.protocol.placement.cost_model import Deal, Group
from anabranch.sim.cluster.scenario import Fleet

#: Parameters of the evolutionary search: population, children, and exchanges tried per child (a choice; more
#: did not help).
POPULATION, CHILDREN, EXCHANGES = 16, 120, 60
#: Parameters of the swap protocol: rounds in which every relay proposes once (a choice); the first
#: temperature, and its factor at each accepted swap (DecCom-Python, arpegio.py at f056bde).
ROUNDS, HOT, COOLING = 60, 3.0, 0.992


class Links:
    """Seconds between relays for a part of a reduce, and for an activation."""

    def __init__(self, fleet: Fleet) -> None:
        work = fleet.scenario.work
        relays = [host.id for host in fleet.hosts.values() if host.stage]
        self._trip_s: dict[tuple[str, str], float] = {}
        self._bps: dict[tuple[str, str], float] = {}
        for one in relays:
            for other in relays:
                way, lines = fleet.link(one, other), (fleet.line(one).up_bps, fleet.line(other).down_bps)
                self._trip_s[one, other] = way.latency_s
                self._bps[one, other] = min(way.rate_bps, *lines)
        self._exchanged_bits = 8.0 * work.reduce_bytes * work.parameters(1)
        self._activation_bits = 8.0 * work.activation_bytes

    def exchange_s(self, one: str, other: str, members: int) -> float:
        """Seconds of what one relay sends another in a reduce among `members`."""
        return self._trip_s[one, other] + self._exchanged_bits / members / self._bps[one, other]

    def hop_s(self, one: str, other: str) -> float:
        """Seconds of an activation, the worse of both directions."""
        pairs = ((one, other), (other, one))
        return max(self._trip_s[pair] + self._activation_bits / self._bps[pair] for pair in pairs)

    def reduce_s(self, member: str, group: Sequence[str]) -> float:
        """Seconds of all that a member sends the others of its group."""
        return sum(self.exchange_s(member, other, len(group)) for other in group if other != member)


def dealt(fleet: Fleet) -> Deal:
    """Assignment of the fleet, relay -> stage."""
    return {host.id: host.stage for host in fleet.hosts.values() if host.stage}


def at_random(fleet: Fleet, seed: int) -> Deal:
    """Random assignment with as many relays at each stage as the fleet has."""
    relays, stages = list(dealt(fleet)), list(dealt(fleet).values())
    random.Random(f"deal {seed}").shuffle(stages)
    return dict(zip(relays, stages, strict=True))


# --- DT-FM --------------------------------------------------------------------------------------------


class Objective:
    """DT-FM's objective: data-parallel cost of the worst member, plus twice the cheapest pipeline's cost."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._matched: dict[tuple[Group, Group], float] = {}

    def cost(self, groups: Sequence[Group]) -> float:
        reduce = max(self._links.reduce_s(member, group) for group in groups for member in group)
        return reduce + 2.0 * self.tour(groups)[0]

    def tour(self, groups: Sequence[Group]) -> tuple[float, list[int]]:
        """Cost and order of the cheapest open tour over the groups (Held, Karp, 1962)."""
        count = len(groups)
        apart = [[self.matching_s(one, other) for other in groups] for one in groups]
        best = {(1 << at, at): (0.0, -1) for at in range(count)}
        for size in range(2, count + 1):
            for chosen in combinations(range(count), size):
                mask = sum(1 << at for at in chosen)
                for last in chosen:
                    rest = mask & ~(1 << last)
                    best[mask, last] = min(
                        (best[rest, at][0] + apart[at][last], at) for at in chosen if at != last
                    )
        mask = (1 << count) - 1
        last = min(range(count), key=lambda at: best[mask, at][0])
        cost, order = best[mask, last][0], [last]
        while (before := best[mask, last][1]) >= 0:
            mask, last = mask & ~(1 << last), before
            order.append(last)
        return cost, order

    def matching_s(self, one: Group, other: Group) -> float:
        """Bottleneck matching of two groups: seconds of the slowest link in the matching where it is fastest.

        Each member of the larger group gets a partner in the smaller one, whose members take equal numbers.
        """
        if one == other:
            return 0.0
        key = (one, other) if one < other else (other, one)
        if key not in self._matched:
            small, large = sorted(key, key=len)
            seats = small * -(-len(large) // len(small))
            seconds = np.array([[self._links.hop_s(a, b) for b in seats] for a in large])
            bounds = np.unique(seconds)
            at = bisect_left(bounds, True, key=lambda most: _all_matched(seconds <= most))
            self._matched[key] = float(bounds[at])
        return self._matched[key]


def _all_matched(allowed: npt.NDArray[np.bool_]) -> bool:
    """True if every row can be matched with a column of its own. allowed: rows x columns."""
    return bool((maximum_bipartite_matching(csr_array(allowed), perm_type="column") >= 0).all())


def arranged(fleet: Fleet, seed: int, children: int = CHILDREN) -> Deal:
    """DT-FM's search, begun with the fleet's assignment and with random ones."""
    rng, objective = random.Random(f"arranged {seed}"), Objective(Links(fleet))
    first = _groups(dealt(fleet))
    starts = [first, *(_groups(at_random(fleet, seed * POPULATION + n)) for n in range(1, POPULATION))]
    kept = sorted((objective.cost(groups), groups) for groups in starts)
    for _ in range(children):
        one, other = rng.sample([groups for _, groups in kept], 2)
        child = _bettered(_child(one, other, rng), objective, rng)
        if child not in kept and child[0] < kept[-1][0]:
            kept = sorted([*kept[:-1], child])
    groups = kept[0][1]
    order = objective.tour(groups)[1]
    return {name: stage for stage, at in enumerate(order, start=1) for name in groups[at]}


def _groups(deal: Mapping[str, int]) -> tuple[Group, ...]:
    members: dict[int, list[str]] = defaultdict(list)
    for name, stage in sorted(deal.items()):
        members[stage].append(name)
    return tuple(sorted(map(tuple, members.values())))


def _child(one: Sequence[Group], other: Sequence[Group], rng: random.Random) -> tuple[Group, ...]:
    """Child with half of one parent's groups, the other relays grouped as in the other parent if possible."""
    kept = rng.sample(list(one), len(one) // 2)
    taken = {name for group in kept for name in group}
    left = [name for group in other for name in group if name not in taken]
    sizes = sorted(map(len, (group for group in one if group not in kept)), reverse=True)
    found, at = list(kept), 0
    for size in sizes:
        found.append(tuple(sorted(left[at : at + size])))
        at += size
    return tuple(sorted(found))


def _bettered(
    groups: tuple[Group, ...], objective: Objective, rng: random.Random
) -> tuple[float, tuple[Group, ...]]:
    """Cost and groups after exchanges of two members, as far as they lower the cost."""
    cost = objective.cost(groups)
    for _ in range(EXCHANGES):
        one, other = rng.sample(range(len(groups)), 2)
        a, b = rng.choice(groups[one]), rng.choice(groups[other])
        changed = list(groups)
        changed[one] = tuple(sorted({*groups[one], b} - {a}))
        changed[other] = tuple(sorted({*groups[other], a} - {b}))
        tried = tuple(sorted(changed))
        if (less := objective.cost(tried)) < cost:
            cost, groups = less, tried
    return cost, groups


# --- swaps by GWTF's authors' rule ---------------------------------------------------------------------


def swapped(fleet: Fleet, seed: int, rounds: int = ROUNDS) -> Deal:
    """Swaps by the acceptance rule of GWTF's authors: each relay in turn proposes a swap to a random one of
    another stage.

    They swap if the larger of their two costs is less after it, otherwise with probability exp(-rise / T),
    where the rise is that of the larger cost. The cost is not theirs: theirs counts links to the own stage
    alone, this one also those to adjacent stages.
    """
    rng, links, deal = random.Random(f"swaps {seed}"), Links(fleet), dealt(fleet)
    heat = HOT

    def cost(name: str) -> float:
        """Cost of a relay's own links: its part of the reduce, and twice a mean hop to adjacent stages."""
        group = [other for other, stage in deal.items() if stage == deal[name]]
        beside = [other for other, stage in deal.items() if abs(stage - deal[name]) == 1]
        hops = sum(links.hop_s(name, other) for other in beside) / max(1, len(beside))
        return links.reduce_s(name, group) + 2.0 * hops

    for _ in range(rounds):
        for one in rng.sample(sorted(deal), len(deal)):
            others = [name for name, stage in sorted(deal.items()) if stage != deal[one]]
            if not others:
                return deal
            other = rng.choice(others)
            before = cost(one), cost(other)
            deal[one], deal[other] = deal[other], deal[one]
            rise = max(cost(one), cost(other)) - max(before)
            if rise < 0.0 or rng.random() < math.exp(-rise / heat):
                heat *= COOLING
            else:
                deal[one], deal[other] = deal[other], deal[one]
    return deal
