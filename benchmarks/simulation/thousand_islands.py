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

import sys
from collections.abc import Sequence

from anabranch.sim.cluster.scenario import load_scenario
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.simulation.simulation_cost import (
    WARM_UP,
    Cost,
    compiled,
    cost_of,
    in_own_process,
    kinds_table,
)

#: Iterations: a synchronous one, in which the first round is planned, then twenty rounds.
ITERATIONS, MINUTES, GIB = 21, 5.0, 4.0
SIZES = (100, 200, 500, 1000)
#: Number of message kinds that are listed.
LISTED = 10


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
    return cost_of(islands, scenario, minutes)


def goals_of(costs: Sequence[Cost]) -> list[Goal]:
    """Goals at the greatest size; open where no round of it was waited for."""
    last = costs[-1]
    found = [
        harness.at_most(
            f"CPU minutes of 20 rounds of {last.size} islands", MINUTES, last.minutes, "{:.1f}"
        ),
        harness.at_most(f"memory at {last.size} islands", GIB, last.gib, "{:.2f} GiB"),
    ]
    return found if last.iterations > WARM_UP else [goal._replace(met="open") for goal in found]


def body_of(costs: Sequence[Cost], crash: float) -> str:
    done = [cost for cost in costs if cost.iterations]
    rows = [
        [
            cost.size,
            f"{cost.iterations} of {ITERATIONS}",
            f"{cost.iteration_s:.2f}",
            f"{1e3 * cost.iteration_s / cost.size:.1f}",
            cost.minutes_text,
            f"{cost.gib:.2f}",
            f"{cost.seconds:.0f}",
            f"{cost.messages:.0f}",
            f"{cost.crashes:.1f}",
        ]
        for cost in done
    ]
    failed = [f"{cost.size} islands: {cost.failure}." for cost in costs if cost.failure]
    head = ["islands", "iterations", "CPU s a round", "ms an island", "minutes of 20", "GiB", "round s"]
    return "\n".join(
        [
            "`volunteers` with whole models, a slot for each machine, a data node for 25, 500 inner steps a "
            f"round, {100 * crash:g} % of the machines crashing in a round; one seed, one process"
            f"{compiled()}. *Round s*: virtual seconds; *messages*: small ones, per node and round. CPU "
            "seconds of a round: mean of the counted ones, without the synchronous step and the first round.",
            *failed,
            "",
            table([*head, "messages", "crashes"], rows),
            "",
            kinds_table(done, "islands", LISTED),
        ]
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="islands (default: 100 to 1000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU at most, each (default: 10)")
    parser.add_argument("--crash", type=float, default=0.0, help="share of machines that crash in a round")
    args = parser.parse_args()
    costs = [in_own_process(measure, islands, args.minutes, args.crash) for islands in args.sizes]
    body, goals = body_of(costs, args.crash), goals_of(costs)
    name = "thousand-islands" + "-churn" * (args.crash > 0.0)
    harness.write(name, "A thousand islands", body, goals=goals, data=costs, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
