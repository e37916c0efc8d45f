"""Cost of a large simulation: CPU seconds of its iterations, memory, and messages of a node."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.log.records import Commit
from anabranch.protocol.peer import peer
from anabranch.sim.cluster.scenario import Scenario, fleet_of
from anabranch.sim.experiment.run import Simulation
from benchmarks.harness import table

#: Iterations at the beginning that are not counted.
WARM_UP = 2


class _OutOfTime(Exception):
    """A simulation took longer than it may."""


class _Timed(Simulation):
    """Notes when each iteration ends, in seconds of CPU (the first lasts from before the peers are made), and
    gives up after the one that ends too late."""

    def __init__(self, scenario: Scenario, limit_s: float) -> None:
        self.ends_s = [time.process_time()]
        super().__init__(fleet_of(scenario, find_profile(scenario.network.profile), 0), "auction", 0)
        self.limit_s = limit_s

    def _committed(self, record: Commit) -> None:
        super()._committed(record)
        self.ends_s.append(time.process_time())
        if self.ends_s[-1] - self.ends_s[0] > self.limit_s:
            raise _OutOfTime


@dataclass(frozen=True)
class Cost:
    """Cost of a fleet of `size`. planned, iterations: to do, and done. begin_s, iteration_s, end_s: CPU
    seconds from making the peers until the first counted iteration; of each counted one; and after the last.
    gib: greatest memory. seconds: virtual, of an iteration. messages, kilobytes, kinds: control messages of a
    node in an iteration. crashes: in an iteration."""

    size: int
    planned: int
    iterations: int
    begin_s: float
    iteration_s: float = 0.0
    end_s: float = 0.0
    gib: float = 0.0
    seconds: float = 0.0
    messages: float = 0.0
    kilobytes: float = 0.0
    kinds: Mapping[str, float] = field(default_factory=dict)
    crashes: float = 0.0
    failure: str = ""

    @property
    def minutes(self) -> float:
        """CPU minutes of all, extrapolated where some iterations were not done."""
        counted = self.planned - _skipped(self.iterations)
        return (self.begin_s + counted * self.iteration_s + self.end_s) / 60.0

    @property
    def minutes_text(self) -> str:
        return f"{self.minutes:.1f}" + ("" if self.iterations == self.planned else " (extrapolated)")


def _skipped(iterations: int) -> int:
    """Iterations that are not counted of so many."""
    return min(WARM_UP, max(0, iterations - 1))


def cost_of(size: int, scenario: Scenario, minutes: float) -> Cost:
    """Simulate a scenario in this process, whose memory counts; at most so many minutes of CPU, and the
    iteration in which they end."""
    timed = _Timed(scenario, 60.0 * minutes)
    try:
        failure = timed.run().failure
    except _OutOfTime:
        failure = ""
    rows, ends_s, planned = timed.recorder.rows, timed.ends_s, scenario.run.iterations
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    if not rows:
        return Cost(size, planned, 0, ends_s[-1] - ends_s[0], gib=gib, failure=failure)
    skipped = _skipped(len(rows))
    counted = rows[skipped:]
    kinds = Counter[str]()
    for row in counted:
        kinds.update(row.kinds)
    share = 1.0 / len(timed.fleet.hosts) / len(counted)
    return Cost(
        size,
        planned,
        len(rows),
        ends_s[skipped] - ends_s[0],
        (ends_s[len(rows)] - ends_s[skipped]) / len(counted),
        time.process_time() - ends_s[len(rows)],
        gib,
        fmean(row.seconds for row in counted),
        sum(row.messages for row in counted) * share,
        sum(row.message_bytes for row in counted) * share / 1e3,
        {kind: count * share for kind, count in kinds.items()},
        fmean(row.crashes for row in counted),
        failure,
    )


def in_own_process(measure: Callable[..., Cost], *arguments: Any) -> Cost:
    """Cost that `measure` finds in a new process, whose peak memory is its own; printed as it is found."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        cost = own.submit(measure, *arguments).result()
    print(cost, file=sys.stderr, flush=True)
    return cost


def compiled() -> str:
    """Suffix of the set-up line for a compiled program; "" for plain Python."""
    return "" if str(peer.__file__).endswith(".py") else ", compiled (`make compiled`)"


def kinds_table(costs: Sequence[Cost], what: str, listed: int) -> str:
    """Table of the message kinds that are most at the greatest size. what: name of the sizes."""
    most = next((cost.kinds for cost in reversed(costs) if cost.kinds), {})
    names = sorted(most, key=lambda kind: -most[kind])[:listed]
    rows = [[kind, *(f"{cost.kinds.get(kind, 0.0):.1f}" for cost in costs)] for kind in names]
    return table(["messages per node and iteration", *(f"{cost.size} {what}" for cost in costs)], rows)
