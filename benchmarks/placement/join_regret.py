"""Regret of the stage that a joiner is given, over the best of all stages solved exactly.

    nice python -m benchmarks.placement.join_regret --studies 3 --fleets 20

Two parts. *The join study* (REFERENCE: 100 nodes, 11 stages, capacities 10 to 50, link costs 1 to 100, 20
candidates): capacity is what a node passes at once, so to the rule it is a speed. Each candidate is put into
every stage, and the least-cost maximum flow solved exactly; what counts is the cost per microbatch, twice the
mean path and the slowest aggregation over the flow. *Ten regions* (`wan10`, `wan10-mixed`): a seventeenth
relay joins. Counted is, once, twice the mean path over the flow, of the exact least-cost maximum flow over
the true d_ij and slots; and once the clairvoyant bound of an iteration, its computing and reduce included.
Regret: what the rule's stage costs over the best one, less one. Writes the result `joining`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, quantiles

from anabranch.flow.graph.oracle import solve
from anabranch.flow.graph.problem import DataNode, Instance, Relay, link_cost
from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Member
from anabranch.protocol.placement.join_placement import best_stage, neediest_stage
from anabranch.protocol.placement.rates import Batch
from anabranch.protocol.telemetry.link_table import LinkMeasurements
from anabranch.sim.cluster.device_model import Machine, known_devices
from anabranch.sim.cluster.scenario import Fleet, Host, fleet_of, load_scenario
from anabranch.sim.experiment.run import Simulation
from anabranch.sim.metrics.lower_bound import LowerBound
from anabranch.sim.network.shared_link import Line
from benchmarks import harness
from benchmarks.harness import table

GOAL = 0.03
STAGES, RELAYS, CANDIDATES = 11, 99, 20
CAPACITY, COST = (10, 50), (1, 100)
FLEETS = ("wan10", "wan10-mixed")
#: Iterations that are simulated with a joiner at a stage, and of them the first, which are not counted.
ITERATIONS, WARM_UP = 5, 2


@dataclass(frozen=True)
class Regret:
    """rule, random: of the rule's stage, and the mean over all stages, over the best one, less one."""

    rule: float
    random: float


def regret(chosen: int, stages: int, cost: Callable[[int], float]) -> Regret:
    costs = {stage: cost(stage) for stage in range(1, stages + 1)}
    best = min(costs.values())
    return Regret(costs[chosen] / best - 1.0, fmean(costs.values()) / best - 1.0)


# --- the join study -----------------------------------------------------------------------------------


def study(seed: int, candidates: int) -> list[Regret]:
    """Regrets in a random swarm, for each candidate alone."""
    rng = random.Random(f"join study {seed}")
    stage_of = [1 + n % STAGES for n in range(RELAYS)]
    relays = [Relay(f"r{n}", stage, rng.randint(*CAPACITY)) for n, stage in enumerate(stage_of)]
    aggregation = max(rng.randint(*COST) for _ in relays)
    links = _Links(rng)

    def cost(stage: int, candidate: Relay, its_aggregation: int) -> float:
        known = [*relays, replace(candidate, stage=stage)]
        solution = solve(links.instance(known))
        return (2.0 * solution.cost / solution.flow + max(aggregation, its_aggregation)) / solution.flow

    found = []
    for number in range(candidates):
        candidate = Relay(f"candidate {number}", 1, rng.randint(*CAPACITY))
        its_aggregation = rng.randint(*COST)
        chosen = neediest_stage(map(_as_member, relays), (1,) * STAGES)
        found.append(regret(chosen, STAGES, lambda stage: cost(stage, candidate, its_aggregation)))  # noqa: B023
    return found


def _as_member(relay: Relay) -> Member:
    """Its capacity is what it passes at once: a speed."""
    return Member(relay.id, relay.stage, 1, "", 1 << 20, forward_s=1e-3 / relay.capacity)


