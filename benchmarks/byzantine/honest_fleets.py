"""Seats that honest machines lose: fleets without a liar, on slow, unsteady, hidden and lossy lines.

    nice python -m benchmarks.byzantine.honest_fleets [--iterations 12] [--seeds 0 1]

The rules against guests that withhold, delay or lie must leave honest machines alone. Each fleet is simulated
with the real protocol. What counts is a machine that is removed more often than it crashed, moves to other
stages apart, and each time that the log goes back. Writes the result `honest-fleets`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.log.records import Members, Rollback, decode_entry
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.initial_placement import placed
from anabranch.sim.experiment.run import Simulation
from benchmarks import harness

INT8: Mapping[str, Any] = {"wire.activations": "int8", "wire.gradients": "int8"}
UNSTEADY: Mapping[str, Any] = {"drift.speed": 0.3, "drift.links": 0.3}
#: Name of a fleet -> scenario, and its changes.
FLEETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "24 at home, 5 % crash": ("volunteers", {}),
    "unequal, unsteady": ("wan10-mixed", UNSTEADY),
    "unsteady, two iterations in flight, int8": ("wan10", {**UNSTEADY, **INT8, "run.delay": 1}),
    "20 Mbit/s up, unsteady, int8 and coarse sums": (
        "wan10-mixed",
        {**UNSTEADY, **INT8, "wire.reduce": "coarse", "network.up_bps": [2e7], "network.down_bps": [1e8]},
    ),
    "three of four behind carriers, unsteady": ("wan10", {**UNSTEADY, "network.hidden": 0.75}),
    "unequal, unsteady, 10 % crash": ("wan10-mixed", {**UNSTEADY, "churn.crash": 0.1}),
    "islands at home, unsteady, 5 % crash": (
        "volunteers",
        {**UNSTEADY, "model.stages": 0, "model.microbatches": 24, "round.slots": 24, "round.steps": 60},
    ),
}


class Found(NamedTuple):
    """Outcome of one seed. lost: seats lost without a crash, with the reasons. backward: times that the log
    went back."""

    iterations: int
    mean_s: float
    most_s: float
    crashes: int
    lost: list[str]
    backward: int
    failure: str


def found_in(name: str, iterations: int, seed: int) -> Found:
    base, changes = FLEETS[name]
    scenario = load_scenario(base, {**changes, "run.iterations": iterations})
    simulation = Simulation(placed(scenario, find_profile(scenario.network.profile), seed), "auction", seed)
    outcome = simulation.run()
    crashes = Counter(relay for relay, _ in simulation.crashed)
    records = [decode_entry(line).record for line in simulation.world.log]
    removed = [each for record in records if isinstance(record, Members) for each in record.removed.items()]
    reasons: dict[str, list[str]] = {}
    for peer, why in removed:
        if "moves to" not in why:
            reasons.setdefault(peer, []).append(f"{peer}: {why}")
    lost = [why for peer, found in reasons.items() for why in found[crashes[peer] :]]
    seconds = [row.seconds for row in outcome.rows] or [0.0]
    backward = sum(isinstance(record, Rollback) for record in records)
    made, failure = len(outcome.rows), outcome.failure or ""
    return Found(made, fmean(seconds), max(seconds), crashes.total(), lost, backward, failure)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    rows, outcomes = [], []
    for name in FLEETS:
        for seed in args.seeds:
            begun = time.process_time()
            found = found_in(name, args.iterations, seed)
            outcomes.append({"fleet": name, "seed": seed, **found._asdict()})
            print(name, found, f"{time.process_time() - begun:.0f} CPU s", flush=True)
            rows.append([
                name, seed, found.iterations, f"{found.mean_s:.1f}", f"{found.most_s:.1f}", found.crashes,
                len(found.lost), found.backward,
            ])  # fmt: skip
    head = ["fleet", "seed", "iterations", "mean s", "most s", "crashes", "seats lost", "log went back"]
    lost = sum(len(each["lost"]) for each in outcomes)
    whole = all(each["iterations"] == args.iterations and not each["failure"] for each in outcomes)
    goals = [
        harness.goal("seats that honest machines lost without a crash", "0", str(lost), not lost),
        harness.goal("fleets that made all iterations", "all", "all" if whole else "not all", whole),
    ]
    body = (
        "Simulated fleets without a liar, llama-350m, the real protocol. *Seats lost*: removals of members "
        "beyond their crashes, moves to other stages apart.\n\n" + harness.table(head, rows)
    )
    seeds = " ".join(map(str, args.seeds))
    reproduce = f"python -m benchmarks.byzantine.honest_fleets --iterations {args.iterations} --seeds {seeds}"
    title = "Honest fleets on poor lines"
    harness.write(
        "honest-fleets", title, body, goals=goals, data=outcomes, dry=args.dry, reproduce=reproduce
    )


if __name__ == "__main__":
    main()
