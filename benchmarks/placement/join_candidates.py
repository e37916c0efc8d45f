"""Which of twenty candidates to let in: the rule of GWTF's authors on ten set-ups, against trying every one.

    nice python -m benchmarks.placement.join_candidates --swarms 3

The set-ups are those of the results in the authors' repository (DecCom-Python, `new_node_addition_results` at
commit f804a45): stages of equal size, one data node, capacities and link costs drawn from a range, twenty
candidates, one or five places. The swarms are drawn here, by fixed seeds. A candidate joins the bottleneck,
the stage with the highest flow over capacity. The cost of a microbatch is twice the sum over hops of the
dearest link in use, plus the slowest aggregation, over the flow, which is solved exactly. Beside it, the
stage that a joiner is given in the authors' larger study (`join_regret.study`). Writes the result
`join-candidates`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from anabranch.flow.graph.oracle import solve
from anabranch.flow.graph.problem import DataNode, Instance, Relay
from anabranch.sim.metrics.iteration_metrics import Estimate, estimate
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.placement.join_regret import row as regret_row
from benchmarks.placement.join_regret import study

CANDIDATES = 20
#: Practically no limit on what the data node sends.
MANY = 6000
#: An aggregation takes ten times the dearest link into the stage, plus a draw from this range.
AGGREGATION, MORE = 10, (50, 100)


@dataclass(frozen=True)
class SetUp:
    """stages, each: stages and relays of each. source: capacity of the data node. capacity, cost: ranges of
    the relays' capacities and of the link costs. places: candidates that are let in, one after another."""

    stages: int
    each: int
    source: int
    capacity: tuple[int, int]
    cost: tuple[int, int]
    places: int


#: As the read-me files state them. That of number 8 names no limit and capacities up to 20, its results show
#: flows of at most 30: number 3's figures are used.
SET_UPS = (
    SetUp(8, 12, MANY, (1, 20), (1, 100), 1),
    SetUp(8, 12, MANY, (1, 20), (20, 100), 1),
    SetUp(8, 12, 30, (1, 5), (20, 100), 1),
    SetUp(8, 4, 30, (1, 5), (20, 100), 1),
    SetUp(12, 8, 30, (1, 5), (20, 100), 5),
    SetUp(8, 12, MANY, (1, 20), (1, 100), 5),
    SetUp(8, 12, MANY, (1, 20), (20, 100), 5),
    SetUp(8, 12, 30, (1, 5), (20, 100), 5),
    SetUp(8, 4, 30, (1, 5), (20, 100), 5),
    SetUp(12, 8, 30, (1, 5), (20, 100), 1),
)


@dataclass(frozen=True)
class Candidate:
    """Relay that asks to join, with one cost for all its links."""

    id: str
    capacity: int
    link: int
    aggregation: int


@dataclass(frozen=True)
class Swarm:
    """A swarm and its exact flow. aggregation: slowest one of all stages."""

    stages: int
    source: int
    relays: tuple[Relay, ...]
    links: dict[tuple[str, str], float]
    aggregation: int
    flow: int = 0
    path_cost: float = 0.0
    """Sum over hops of the dearest link in use."""
    load: Counter[str] = field(default_factory=Counter)

    @property
    def cost(self) -> float:
        """Cost of a microbatch."""
        return (2.0 * self.path_cost + self.aggregation) / self.flow

    def utilisation(self) -> list[tuple[float, int, int]]:
        """(flow over capacity, stage, capacity) of each stage, the bottleneck first."""
        capacity = Counter[int]()
        for relay in self.relays:
            capacity[relay.stage] += relay.capacity
        return sorted(((self.flow / room, stage, room) for stage, room in capacity.items()), reverse=True)

    def solved(self) -> Swarm:
        data = (DataNode("data", self.source),)
        paths = solve(Instance(self.stages, "any", data, self.relays, self.links)).paths
        assert paths is not None
        dearest = [0.0] * (self.stages + 1)
        for path in paths.paths:
            for hop, pair in enumerate(pairwise(path)):
                dearest[hop] = max(dearest[hop], self.links[pair])
        load = Counter(node for path in paths.paths for node in path[1:-1])
        return replace(self, flow=paths.value, path_cost=sum(dearest), load=load)

    def with_one(self, candidate: Candidate) -> Swarm:
        """With the candidate in the bottleneck, solved anew."""
        stage = self.utilisation()[0][1]
        before = [relay.id for relay in self.relays if relay.stage == stage - 1] if stage > 1 else ["data"]
        after = [relay.id for relay in self.relays if relay.stage == stage + 1]
        links = dict(self.links)
        links |= {(other, candidate.id): float(candidate.link) for other in before}
        links |= {(candidate.id, other): float(candidate.link) for other in after}
        if stage == self.stages:
            links[candidate.id, "data"] = 0.0
        relays = (*self.relays, Relay(candidate.id, stage, candidate.capacity))
        slowest = max(self.aggregation, candidate.aggregation)
        return replace(self, relays=relays, links=links, aggregation=slowest).solved()


