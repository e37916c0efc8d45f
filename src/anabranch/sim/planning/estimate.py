"""How long an iteration takes, by arithmetic: quick enough to compare hundreds of plans.

    T = max over stages of max(computing, lines, places) + the way there and back + the longest reduce

*computing*: the batch dealt to a stage's replicas by their speed, the last one's end. *lines*: two
activations in and two out per microbatch over a replica's own line. *places*: by Little's law a stage with K
places, each taken for the seconds between a microbatch's coming and its gradient's, passes K on in these
seconds. *the way*: the mean path of the cheapest flow of the whole batch (`flow.oracle`), forward and back.
And T is never less than the clairvoyant bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from anabranch.flow.oracle import solve
from anabranch.flow.problem import DataNode, Flow, Instance, Relay, link_cost
from anabranch.protocol import tasks
from anabranch.sim.clairvoyant import Available, bound_s
from anabranch.sim.devices import GRADIENT_BYTES
from anabranch.sim.scenario import Fleet, Host
from anabranch.train.sizes import SUM_WIRE_BYTES

OF_THE_STEP = (tasks.Freeze, tasks.SumPart, tasks.Assemble, tasks.Apply)


@dataclass(frozen=True)
class Estimated:
    """Seconds of an iteration, and of its parts: those of the stage that takes longest."""

    iteration_s: float
    bound_s: float
    computing_s: float
    lines_s: float
    places_s: float
    way_s: float
    reduce_s: float


def estimate(fleet: Fleet) -> Estimated:
    """Of a fleet whose relays all have their stage."""
    scenario = fleet.scenario
    stages, microbatches = scenario.model.stages, scenario.model.microbatches
    loads = {
        host: load for s in range(stages + 1) for host, load in _dealt(fleet.stage(s), microbatches).items()
    }
    hops = _hops(fleet, loads)
    alive = 1.0 - scenario.churn.crash
    computing = lines = places = longest = reduce = 0.0
    for stage in range(stages + 1):
        hosts = fleet.stage(stage)
        waits_s = 2.0 * sum(hops[stage:])
        again = _again(fleet, hosts, waits_s) if stage else dict.fromkeys(loads, 0.0)
        computing_s = max(loads[h.id] * (h.machine.microbatch_s(stage) + again[h.id]) for h in hosts) / alive
        lines_s = max(loads[host.id] * _carried_s(fleet, host) for host in hosts)
        places_s = microbatches * waits_s / sum(map(fleet.places, hosts)) if stage else 0.0
        computing, lines, places = max(computing, computing_s), max(lines, lines_s), max(places, places_s)
        longest = max(longest, computing_s, lines_s, places_s)
        reduce = max(reduce, reduce_s(fleet, hosts))
    way_s = 2.0 * sum(hops)
    least = bound_s(fleet, Available({}, {}))
    return Estimated(
        max(least, longest + way_s + reduce), least, computing, lines, places, way_s, reduce
    )


def _dealt(hosts: Sequence[Host], microbatches: int) -> dict[str, int]:
    """Each one's share of the batch, so that the last to end ends earliest."""
    load = dict.fromkeys((host.id for host in hosts), 0)
    each_s = {host.id: host.machine.microbatch_s(host.stage) for host in hosts}
    whole = sum(1.0 / seconds for seconds in each_s.values())
    for name, seconds in each_s.items():
        load[name] = int(microbatches / seconds / whole)
    for _ in range(microbatches - sum(load.values())):
        load[min(load, key=lambda name: ((load[name] + 1) * each_s[name], name))] += 1
    return load


def _hops(fleet: Fleet, loads: dict[str, int]) -> list[float]:
    """Mean d_ij of each hop, from data node to stage 1 up to stage S to data node: seconds one way, with half
    of the computing at either end."""
    stages = fleet.scenario.model.stages
    data = tuple(DataNode(host.id, loads[host.id]) for host in fleet.stage(0))
    relays = tuple(
        Relay(host.id, stage, loads[host.id]) for stage in range(1, stages + 1) for host in fleet.stage(stage)
    )
    layers = [fleet.stage(stage % (stages + 1)) for stage in range(stages + 2)]
    links = {
        (one.id, other.id): _cost(fleet, one, other)
        for before, after in pairwise(layers)
        for one in before
        for other in after
    }
    found = solve(Instance(stages, "any", data, relays, links)).paths
    paths = (found or Flow(())).paths
    return [
        sum(links[path[at], path[at + 1]] for path in paths) / max(1, len(paths)) for at in range(stages + 1)
    ]


def _cost(fleet: Fleet, one: Host, other: Host) -> float:
    there, back = fleet.way(one.id, other.id), fleet.way(other.id, one.id)
    first = (_pass_s(one), _pass_s(other))
    rates = (
        min(there.rate_bps, one.line.up_bps, other.line.down_bps),
        min(back.rate_bps, other.line.up_bps, one.line.down_bps),
    )
    return link_cost(
        first, (there.latency_s, back.latency_s), rates, fleet.scenario.work.activation_bytes
    )


def _pass_s(host: Host) -> float:
    """Forward and input gradient, averaged; the head counts at either end of a data node."""
    kinds = (tasks.Forward, tasks.InputGradient) if host.stage else (tasks.Embed, tasks.Head)
    return sum(host.machine.seconds(host.stage, kind) for kind in kinds) / 2.0


def _again(fleet: Fleet, hosts: Sequence[Host], waits_s: float) -> dict[str, float]:
    """Seconds per microbatch of copies to host memory and of forwards that are computed again, because of
    those in flight so many are beyond the device's memory."""
    found, kept = {}, fleet.scenario.work.kept_bytes(hosts[0].stage)
    for host in hosts:
        machine, stage = host.machine, host.stage
        flying = min(fleet.places(host), waits_s / machine.microbatch_s(stage))
        beyond, again = (_share_beyond(places, flying) for places in (host.resident, host.capacity))
        found[host.id] = again * machine.seconds(stage, tasks.Forward)
        if host.parked:
            found[host.id] += (beyond - again) * 2.0 * kept / machine.device.host_link_bytes_per_s
    return found


def _share_beyond(places: int, flying: float) -> float:
    return max(0.0, 1.0 - places / flying) if flying else 0.0


def _carried_s(fleet: Fleet, host: Host) -> float:
    """What the host's own line takes for one microbatch: there and back."""
    bits = 2.0 * 8.0 * fleet.scenario.work.activation_bytes
    return bits / min(host.line.up_bps, host.line.down_bps)


def reduce_s(fleet: Fleet, hosts: Sequence[Host]) -> float:
    """Seconds in which all replicas of a stage have added up their sums, a part each, told each other, and
    taken the step."""
    stage, count = hosts[0].stage, len(hosts)
    step_s = max(sum(host.machine.seconds(stage, kind, count) for kind in OF_THE_STEP) for host in hosts)
    if count < 2:
        return step_s
    elements = fleet.scenario.work.parameters(stage) / count
    sent_s = 0.0
    for size in (SUM_WIRE_BYTES, GRADIENT_BYTES):
        bits = 8.0 * size * elements
        line_s = max(bits * (count - 1) / min(h.line.up_bps, h.line.down_bps) for h in hosts)
        ways = [fleet.way(a.id, b.id) for a in hosts for b in hosts if a is not b]
        sent_s += max(max(way.latency_s + bits / way.rate_bps for way in ways), line_s)
    return step_s + sent_s if math.isfinite(sent_s) else math.inf
