"""Run of a routing policy on one instance (`anabranch route`): flow, datagrams, repair after crashes."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from anabranch.counter_rng import CounterRng
from anabranch.errors import UserError
from anabranch.flow.graph.oracle import optimal, solve
from anabranch.flow.graph.problem import Flow, Instance, Path
from anabranch.flow.policies.registry import PLANNERS, Planner
from anabranch.flow.policies.static import arrange
from anabranch.flow.policies.wiring import greedy_agent, swarm_agent
from anabranch.sim.routing_lab.agent_world import FlowWorld, Weather

#: Virtual seconds after which the flow of a policy that still sends messages is reported. A plain choice.
HORIZON_S = 3600.0
#: Policies with an agent at every node: those of live runs, and two that exist as agents only here.
AGENTS: dict[str, Planner] = {**PLANNERS, "swarm": Planner(swarm_agent), "greedy": Planner(greedy_agent)}
#: Policies that compute a flow from the whole graph, without messages.
CENTRAL: dict[str, Callable[[Instance], Flow]] = {"static": arrange, "optimal": optimal}
POLICIES = (*AGENTS, *CENTRAL)


class Messages(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of datagrams sent: in all, mean and greatest of a node, mean of a link. confirmations: those
    that only repeat the agreed state."""

    total: int = 0
    per_node_mean: float = 0.0
    per_node_max: int = 0
    per_link_mean: float = 0.0
    confirmations: int = 0


class Optimum(msgspec.Struct, frozen=True, kw_only=True):
    """Greatest flow (microbatches) and its least cost (s). exact: False if flow is an upper bound, and cost
    the bound at that flow."""

    flow: float
    cost: float
    exact: bool = True


class Repair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measurement of a repair after a crash of relays. flow, cost: after it. messages, seconds: datagrams and
    virtual time that it took. nodes_touched: number of nodes that sent anything but confirmations.
    graph_distance_*: median and greatest hops from these to a crashed relay. quiet: False if it was not over.
    oracle: optimum without the crashed relays, if asked for."""

    crashed: list[str]
    flow: int
    cost: float
    messages: int
    seconds: float
    nodes_touched: int
    graph_distance_median: float
    graph_distance_max: int
    quiet: bool
    oracle: Optimum | None = None


class RouteResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of `anabranch route --json` (`docs/reference`). flow, cost: microbatches that have a path, and
    their cost. paths: one per such microbatch. demand: microbatches in all. simulated_seconds: virtual time
    of the last datagram that changed anything (0 without messages). quiet: False if the policy was not done.
    oracle, churn: optimum and repair, if asked for."""

    policy: str
    flow: int
    cost: float
    max_path_cost: float
    paths: list[Path]
    messages: Messages
    simulated_seconds: float
    quiet: bool
    demand: int
    oracle: Optimum | None = None
    churn: Repair | None = None


def make_world(instance: Instance, policy: str, seed: int, weather: Weather | None = None) -> FlowWorld:
    """World of simulated agents of `policy` (a key of AGENTS) on `instance`. weather: delay, loss,
    duplication and reordering of their messages (None: `Weather()`). Raises UserError if the policy cannot
    solve the instance."""
    if policy == "auction" and instance.returns == "own" and len(instance.data_nodes) > 1:
        raise UserError(
            'policy auction plans for return "any" alone, and the instance has return "own" and several data '
            'nodes; use policy gwtf, swarm, greedy, static or optimal, or change its return to "any"'
        )
    planner = AGENTS[policy]
    return FlowWorld(instance, planner.agent, seed=seed, weather=weather, same_stage=planner.published)