def drawn(set_up: SetUp, rng: random.Random) -> tuple[Swarm, list[Candidate]]:
    layers = [["data"]]
    relays: list[Relay] = []
    links: dict[tuple[str, str], float] = {}
    aggregations = []
    for stage in range(1, set_up.stages + 1):
        layer = [f"r{stage}.{n}" for n in range(set_up.each)]
        relays += [Relay(name, stage, rng.randint(*set_up.capacity)) for name in layer]
        costs = {(a, b): float(rng.randint(*set_up.cost)) for a in layers[-1] for b in layer}
        aggregations.append(int(AGGREGATION * max(costs.values())) + rng.randint(*MORE))
        links |= costs
        layers.append(layer)
    links |= {(name, "data"): 0.0 for name in layers[-1]}
    candidates = []
    for n in range(CANDIDATES):
        link = rng.randint(*set_up.cost)
        capacity, more = rng.randint(*set_up.capacity), rng.randint(*MORE)
        candidates.append(Candidate(f"candidate {n}", capacity, link, AGGREGATION * link + more))
    swarm = Swarm(set_up.stages, set_up.source, tuple(relays), links, max(aggregations))
    return swarm.solved(), candidates


# --- rules --------------------------------------------------------------------------------------------


def authors(swarm: Swarm, candidates: list[Candidate]) -> Candidate | None:
    """The authors' estimate of the cost of a microbatch after joining; None if no candidate lowers it."""
    (_, _, room), *others = swarm.utilisation()
    rest = [min(capacity, swarm.source) for _, _, capacity in others if capacity > room]
    next_room = min(rest, default=room)
    hop = swarm.path_cost / swarm.stages

    def saved(candidate: Candidate) -> float:
        flow = min(next_room, room + candidate.capacity)
        path = swarm.path_cost - 2.0 * hop + max(2.0 * hop, 2.0 * candidate.link)
        cost = 2.0 * path + max(swarm.aggregation, candidate.aggregation)
        return swarm.cost - cost / flow

    best = max(candidates, key=saved)
    return best if saved(best) > 0.0 else None


def by_trying(swarm: Swarm, candidates: list[Candidate]) -> Candidate | None:
    """The candidate with which a microbatch costs least, if any lowers the cost."""
    best = min(candidates, key=lambda each: swarm.with_one(each).cost)
    return best if swarm.with_one(best).cost < swarm.cost else None


AUTHORS = "the authors' estimate"
Rule = Callable[[Swarm, list[Candidate]], Candidate | None]
RULES: dict[str, Rule] = {
    "trying every one": by_trying,
    AUTHORS: authors,
    "the greatest capacity": lambda _, candidates: max(candidates, key=lambda each: (each.capacity, each.id)),
    "the cheapest link": lambda _, candidates: min(candidates, key=lambda each: (each.link, each.id)),
    "the first": lambda _, candidates: candidates[0],
}


def after(swarm: Swarm, candidates: list[Candidate], places: int, rule: Rule) -> Swarm:
    left = list(candidates)
    for _ in range(places):
        chosen = rule(swarm, left)
        if chosen is None:
            break
        left.remove(chosen)
        swarm = swarm.with_one(chosen)
    return swarm


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--swarms", type=int, default=3, help="drawn swarms of each set-up (default: 3)")
    args = parser.parse_args()
    rows, regrets = [], {name: list[float]() for name in RULES}
    for number, set_up in enumerate(SET_UPS, 1):
        found = {name: list[float]() for name in RULES}
        flows = []
        for seed in range(args.swarms):
            swarm, candidates = drawn(set_up, random.Random(f"join candidates {number} {seed}"))
            ended = {name: after(swarm, candidates, set_up.places, rule) for name, rule in RULES.items()}
            least = ended["trying every one"].cost
            for name, each in ended.items():
                found[name].append(each.cost / least - 1.0)
            flows.append(f"{swarm.flow} → {ended[AUTHORS].flow}")
        for name, each in found.items():
            regrets[name] += each
        source = "no limit" if set_up.source == MANY else set_up.source
        ranges = f"{set_up.capacity[0]}–{set_up.capacity[1]}, {set_up.cost[0]}–{set_up.cost[1]}"
        shape = f"{set_up.stages} × {set_up.each}"
        means = [f"{100 * fmean(found[name]):.1f} %" for name in list(RULES)[1:]]
        rows.append([str(number), shape, str(source), ranges, str(set_up.places), ", ".join(flows), *means])
        print(*rows[-1], flush=True)
    harness.write(
        "join-candidates",
        "Which candidate joins",
        f"{words(args.swarms)}\n\n{table(head(), [*rows, total(regrets)])}\n\n{stages(args.swarms)}",
        data=regrets,
        dry=args.dry,
    )


def head() -> list[str]:
    columns = [
        "set-up",
        "stages × relays",
        "source",
        "capacities, costs",
        "places",
        "flow, by the authors' estimate",
    ]
    return [*columns, *list(RULES)[1:]]


def total(regrets: dict[str, list[float]]) -> list[str]:
    spread: list[Estimate] = [estimate(regrets[name]) for name in list(RULES)[1:]]
    cells = [f"{100 * each.mean:.1f} ± {100 * each.half:.1f} %" for each in spread]
    return ["all", "", "", "", "", "", *cells]


def stages(swarms: int) -> str:
    """The stage that a joiner is given, where all stages have the same number of relays."""
    found = [each for seed in range(swarms) for each in study(seed, CANDIDATES)]
    about = (
        "**The stage.** 99 relays over 11 stages of equal size, capacities 10 to 50, link costs 1 to 100, "
        f"{swarms} swarms of {CANDIDATES} candidates: cost of a microbatch with the candidate in the stage "
        "that our rule gives it, over that in the best of all stages, less one."
    )
    columns = ["swarm", "joiners", "mean regret", "95 %", "most", "best stage", "any stage"]
    return f"{about}\n\n{table(columns, [regret_row('equal stages', found)])}"


def words(swarms: int) -> str:
    return (
        f"The ten set-ups of the authors' join study, {swarms} swarms of each drawn by fixed seeds, "
        f"{CANDIDATES} candidates. Figures are the cost of a microbatch after joining, over that after "
        "*trying every one* (for several places: the best one at a time, solved exactly), less one. The "
        "authors' estimate is the capacity that the bottleneck and the next bottleneck leave, with the "
        "candidate's link in place of a mean hop; it lets nobody in where it expects no gain. A swarm of "
        "this project lets everybody in and chooses the stage ([the stage that a joiner is "
        "given](joining.md)); the choice of a candidate is measured here alone."
    )


if __name__ == "__main__":
    main()
