"""Cost of simulating a thousand relays in twelve stages, a tenth of which crash in every iteration.

    nice python -m benchmarks.simulation.thousand_relays --minutes 20

Simulates `fleet1000` at several sizes, with as much of everything for each relay, and prints what it costs:
CPU minutes (a simulation is one process), memory, and what control messages a node sends in an iteration. A
size that takes longer than `--minutes` stops after the iteration in which it does, and its twenty iterations
are extrapolated from those that were done. Writes the result `thousand`.

It takes about half the minutes after `make compiled`, with PYTHONPATH=build/compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from anabranch.sim.cluster.scenario import load_scenario
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.simulation.simulation_cost import Cost, compiled, cost_of, in_own_process, kinds_table

ITERATIONS, MINUTES, GIB, RATIO = 20, 5.0, 4.0, 1.5
SIZES = (50, 250, 1000)
#: Number of message kinds that are listed.
LISTED = 12


def measure(relays: int, minutes: float) -> Cost:
    """In a process of its own, which ends with it."""
    scenario = load_scenario(
        "fleet1000",
        {
            "fleet.relays": relays,
            "fleet.data_nodes": max(2, relays // 25),
            "model.microbatches": 8 * relays // 25,
            "run.iterations": ITERATIONS,
        },
    )
    return cost_of(relays, scenario, minutes)


def goals_of(costs: Sequence[Cost]) -> list[Goal]:
    """Goals at the greatest size; open where no iteration of it was waited for."""
    first, last = costs[0], costs[-1]
    ratio = last.messages / first.messages if first.messages else 0.0
    goals = [
        (f"CPU minutes of {ITERATIONS} iterations at {last.size} relays", MINUTES, last.minutes, "{:.1f}"),
        (f"memory at {last.size} relays", GIB, last.gib, "{:.2f} GiB"),
        (f"messages per node and iteration over those at {first.size} relays", RATIO, ratio, "{:.2f}"),
    ]
    found = [harness.at_most(*each) for each in goals]
    return found if last.iterations else [goal._replace(met="open") for goal in found]


def body_of(costs: Sequence[Cost]) -> str:
    first, done = costs[0], [cost for cost in costs if cost.iterations]
    rows = [
        [
            cost.size,
            f"{cost.iterations} of {ITERATIONS}",
            cost.minutes_text,
            f"{cost.gib:.2f}",
            f"{cost.seconds:.1f}",
            f"{cost.messages:.0f}",
            f"{cost.messages / first.messages:.2f}",
            f"{cost.kilobytes:.0f}",
        ]
        for cost in done
    ]
    failed = [f"{cost.size} relays: {cost.failure}." for cost in costs if cost.failure]
    return "\n".join(
        [
            "`fleet1000`: twelve stages, a tenth of the relays crash in every iteration but the first, "
            f"everything else in proportion to the relays; one seed, one process{compiled()}. *Minutes*: of "
            "CPU, of all iterations; *iteration*: virtual seconds; *messages*, *kB*: small ones, per node "
            f"and iteration, the first two not counted; *ratio*: to {first.size} relays.",
            *failed,
            "",
            table(["relays", "iterations", "minutes", "GiB", "iteration s", "messages", "ratio", "kB"], rows),
            "",
            kinds_table(done, "relays", LISTED),
        ]
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="relays (default: 50 250 1000)")
    parser.add_argument(
        "--minutes",
        type=float,
        nargs="+",
        default=[20.0],
        help="of CPU at most, of all or each (default: 20)",
    )
    args = parser.parse_args()
    limits = args.minutes * len(args.sizes) if len(args.minutes) == 1 else args.minutes
    if len(limits) != len(args.sizes):
        parser.error("--minutes: one number, or one for each of --sizes")
    costs = [in_own_process(measure, *each) for each in zip(args.sizes, limits, strict=True)]
    body, goals = body_of(costs), goals_of(costs)
    harness.write("thousand", "A thousand relays", body, goals=goals, data=costs, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