class _Links:
    """Costs between any two nodes, drawn when they are first asked for."""

    def __init__(self, rng: random.Random) -> None:
        self._dice = rng
        self._costs: dict[tuple[str, str], float] = {}

    def instance(self, relays: Sequence[Relay]) -> Instance:
        layers = [["data"]] + [[r.id for r in relays if r.stage == s] for s in range(1, STAGES + 1)]
        layers.append(["data"])
        hops = [(a, b) for before, after in pairwise(layers) for a in before for b in after]
        for hop in hops:
            self._costs.setdefault(hop, float(self._dice.randint(*COST)))
        demand = sum(relay.capacity for relay in relays)
        links = {hop: self._costs[hop] for hop in hops}
        return Instance(STAGES, "any", (DataNode("data", demand),), tuple(relays), links)


# --- ten regions --------------------------------------------------------------------------------------


def ten_regions(name: str, seed: int) -> tuple[Regret, Regret, Regret]:
    """A machine like the others of the fleet, in one of the regions: regret of the flow, of
    iterations of the whole protocol, and of the bound."""
    scenario = load_scenario(name, {"run.iterations": ITERATIONS})
    fleet = fleet_of(scenario, find_profile("wan10"), seed)
    rng, part = random.Random(f"joiner {seed}"), scenario.fleet
    device = known_devices(part.devices)[rng.choice(part.device)]
    machine = Machine(device, scenario.work, part.achieved, rng.choice(part.speed))
    line = Line(scenario.network.up_bps[0], scenario.network.down_bps[0])
    capacity = rng.choice(part.capacity) if part.capacity else machine.capacity(1)
    joiner = Host("joiner", 1, rng.choice(find_profile("wan10").regions), max(1, capacity), machine, line)
    stages = scenario.model.stages
    blocks = [scenario.work.blocks(stage) for stage in range(1, stages + 1)]
    members = [host_as_member(host, fleet) for host in fleet.hosts.values()]
    regions = {host.id: host.region for host in [*fleet.hosts.values(), joiner]}
    way, work = told_by(fleet).between(regions), scenario.work
    assert way is not None
    batch = Batch(scenario.model.microbatches, work.activation_bytes, work.block_bytes, work.ends_bytes)
    chosen = best_stage(host_as_member(joiner, fleet), members, blocks, batch, way)

    def joined(stage: int) -> Fleet:
        return replace(fleet, hosts={**fleet.hosts, joiner.id: replace(joiner, stage=stage)})

    def of_flow(stage: int) -> float:
        solution = solve(_as_instance(joined(stage)))
        return 2.0 * solution.cost / solution.flow**2

    def of_bound(stage: int) -> float:
        return LowerBound(joined(stage)).bound_s({}, {})

    def of_iterations(stage: int) -> float:
        outcome = Simulation(joined(stage), "auction", seed).run()
        return math.inf if outcome.failure else fmean(row.seconds for row in outcome.rows[WARM_UP:])

    flow, simulated, bound = (regret(chosen, stages, cost) for cost in (of_flow, of_iterations, of_bound))
    return flow, simulated, bound


def told_by(fleet: Fleet) -> LinkMeasurements:
    """Link table of the leader: latency to neighbours, and bandwidth to members of adjacent stages."""
    ways, stages = LinkMeasurements(), fleet.scenario.model.stages + 1
    for one in fleet.hosts.values():
        links = {}
        for other in fleet.hosts.values():
            apart, way = (one.stage - other.stage) % stages, fleet.link(one.id, other.id)
            if other is not one and apart in (0, 1, stages - 1):
                links[other.id] = (2.0 * way.latency_s, way.rate_bps if apart else 0.0)
        ways.told(one.id, links)
    return ways


