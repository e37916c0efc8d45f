"""Assignments of relays to stages by our rules, other systems' and chance, on the same machines.

    nice python -m benchmarks.placement.assignment --seeds 3

The machines of a scenario as its seed draws them; then each rule deals them to the stages. *In turn*: as the
scenario does. *Joiners*: our rule, relays coming one after another in an order that is drawn, each given its
stage as the leader gives it (`protocol.placement`). *Dealt at the start*: so too, and then dealt by links
before the first step (`protocol.fleet`, by the real protocol in virtual time). *Moves*: in turn, and then
`fleet.rebalance` = 3 while it runs, for so many iterations that it can pay, and beside it *in turn* for as
many. *Swaps*, *DT-FM*: `baselines`. *Plan*: as `anabranch plan` deals the machines to this
number of stages. *Best of all*, of a small fleet: every deal, by `plan`'s arithmetic. All run under `auction`
without churn; yardsticks that know links alone take machines to be alike. Writes the result `placement`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.placement.join_placement import KEPT_FIRST, best_stage, neediest_stage
from anabranch.protocol.placement.rates import Batch, stage_counts
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Fleet, Scenario, fleet_of, load_scenario
from anabranch.sim.experiment.initial_placement import assigned_by_links
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Estimate
from anabranch.sim.metrics.iteration_metrics import estimate as interval
from anabranch.sim.planning.estimate import estimate, of_any_assignment
from anabranch.sim.planning.search import Plan, improve
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.placement.baselines import Deal, arranged, at_random, dealt, swapped
from benchmarks.placement.join_regret import host_as_member, told_by

#: Random deals of each seed.
RANDOM = 2
#: Name -> scenario, changes.
FLEETS: dict[str, tuple[str, dict[str, object]]] = {
    "`wan10`": ("wan10", {}),
    "`wan10-mixed`": ("wan10-mixed", {}),
    "seven of `wan10-mixed`": (
        "wan10-mixed",
        {"fleet.relays": 7, "model.stages": 2, "model.microbatches": 24, "fleet.data_nodes": 1},
    ),
}
SMALL = "seven of `wan10-mixed`"


@dataclass(frozen=True)
class Found:
    """Seconds of an iteration by arithmetic and in virtual time, and the clairvoyant bound."""

    estimated_s: float
    simulated_s: float
    bound_s: float


def named(fleet: Fleet, deal: Mapping[str, int]) -> Scenario:
    """The scenario with every machine by name, at the stage that it is dealt to."""
    scenario = fleet.scenario
    parts = [
        MachinePart(
            name=host.id,
            device=host.machine.device.name,
            region=host.region,
            role="relay" if host.stage else "data",
            stage=deal.get(host.id, 0),
            speed=host.machine.speed,
            capacity=host.resident if host.stage and scenario.fleet.capacity else 0,
            up_bps=host.line.up_bps,
            down_bps=host.line.down_bps,
        )
        for host in fleet.hosts.values()
    ]
    return replace(scenario, machines=tuple(parts))


def joiners(fleet: Fleet, seed: int) -> Deal:
    """Relays that join one after another, as the leader gives them stages."""
    scenario, work = fleet.scenario, fleet.scenario.work
    blocks = [work.blocks(stage) for stage in range(1, scenario.model.stages + 1)]
    batch = Batch(scenario.model.microbatches, work.activation_bytes, work.block_bytes, work.ends_bytes)
    regions = {host.id: host.region for host in fleet.hosts.values()}
    relays = [host for host in fleet.hosts.values() if host.stage]
    random.Random(f"joiners {seed}").shuffle(relays)
    there = replace(fleet, hosts={host.id: host for host in fleet.stage(0)})
    for host in relays:
        members = [host_as_member(other, there) for other in there.hosts.values()]
        way = told_by(there).between(regions)
        if way is None or min(stage_counts(members, blocks)) < KEPT_FIRST:
            stage = neediest_stage(members, blocks)
        else:
            stage = best_stage(host_as_member(host, fleet), members, blocks, batch, way)
        there = replace(there, hosts={**there.hosts, host.id: replace(host, stage=stage)})
    return dealt(there)


def planned(fleet: Fleet) -> Deal:
    """As `plan` improves a deal, begun with the one that is there."""
    scenario = named(fleet, dealt(fleet))
    regions = find_profile("wan10")
    better = improve(Plan(scenario, estimate(fleet_of(scenario, regions, 0))), regions).scenario
    return {part.name: part.stage for part in better.machines if part.stage}


def best_of_all(fleet: Fleet) -> Deal:
    """Every deal that leaves no stage empty."""
    stages, relays = fleet.scenario.model.stages, list(dealt(fleet))
    deals = [
        dict(zip(relays, chosen, strict=True))
        for chosen in product(range(1, stages + 1), repeat=len(relays))
        if len(set(chosen)) == stages
    ]
    return min(deals, key=of_any_assignment(named(fleet, dealt(fleet)), find_profile("wan10")).seconds)


RULES: dict[str, Callable[[Fleet, int], list[Deal]]] = {
    "in turn": lambda fleet, seed: [dealt(fleet)],
    "at random": lambda fleet, seed: [at_random(fleet, RANDOM * seed + n) for n in range(RANDOM)],
    "joiners, our rule": lambda fleet, seed: [joiners(fleet, seed)],
    "dealt at the start (ours)": lambda fleet, seed: [dict(assigned_by_links(fleet, seed))],
    "in turn, as long": lambda fleet, seed: [dealt(fleet)],
    "moves while it runs": lambda fleet, seed: [dealt(fleet)],
    "swaps (GWTF's authors)": lambda fleet, seed: [swapped(fleet, seed)],
    "DT-FM's search": lambda fleet, seed: [arranged(fleet, seed)],
    "`plan`": lambda fleet, seed: [planned(fleet)],
    "best of all, by `plan`'s arithmetic": lambda fleet, seed: [best_of_all(fleet)],
}
MOVES, LONG = "moves while it runs", "in turn, as long"
#: Iterations of these two, and how many of them are not counted: until then it has moved.
ITERATIONS, WARM_UP = 24, 12
ALL = "best of all, by `plan`'s arithmetic"


def measure(fleet: Fleet, deal: Deal, rule: str, seed: int) -> Found:
    scenario = named(fleet, deal)
    if rule in (MOVES, LONG):
        scenario = replace(scenario, run=replace(scenario.run, iterations=ITERATIONS, warm_up=WARM_UP))
    if rule == MOVES:
        scenario = replace(scenario, fleet=replace(scenario.fleet, rebalance=3))
    estimated = estimate(fleet_of(scenario, find_profile("wan10"), seed))
    outcome = simulate(scenario, find_profile("wan10"), "auction", seed)
    if outcome.failure:
        raise RuntimeError(f"{rule}, seed {seed}: {outcome.failure}")
    rows = outcome.rows[scenario.run.warm_up :]
    seconds = sum(row.seconds for row in rows) / len(rows)
    return Found(estimated.iteration_s, seconds, estimated.bound_s)


def rows_of(name: str, seeds: int, iterations: int, rules: Sequence[str]) -> list[list[str]]:
    scenario, changes = FLEETS[name]
    more = {"run.iterations": iterations, "run.warm_up": 2, "run.heartbeat_s": 5.0, "fleet.park": 1.0}
    found: dict[str, list[Found]] = {}
    for seed in range(seeds):
        fleet = fleet_of(load_scenario(scenario, changes | more), find_profile("wan10"), seed)
        for rule in rules:
            if rule == ALL and name != SMALL:
                continue
            deals = RULES[rule]
            each = [measure(fleet, deal, rule, seed) for deal in deals(fleet, seed)]
            mean = [sum(getattr(one, key) for one in each) / len(each) for key in Found.__dataclass_fields__]
            found.setdefault(rule, []).append(Found(*mean))
            print(f"{name} {seed} {rule}: {found[rule][-1]}", flush=True)
    rows = []
    for rule, each in found.items():
        first = [one.simulated_s for one in found[LONG if rule == MOVES else "in turn"]]
        share = interval([one.simulated_s / turn for one, turn in zip(each, first, strict=True)])
        simulated = interval([one.simulated_s for one in each])
        estimated = sum(one.estimated_s for one in each) / len(each)
        bound = sum(one.bound_s for one in each) / len(each)
        rows.append([name, rule, f"{bound:.1f}", f"{estimated:.1f}", _text(simulated, 1), _text(share, 2)])
    return rows


def _text(figure: Estimate, digits: int) -> str:
    half = f" ± {figure.half:.{digits}f}" if figure.half else ""
    return f"{figure.mean:.{digits}f}{half}"


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=7, help="two of them not counted")
    parser.add_argument("--rules", nargs="+", default=[*RULES], help="*in turn* among them")
    args = parser.parse_args()
    rows = [row for name in FLEETS for row in rows_of(name, args.seeds, args.iterations, args.rules)]
    seeds = f"{args.seeds} seeds (mean ± half of the 95 % interval)" if args.seeds > 1 else "one seed"
    head = ["fleet", "who serves which stage", "bound s", "estimate s", "iteration s", "over *in turn*"]
    body = "\n".join(
        [
            f"The same machines dealt to the stages by each rule; `auction`, no churn, {seeds}, "
            f"{args.iterations} iterations, the first 2 not counted; *{MOVES}*, whose share is that over "
            f"*{LONG}*, {ITERATIONS} iterations, the first {WARM_UP} not counted; *at "
            f"random*: {RANDOM} deals of each seed. *bound*: the clairvoyant one of that placement; "
            "*estimate*: `plan`'s arithmetic. *In turn* has as many relays in each stage as can be; "
            "*joiners* and `plan` heed machines and links, so do *moves* and *dealt at the start*, as peers "
            "measure them, and *best of all*; swaps and DT-FM links alone (docs/explanation/simulator.md).",
            "",
            table(head, rows),
        ]
    )
    harness.write("placement", "Who serves which stage", body, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
