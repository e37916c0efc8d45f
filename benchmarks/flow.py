"""Routing policies on random instances: flow and cost against the optimum, datagrams, repairs.

    make bench-flow
    .venv/bin/python benchmarks/flow.py --seeds 5 --families AE --policies auction,gwtf

Virtual time throughout: what is printed follows from the seeds alone. Rewrites the sections `flow-*` of
docs/results.md.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch.flow.instances import FAMILIES, Family, partial_knowledge
from anabranch.flow.oracle import linear_bound, solve
from anabranch.flow.problem import Flow, Instance
from anabranch.sim.flows import FlowWorld, Weather
from anabranch.sim.routing import AGENTS, POLICIES, crash_and_repair, make_world, messages_of, route, victims
from report import table, write_section

FACTORS = (1.0, 1.5)
CALM = Weather()
ROUGH = Weather(loss=0.05, duplicate=0.05, reorder=0.2)
#: The same kind of graph with about 100 and 1,000 relays over 12 stages, and what the larger may cost.
SIZES = {"100": Family(12, 8, (1, 3), (1, 20)), "1000": Family(12, 84, (1, 3), (1, 20))}
#: A policy that is not quiet by then (virtual seconds) counts as it stands.
HORIZON_S = 3600.0


@dataclass(frozen=True)
class Trial:
    """One run: `setting` names the section it belongs to."""

    setting: str
    policy: str
    family: str
    factor: float
    seed: int


@dataclass(frozen=True)
class Fixing:
    """A repair: shares of the cold start's datagrams and of all nodes."""

    messages_share: float
    nodes_share: float
    distance: float
    flow_share: float
    cost_ratio: float
    seconds: float
    quiet: bool


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    flow_share: float
    cost_ratio: float
    per_link: float
    per_node: float
    seconds: float
    quiet: bool
    wall_s: float
    one: Fixing | None = None
    tenth: Fixing | None = None


