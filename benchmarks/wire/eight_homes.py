"""Seconds of a step of eight stages behind home lines: dense cuts, 8-bit cuts, subspace cuts, both.

    nice python -m benchmarks.wire.eight_homes [--iterations 24]

Virtual time, the shipped scenario `eight-homes`: one machine a stage and a data node, lines of 200 Mbit/s in
both directions, 50 ms from one to another, width 1,024, 524,288 tokens a step. The same with uplinks of
50 Mbit/s, which many homes have. Two iterations are not counted; the others include snapshots. Finished
simulations are kept in build/ until the program changes.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import Scenario, load_scenario
from anabranch.sim.experiment.run import simulate
from benchmarks import harness

#: Codecs of 8 bits with a bf16 scale for each 64 values.
INT8 = {"wire.activations": "int8", "wire.gradients": "int8"}
SUBSPACE = 160
#: Cuts -> changes of the scenario, and the goal in seconds a step.
CUTS: dict[str, tuple[dict[str, Any], float]] = {
    "dense, bf16": ({}, 110.0),
    "dense, 8 bits": (dict(INT8), 60.0),
    f"subspace {SUBSPACE}, bf16": ({"model.subspace": SUBSPACE}, 20.0),
    f"subspace {SUBSPACE}, 8 bits": ({"model.subspace": SUBSPACE, **INT8}, 12.0),
}
#: Uplinks (bit/s): that of the goals first.
UPLINKS = (200e6, 50e6)


def line_s(scenario: Scenario) -> float:
    """Least seconds of a step by the uplink of a relay, which sends an activation and a gradient of each
    microbatch."""
    sent = scenario.work.activation_bytes + scenario.work.gradient_bytes
    return scenario.model.microbatches * sent * 8 / scenario.network.up_bps[0]


def kept(cuts: str, scenario: Scenario) -> dict[str, float]:
    """Figures of a simulation, computed unless they are kept."""
    key = hashlib.sha256(f"{harness.program()} {scenario}".encode()).hexdigest()[:16]
    path = harness.CACHE / "eight_homes" / f"{key}.json"
    if not path.exists():
        harness.write_whole(path, json.dumps(measured(scenario)).encode())
    found: dict[str, float] = json.loads(path.read_bytes())
    print(cuts, found, flush=True)
    return found


def measured(scenario: Scenario) -> dict[str, float]:
    """Figures of the counted iterations."""
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", seed=0)
    if outcome.failure:
        raise SystemExit(outcome.failure)
    seconds = [row.seconds for row in outcome.rows[scenario.run.warm_up :]]
    work = scenario.work
    return {
        "step_s": statistics.mean(seconds),
        "longest_s": max(seconds),
        "line_s": line_s(scenario),
        "bytes_per_token": (work.activation_bytes + work.gradient_bytes) / work.tokens,
        "parameters": sum(map(work.parameters, range(work.stages + 1))),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--uplinks", type=float, nargs="+", default=list(UPLINKS), help="bit/s")
    args = parser.parse_args()
    rows, goals, data = [], [], {}
    for up_bps in args.uplinks:
        for cuts, (changes, most_s) in CUTS.items():
            run = {"run.iterations": args.iterations + 2, "run.warm_up": 2, "network.up_bps": [up_bps]}
            scenario = load_scenario("eight-homes", {**changes, **run})
            found = kept(cuts, scenario)
            data[f"{cuts}, {up_bps / 1e6:.0f} Mbit/s up"] = found
            rows.append([
                f"{up_bps / 1e6:.0f}", cuts, f"{found['bytes_per_token']:,.0f}", f"{found['step_s']:.1f}",
                f"{found['longest_s']:.1f}", f"{found['line_s']:.1f}", f"{found['parameters'] / 1e6:.0f} M",
            ])  # fmt: skip
            if up_bps == UPLINKS[0]:
                goals.append(harness.at_most(f"seconds a step, {cuts}", most_s, found["step_s"], "{:.1f}"))
    head = ["Mbit/s up", "cuts", "bytes per token and cut, both ways", "s a step", "longest step",
            "least by the line", "parameters"]  # fmt: skip
    setting = (
        "llama-350m (width 1,024, 24 blocks) over eight stages, one RTX 4090 each at 40 % of its peak, and "
        "one data node; 524,288 tokens a step in 128 microbatches; 200 Mbit/s down, 50 ms one way; no churn. "
        "Bytes of a cut: an activation and its gradient, with token ids in a subspace model (4 B) forward. "
        "8 bits: a bf16 scale for each 64 values. Steps include snapshots of each stage for two other "
        f"machines (mean of {args.iterations}). A subspace model is another model: its cost in loss is in "
        "[Loss of subspace models](subspace-loss.md)."
    )
    harness.write(
        "eight-homes",
        "Eight stages behind home lines",
        f"{setting}\n\n{harness.table(head, rows)}",
        goals=goals,
        data=data,
        dry=args.dry,
    )


if __name__ == "__main__":
    main()
