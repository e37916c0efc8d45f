"""Trial of a routing policy: its flow against the optimum, its datagrams, and its repairs.

Virtual time throughout: everything but `cpu_s` follows from the trial alone.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace

from anabranch.flow.graph.oracle import linear_bound, solve
from anabranch.flow.graph.problem import DataNode, Flow, Instance
from anabranch.sim.routing_lab.agent_world import FlowWorld, Weather
from anabranch.sim.routing_lab.experiment import (
    AGENTS,
    crash_and_repair,
    make_world,
    messages_of,
    route,
    victims,
)
from benchmarks.flow.families import FAMILIES, Family, partial_knowledge
from benchmarks.flow.feasibility import with_demand

CALM = Weather()
ROUGH = Weather(loss=0.05, duplicate=0.05, reorder=0.2)
#: The same kind of graph with about 100 and 1,000 relays over 12 stages.
SIZES = {"100": Family(12, 8, (1, 3), (1, 20)), "1000": Family(12, 84, (1, 3), (1, 20))}
#: Virtual seconds, from the start or from the crash, after which a run that is not quiet counts as it stands.
HORIZON_S = 7200.0
#: At 1,000 relays.
LONG_HORIZON_S = 36_000.0


@dataclass(frozen=True)
class Trial:
    """Key of one run: `setting` names the result it belongs to."""

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
    """`per_link`, `per_node`: datagrams from cold to quiet; `seconds`: virtual, until quiet."""

    trial: Trial
    flow_share: float
    cost_ratio: float
    per_link: float
    per_node: float
    seconds: float
    quiet: bool
    cpu_s: float
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
    most = int(solve(with_demand(part, 10**6)).flow)
    return with_demand(part, -int(-most * trial.factor // 1))


def against(instance: Instance, flow: Flow) -> tuple[float, float]:
    """Flow over the maximum flow, and cost over the least cost of as many units.

    Where the flow is short, the least cost is that of the same number of units from each data node; under
    `own` with several data nodes it is the linear program's.
    """
    several = instance.returns == "own" and len(instance.data_nodes) > 1
    best = linear_bound(instance) if several else solve(instance)
    if best.flow < 0.5 or not flow.value:
        return (1.0 if best.flow < 0.5 else 0.0), 1.0
    share = flow.value / best.flow
    if flow.value < best.flow - 0.5:
        sent = Counter(path[0] for path in flow.paths)
        nodes = tuple(DataNode(node.id, sent[node.id]) for node in instance.data_nodes)
        fewer = replace(instance, data_nodes=nodes)
        best = linear_bound(fewer) if several else solve(fewer)
    return share, flow.cost(instance) / best.cost


def run(trial: Trial) -> Outcome:
    started = time.process_time()
    instance = instance_of(trial)
    if trial.policy not in AGENTS:
        result = route(instance, trial.policy)
        cpu_s = time.process_time() - started
        share, ratio = against(instance, Flow(tuple(result.paths)))
        return Outcome(trial, share, ratio, 0.0, 0.0, 0.0, True, cpu_s)
    started = time.process_time()
    world = make_world(instance, trial.policy, trial.seed, ROUGH if trial.setting == "rough" else CALM)
    quiet = world.run(LONG_HORIZON_S if trial.setting == "size" else HORIZON_S)
    cpu_s = time.process_time() - started
    share, ratio = against(instance, world.flow())
    messages = messages_of(world)
    numbers = (share, ratio, messages.per_link_mean, messages.per_node_mean, world.last_work, quiet)
    one = tenth = None
    if trial.setting == "calm" and trial.factor == 1.0 and quiet:
        order = victims(instance, len(instance.relays), trial.seed)
        used = {name for path in world.flow().paths for name in path}
        # The victim carries units: a relay that nobody uses is no loss.
        first = next(name for name in order if name in used)
        one = fix(world, [first], messages.total)
        if one.quiet:
            order.remove(first)
            tenth = fix(world, order[: max(1, len(instance.relays) // 10)], messages.total)
    return Outcome(trial, *numbers, cpu_s, one, tenth)


def fix(world: FlowWorld, names: list[str], cold: int) -> Fixing:
    """Crash `names` and let the rest repair; `cold`: datagrams of the cold start."""
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
