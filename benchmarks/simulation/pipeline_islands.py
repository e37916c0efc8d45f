"""A model that fits into none of 64 volunteers' machines: synchronous pipeline against pipeline islands.

    nice python -m benchmarks.simulation.pipeline_islands

The scenario is `volunteers-8b` (llama-8b), with a subspace of 512 values and 8 bits at the cuts, without
churn. Rows: the synchronous protocol, with and without standbys; four islands of sixteen machines with 10
inner steps of 131,072 tokens each in a round, with as many microbatches under way as the machines' memory
holds, and with three times as many, whose forward passes are computed again (busy counts these, too). The
quickest iteration of each after the first counts.
Throughput is not progress: docs/explanation/islands.md says what islands cost in tokens. Some ten minutes on
a free core. Writes the result `pipeline-islands`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.run import simulate
from benchmarks import harness
from benchmarks.harness import Goal, at_least, table

#: Thin cuts of all rows.
CUTS = {"model.subspace": 512, "wire.activations": "int8", "wire.gradients": "int8"}
#: Crews: four islands with ten inner steps.
ISLANDS: dict[str, Any] = {"run.iterations": 4, "round.start": 2, "round.slots": 4, "round.steps": 10}
#: Row -> changes of the scenario. Links are known to the leader after the first step, crews' speeds after the
#: first round.
ROWS: dict[str, dict[str, Any]] = {
    "synchronous": {"run.iterations": 4},
    "synchronous, standbys": {"run.iterations": 4, "fleet.spare": "links"},
    "islands, forwards kept": ISLANDS,
    "islands": {**ISLANDS, "fleet.recompute": 2.0},
}


def one(name: str, seed: int) -> dict[str, float]:
    """Figures of the quickest iteration of a row, from the cache if it was simulated before."""
    path = harness.CACHE / "pipeline-islands" / f"{name.replace(' ', '-').replace(',', '')}-{seed}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    scenario = load_scenario("volunteers-8b", {**CUTS, **ROWS[name]})
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", seed)
    if outcome.failure:
        raise SystemExit(f"{name}, seed {seed}: {outcome.failure}")
    row = max(outcome.rows[1:], key=lambda row: row.microbatches / row.seconds)
    found = {
        "iteration_s": row.seconds,
        "tokens": float(row.microbatches * scenario.work.tokens),
        "tokens_per_s": row.microbatches * scenario.work.tokens / row.seconds,
        "busy": row.busy_s / row.alive_s,
        "exchange_s": row.phases["drain_s"] + row.phases["reduce_s"],
        "payload_bytes_per_token": row.payload_bytes / (row.microbatches * scenario.work.tokens),
    }
    harness.write_whole(path, json.dumps(found).encode())
    print(f"{name}, seed {seed}: {found['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, dict[str, float]]) -> tuple[str, list[Goal]]:
    lines = [
        [
            name,
            f"{each['iteration_s']:,.0f}",
            f"{each['exchange_s']:,.0f}",
            f"{each['tokens_per_s']:,.0f}",
            f"{100 * each['busy']:.1f} %",
            f"{each['payload_bytes_per_token']:,.0f}",
        ]
        for name, each in found.items()
    ]
    head = ["", "iteration or round, s", "of it exchange, s", "tokens/s", "GPUs busy", "bytes a token"]
    islands = found["islands"]
    best = max(each["tokens_per_s"] for name, each in found.items() if not name.startswith("islands"))
    goals = [
        at_least("GPUs busy, islands", 0.4, islands["busy"], "{:.3f}"),
        at_least("× the better synchronous row, islands", 5.0, islands["tokens_per_s"] / best, "{:.2f}"),
    ]
    return table(head, lines), goals


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--rows", nargs="*", default=[], metavar="ROW", help="only simulate these")
    args = arguments.parse_args()
    found = {name: one(name, args.seed) for name in args.rows or ROWS}
    if args.rows:
        return 0
    text, goals = report(found)
    title = "A model that fits into no machine: pipeline islands against the synchronous pipeline"
    harness.write("pipeline-islands", title, text, goals=goals, data=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
