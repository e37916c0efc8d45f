"""Twenty-four volunteers at home against the best of their machines alone: pipeline, whole models, islands.

    nice python -m benchmarks.simulation.islands --seeds 2

The scenario is `volunteers` (llama-350m). Rows: today's pipeline; every relay with the whole model, each step
synchronous; islands with 500 inner steps a round, of 32,768 tokens each on average, without churn and with 5
% of the relays crashing in an hour (3 % in a round of 34 minutes); islands with 125, 62 and 32 steps a round,
also with steps ahead, which are computed while the contributions are exchanged, and with results of 4 bits.
The best machine is the quickest relay of the same draw, if it trained alone with a step for each batch.
Throughput is not progress: docs/explanation/islands.md says what islands cost in tokens. Writes the result
`islands`.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Outcome
from benchmarks import harness
from benchmarks.harness import Goal, at_least, table

#: Settings of all rows without a pipeline.
WHOLE = {"model.stages": 0, "fleet.neighbours": 24, "fleet.spare": "never"}
ISLANDS = {
    **WHOLE,
    "model.microbatches": 384,
    "round.slots": 24,
    "round.steps": 500,
    "run.heartbeat_s": 60.0,
}
SHORT = {**ISLANDS, "churn.crash": 0.0, "run.iterations": 8, "run.warm_up": 3}
#: Row -> changes of the scenario. The first rounds are planned before all speeds and lines are known.
ROWS: dict[str, dict[str, Any]] = {
    "pipeline of 6 stages": {"churn.crash": 0.0, "run.iterations": 4},
    "whole models, synchronous": {**WHOLE, "churn.crash": 0.0, "run.iterations": 3, "run.heartbeat_s": 60.0},
    "islands": {**ISLANDS, "churn.crash": 0.0, "run.iterations": 4, "run.warm_up": 2},
    "islands, 5 % churn": {**ISLANDS, "churn.crash": 0.03, "run.iterations": 6, "run.warm_up": 2},
    "islands, 125 steps": {**SHORT, "round.steps": 125},
    "islands, 62 steps": {**SHORT, "round.steps": 62},
    "islands, 125 steps, 40 ahead": {**SHORT, "round.steps": 125, "round.overlap": 40},
    "islands, 32 steps": {**SHORT, "round.steps": 32},
    "islands, 32 steps, 31 ahead": {**SHORT, "round.steps": 32, "round.overlap": 31},
    "islands, 125 steps, 4-bit results": {**SHORT, "round.steps": 125, "round.results": "int4"},
    "islands, 62 steps, 4-bit results": {**SHORT, "round.steps": 62, "round.results": "int4"},
    "islands, 32 steps, 4-bit results": {**SHORT, "round.steps": 32, "round.results": "int4"},
}


def tokens_per_s(outcome: Outcome, changes: dict[str, Any]) -> float:
    """Tokens of the steps and rounds that count, per virtual second."""
    scenario = load_scenario("volunteers", changes)
    rows = outcome.rows[scenario.run.warm_up :]
    count = sum(row.microbatches or scenario.model.microbatches for row in rows)
    return count * scenario.work.tokens / sum(row.seconds for row in rows)


def one(name: str, seed: int) -> dict[str, float]:
    """Figures of a row for a seed, from the cache if it was simulated before."""
    path = harness.CACHE / "islands" / f"{name.replace(' ', '-').replace('%', '')}-{seed}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    scenario = load_scenario("volunteers", ROWS[name])
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", seed)
    if outcome.failure:
        raise SystemExit(f"{name}, seed {seed}: {outcome.failure}")
    rows = outcome.rows[scenario.run.warm_up :]
    rate = tokens_per_s(outcome, ROWS[name])
    found = {
        "iteration_s": statistics.mean(row.seconds for row in rows),
        "tokens_per_s": rate,
        "busy": sum(row.busy_s for row in rows) / sum(row.alive_s for row in rows),
        "over_alone": rate / outcome.alone_tokens_per_s,
        "wasted": sum(row.wasted_s for row in rows) / sum(row.computed_s for row in rows),
        "crashes": sum(row.crashes for row in rows) / len(rows),
    }
    harness.write_whole(path, json.dumps(found).encode())
    print(f"{name}, seed {seed}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def row_of(name: str, seeds: int) -> dict[str, list[float]]:
    """Figures of a row, a list entry for each seed."""
    each = [one(name, seed) for seed in range(seeds)]
    return {key: [figures[key] for figures in each] for key in each[0]}


def report(found: dict[str, dict[str, list[float]]]) -> tuple[str, list[Goal]]:
    mean = {
        name: {key: statistics.mean(values) for key, values in each.items()} for name, each in found.items()
    }
    lines = [
        [
            name,
            f"{each['iteration_s']:,.0f}",
            f"{each['tokens_per_s']:,.0f}",
            f"{100 * each['busy']:.1f} %",
            f"{each['over_alone']:.2f} ({', '.join(f'{one:.2f}' for one in found[name]['over_alone'])})",
        ]
        for name, each in mean.items()
    ]
    head = ["", "iteration or round, s", "tokens/s", "GPUs busy", "× best machine (each seed)"]
    calm, struck = mean["islands"], mean["islands, 5 % churn"]
    kept, ahead = struck["tokens_per_s"] / calm["tokens_per_s"], mean["islands, 125 steps, 40 ahead"]
    goals = [
        at_least("GPUs busy, islands", 0.85, calm["busy"], "{:.3f}"),
        at_least("× the best machine alone, islands", 10.0, calm["over_alone"], "{:.2f}"),
        at_least("throughput kept with 5 % churn an hour", 0.9, kept, "{:.3f}"),
        at_least("GPUs busy, rounds of 125 steps, 40 ahead", 0.85, ahead["busy"], "{:.3f}"),
        at_least("× the best machine alone, so", 10.0, ahead["over_alone"], "{:.2f}"),
    ]
    return table(head, lines), goals


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=2)
    args = arguments.parse_args()
    found = {name: row_of(name, args.seeds) for name in ROWS}
    text, goals = report(found)
    title = "Volunteers at home: islands against the best machine alone"
    harness.write("islands", title, text, goals=goals, data=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
