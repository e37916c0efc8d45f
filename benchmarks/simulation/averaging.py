"""Seconds of a step of whole-model peers, with the parts of a reduce shared out by links and by DeDLOC's
linear program.

    nice python -m benchmarks.simulation.averaging --seeds 3

Fleets: six machines of `volunteers` (home lines) and the sixteen of `wan10-mixed` (2 Gbit/s each), each with
the whole llama-350m, 12 and 48 microbatches a step. Lines are measured in the first four steps, which do not
count. Writes the result `averaging`.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.run import simulate
from benchmarks import harness
from benchmarks.harness import Goal, at_least, table

WHOLE = {"model.stages": 0, "fleet.neighbours": 24, "churn.crash": 0.0, "run.heartbeat_s": 60.0}
FLEETS: dict[str, dict[str, Any]] = {
    "volunteers": {**WHOLE, "fleet.relays": 6, "model.microbatches": 12, "run.iterations": 7},
    "wan10-mixed": {**WHOLE, "run.iterations": 7, "run.heartbeat_s": 10.0},
}
#: Values of fleet.spread.
ROWS = ("links", "program")
#: Steps that do not count: lines are measured in them.
WARM_UP = 4


def one(fleet: str, row: str, seed: int) -> dict[str, float]:
    """Mean seconds of a step, from the cache if they were simulated before."""
    path = harness.CACHE / "averaging" / f"{fleet}-{row}-{seed}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    changes = {**FLEETS[fleet], "fleet.spread": row, "fleet.spare": "never", "run.warm_up": WARM_UP}
    scenario = load_scenario(fleet, changes)
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", seed)
    if outcome.failure:
        raise SystemExit(f"{fleet}, {row}, seed {seed}: {outcome.failure}")
    rows = outcome.rows[WARM_UP:]
    found = {"step_s": statistics.mean(each.seconds for each in rows)}
    harness.write_whole(path, json.dumps(found).encode())
    print(f"{fleet}, {row}, seed {seed}: {found['step_s']:,.1f} s", file=sys.stderr, flush=True)
    return found


def report(found: dict[str, dict[str, list[float]]]) -> tuple[str, list[Goal]]:
    lines, goals = [], []
    for fleet, rows in found.items():
        for row, seconds in rows.items():
            each = ", ".join(f"{one:,.1f}" for one in seconds)
            of_links = statistics.mean(a / b for a, b in zip(seconds, rows["links"], strict=True))
            lines.append([fleet, row, f"{statistics.mean(seconds):,.1f} ({each})", f"{of_links:.2f}"])
        gains = [a / b for a, b in zip(rows["links"], rows["program"], strict=True)]
        goals.append(at_least(f"steps by links over by the program, {fleet}", 1.0, min(gains), "{:.3f}"))
    return table(["fleet", "shares", "step, s (each seed)", "of links'"], lines), goals


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    args = arguments.parse_args()
    found = {
        fleet: {row: [one(fleet, row, seed)["step_s"] for seed in range(args.seeds)] for row in ROWS}
        for fleet in FLEETS
    }
    text, goals = report(found)
    title = "Shares of a reduce: by links and by DeDLOC's linear program"
    harness.write("averaging", title, text, goals=goals, data=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
