"""Cost of simulating rounds of up to a thousand islands of one machine each.

    nice python -m benchmarks.simulation.thousand_islands --sizes 100 200 500 1000 --minutes 10

The fleet is that of `volunteers` with the whole model at every relay, a slot for each and a data node for 25,
500 inner steps of one microbatch a round. Prints CPU seconds of a round (a simulation is one process),
memory, and messages of a node in a round. A size that takes longer than `--minutes` stops after the round in
which it does, and its twenty rounds are extrapolated from those that were done. Writes the result
`thousand-islands`.

It takes about half the time after `make compiled`, with PYTHONPATH=build/compiled.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean

from anabranch.protocol.peer import peer
from anabranch.sim.cluster.scenario import load_scenario
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.simulation.thousand_relays import OutOfTime, Timed

ITERATIONS, MINUTES, GIB = 21, 5.0, 4.0
"""Iterations: a synchronous one, then twenty rounds."""
SIZES = (100, 200, 500, 1000)
#: Iterations that are not counted: the synchronous one, and the round that is planned before it.
WARM_UP = 2
#: Number of message kinds that are listed.
LISTED = 10


@dataclass(frozen=True)
class Cost:
    """Cost of so many islands. begin_s, round_s, end_s: CPU seconds from making the peers until the first
    counted round, of each counted one, and after the last. seconds: virtual, of a round. messages, payloads,
    kinds: sent by a node in a round."""

    islands: int
    iterations: int
    begin_s: float
    round_s: float
    end_s: float
    gib: float
    seconds: float
    messages: float
    kinds: Mapping[str, float]
    crashes: float
    failure: str

    @property
    def minutes(self) -> float:
        """CPU minutes of all, extrapolated where some rounds were not done."""
        counted = ITERATIONS - min(WARM_UP, self.iterations)
        return (self.begin_s + counted * self.round_s + self.end_s) / 60.0


def measure(islands: int, minutes: float, crash: float) -> Cost:
    """In a process of its own, which ends with it."""
    scenario = load_scenario(
        "volunteers",
        {
            "model.stages": 0,
            "model.microbatches": islands,
            "fleet.relays": islands,
            "fleet.data_nodes": max(2, islands // 25),
            "fleet.spare": "never",
            # The one synchronous step is no part of the question: its sums are coarse.
            "precision.sum_bytes": 0.5,
            "precision.reduced_bytes": 1.0,
            "round.slots": islands,
            "round.steps": 500,
            "churn.crash": crash,
            "run.heartbeat_s": 60.0,
            "run.iterations": ITERATIONS,
        },
    )
    timed = Timed(scenario, 60.0 * minutes)
    try:
        failure = timed.run().failure
    except OutOfTime:
        failure = ""
    rows, ends_s, nodes = timed.recorder.rows, timed.ends_s, len(timed.fleet.hosts)
    skipped = min(WARM_UP, max(0, len(rows) - 1))
    counted = rows[skipped:]
    if not counted:
        return Cost(islands, 0, ends_s[-1] - ends_s[0], 0.0, 0.0, _gib(), 0.0, 0.0, {}, 0.0, failure)
    kinds = Counter[str]()
    for row in counted:
        kinds.update(row.kinds)
    share = 1.0 / nodes / len(counted)
    return Cost(
        islands,
        len(rows),
        ends_s[skipped] - ends_s[0],
        (ends_s[len(rows)] - ends_s[skipped]) / len(counted),
        time.process_time() - ends_s[len(rows)],
        _gib(),
        fmean(row.seconds for row in counted),
        sum(row.messages for row in counted) * share,
        {kind: count * share for kind, count in kinds.items()},
        fmean(row.crashes for row in counted),
        failure,
    )


def _gib() -> float:
    """Greatest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def _compiled() -> str:
    return "" if str(peer.__file__).endswith(".py") else ", compiled (`make compiled`)"


def goals_of(costs: Sequence[Cost]) -> list[Goal]:
    """Goals at the greatest size; open where no round of it was waited for."""
    last = costs[-1]
    found = [
        harness.at_most(
            f"CPU minutes of 20 rounds of {last.islands} islands", MINUTES, last.minutes, "{:.1f}"
        ),
        harness.at_most(f"memory at {last.islands} islands", GIB, last.gib, "{:.2f} GiB"),
    ]
    return found if last.iterations > WARM_UP else [goal._replace(met="open") for goal in found]


def body_of(costs: Sequence[Cost], crash: float) -> str:
    last, done = costs[-1], [cost for cost in costs if cost.iterations]
    rows = [
        [
            cost.islands,
            f"{cost.iterations} of {ITERATIONS}",
            f"{cost.round_s:.2f}",
            f"{1e3 * cost.round_s / cost.islands:.1f}",
            f"{cost.minutes:.1f}" + ("" if cost.iterations == ITERATIONS else " (extrapolated)"),
            f"{cost.gib:.2f}",
            f"{cost.seconds:.0f}",
            f"{cost.messages:.0f}",
            f"{cost.crashes:.1f}",
        ]
        for cost in done
    ]
    names = sorted(last.kinds, key=lambda kind: -last.kinds[kind])[:LISTED]
    each = [[kind, *(f"{cost.kinds.get(kind, 0.0):.1f}" for cost in done)] for kind in names]
    failed = [f"{cost.islands} islands: {cost.failure}." for cost in costs if cost.failure]
    head = ["islands", "iterations", "CPU s a round", "ms an island", "minutes of 20", "GiB", "round s"]
    return "\n".join(
        [
            "`volunteers` with whole models, a slot for each machine, a data node for 25, 500 inner steps a "
            f"round, {100 * crash:g} % of the machines crashing in a round; one seed, one process"
            f"{_compiled()}. *Round s*: virtual seconds; *messages*: small ones, per node and round. CPU "
            "seconds of a round are those after the first round, up to the iterations that were done.",
            *failed,
            "",
            table([*head, "messages", "crashes"], rows),
            "",
            table(["messages per node and round", *(f"{cost.islands} islands" for cost in done)], each),
        ]
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="islands (default: 100 to 1000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU at most, each (default: 10)")
    parser.add_argument("--crash", type=float, default=0.0, help="share of machines that crash in a round")
    args = parser.parse_args()
    costs = []
    for islands in args.sizes:
        # A new process, so that its peak memory is its own.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
            costs.append(own.submit(measure, islands, args.minutes, args.crash).result())
        print(costs[-1], file=sys.stderr, flush=True)
    body, goals = body_of(costs, args.crash), goals_of(costs)
    name = "thousand-islands" + "-churn" * (args.crash > 0.0)
    harness.write(name, "A thousand islands", body, goals=goals, data=costs, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