def instance_of(trial: Trial) -> Instance:
    family = SIZES.get(trial.family) or FAMILIES[trial.family[0]]
    own = "own" if trial.family.endswith("own") else "any"
    instance = family.draw(trial.seed, trial.factor, own)  # type: ignore[arg-type]
    if trial.setting != "third":
        return instance
    # The demand follows the maximum of the graph that is left.
    part = partial_knowledge(instance, 1 / 3, trial.seed)
    most = int(solve(part.with_demand(10**6)).flow)
    return part.with_demand(-int(-most * trial.factor // 1))


def against(instance: Instance, flow: Flow) -> tuple[float, float]:
    """Flow over maximum flow; cost per unit over the optimum's (under `own` over the linear program's)."""
    several = instance.returns == "own" and len(instance.data_nodes) > 1
    best = linear_bound(instance) if several else solve(instance)
    if not best.flow or not flow.value:
        return (1.0 if not best.flow else 0.0), 1.0
    return flow.value / best.flow, (flow.cost(instance) / flow.value) / (best.cost / best.flow)


def run(trial: Trial) -> Outcome:
    started = time.perf_counter()
    instance = instance_of(trial)
    if trial.policy not in AGENTS:
        result = route(instance, trial.policy)
        share, ratio = against(instance, Flow(tuple(result.paths)))
        return Outcome(trial, share, ratio, 0.0, 0.0, 0.0, True, time.perf_counter() - started)
    world = make_world(instance, trial.policy, trial.seed, ROUGH if trial.setting == "rough" else CALM)
    quiet = world.run(HORIZON_S)
    share, ratio = against(instance, world.flow())
    messages = messages_of(world)
    outcome = (share, ratio, messages.per_link_mean, messages.per_node_mean, world.last_work, quiet)
    one = tenth = None
    if trial.setting == "calm" and trial.factor == 1.0 and quiet:
        order = victims(instance, len(instance.relays), trial.seed)
        used = {name for path in world.flow().paths for name in path}
        # One that carries something: what nobody uses is no loss.
        first = next(name for name in order if name in used)
        one = fix(world, [first], messages.total)
        if one.quiet:
            order.remove(first)
            tenth = fix(world, order[: max(1, len(instance.relays) // 10)], messages.total)
    return Outcome(trial, *outcome, time.perf_counter() - started, one, tenth)


def fix(world: FlowWorld, names: list[str], cold: int) -> Fixing:
    repair = crash_and_repair(world, names, horizon_s=HORIZON_S)
    left = world.instance.without(name for name in world.instance.relay if name not in world.agents)
    share, ratio = against(left, world.flow())
    return Fixing(
        repair.messages / max(1, cold),
        repair.nodes_touched / len(world.agents),
        repair.graph_distance_median,
        share,
        ratio,
        repair.seconds,
        repair.quiet,
    )


def plan(
    policies: Sequence[str], families: Sequence[str], seeds: int, settings: Sequence[str]
) -> Iterable[Trial]:
    for policy, seed in itertools.product(policies, range(seeds)):
        for family, factor in itertools.product(families, FACTORS):
            if "calm" in settings:
                yield Trial("calm", policy, family, factor, seed)
            for setting in ("rough", "third"):
                if setting in settings and policy in AGENTS and factor == 1.0:
                    yield Trial(setting, policy, family, factor, seed)
        if "own" in settings and "E" in families:
            yield Trial("own", policy, "E own", 1.0, seed)
    if "size" in settings:
        for size in SIZES:
            # The published algorithm would take hours there.
            yield Trial("size", "auction", size, 1.0, 0)


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def main_table(outcomes: Sequence[Outcome]) -> str:
    groups: dict[tuple[str, float, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.trial.family, outcome.trial.factor, outcome.trial.policy].append(outcome)
    head = ["family", "demand", "policy", "flow", "cost", "worst", "per link", "per node", "s", "quiet"]
    rows = [
        [
            family,
            f"{factor:g}×",
            policy,
            f"{mean(o.flow_share for o in group):.4f}",
            f"{mean(o.cost_ratio for o in group):.4f}",
            f"{max(o.cost_ratio for o in group):.4f}",
            f"{mean(o.per_link for o in group):.1f}",
            f"{mean(o.per_node for o in group):.0f}",
            f"{mean(o.seconds for o in group):.0f}",
            f"{sum(o.quiet for o in group)}/{len(group)}",
        ]
        for (family, factor, policy), group in sorted(groups.items(), key=_order)
    ]
    return table(head, rows)


def repair_table(outcomes: Sequence[Outcome], what: str) -> str:
    groups: dict[tuple[str, float, str], list[Fixing]] = defaultdict(list)
    for outcome in outcomes:
        fixing = outcome.one if what == "one" else outcome.tenth
        if fixing is not None:
            groups[outcome.trial.family, outcome.trial.factor, outcome.trial.policy].append(fixing)
    head = ["family", "policy", "flow", "cost", "worst", "messages/cold", "nodes", "distance", "s", "quiet"]
    rows = [
        [
            family,
            policy,
            f"{mean(f.flow_share for f in group):.4f}",
            f"{mean(f.cost_ratio for f in group):.4f}",
            f"{max(f.cost_ratio for f in group):.4f}",
            f"{mean(f.messages_share for f in group):.2f}",
            f"{mean(f.nodes_share for f in group):.2f}",
            f"{statistics.median(f.distance for f in group):g}",
            f"{mean(f.seconds for f in group):.0f}",
            f"{sum(f.quiet for f in group)}/{len(group)}",
        ]
        for (family, _, policy), group in sorted(groups.items(), key=_order)
    ]
    return table(head, rows)


def _order(item: tuple[tuple[str, float, str], object]) -> tuple[str, float, int]:
    family, factor, policy = item[0]
    return family, factor, POLICIES.index(policy)


LEGEND = (
    "flow: over the maximum flow; cost: per unit over the optimum's, mean and worst; messages per neighbour "
    "link and per node, from cold to quiet; s: virtual seconds until quiet; quiet: runs that were, of all."
)


def write(outcomes: Sequence[Outcome], seeds: int) -> None:
    by_setting: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_setting[outcome.trial.setting].append(outcome)
    calm = by_setting["calm"]
    if calm:
        families = ", ".join(sorted({outcome.trial.family for outcome in calm}))
        intro = f"Families {families}, {seeds} seeds each, link delays 10–300 ms. {LEGEND}"
        write_section("flow-families", f"{intro}\n\n{main_table(calm)}")
    if any(outcome.one for outcome in calm):
        text = [
            "After convergence at demand 1×: one relay that carries units crashes; then a tenth of all. "
            "messages/cold: datagrams of the repair over those of the cold start; nodes: share that sent "
            "anything but confirmations; distance: median over them of the hops from a crashed one.",
            f"One relay:\n\n{repair_table(calm, 'one')}",
            f"A tenth of the relays:\n\n{repair_table(calm, 'tenth')}",
        ]
        write_section("flow-repair", "\n\n".join(text))
    titles = {
        "rough": "5 % of datagrams lost, 5 % doubled, 20 % overtaken",
        "third": "Each node knows a third of the next stage's peers; the optimum is that graph's",
        "own": "`own`: two data nodes, each unit returns to its own; against the linear bound",
        "size": "About 100 and 1,000 relays over 12 stages, capacity 1–3, cost 1–20, complete between stages",
    }
    for setting, title in titles.items():
        if by_setting[setting]:
            body = f"{title}. Columns as above.\n\n{main_table(by_setting[setting])}"
            if setting == "size":
                walls = [f"{o.trial.policy} {o.trial.family}: {o.wall_s:.0f}" for o in by_setting[setting]]
                body += f"\n\nWall seconds on one core: {', '.join(walls)}."
            write_section(f"flow-{setting}", body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--families", default="ABCDEF", help="letters")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--settings", default="calm,rough,third,own,size")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    trials = list(plan(args.policies.split(","), args.families, args.seeds, args.settings.split(",")))
    # Long ones first, so that no process is left with one at the end.
    trials.sort(key=lambda trial: (trial.setting == "size", trial.family[0] in "FE"), reverse=True)
    outcomes: list[Outcome] = []
    with multiprocessing.Pool(args.processes) as pool:
        for outcome in pool.imap_unordered(run, trials):
            outcomes.append(outcome)
            print(f"\r{len(outcomes)}/{len(trials)}", end="", flush=True)
    print()
    write(sorted(outcomes, key=lambda outcome: str(outcome.trial)), args.seeds)


if __name__ == "__main__":
    main()
