"""Throughput kept under churn, wasted compute and microbatches counted twice, beside SWARM and a restart.

    nice python -m benchmarks.simulation.churn --seeds 3

The settings are those of policies.py, which keeps what was computed in build/tables/: after `make tables`
this only reads. All policies see the same draws of crashes. Writes the result `churn`.
"""

from __future__ import annotations

import sys
from itertools import product

from anabranch.executors import executor
from anabranch.sim.metrics.iteration_metrics import Estimate, estimate
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.simulation.policies import (
    CHURN,
    FLEETS,
    MODELS,
    OURS,
    ROWS,
    Cell,
    main_cell,
    outcome_of,
    run_all,
    summary_of,
    text,
)

#: Throughput kept, in the simulator.
GOAL = 0.9


def settings(iterations: int) -> dict[tuple[str, str, str, float], Cell]:
    """(model, machines, policy, churn) -> its cell."""
    keys = product(MODELS, FLEETS, ROWS, CHURN)
    return {(m, f, p, c): main_cell(m, f, c, p, iterations) for m, f, p, c in keys}


def kept(calm: Cell, struck: Cell, seeds: int) -> Estimate:
    """Throughput over that without churn: of each seed, then the mean."""

    def seconds(each: Cell, seed: int) -> float | None:
        outcome = outcome_of(each, seed)
        rows = outcome.rows[each.load().run.warm_up :]
        return None if outcome.failure or not rows else sum(row.seconds for row in rows) / len(rows)

    pairs = [(seconds(calm, seed), seconds(struck, seed)) for seed in range(seeds)]
    return estimate([before / after for before, after in pairs if before and after])


def report(seeds: int, iterations: int) -> tuple[str, list[Goal]]:
    cells = settings(iterations)
    lines = [
        f"{seeds} seeds, mean ± half of the 95 % interval. *kept*: throughput over that of the same policy "
        "without churn. *over bound*: over the clairvoyant bound of the relays that survived. *wasted*: of "
        "all compute seconds those whose result entered no step; *beyond*: of these, what did not die with "
        "its process. *recoveries*: microbatches whose way was mended, and *twice*: contributions that are "
        "in a gradient more than once, per iteration. `auction` and `gwtf` route for the real protocol, with "
        "its recovery; the others are models of other systems, to which decisions cost nothing "
        "(docs/explanation/simulator.md): `restart` goes back to what was there when the iteration began.",
        "",
    ]
    for model, machines in product(MODELS, FLEETS):
        rows = []
        for crash, policy in product(CHURN, ROWS):
            each = summary_of(cells[model, machines, policy, crash], seeds)
            figures = each.figures
            share = kept(cells[model, machines, policy, 0.0], cells[model, machines, policy, crash], seeds)
            rows.append(
                [
                    f"{100 * crash:.0f} %",
                    policy,
                    text(figures["iteration_s"], "{:.1f}"),
                    text(share, "{:.0f} %", 100.0) if crash else "–",
                    text(figures["over_bound"]),
                    text(figures["wasted_share"], "{:.1f} %", 100.0),
                    text(figures["beyond_share"], "{:.1f} %", 100.0),
                    f"{figures['crashes'].mean:.2f}",
                    f"{figures['recoveries'].mean:.1f}",
                    f"{figures['twice'].mean:.1f}",
                ]
            )
        head = ["churn", "policy", "iteration s", "kept", "over bound", "wasted", "beyond", "crashes"]
        lines += [f"**{model} ({MODELS[model]}), {machines} machines (`{FLEETS[machines]}`)**", ""]
        lines += [table([*head, "recoveries", "twice"], rows), ""]
    goals = []
    for crash in CHURN[1:]:
        found = {
            f"{model}, {machines}": kept(
                cells[model, machines, OURS, 0.0], cells[model, machines, OURS, crash], seeds
            ).mean
            for model, machines in product(MODELS, FLEETS)
        }
        words = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.items())
        lines.append(f"- `{OURS}` at {100 * crash:.0f} % churn keeps: {words}.")
        what = f"throughput of `{OURS}` kept at {100 * crash:.0f} % churn"
        goals.append(harness.at_least(what, GOAL, min(found.values()), "{:.0%}"))
    return "\n".join(lines), goals


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="at most so many")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further seed after so long")
    harness.add_executor(parser)
    args = parser.parse_args()
    where = executor(args.executor, args.processes)
    seeds = run_all(settings(args.iterations).values(), args.seeds, where, args.minutes)
    if not seeds:
        print("no seed is complete: run it again, it goes on where it was", file=sys.stderr)
        return 1
    body, goals = report(seeds, args.iterations)
    harness.write("churn", "Throughput kept under churn", body, goals=goals, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(harness.main_by_name())
