"""A model that fits into none of 64 volunteers' machines: synchronous pipeline against pipeline islands.

    nice python -m benchmarks.simulation.pipeline_islands

The scenario is `volunteers-8b` (llama-8b), with a subspace of 512 values and 8 bits at the cuts. Rows: the
synchronous protocol, with and without standbys; four islands of sixteen machines with 8 inner steps of
131,072 tokens each in a round, contributions and results of 4 bits, with as many microbatches under way as
the machines' memory holds, and with three times as many, whose forward passes are computed again (busy counts
these, too); the latter with crashes, in each round a relay with the probability of 5 % an hour. A machine is
back after a minute, without the state. Of synchronous rows the quickest iteration after the first counts, of
islands all rounds from the second on: three without crashes, and 25 with crashes. Throughput is not progress:
docs/explanation/islands.md says what islands cost in tokens. Some two minutes of a free core for each row and
seed, six with crashes (compiled). Writes the result `pipeline-islands`.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import estimate
from benchmarks import harness
from benchmarks.harness import Goal, at_least, table

#: Thin cuts of all rows.
CUTS = {"model.subspace": 512, "wire.activations": "int8", "wire.gradients": "int8"}
#: Crews: four islands with eight inner steps.
ISLANDS: dict[str, Any] = {
    "run.iterations": 6,
    "round.start": 2,
    "round.slots": 4,
    "round.steps": 8,
    "round.results": "int4",
}
AGAIN = {**ISLANDS, "fleet.recompute": 2.0}
#: Probability of a crash in a round of 175 s at 5 % an hour.
CRASH = 0.05 * 175 / 3600
#: Row -> changes of the scenario. Links are known to the leader after the first step, crews' speeds after the
#: first round.
ROWS: dict[str, dict[str, Any]] = {
    "synchronous": {"run.iterations": 4},
    "synchronous, standbys": {"run.iterations": 4, "fleet.spare": "links"},
    "islands, forwards kept": ISLANDS,
    "islands": AGAIN,
    "islands, 5 % churn": {**AGAIN, "run.iterations": 28, "churn.crash": CRASH},
}
#: Figures of a row, a list entry for each seed.
Figures = list[dict[str, float]]


def one(name: str, seed: int) -> dict[str, float]:
    """Figures of a row for a seed, from the cache if it was simulated before."""
    words = name.replace(" ", "-").replace(",", "").replace("-%", "")
    path = harness.CACHE / "pipeline-islands" / f"{words}-{seed}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    changes = ROWS[name]
    scenario = load_scenario("volunteers-8b", {**CUTS, **changes})
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", seed)
    if outcome.failure:
        raise SystemExit(f"{name}, seed {seed}: {outcome.failure}")
    rows = outcome.rows[changes.get("round.start", 0) + 1 :]
    if "round.slots" not in changes:
        rows = [min(rows, key=lambda row: row.seconds)]
    seconds, count = sum(row.seconds for row in rows), sum(row.microbatches for row in rows)
    tokens = float(count * scenario.work.tokens)
    found = {
        "iterations": float(len(rows)),
        "iteration_s": seconds / len(rows),
        "tokens_per_s": tokens / seconds,
        "busy": sum(row.busy_s for row in rows) / sum(row.alive_s for row in rows),
        "exchange_s": sum(row.phases["drain_s"] + row.phases["reduce_s"] for row in rows) / len(rows),
        "payload_bytes_per_token": sum(row.payload_bytes for row in rows) / tokens,
        "crashes_per_hour": 3600.0 * sum(row.crashes for row in rows) / seconds,
    }
    harness.write_whole(path, json.dumps(found).encode())
    print(f"{name}, seed {seed}: {found['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, Figures]) -> tuple[str, list[Goal]]:
    lines, mean = [], {}
    for name, seeds in found.items():
        each = mean[name] = {key: statistics.mean(one[key] for one in seeds) for key in seeds[0]}
        rates = ", ".join(f"{one['tokens_per_s']:,.0f}" for one in seeds)
        lines.append(
            [
                name,
                f"{each['iteration_s']:,.0f}",
                f"{each['exchange_s']:,.0f}",
                f"{each['tokens_per_s']:,.0f} ({rates})",
                f"{100 * each['busy']:.1f} %",
                f"{each['payload_bytes_per_token']:,.0f}",
                f"{each['crashes_per_hour']:.1f}",
            ]
        )
    head = [
        "",
        "iteration or round, s",
        "of it exchange, s",
        "tokens/s (each seed)",
        "GPUs busy",
        "bytes a token",
        "crashes an hour",
    ]
    calm, struck = found["islands"], found["islands, 5 % churn"]
    synchronous = [name for name in found if not name.startswith("islands")]
    pairs = zip(found["islands"], *(found[name] for name in synchronous), strict=True)
    factors = [
        one["tokens_per_s"] / max(other["tokens_per_s"] for other in others) for one, *others in pairs
    ]
    both = zip(struck, calm, strict=True)
    kept = estimate([one["tokens_per_s"] / other["tokens_per_s"] for one, other in both])
    busy, left = (estimate([one["busy"] for one in row]) for row in (calm, struck))
    goals = [
        at_least("GPUs busy, islands", 0.4, busy.mean, "{:.3f}", busy.half),
        at_least("× the better synchronous row, islands, worst seed", 5.0, min(factors), "{:.2f}"),
        at_least("throughput kept with 5 % churn an hour", 0.9, kept.mean, "{:.3f}", kept.half),
        at_least("GPUs busy, islands, 5 % churn", 0.4, left.mean, "{:.3f}", left.half),
    ]
    return table(head, lines), goals


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    arguments.add_argument("--rows", nargs="*", default=[], metavar="ROW", help="only simulate these")
    args = arguments.parse_args()
    found = {name: [one(name, seed) for seed in args.seeds] for name in args.rows or ROWS}
    if args.rows:
        return 0
    text, goals = report(found)
    title = "A model that fits into no machine: pipeline islands against the synchronous pipeline"
    harness.write("pipeline-islands", title, text, goals=goals, data=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