def route(
    instance: Instance,
    policy: str,
    *,
    seed: int = 0,
    weather: Weather | None = None,
    churn: int = 0,
    oracle: bool = False,
    horizon_s: float = HORIZON_S,
) -> RouteResult:
    """Solve `instance` by `policy` (one of POLICIES). weather: of the links (None: no losses); ignored by the
    policies of CENTRAL, which send nothing. With `churn` > 0, crash that many relays at once afterwards and
    let the policy repair. The crash comes when all agents are quiet, at the latest after `horizon_s`; the
    repair may take as long. oracle: True to compute the optimum as well. Raises UserError if there are too
    few relays, or the policy cannot solve the instance."""
    if churn > len(instance.relays):
        raise UserError(f"{churn} relays cannot crash: there are {len(instance.relays)}")
    crashing = victims(instance, churn, seed)
    repair = None
    if policy in CENTRAL:
        result = _result(instance, policy, CENTRAL[policy](instance), Messages(), 0.0, quiet=True)
        if crashing:
            left = instance.without(crashing)
            repair = _solved_anew(left, crashing, CENTRAL[policy](left), oracle)
    else:
        world = make_world(instance, policy, seed, weather)
        quiet = world.run(horizon_s)
        result = _result(instance, policy, world.flow(), messages_of(world), world.last_work, quiet)
        if crashing:
            repair = crash_and_repair(world, crashing, oracle, horizon_s)
    return msgspec.structs.replace(result, oracle=_optimum(instance) if oracle else None, churn=repair)


def _result(
    instance: Instance, policy: str, flow: Flow, messages: Messages, seconds: float, quiet: bool
) -> RouteResult:
    return RouteResult(
        policy=policy,
        flow=flow.value,
        cost=flow.cost(instance),
        max_path_cost=flow.max_path_cost(instance),
        paths=list(flow.paths),
        messages=messages,
        simulated_seconds=seconds,
        quiet=quiet,
        demand=instance.demand,
    )


def victims(instance: Instance, count: int, seed: int) -> list[str]:
    """Ids of `count` relays of the instance, drawn by `seed`, to be crashed; all of them if there are
    fewer."""
    names = [relay.id for relay in instance.relays]
    CounterRng(seed, stream=2).shuffle(names)
    return names[:count]


def messages_of(world: FlowWorld) -> Messages:
    """Numbers of datagrams that the agents of a world sent since the last reset."""
    counts = world.counts
    return Messages(
        total=counts.total,
        per_node_mean=counts.total / max(1, len(world.instance.stage)),
        per_node_max=max(counts.by_node.values(), default=0),
        per_link_mean=counts.total / max(1, world.neighbour_links),
        confirmations=counts.confirmations,
    )


def crash_and_repair(
    world: FlowWorld, victims: list[str], oracle: bool = False, horizon_s: float = HORIZON_S
) -> Repair:
    """Crash the relays `victims` of a world now, and measure the repair until all agents are quiet, at most
    for `horizon_s`. The world's counts are reset. oracle: True to compute the optimum without these relays as
    well."""
    started = world.now
    world.restart_counts()
    world.crash(victims)
    quiet = world.run(started + horizon_s)
    left = world.instance.without(name for name in world.instance.relay if name not in world.agents)
    distance = _distances(world.instance, victims)
    touched = sorted(distance[name] for name in world.counts.workers if name in distance)
    return msgspec.structs.replace(
        _solved_anew(left, victims, world.flow(), oracle),
        messages=world.counts.total,
        seconds=max(0.0, world.last_work - started),
        nodes_touched=len(world.counts.workers),
        graph_distance_median=float(statistics.median(touched)) if touched else 0.0,
        graph_distance_max=max(touched, default=0),
        quiet=quiet,
    )


def _solved_anew(left: Instance, crashed: list[str], flow: Flow, oracle: bool) -> Repair:
    """Record of a repair whose flow is `flow` on `left`, the instance without the crashed relays; its
    messages, seconds and distances are 0. oracle: True to compute the optimum on `left` as well."""
    return Repair(
        crashed=crashed,
        flow=flow.value,
        cost=flow.cost(left),
        messages=0,
        seconds=0.0,
        nodes_touched=0,
        graph_distance_median=0.0,
        graph_distance_max=0,
        quiet=True,
        oracle=_optimum(left) if oracle else None,
    )


def _optimum(instance: Instance) -> Optimum:
    solution = solve(instance)
    return Optimum(flow=solution.flow, cost=solution.cost, exact=solution.exact)


def _distances(instance: Instance, starts: Iterable[str]) -> dict[str, int]:
    """{node: hops to the nearest of `starts`}, over links in either direction; nodes that cannot be reached
    are missing."""
    distance = dict.fromkeys(starts, 0)
    queue = deque(distance)
    while queue:
        node = queue.popleft()
        for other in (*instance.successors[node], *instance.predecessors[node]):
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance
