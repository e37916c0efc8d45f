"""Seconds of a round of real islands behind home lines, beside those of the simulator.

    python -m benchmarks.overhead.islands_against_real

Takes the runs of llama-tiny with rounds that `benchmarks.overhead.home_lines` keeps in build/home-lines: real
processes under the emulated ten regions, each with a share of a core and a line of 20 Mbit/s. From a run it
takes the seconds of the round's longest slot, and nothing else: the simulator has machines that are as quick,
the same lines, the network's profile and the protocol, and says how long a round is. Rounds of full length
count, and medians of both. Writes the result `sim-vs-real-islands`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from anabranch.config import RunConfig, load_run_file
from anabranch.errors import UserError
from anabranch.net.wan.profile import find_profile
from anabranch.observe.event_log import read_events
from anabranch.observe.events import Step, Timing
from anabranch.sim.cluster.scenario import Scenario, fleet_of, load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.train.model.rounds import rounds_of
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.overhead.home_lines import FOLDER, LINE_BPS

GOAL, SEEDS = 0.10, 3
#: Rounds that are simulated, and those that are not counted: the first are planned before speeds are known.
ROUNDS, WARM_UP = 10, 4
#: Rounds of a run that are not counted after the first of full length, for the same reason.
SETTLING = 3
#: Fewest rounds of full length that are judged.
FEWEST = 5


@dataclass(frozen=True)
class Measured:
    """Medians over the rounds of full length of a run: seconds of a round, and of its longest slot."""

    run: RunConfig
    round_s: float
    slot_s: float
    rounds: int


def measured(directory: Path) -> Measured | None:
    """Figures of a kept run; None if it has too few rounds of full length."""
    run = load_run_file(directory / "run.toml")
    rounds, seconds, slots = rounds_of(run), dict[int, float](), dict[int, float]()
    for event in read_events(directory / "events.jsonl"):
        if isinstance(event, Step) and rounds.has(event.t) and rounds.length(event.t) == run.round.steps:
            seconds[event.t] = event.seconds
        elif isinstance(event, Timing) and event.stage == 1:
            slots[event.t] = max(slots.get(event.t, 0.0), event.forward_s)
    full = [t for t in sorted(seconds)[SETTLING:] if t in slots]
    if len(full) < FEWEST:
        return None
    return Measured(run, median(seconds[t] for t in full), median(slots[t] for t in full), len(full))


def scenario_of(run: RunConfig, speed: float) -> Scenario:
    """Scenario of a run's machines. speed: of each, as a factor."""
    part = run.round
    changes: dict[str, Any] = {
        "model.size": "llama-tiny", "model.stages": 0, "model.rows": run.batch.rows,
        "model.sequence": run.batch.sequence, "model.microbatches": run.batch.microbatches,
        "model.dtype": "fp32", "fleet.data_nodes": run.fleet.data_nodes, "fleet.relays": run.fleet.relays,
        "fleet.device": ["t4"], "fleet.achieved": 0.01, "fleet.speed": [speed],
        "fleet.neighbours": run.fleet.relays, "fleet.spare": "never", "network.up_bps": [LINE_BPS],
        "network.down_bps": [LINE_BPS], "churn.crash": 0.0, "run.iterations": ROUNDS, "run.warm_up": WARM_UP,
        "round.slots": part.slots, "round.steps": part.steps, "round.contributions": part.contributions,
        "round.results": part.results,
    }  # fmt: skip
    return load_scenario("wan10", changes)


def predicted_s(found: Measured) -> float:
    """Simulated seconds of a round, mean over seeds, of machines whose slots take as long as the measured."""
    run, wan = found.run, find_profile("wan10")
    usual = fleet_of(scenario_of(run, 1.0), wan, 0)
    machine = next(host.machine for host in usual.hosts.values() if host.stage)
    machine = replace(machine, work=replace(machine.work, stages=1, whole=True))
    count = run.batch.microbatches // run.round.slots
    scenario = scenario_of(run, machine.inner_s(run.round.steps, count) / found.slot_s)
    of_seeds = []
    for seed in range(SEEDS):
        outcome = simulate(scenario, wan, "auction", seed)
        if outcome.failure:
            raise UserError(f"seed {seed}: {outcome.failure}")
        of_seeds.append(median(row.seconds for row in outcome.rows[WARM_UP:]))
    return fmean(of_seeds)


def main() -> int:
    args = harness.parser(__doc__).parse_args()
    rows, goals, data = list[list[str]](), list[Goal](), dict[str, Any]()
    for directory in sorted(FOLDER.glob("llama-tiny-islands-*")):
        found = measured(directory) if directory.is_dir() else None
        if found is None:
            continue
        simulated_s, part = predicted_s(found), found.run.round
        ratio = simulated_s / found.round_s
        name = f"H = {part.steps}, first_moment = {part.first_moment}"
        rows.append([
            name, str(found.rounds), f"{found.slot_s:.2f}", f"{found.round_s:.2f}", f"{simulated_s:.2f}",
            f"{ratio:.3f}",
        ])  # fmt: skip
        label, held = f"predicted over measured seconds of a round, {name}", abs(ratio - 1.0) <= GOAL
        goals.append(harness.goal(label, f"1 ± {GOAL:g}", f"{ratio:.3f}", held))
        data[directory.name] = {"slot_s": found.slot_s, "round_s": found.round_s, "predicted_s": simulated_s}
    if not rows:
        raise SystemExit(f"{FOLDER}: no run with rounds; run benchmarks.overhead.home_lines first")
    columns = ["rounds", "number measured", "longest slot, s", "round, s", "predicted, s"]
    columns += ["predicted/measured"]
    text = (
        "Rounds of eight islands of llama-tiny behind lines of 20 Mbit/s in the ten regions, real processes "
        "(`home-lines`) and the simulator, which is told how long the longest slot takes. Medians of rounds "
        f"of full length; predictions are means of {SEEDS} seeds.\n\n{table(columns, rows)}"
    )
    harness.write("sim-vs-real-islands", "Rounds of islands: the simulator against real processes", text,
                  goals=goals, data=data, dry=args.dry)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
