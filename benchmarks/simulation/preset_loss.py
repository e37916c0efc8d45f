"""Held-out loss of the presets at equal tokens, and their simulated time to the synchronous loss.

    nice python -m benchmarks.simulation.preset_loss --minutes 60

Runs of 4,000 steps of 256 tokens, computed by one process (`sync_methods.Trainer`). Every row has four slots,
since a batch has four microbatches, and rounds of at most 50 steps, since 500 would be eight rounds. Learning
rates are tuned on the first seed, the other seeds have the best. A run is kept in build/sync-methods as soon
as it ends, and its state at each point of its curve, so that a program begun again goes on; `--kept` begins
none. Time is by throughputs of the simulator (llama-350m, calm), which `--fleets N` measures, N missing ones
at most. Writes the result `sync-presets`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from anabranch.config import PipelineSection, RunConfig, with_changes
from anabranch.data.corpus import Corpus
from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import load_scenario
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import estimate
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.presets import with_preset
from anabranch.train.recipes.recipes import recipe_run
from anabranch.train.stage.outer_step import begin_rounds
from benchmarks import harness
from benchmarks.harness import Goal, goal, table
from benchmarks.simulation.sync_methods import Trainer, corpus_of

KEPT = harness.CACHE / "sync-methods"
SYNCHRONOUS, OURS = "synchronous", "anabranch"
#: Rows, those that decide a goal first. `synchronous` is preset gwtf or dedloc, whose losses are equal.
ROWS = (
    SYNCHRONOUS, OURS, "diloco", "streaming-diloco", "opendiloco", "ravnest", "sparse", "gaia",
)  # fmt: skip
MODELS = "llama-tiny", "gpt-tiny"
SLOTS, MOST_STEPS, POINTS = 4, 50, 20

Curve = list[tuple[int, float]]
"""(optimizer steps, held-out nats per token)."""
Found = dict[str, dict[float, dict[int, Curve]]]
"""Row -> learning rate -> seed -> curve."""


def run_file(model: str, row: str, rate: float, seed: int, args: Namespace) -> RunConfig:
    """Run file of a row, as one process computes it."""
    changes = {"compute.device": "cpu", "compute.dtype": "fp32", "run.steps": args.steps, "run.seed": seed}
    changes |= {"batch.microbatches": SLOTS, "batch.rows": args.rows, "batch.sequence": args.sequence}
    run = with_changes(recipe_run(model), changes | {"optimizer.lr": rate})
    if row != SYNCHRONOUS:
        run = with_preset(run, row, {"round.slots": SLOTS, "batch.microbatches": SLOTS})
        run = replace(run, round=replace(run.round, steps=min(run.round.steps, MOST_STEPS)))
    return replace(run, pipeline=PipelineSection(stages=0))


def kept(model: str, row: str, rate: float, seed: int, args: Namespace) -> Path:
    """File of a run's curve."""
    size = f"{args.steps}x{SLOTS * args.rows}x{args.sequence}"
    return KEPT / f"{model}-{row}-{size}-{rate:g}-{seed}.json"


