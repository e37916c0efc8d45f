"""Held-out loss of the presets at equal tokens, and their simulated time to the synchronous loss.

    nice python -m benchmarks.simulation.preset_loss --minutes 60 --fleets 30

Runs of 4,000 steps of 256 tokens, computed by one process (`sync_methods.Trainer`). Every row has four slots,
since a batch has four microbatches, and rounds of at most 50 steps, since 500 would be eight rounds. Learning
rates are tuned on the first seed, the other seeds have the best. A run is kept in build/sync-methods as soon
as it ends, and its state at each point of its curve, so that a program begun again goes on; `--kept` begins
none. `--longer` are lengths of further runs, with the best rate, of the presets of `--longer-presets`: a
preset that is quick and needs more tokens may have them. `--fleets N` finds throughputs and bytes
(`preset_fleets`), N missing ones at most. Writes the result `sync-presets` and its picture (`preset_page`),
with what there is.
"""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from anabranch.config import PipelineSection, RunConfig, with_changes
from anabranch.data.corpus import Corpus
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.presets import with_preset
from anabranch.train.recipes.recipes import recipe_run
from anabranch.train.stage.outer_step import begin_rounds
from benchmarks import harness
from benchmarks.simulation import preset_fleets, preset_page
from benchmarks.simulation.preset_fleets import FLEETS, KEPT, OURS_STEPS, SYNCHRONOUS, with_row
from benchmarks.simulation.preset_page import Trained
from benchmarks.simulation.preset_times import Curve, Found, best_curves, best_rate, next_rate, steps_to
from benchmarks.simulation.sync_methods import Trainer, corpus_of

#: Rows, those that decide a goal first. `synchronous` is preset gwtf or dedloc, whose losses are equal.
ROWS = (
    SYNCHRONOUS, *OURS_STEPS, "diloco", "streaming-diloco", "opendiloco", "ravnest", "sparse", "gaia",
)  # fmt: skip
MODELS = "llama-tiny", "gpt-tiny"
SLOTS, MOST_STEPS, POINTS = 4, 50, 20


def run_file(model: str, row: str, rate: float, seed: int, args: Namespace) -> RunConfig:
    """Run file of a row, as one process computes it."""
    changes = {"compute.device": "cpu", "compute.dtype": "fp32", "run.steps": args.steps, "run.seed": seed}
    changes |= {"batch.microbatches": SLOTS, "batch.rows": args.rows, "batch.sequence": args.sequence}
    run = with_changes(recipe_run(model), changes | {"optimizer.lr": rate})
    if row != SYNCHRONOUS:
        run = with_row(run, row, {"round.slots": SLOTS, "batch.microbatches": SLOTS})
        run = replace(run, round=replace(run.round, steps=min(run.round.steps, MOST_STEPS)))
    return replace(run, pipeline=PipelineSection(stages=0))


def kept(model: str, row: str, rate: float, seed: int, args: Namespace) -> Path:
    """File of a run's curve."""
    return KEPT / _name(model, row, f"{rate:g}", seed, args)


def _name(model: str, row: str, rate: str, seed: int, args: Namespace) -> str:
    size = f"{args.steps}x{SLOTS * args.rows}x{args.sequence}"
    return f"{model}-{row}-{size}-{rate}-{seed}.json"


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


def planned(args: Namespace, model: str) -> Iterator[tuple[str, float, int]]:
    """(row, rate, seed) of the runs known so far: rates on the first seed, those of rows with the fewest
    first, then other seeds with the best."""
    found, first = read(args, model), args.seeds[0]
    tuned = {row: next_rate(found.get(row, {}), first, args.rate) for row in args.presets}
    for row in sorted(args.presets, key=lambda row: len(found.get(row, {}))):
        if (rate := tuned[row]) is not None:
            yield row, rate, first
    for row in args.presets:
        if tuned[row] is None:
            yield from ((row, best_rate(found[row], first), seed) for seed in args.seeds[1:])


