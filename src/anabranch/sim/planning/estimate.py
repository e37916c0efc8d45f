"""Estimate of an iteration's time, fast enough to compare thousands of assignments of relays to stages.

    T = max over stages of max(compute, line, slots) + 2 * the path + the longest reduce

The terms are those of the leader's cost model (`protocol.placement.cost_model`), whose shares, hops and
spread reduce are used here, with what only the planner knows: a machine's seconds of every task, recomputed
and offloaded microbatches, and the slots of each machine instead of those of a stage. *slots*: a microbatch
occupies a slot of a machine from its dispatch until its weight gradient is computed, and any machine with a
free slot is sent a microbatch. So a fast machine with few slots gets less than its share of the batch, and a
slow one with many slots has all of them occupied when the batch ends. `estimate` gives at least the lower
bound (`sim.metrics.lower_bound`), which `Estimates` do not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from anabranch.flow.graph.problem import link_cost
from anabranch.protocol.interface import tasks
from anabranch.protocol.placement.averaging_program import averaging_s
from anabranch.protocol.placement.cost_model import Group, Hops, Shares, shared_out, spread_reduce_s
from anabranch.protocol.reduce.hierarchy import FLAT
from anabranch.sim.cluster.scenario import Fleet, Host, Regions, Scenario, fleet_of
from anabranch.sim.metrics.lower_bound import LowerBound

#: Tasks of a reduce and of the optimizer step.
OF_THE_STEP = (tasks.Freeze, tasks.SumPart, tasks.Assemble, tasks.Apply)


@dataclass(frozen=True)
class Estimated:
    """Estimated seconds of an iteration, and of its parts, each at the stage where that part takes longest.
    bound_s: lower bound (0: not computed). lines_s: transfers on access lines. places_s: until the batch is
    done if slots bind. way_s: path of a microbatch there and back. reduce_s: reduce and optimizer step."""

    iteration_s: float
    bound_s: float
    computing_s: float
    lines_s: float
    places_s: float
    way_s: float
    reduce_s: float


def estimate(fleet: Fleet) -> Estimated:
    """Estimate for a fleet with the stages that its relays have. It has the lower bound, and its iteration is
    not below that."""
    found = Estimates(fleet).of({host.id: host.stage for host in fleet.hosts.values() if host.stage})
    least = LowerBound(fleet).bound_s({}, {})
    return replace(found, iteration_s=max(least, found.iteration_s), bound_s=least)


def of_any_assignment(scenario: Scenario, regions: Regions) -> Estimates:
    """Estimates for the fleet of a scenario (seed 0) that can be asked about any assignment of its relays to
    stages. All machines must be named. Raises UserError as `fleet_of`."""
    work, hosts, like = scenario.work, list[Host](), dict[int, Fleet]()
    for stage in range(1, work.stages + 1):
        if work.blocks(stage) not in like:
            parts = (replace(p, stage=stage) if p.role == "relay" else p for p in scenario.machines)
            like[work.blocks(stage)] = fleet_of(replace(scenario, machines=tuple(parts)), regions, 0)
        there = like[work.blocks(stage)].hosts.values()
        hosts += [replace(host, stage=stage) for host in there if host.stage]
    return Estimates(fleet_of(scenario, regions, 0), hosts)


@dataclass(frozen=True)
class _MachineCosts:
    """Seconds that one microbatch takes at a machine of a stage, and the machine's slots. pass_s: all its
    tasks; forward_s, weight_gradient_s: those tasks alone. half_pass_s: (forward + input gradient) / 2, at
    stage 0 (embedding + head) / 2. line_s: both transfers in each direction over the machine's access line,
    at the lower of its two rates. copies_s: copies of its activations to host memory and back; 0 without
    offloading. slots: microbatches that the machine holds at once."""

    host: Host
    pass_s: float
    forward_s: float
    weight_gradient_s: float
    half_pass_s: float
    line_s: float
    copies_s: float
    slots: int


@dataclass(frozen=True)
class _StageCosts:
    """Seconds of an iteration at a stage, if a given group of machines serves it. kinds: costs of each
    machine. shares: microbatches of the batch that each computes. each_s: seconds of a microbatch at each
    machine, recomputation included. computing_s, lines_s: until the slowest machine has computed its share,
    and until the slowest line has carried it. reduce_s: reduce and optimizer step."""

    kinds: tuple[_MachineCosts, ...]
    shares: Shares
    each_s: tuple[float, ...]
    computing_s: float
    lines_s: float
    reduce_s: float


class Estimates:
    """Estimates for assignments of relays to stages in one fleet, cached by group of machines. Identical
    machines share the name of the first one, so that equal groups are computed once. hosts: besides the
    fleet's own, hosts of the same machines at the other stages that an assignment may give them."""

    def __init__(self, fleet: Fleet, hosts: Iterable[Host] = ()) -> None:
        self._fleet, self._work = fleet, fleet.scenario.work
        self.stages = self._work.stages
        self._microbatches = fleet.scenario.model.microbatches
        found = {(host.id, host.stage): host for host in [*fleet.hosts.values(), *hosts]}
        self._kinds = {at: _kind(fleet, host) for at, host in found.items()}
        self._misfits = {at for at, host in found.items() if host.machine.capacity(host.stage) < 1}
        looks, first = dict.fromkeys(fleet.hosts, ""), dict[str, str]()
        for host in found.values():
            looks[host.id] += repr(replace(host, id=""))
        self._like = {name: first.setdefault(look, name) for name, look in looks.items()}
        self._ends: Group = tuple(self._like[host.id] for host in fleet.stage(0))
        self._hops = Hops(self._microbatches, self._link_s)
        self._stages: dict[tuple[int, Group, Group], _StageCosts] = {}
        self._steps: dict[tuple[str, int, int], float] = {}
        self._kinds_like = list(dict.fromkeys(self._like.values()))
        self._rates: dict[str, list[float]] = {}
        self._slowest: dict[Group, Mapping[str, float]] = {}
        self._found: dict[tuple[Group, ...], Estimated] = {}

    def seconds(self, assignment: Mapping[str, int]) -> float:
        """Estimated seconds of an iteration with an assignment (relay -> stage 1 to S; absent relays are
        unused), without regard to the lower bound. Infinite if a stage is empty or does not fit into the
        memory of one of its machines."""
        fits = len(set(assignment.values())) == self.stages and self._misfits.isdisjoint(assignment.items())
        return self.of(assignment).iteration_s if fits else math.inf

    def of(self, assignment: Mapping[str, int]) -> Estimated:
        """Estimate for an assignment (relay -> stage; absent relays are unused), without a lower bound. Every
        stage must have a relay."""
        names: list[list[str]] = [[] for _ in range(self.stages)]
        for name, stage in assignment.items():
            names[stage - 1].append(self._like[name])
        relays = tuple(tuple(sorted(each)) for each in names)
        if relays not in self._found:
            self._found[relays] = self._of([self._ends, *relays])
        return self._found[relays]

    def _of(self, layers: Sequence[Group]) -> Estimated:
        everybody = tuple(sorted(name for layer in layers for name in layer))
        stages = [self._stage(stage, layer, everybody) for stage, layer in enumerate(layers)]
        hops = [self._hops.mean_s(one.shares, other.shares) for one, other in pairwise([*stages, stages[0]])]
        # Time in which the batch arrives at a stage. At the first one: a quarter of what the lines carry.
        coming_s, slots_s = stages[0].lines_s / 4.0, 0.0
        for at, stage in enumerate(stages[1:], 1):
            there_s = self._slots_s(stage, 2.0 * sum(hops[at - 1 :]), coming_s)
            coming_s, slots_s = max(coming_s, there_s), max(slots_s, there_s)
        computing_s = max(stage.computing_s for stage in stages) / (1.0 - self._fleet.scenario.churn.crash)
        lines_s, way_s = max(stage.lines_s for stage in stages), 2.0 * sum(hops)
        reduce_s = max(stage.reduce_s for stage in stages)
        whole_s = max(computing_s, lines_s, slots_s) + way_s + reduce_s
        return Estimated(whole_s, 0.0, computing_s, lines_s, slots_s, way_s, reduce_s)

    # --- a stage and its links --------------------------------------------------------------

    def _stage(self, stage: int, names: Group, everybody: Group) -> _StageCosts:
        key = (self._work.blocks(stage) if stage else 0, names, everybody)
        if key not in self._stages:
            kinds = tuple(self._kinds[name, stage] for name in names)
            # Data nodes get equal parts of the batch.
            shares = shared_out([kind.pass_s if stage else 1.0 for kind in kinds], self._microbatches)
            pairs = [*zip(kinds, shares, strict=True)]
            each_s = [kind.pass_s + _offload_and_recompute_s(kind, share) for kind, share in pairs]
            self._stages[key] = _StageCosts(
                kinds,
                Shares(names, tuple(kind.half_pass_s for kind in kinds), tuple(shares)),
                tuple(each_s),
                max(share * seconds for share, seconds in zip(shares, each_s, strict=True)),
                max(share * kind.line_s for kind, share in pairs),
                self._reduce_s([kind.host for kind in kinds], names, everybody),
            )
        return self._stages[key]

    def _reduce_s(self, hosts: Sequence[Host], names: Group, everybody: Group) -> float:
        """Seconds of reduce and optimizer step of a stage's replicas. hosts, names: the replicas, alike ones
        under one name. everybody: names of all machines, which may help. The reduce is even (each member sums
        one part) or, where that is quicker and `fleet.spread` allows, spread over helpers
        (`protocol.coordinator.reduce_schedule`) or with the shares of the averaging program."""
        fleet, stage, count = self._fleet, hosts[0].stage, len(hosts)
        step_s = max(self._step_s(host, count) for host in hosts)
        if count < 2:
            return step_s
        lines_bps = [min(host.line.up_bps, host.line.down_bps) for host in hosts]
        links = [fleet.link(a.id, b.id) for a, b in permutations(hosts, 2)]
        elements = self._work.parameters(stage)
        sent_s = 0.0
        for size in (self._work.sum_bytes, self._work.reduced_bytes):
            bits = 8.0 * size * (elements / count)
            line_s = max(bits * (count - 1) / bps for bps in lines_bps)
            sent_s += max(max(link.latency_s + bits / link.rate_bps for link in links), line_s)
        if fleet.scenario.fleet.spread == "links" and count <= FLAT * fleet.scenario.fleet.neighbours:
            slowest_bps = self._slowest_bps(names)
            latency_s = max(link.latency_s for link in links)
            bits = 8.0 * self._work.reduce_bytes * elements
            relay_bps = [slowest_bps[other] for other in everybody]
            sent_s = min(sent_s, spread_reduce_s(bits, latency_s, relay_bps, lines_bps))
        if fleet.scenario.fleet.spread == "program" and count <= FLAT * fleet.scenario.fleet.neighbours:
            sizes = self._work.sum_bytes, self._work.reduced_bytes
            lines = [(host.line.up_bps, host.line.down_bps) for host in hosts]
            sent_s = min(sent_s, averaging_s(lines, *(8.0 * size * elements for size in sizes)))
        return step_s + sent_s if math.isfinite(sent_s) else math.inf

    def _step_s(self, host: Host, count: int) -> float:
        """Seconds of the tasks of reduce and optimizer step at one of `count` replicas, transfers left out:
        the parts that each adds up become smaller with their number."""
        key = host.id, host.stage, count
        if key not in self._steps:
            tasks_s = (host.machine.seconds(host.stage, kind, count) for kind in OF_THE_STEP)
            self._steps[key] = sum(tasks_s)
        return self._steps[key]

    def _slowest_bps(self, names: Group) -> Mapping[str, float]:
        """{machine: rate (bits per second) of the slowest of the links to it from the machines `names`}."""
        if names not in self._slowest:
            rates = [self._rates_bps(name) for name in dict.fromkeys(names)]
            slowest = map(min, *rates) if len(rates) > 1 else rates[0]
            self._slowest[names] = dict(zip(self._kinds_like, slowest, strict=True))
        return self._slowest[names]

    def _rates_bps(self, name: str) -> list[float]:
        """Rates (bits per second) of the links from a machine to each of `_kinds_like`, the first machine of
        each group of alike ones."""
        if name not in self._rates:
            self._rates[name] = [self._fleet.link(name, other).rate_bps for other in self._kinds_like]
        return self._rates[name]

    def _link_s(self, one: str, other: str) -> float:
        there, back = self._fleet.link(one, other), self._fleet.link(other, one)
        lines = self._fleet.line(one), self._fleet.line(other)
        rates = (
            min(there.rate_bps, lines[0].up_bps, lines[1].down_bps),
            min(back.rate_bps, lines[1].up_bps, lines[0].down_bps),
        )
        return link_cost((0.0, 0.0), (there.latency_s, back.latency_s), rates, self._work.activation_bytes)

    def _slots_s(self, stage: _StageCosts, away_s: float, coming_s: float) -> float:
        """Seconds until the last microbatch of a stage is done, if each is sent to the free slot that
        finishes it first. stage: its costs. away_s: seconds from sending a microbatch on until the arrival of
        its gradient. coming_s: seconds within which the batch arrives at the earliest."""
        rates = []
        for kind, seconds in zip(stage.kinds, stage.each_s, strict=True):
            held_s = away_s + kind.weight_gradient_s + seconds - kind.pass_s
            rates.append(min(1.0 / seconds, kind.slots / held_s))
        passed, slots = sum(rates), sum(kind.slots for kind in stage.kinds)
        coming_s = max(coming_s, (self._microbatches - slots) / passed)
        most = [kind.slots + coming_s * rate for kind, rate in zip(stage.kinds, rates, strict=True)]
        return max(self._microbatches / passed, _shared_s(stage.each_s, most, self._microbatches))