def train(run: RunConfig, corpus: Corpus, path: Path, windows: int, until: float) -> Curve | None:
    """Curve of a run, which goes on from its last point that was kept; None if it did not end in time."""
    trainer, curve, first = Trainer(run, corpus), Curve(), 1
    rounds, saved, begun = trainer.rounds, path.with_suffix(".pt"), beginning(path, trainer.rounds.start)
    # Objects of this program, by this program, in its own build folder.
    if saved.exists():
        first, curve, trainer.state, trainer.carried, trainer.taken = torch.load(saved, weights_only=False)
    elif begun.exists():
        first, (curve, trainer.state) = rounds.start + 1, torch.load(begun, weights_only=False)
        begin_rounds(run, trainer.state)
    last, every = rounds.iterations(run.run.steps), max(1, run.run.steps // POINTS)
    shared = int(with_preset(run, "diloco").round.start * run.run.steps)
    for t in range(first, last + 1):
        if rounds.inner == 0 and t == shared + 1:
            torch.save((curve, trainer.state), beginning(path, shared))
        trainer.iterate(t)
        if rounds.passes(t, every) or t == last:
            curve.append((rounds.progress(t), trainer.held_out(windows)))
            torch.save((t + 1, curve, trainer.state, trainer.carried, trainer.taken), saved)
            print(f"{path.stem}: {curve[-1]}", file=sys.stderr, flush=True)
            if time.time() > until and t < last:
                return None
    harness.write_whole(path, json.dumps(curve).encode())
    saved.unlink()
    return curve


def beginning(path: Path, start: int) -> Path:
    """File of the synchronous beginning that the presets with as many such steps share: same model, rate and
    seed."""
    first, rate, seed = path.stem.rsplit("-", 2)
    model, size = "-".join(first.split("-")[:2]), first.rsplit("-", 1)[1]
    return path.with_name(f"begun-{model}-{size}-{rate}-{seed}-{start}.pt")


def best_rate(tried: Mapping[float, Mapping[int, Curve]], seed: int) -> float:
    """Learning rate with the least loss at the end, on the seed with which rates are tuned."""
    return min((rate for rate in tried if seed in tried[rate]), key=lambda rate: tried[rate][seed][-1][1])


def steps_to(curve: Curve, loss: float) -> float | None:
    """Steps after which a curve has a loss, linear between its points; None if it never has."""
    if curve[0][1] <= loss:
        return float(curve[0][0])
    for (few, high), (many, low) in pairwise(curve):
        if low <= loss < high:
            return few + (many - few) * (high - loss) / (high - low)
    return None


def loss_goal(name: str, ratios: Sequence[float]) -> Goal:
    """Goal of the loss over that of synchronous steps; open where its interval crosses the limit, and with
    one seed, which has none."""
    if len(ratios) < 2:
        return goal(name, "at most 1.02", f"{ratios[0]:.3f}" if ratios else "not run", None)
    found = estimate(ratios)
    held = True if found.mean + found.half <= 1.02 else False if found.mean - found.half > 1.02 else None
    return goal(name, "at most 1.02", f"{found.mean:.3f} ± {found.half:.3f}", held)


_LINES_100 = {"network.up_bps": [100e6], "network.down_bps": [100e6]}
_EQUAL = {"fleet.device": ["rtx3090"], "fleet.speed": [1.0]} | _LINES_100
#: Fleet -> scenario, changes of it. None of them has churn.
FLEETS: dict[str, tuple[str, dict[str, Any]]] = {
    "volunteers": ("volunteers", {}),
    "100 Mbit/s": ("volunteers", _EQUAL),
    "wan10": ("wan10", {}),
}


def fleet_changes(fleet: str, row: str) -> tuple[str, dict[str, Any]]:
    """Scenario of a row on a fleet, and its changes: every relay has a slot, by the rounds of the preset."""
    name, changes = FLEETS[fleet]
    relays = load_scenario(name, changes).fleet.relays
    changes = changes | {"churn.crash": 0.0, "run.heartbeat_s": 60.0, "run.iterations": 3, "run.warm_up": 1}
    if row == SYNCHRONOUS:
        return name, changes | {"fleet.neighbours": relays}
    part = with_preset(recipe_run("llama-tiny"), row).round
    whole = {"model.stages": 0, "fleet.neighbours": relays, "fleet.spare": "never"}
    rounds = {"round.slots": relays, "round.steps": min(part.steps, MOST_STEPS)}
    codecs = {"round.contributions": part.contributions, "round.results": part.results}
    return name, changes | whole | rounds | codecs | {"model.microbatches": 16 * relays}


def throughput(fleet: str, row: str) -> dict[str, float] | None:
    """Tokens per virtual second of a row on a fleet, as kept; None if not."""
    path = KEPT / f"fleet-{fleet.split()[0]}-{row}.json"
    return json.loads(path.read_text()) if path.exists() else None


def measure(fleet: str, row: str) -> None:
    """Simulate a row on a fleet, and keep its figures."""
    name, changes = fleet_changes(fleet, row)
    scenario = load_scenario(name, changes)
    outcome = simulate(scenario, find_profile(scenario.network.profile), "auction", 0)
    if outcome.failure:
        print(f"{fleet}, {row}: {outcome.failure}", file=sys.stderr, flush=True)
        return
    rows = outcome.rows[scenario.run.warm_up :]
    tokens = scenario.work.tokens * sum(each.microbatches or scenario.model.microbatches for each in rows)
    found = {"tokens_per_s": tokens / sum(each.seconds for each in rows)}
    harness.write_whole(KEPT / f"fleet-{fleet.split()[0]}-{row}.json", json.dumps(found).encode())
    print(f"{fleet}, {row}: {found}", file=sys.stderr, flush=True)


def planned(args: Namespace, model: str) -> Iterator[tuple[str, float, int]]:
    """(row, rate, seed) of the runs known so far: rates on the first seed, then seeds by the best."""
    found = read(args, model)
    for rate in args.rates:
        yield from ((row, rate, args.seeds[0]) for row in args.presets)
    for row in args.presets:
        if len(found.get(row, {})) == len(args.rates):
            yield from ((row, best_rate(found[row], args.seeds[0]), seed) for seed in args.seeds[1:])


def read(args: Namespace, model: str) -> Found:
    """Curves that were kept."""
    found: Found = {}
    for row in args.presets:
        for rate in args.rates:
            for seed in args.seeds:
                path = kept(model, row, rate, seed, args)
                if path.exists():
                    curve = [(int(steps), float(loss)) for steps, loss in json.loads(path.read_text())]
                    found.setdefault(row, {}).setdefault(rate, {})[seed] = curve
    return found


def run_missing(args: Namespace, until: float) -> None:
    """Take the runs that were not kept, one after the other, until time is up."""
    for model in args.models:
        while time.time() < until:
            runs = planned(args, model)
            missing = next((run for run in runs if not kept(model, *run, args).exists()), None)
            if missing is None:
                break
            run = run_file(model, *missing, args)
            KEPT.mkdir(parents=True, exist_ok=True)
            train(run, corpus_of(run), kept(model, *missing, args), args.windows, until)


def row_cells(row: str, found: Found, first: int) -> list[str]:
    """Cells of a row: rates and seeds that were run, loss at the end, over synchronous, and times."""
    if first not in {seed for tried in found.get(row, {}).values() for seed in tried}:
        return [row, "not run", "", "", "", *["not run"] * len(FLEETS)]
    rate = best_rate(found[row], first)
    curves, ratios = found[row][rate], ratios_of(row, found, first)
    over = f"{100 * (statistics.mean(ratios) - 1):+.1f} %" if ratios else "–"
    loss = statistics.mean(curve[-1][1] for curve in curves.values())
    cells = [row, f"{rate:g} of {len(found[row])}", str(len(curves)), f"{loss:.3f}", over]
    return cells + [time_cell(fleet, row, found, first) for fleet in FLEETS]


def ratios_of(row: str, found: Found, first: int) -> list[float]:
    """Loss at the end over that of synchronous steps with the same seed, each with its best rate."""
    if not found.get(row) or not found.get(SYNCHRONOUS):
        return []
    base = found[SYNCHRONOUS][best_rate(found[SYNCHRONOUS], first)]
    curves = found[row][best_rate(found[row], first)]
    return [curve[-1][1] / base[seed][-1][1] for seed, curve in curves.items() if seed in base]


def time_cell(fleet: str, row: str, found: Found, first: int) -> str:
    """Time to the synchronous run's final loss on a fleet over that of the synchronous run, first seed."""
    mine, its = throughput(fleet, row), throughput(fleet, SYNCHRONOUS)
    if not mine or not its or not found.get(SYNCHRONOUS):
        return "not run"
    base = found[SYNCHRONOUS][best_rate(found[SYNCHRONOUS], first)][first]
    steps = steps_to(found[row][best_rate(found[row], first)][first], base[-1][1])
    if steps is None:
        return "not reached"
    return f"{steps / mine['tokens_per_s'] / (base[-1][0] / its['tokens_per_s']):.3f}"


def speed_cell(found: Mapping[str, float] | None) -> str:
    return f"{found['tokens_per_s']:,.0f}" if found else "not run"


def write(args: Namespace) -> None:
    """Write the result with what was kept."""
    text, goals, data = list[str](), list[Goal](), dict[str, Any]()
    columns = ["preset", "best rate", "seeds", "held-out loss", "against synchronous",
               *(f"time, {fleet}" for fleet in FLEETS)]  # fmt: skip
    for model in args.models:
        data[model] = found = read(args, model)
        rows = [row_cells(row, found, args.seeds[0]) for row in args.presets]
        text.append(f"**{model}**\n\n{table(columns, rows)}")
        goals.append(loss_goal(f"loss over synchronous, {model}", ratios_of(OURS, found, args.seeds[0])))
    for fleet in FLEETS:
        name = f"time to the synchronous loss, anabranch first, {fleet}"
        goals.append(goal(name, "no preset beats it", "not run", None))
    speeds = {fleet: {row: throughput(fleet, row) for row in args.presets} for fleet in FLEETS}
    lines = [[row, *(speed_cell(speeds[fleet][row]) for fleet in FLEETS)] for row in args.presets]
    text.append(table(["tokens/s, simulated", *FLEETS], lines))
    head = (
        f"{args.steps} steps of {SLOTS * args.rows * args.sequence} tokens, fp32, {SLOTS} slots, rounds of "
        f"at most {MOST_STEPS} steps; the last round may end up to {MOST_STEPS} steps later. "
        f"{args.windows} held-out windows. *Best rate*: of so many that were run on the first seed. *Time*: "
        "to the synchronous run's final loss, over the time of that run, first seed; synchronous is the "
        "pipeline of the fleet. Rounds of the fleets are dense and take no steps ahead, and `ravnest` has "
        "whole models there: rough for it, `sparse`, `gaia` and `streaming-diloco`. Bytes are not counted, "
        "nor the time of the synchronous beginning of a run. What says *not run* was not run."
    )
    title = "Presets at equal tokens, and their time to the synchronous loss"
    data["tokens_per_s"] = speeds
    harness.write("sync-presets", title, "\n\n".join([head, *text]), goals=goals, data=data, dry=args.dry)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments.add_argument("--presets", nargs="+", default=list(ROWS), choices=ROWS)
    arguments.add_argument("--steps", type=int, default=4000)
    arguments.add_argument("--rows", type=int, default=1, help="of each of four microbatches")
    arguments.add_argument("--sequence", type=int, default=64)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.0025, 0.005, 0.00125])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--windows", type=int, default=64)
    arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    arguments.add_argument("--fleets", type=int, default=0, help="throughputs to measure, at most")
    arguments.add_argument("--kept", action="store_true", help="begin no run")
    args = arguments.parse_args()
    configure(1)
    pairs = [(fleet, row) for row in args.presets for fleet in FLEETS if throughput(fleet, row) is None]
    for fleet, row in pairs[: args.fleets]:
        measure(fleet, row)
    if not args.kept:
        run_missing(args, time.time() + 60 * args.minutes)
    write(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