def _as_instance(fleet: Fleet) -> Instance:
    """The flow problem of a batch: slots, and d_ij by true links and passes."""
    stages, size = fleet.scenario.model.stages, fleet.scenario.work.activation_bytes
    ends = [host.id for host in fleet.stage(0)]
    layers = [ends, *([host.id for host in fleet.stage(s)] for s in range(1, stages + 1)), ends]
    pass_s = {host.id: host.machine.microbatch_s(host.stage) / 2.0 for host in fleet.hosts.values()}

    def cost(a: str, b: str) -> float:
        there, back = fleet.link(a, b), fleet.link(b, a)
        rates = (there.rate_bps, back.rate_bps)
        return link_cost((pass_s[a], pass_s[b]), (there.latency_s, back.latency_s), rates, size)

    hops = [(a, b) for before, after in pairwise(layers) for a in before for b in after]
    each = fleet.scenario.model.microbatches // len(ends)
    relays = [Relay(h.id, h.stage, fleet.slots(h)) for h in fleet.hosts.values() if h.stage]
    links = {hop: cost(*hop) for hop in hops}
    return Instance(stages, "any", tuple(DataNode(end, each) for end in ends), tuple(relays), links)


def host_as_member(host: Host, fleet: Fleet) -> Member:
    """Member record of a host: seconds of a block's forward and backward."""
    work, machine = fleet.scenario.work, host.machine
    forward_s = machine.seconds(1, tasks.Forward) / work.blocks(1)
    backward_s = (machine.microbatch_s(1) - machine.seconds(1, tasks.Forward)) / work.blocks(1)
    capacity = int(host.capacity * (1.0 + fleet.scenario.fleet.recompute))
    return Member(
        host.id, host.stage, 1, "", capacity, host.id, host.region, "", forward_s, backward_s=backward_s
    )


def row(name: str, found: Sequence[Regret]) -> list[str]:
    rule, other = [each.rule for each in found], [each.random for each in found]
    best = sum(each < 1e-9 for each in rule) / len(rule)
    tail = quantiles(rule, n=20)[-1]
    cells = [f"{100 * fmean(rule):.2f} %", f"{100 * tail:.1f} %", f"{100 * max(rule):.1f} %"]
    return [name, str(len(rule)), *cells, f"{100 * best:.0f} %", f"{100 * fmean(other):.1f} %"]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--studies", type=int, default=3, help="random swarms of the join study (default: 3)")
    parser.add_argument("--candidates", type=int, default=CANDIDATES)
    parser.add_argument("--fleets", type=int, default=20, help="seeds of each ten-region fleet (default: 20)")
    args = parser.parse_args()
    found = [each for seed in range(args.studies) for each in study(seed, args.candidates)]
    regrets = {"join study": found}
    for name in FLEETS:
        of_fleets = [ten_regions(name, seed) for seed in range(args.fleets)]
        for what, each in zip(("flow", "simulated", "bound"), zip(*of_fleets, strict=True), strict=True):
            regrets[f"`{name}`, {what}"] = list(each)
    rows = [row(name, each) for name, each in regrets.items()]
    goals = [
        harness.at_most(f"mean regret, {name}", GOAL, fmean(one.rule for one in each), "{:.2%}")
        for name, each in regrets.items()
    ]
    head = ["swarm", "joiners", "mean regret", "95 %", "most", "best stage", "any stage"]
    text = "\n".join(
        [
            f"Join study: {args.studies} random swarms of {RELAYS + 1} nodes over {STAGES} stages, "
            f"{args.candidates} candidates each, cost per microbatch of the exact least-cost maximum flow. "
            "Ten regions: a seventeenth relay; *flow*: cost per microbatch of the exact flow; *simulated*: "
            f"mean of {ITERATIONS - WARM_UP} iterations of the whole protocol without churn, after {WARM_UP} "
            "(they vary by one or two in a hundred with what is drawn, which the best of all stages profits "
            "from); *bound*: the clairvoyant bound of an iteration, with the cheapest reduce. *Regret*: over "
            "the best of all stages, less one; *best stage*: how often it is the rule's; *any stage*: mean "
            "regret of a stage drawn at random. In the join study the rule knows computing and room, in ten "
            "regions also links, "
            "as the leader does: what members measured of neighbours, and for the others, the joiner among "
            "them, what their regions have with each other, or the middle of all.",
            "",
            table(head, rows),
        ]
    )
    title = "The stage that a joiner is given"
    harness.write("joining", title, text, goals=goals, data=regrets, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