def _kind(fleet: Fleet, host: Host) -> _MachineCosts:
    stage, seconds, link = host.stage, host.machine.seconds, host.machine.device.host_link_bytes_per_s
    first = (tasks.Forward, tasks.InputGradient) if stage else (tasks.Embed, tasks.Head)
    work = fleet.scenario.work
    return _MachineCosts(
        host,
        host.machine.microbatch_s(stage),
        seconds(stage, tasks.Forward),
        seconds(stage, tasks.WeightGradient),
        sum(seconds(stage, task) for task in first) / 2.0,
        2.0 * 8.0 * work.activation_bytes / min(host.line.up_bps, host.line.down_bps),
        2.0 * work.kept_bytes(stage) / link if link and stage else 0.0,
        fleet.slots(host),
    )


def _offload_and_recompute_s(kind: _MachineCosts, share: int) -> float:
    """Mean seconds per microbatch of copies to host memory and of repeated forwards, at a machine that
    computes `share` microbatches of the batch. Only the microbatches beyond the device's memory need them: as
    many as its slots hold at the end, since weight gradients are computed last."""
    flying = min(kind.slots, share)
    if not flying or not kind.host.stage or kind.slots == kind.host.resident:
        return 0.0
    # Fractions of the microbatches in flight beyond the device's memory, and beyond the host's, too.
    beyond, again = (max(0.0, 1.0 - n / flying) for n in (kind.host.resident, kind.host.capacity))
    return again * kind.forward_s + (beyond - again) * kind.copies_s


def _shared_s(each_s: Sequence[float], most: Sequence[float], microbatches: int) -> float:
    """Seconds until all microbatches of a batch are computed, if the machines of a stage share them by speed.
    each_s: seconds of a microbatch at each machine. most: greatest number of microbatches that each machine
    takes. If the machines take fewer than all together, the seconds of those that they take."""
    left, speed = float(microbatches), sum(1.0 / seconds for seconds in each_s)
    longest_s, pairs = 0.0, zip(most, each_s, strict=True)
    for whole_s, seconds in sorted((many * seconds, seconds) for many, seconds in pairs):
        if speed * whole_s >= left:
            return max(longest_s, left / speed)
        left, speed, longest_s = left - whole_s / seconds, speed - 1.0 / seconds, whole_s
    return longest_s
