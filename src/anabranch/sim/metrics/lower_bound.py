"""Clairvoyant lower bound on the duration of an iteration, for policies that lose a crashed replica's sum.

Without churn it holds for any policy with any knowledge, on the given placement.

For each stage s, with C_s = the batch's seconds at speed 1, v_r the speed of replica r and a_r the share of
the iteration in which it can contribute, an iteration of T seconds has room for

    C_s <= sum over r of v_r · min(a_r · T, T - reach_s - reduce_s)

because nothing can be computed before the first activation arrives (reach_s: over the quickest path,
computing included) nor while the sums of the stage are reduced (reduce_s: in the cheapest way). And one
microbatch must go forward and back. The bound is the least T that satisfies all of this. Planning, queueing
and control cost nothing.

A replica can contribute while it is alive. If it crashes, its results are taken to be lost with its sum, and
only the time from when it can have the state again counts. That is no law: a replica that crashes after its
stage has reduced has lost nothing (a few simulated iterations are quicker than this figure), and a policy
that hands the sum of a doomed replica over in time could go below it under churn.

Where two iterations are in flight the reach, the reduce and the round trip of one are hidden behind the
other. `overlapped_s` is the bound then: the computing of the slowest stage, or the time that the lines of a
stage's replicas need for what all of them together have to send, or to receive; whichever is most.

The sum "slowest stage's computing + round trip + reduce" is larger and no bound: the round trip of the first
microbatch overlaps with the computing of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.scenario import Fleet, Host

#: Seconds of a microbatch at an empty stage 0, which only sends token ids; not zero, to divide by.
LEAST_S = 1e-9


class LowerBound:
    """Lower bounds on the iterations of one fleet; figures common to all iterations are computed once."""

    def __init__(self, fleet: Fleet) -> None:
        self._microbatches = fleet.scenario.model.microbatches
        self._work = fleet.scenario.work
        self._reach_s, self._round_trip_s = _quickest_paths(fleet)
        stages = range(fleet.scenario.model.relay_stages + 1)
        self._hosts = [fleet.stage(stage) for stage in stages]
        self._speeds = [
            [1.0 / max(LEAST_S, host.machine.microbatch_s(stage)) for host in self._hosts[stage]]
            for stage in stages
        ]
        """Microbatches per second of each replica, by stage."""
        self._reduce_s = [_reduce_s(fleet, hosts) for hosts in self._hosts]

    def bound_s(self, available: Mapping[str, float], members: Mapping[int, int]) -> float:
        """Lower bound on one iteration in seconds. available: relay -> share (0 to 1) of the iteration in
        which it can contribute (missing: 1). members: stage -> number of replicas in its reduce (missing:
        all); a reduce of one takes no time. Infinite if no replica of some stage can contribute."""
        least = 0.0
        for stage, hosts in enumerate(self._hosts):
            shares = [available.get(host.id, 1.0) for host in hosts]
            replicas = list(zip(self._speeds[stage], shares, strict=True))
            alone = members.get(stage, len(hosts)) < 2
            lost_s = self._reach_s[stage] + (0.0 if alone else self._reduce_s[stage])
            least = max(least, _fill(replicas, self._microbatches, lost_s))
        return max(least, self._round_trip_s)

    def overlapped_s(self, available: Mapping[str, float], members: Mapping[int, int]) -> float:
        """Lower bound on the mean seconds of an iteration where two are in flight; arguments as for
        `bound_s`."""
        least = 0.0
        for stage, hosts in enumerate(self._hosts):
            speed = sum(
                v * available.get(host.id, 1.0) for v, host in zip(self._speeds[stage], hosts, strict=True)
            )
            count = members.get(stage, len(hosts))
            computing = self._microbatches / speed if speed else math.inf
            least = max(least, computing, *self._lines_s(stage, hosts, count))
        return least

    def _lines_s(self, stage: int, hosts: Sequence[Host], count: int) -> tuple[float, float]:
        """(least seconds in which the lines of a stage's replicas together send their part of an iteration,
        the same for receiving). Each microbatch comes and goes twice: an activation and its gradient. count:
        replicas in the stage's reduce, all of which need its result; helpers of other stages may sum and send
        results."""
        work = self._work
        cuts = self._microbatches * (work.activation_bytes + work.gradient_bytes)
        elements, others = work.parameters(stage), count - 1
        summed_here = others * (work.sum_bytes + work.reduced_bytes)
        sent = min(summed_here, count * work.sum_bytes) * elements if others > 0 else 0.0
        got = min(summed_here, count * work.reduced_bytes) * elements if others > 0 else 0.0
        up_bps = sum(host.line.up_bps for host in hosts)
        down_bps = sum(host.line.down_bps for host in hosts)
        return 8.0 * (cuts + sent) / up_bps, 8.0 * (cuts + got) / down_bps


def _fill(replicas: Sequence[tuple[float, float]], work: float, lost_s: float) -> float:
    """Least T (seconds) with sum of speed * min(share * T, T - lost_s) >= work, over the (speed, share) pairs
    of the replicas; infinite if all shares are 0. speed: microbatches per second. share: part of the
    iteration in which the replica can contribute. work: microbatches. lost_s: seconds in which no replica can
    compute."""
    low, high = lost_s, lost_s + 1.0

    def done(seconds: float) -> float:
        return sum(speed * max(0.0, min(share * seconds, seconds - lost_s)) for speed, share in replicas)

    if not any(share > 0.0 for _, share in replicas):
        return math.inf
    while done(high) < work:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (low, middle) if done(middle) >= work else (middle, high)
    return low


def _quickest_paths(fleet: Fleet) -> tuple[list[float], float]:
    """(for each stage from 0 on, seconds until the first activation can reach it; seconds of the quickest
    path of a microbatch through all stages and back)."""
    stages, size = fleet.scenario.model.relay_stages, fleet.scenario.work.activation_bytes

    def onward(best: Mapping[str, float], hosts: Sequence[Host]) -> dict[str, float]:
        return {
            host.id: min(at + fleet.link(before, host.id).seconds(size) for before, at in best.items())
            for host in hosts
        }

    def add(best: Mapping[str, float], task: type[tasks.Task]) -> dict[str, float]:
        hosts = [(fleet.hosts[name], at) for name, at in best.items()]
        return {host.id: at + host.machine.seconds(host.stage, task) for host, at in hosts}

    best = add({host.id: 0.0 for host in fleet.stage(0)}, tasks.Embed)
    reach = [0.0]
    for stage in range(1, stages + 1):
        best = onward(best, fleet.stage(stage))
        reach.append(min(best.values()))
        best = add(best, tasks.Forward)
    best = add(onward(best, fleet.stage(0)), tasks.Head)
    for stage in range(stages, 0, -1):
        best = add(onward(best, fleet.stage(stage)), tasks.InputGradient)
    return reach, min(best.values())


def download_s(fleet: Fleet, relay: str) -> float:
    """Least seconds in which a relay downloads its state from all other replicas of its stage at once; 0 if
    there is no other."""
    host = fleet.hosts[relay]
    links = [fleet.link(other.id, relay) for other in fleet.stage(host.stage) if other is not host]
    if not links:
        return 0.0
    rate_bps = min(sum(link.rate_bps for link in links), fleet.line(relay).down_bps)
    bits = 8.0 * fleet.scenario.work.state_bytes * fleet.scenario.work.parameters(host.stage)
    return min(link.latency_s for link in links) + bits / rate_bps


def _reduce_s(fleet: Fleet, hosts: Sequence[Host]) -> float:
    """Least seconds of a reduce among two or more of these replicas, with any helpers; 0 with one replica. At
    least one of n replicas sums a share of at most 1/n. That replica has to send the rest of its sums, and
    its reduced share to the others, over its own line."""
    if len(hosts) < 2:
        return 0.0
    others = [other for other in fleet.hosts.values() if other not in hosts]
    links = [fleet.link(a.id, b.id) for a in hosts for b in [*hosts, *others] if a is not b]
    most_bps = max(host.line.up_bps for host in hosts)
    work = fleet.scenario.work
    elements = work.parameters(hosts[0].stage)

    def sent_bytes(count: int, share: float) -> float:
        return work.sum_bytes * (1.0 - share) + work.reduced_bytes * share * (count - 1)

    least = min(sent_bytes(n, share) for n in range(2, len(hosts) + 1) for share in (0.0, 1.0 / n))
    return 2.0 * min(link.latency_s for link in links) + 8.0 * least * elements / most_bps