def planned_longer(args: Namespace, model: str) -> Iterator[tuple[Namespace, str, float, int]]:
    """(arguments with the length, row, rate, seed) of the longer runs known so far, with the best rate of the
    shortest ones. A seed that reached the synchronous run's final loss in a run has no longer one."""
    first, base = args.seeds[0], best_curves(read(args, model).get(SYNCHRONOUS), args.seeds[0])
    for at, steps in enumerate(args.longer):
        for row in args.longer_presets:
            tried = read(args, model).get(row, {})
            if next_rate(tried, first, args.rate) is not None:
                continue
            rate = best_rate(tried, first)
            shorter = [args, *(_longer(args, fewer) for fewer in args.longer[:at])]
            for seed in args.seeds:
                curves = [read(each, model).get(row, {}).get(rate, {}).get(seed) for each in shorter]
                if seed in base and any(each and steps_to(each, base[seed][-1][1]) for each in curves):
                    continue
                yield _longer(args, steps), row, rate, seed


def _longer(args: Namespace, steps: int) -> Namespace:
    return Namespace(**vars(args) | {"steps": steps})


def read(args: Namespace, model: str) -> Found:
    """Curves that were kept."""
    found: Found = {}
    for row in args.presets:
        for seed in args.seeds:
            for path in sorted(KEPT.glob(_name(model, row, "*", seed, args))):
                curve = [(int(steps), float(loss)) for steps, loss in json.loads(path.read_text())]
                rate = float(path.stem.rsplit("-", 2)[1])
                found.setdefault(row, {}).setdefault(rate, {})[seed] = curve
    return found


def run_missing(args: Namespace, until: float) -> None:
    """Take the runs that were not kept, one after the other, until time is up."""
    for model in args.models:
        while time.time() < until:
            runs = [(args, *run) for run in planned(args, model)] + [*planned_longer(args, model)]
            missing = next(((own, run) for own, *run in runs if not kept(model, *run, own).exists()), None)
            if missing is None:
                break
            own, key = missing
            run = run_file(model, *key, own)
            KEPT.mkdir(parents=True, exist_ok=True)
            train(run, corpus_of(run), kept(model, *key, own), args.windows, until)


def trained_of(args: Namespace, model: str) -> Trained:
    """Curves of a model for the page, as they were kept."""
    longer = {steps: read(_longer(args, steps), model) for steps in args.longer}
    tokens = SLOTS * args.rows * args.sequence
    return Trained(model, tokens, args.seeds[0], args.steps, read(args, model), longer)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments.add_argument("--presets", nargs="+", default=list(ROWS), choices=ROWS)
    arguments.add_argument("--steps", type=int, default=4000)
    arguments.add_argument("--rows", type=int, default=1, help="of each of four microbatches")
    arguments.add_argument("--sequence", type=int, default=64)
    arguments.add_argument("--rate", type=float, default=0.0025, help="learning rate that is tried first")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--longer", type=int, nargs="*", default=[], help="steps of longer runs")
    arguments.add_argument("--longer-presets", nargs="+", default=list(OURS_STEPS), choices=ROWS)
    arguments.add_argument("--windows", type=int, default=64)
    arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    arguments.add_argument("--fleets", type=int, default=0, help="throughputs to measure, at most")
    arguments.add_argument("--kept", action="store_true", help="begin no run")
    args = arguments.parse_args()
    configure(1)
    cells = [(fleet, row) for row in preset_fleets.ROWS for fleet in FLEETS]
    for fleet, row in [cell for cell in cells if preset_fleets.kept(*cell) is None][: args.fleets]:
        preset_fleets.measure(fleet, row)
    if not args.kept:
        run_missing(args, time.time() + 60 * args.minutes)
    trained = [trained_of(args, model) for model in args.models]
    preset_page.write(trained, args.seeds, args.rate, args.windows, MOST_STEPS, args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
