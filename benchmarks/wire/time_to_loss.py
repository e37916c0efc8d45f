"""Simulated time to the loss of the synchronous fp32 run, by codec, unit of the sums, delay and line.

    nice python -m benchmarks.wire.time_to_loss [--seeds 3] [--kept]

Steps: from the curves of held-out loss in the results `wire-loss-1024`, `delayed-loss-1024`, `wire-loss`,
`delayed-loss` and `subspace-loss`, which are those of llama-tiny. Seconds of a step: from the simulator,
llama-350m on `wan10` as it is shipped, and with access lines of 200 and of 50 Mbit/s. Their product is a time
to a loss only as far as a codec costs both models the same share of their tokens. Simulated cells are kept in
build/tables until the program changes; `--kept` simulates nothing and takes the seconds of the result
`wire-time` as it stands. Writes that result and its picture.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any, NamedTuple

import matplotlib
import msgspec
from matplotlib.figure import Figure

from anabranch.config import WireSection
from anabranch.executors import Executor, executor
from anabranch.net.wan.profile import find_profile
from anabranch.observe.plots.policy_plots import POLICY_COLOURS
from anabranch.observe.plots.style import INK, STYLE, save
from anabranch.sim.cluster.scenario import fleet_of
from anabranch.sim.experiment.modelled_world import settings_of
from anabranch.sim.metrics.iteration_metrics import Estimate, estimate
from benchmarks import harness
from benchmarks.simulation.policies import HEARTBEAT_S, OURS, Cell, cell, computed, outcome_of, path_of, text
from benchmarks.wire import delayed_loss
from benchmarks.wire.loss import VARIANTS, Outcome, at_best_rate

#: Name of a line -> bandwidth up and down (bits per second); wan10's own first.
LINES = {"wan10, 2 Gbit/s": 2e9, "200 Mbit/s": 200e6, "50 Mbit/s": 50e6}
NONE = "none"
#: Iterations that are not counted: in the first speeds are unknown. A delay begins with the third and then
#: settles.
WARM_UP, DELAYED_WARM_UP = 2, 4
#: Iterations between snapshots of the stages, without a codec; as many are counted, or twice as many with a
#: delay, as two iterations in flight end in pairs.
PERIOD = 5
BOTH, DELAYED, NARROW = "int8, coarse sums", "delay 1", "subspace of an eighth"
PICTURE = harness.ROOT / "docs" / "images" / "wire-time.svg"

Curve = list[tuple[int, float]]


def changes_of(wire: WireSection) -> dict[str, Any]:
    """Changes of a scenario; it has no rounding mode, which changes no size."""
    return {f"wire.{key}": getattr(wire, key) for key in ("activations", "gradients", "reduce")}


#: Wire -> changes of the scenario.
WIRES: dict[str, dict[str, Any]] = {
    **{name: changes_of(wire) for name, wire in VARIANTS.items()},
    DELAYED: {"run.delay": 1},
    f"{BOTH}, {DELAYED}": {**changes_of(VARIANTS[BOTH]), "run.delay": 1},
    NARROW: {"model.subspace": 128},
}
#: Order of the simulation: what has curves of some length comes first, for a run that is cut off.
ORDER = sorted(WIRES, key=lambda wire: wire not in (NONE, "int8", BOTH, DELAYED))


class Trial(NamedTuple):
    """Curves of held-out loss at equal tokens. curves: wire -> seed -> (step, nats a token)."""

    result: str
    steps: int
    step_tokens: int
    curves: dict[str, dict[int, Curve]]


# --- seconds ------------------------------------------------------------------------------------------


def counted(wire: str) -> range:
    """Rows of the counted iterations."""
    delay = WIRES[wire].get("run.delay", 0)
    begin = DELAYED_WARM_UP if delay else WARM_UP
    return range(begin, begin + PERIOD * (1 + delay))


def cell_of(wire: str, bps: float) -> Cell:
    """Cell with a snapshot in each `PERIOD`. Beside the last of delayed iterations no other one is in flight,
    so there is one more."""
    rows = counted(wire)
    changes = {
        "network.up_bps": [bps],
        "network.down_bps": [bps],
        "run.warm_up": rows.start,
        "run.iterations": rows.stop + WIRES[wire].get("run.delay", 0),
        "run.snapshot_every": PERIOD,
        "run.heartbeat_s": HEARTBEAT_S,
    }
    return cell("wan10", OURS, {**WIRES[wire], **changes})


def snapshot_period(wire: str) -> int:
    """Iterations between snapshots of the stages, as a run of this wire chooses it."""
    scenario = cell("wan10", OURS, WIRES[wire]).load()
    return settings_of(fleet_of(scenario, find_profile("wan10"), 0), OURS).snapshot_every


def mean_s(rows: Sequence[float], period: int, together: int = 1) -> float:
    """Mean seconds of an iteration, if every `period`-th sends snapshots, and of `rows` every `PERIOD`-th.
    together: iterations that end together. What snapshots take is what the mean is above the median."""
    ordinary = median(fmean(rows[at : at + together]) for at in range(0, len(rows), together))
    return ordinary + (fmean(rows) - ordinary) * PERIOD / period


def simulate_missing(seeds: int, where: Executor) -> None:
    """Simulate what is not kept, seed by seed. Wires that differ in rounding alone are
    one cell."""
    cells = [cell_of(wire, bps) for wire, bps in product(ORDER, LINES.values())]
    for seed in range(seeds):
        missing = {path: (each, seed) for each in cells if not (path := path_of(each, seed)).exists()}
        for trial, content in harness.completed(computed, [*missing.values()], where, f"seed {seed}"):
            harness.write_whole(path_of(*trial), content)


def seconds_of(wire: str, bps: float, seeds: int) -> dict[int, float]:
    """Seconds of an iteration, of each kept seed that ended."""
    each, period, found = cell_of(wire, bps), snapshot_period(wire), {}
    for seed in range(seeds):
        if not path_of(each, seed).exists():
            continue
        outcome = outcome_of(each, seed)
        if outcome.failure:
            print(f"{wire}, {bps:g} bit/s, seed {seed}: {outcome.failure}", file=sys.stderr, flush=True)
            continue
        rows = [outcome.rows[at].seconds for at in counted(wire)]
        found[seed] = mean_s(rows, period, 1 + each.load().run.delay)
    return found


# --- steps --------------------------------------------------------------------------------------------


def data_of(result: str) -> Any:
    return json.loads((harness.RESULTS / f"{result}.json").read_bytes())["data"]


def trials() -> list[Trial]:
    """Trials whose curves there are; each side at the learning rate that is best for it at its first seed."""
    found = []
    for result in ("wire-loss-1024", "wire-loss"):
        outcomes = [msgspec.convert(row, Outcome) for row in data_of(result)]
        first, job = min(outcome.job.seed for outcome in outcomes), outcomes[0].job
        curves = {
            wire: {seed: outcome.curve for seed, outcome in sorted(runs.items())}
            for wire in VARIANTS
            if (runs := at_best_rate(outcomes, wire, first))
        }
        found.append(Trial(result, job.steps, 512 * job.microbatches, curves))
    found[0].curves[DELAYED] = delayed_curves("delayed-loss-1024")
    sides = {"synchronous": NONE, "delayed": DELAYED, "dense": NONE, "eighth": NARROW}
    for result in ("delayed-loss", "subspace-loss"):
        rows, curves = data_of(result), {}
        for row in rows:
            wire = sides.get(row["job"].get("variant") or row["job"]["side"])
            points = row.get("curve") or [(int(step), loss) for step, loss in row["losses"].items()]
            if wire:
                curves.setdefault(wire, {})[row["job"]["seed"]] = [(step, loss) for step, loss in points]
        found.append(Trial(result, rows[0]["job"]["steps"], 4096, curves))
    return found


def delayed_curves(result: str) -> dict[int, Curve]:
    """Curves of the delayed runs of a result, by seed, at the rate that is best at the first seed."""
    runs = [msgspec.convert(row, delayed_loss.Outcome) for row in data_of(result)]
    first = min(run.job.seed for run in runs)
    rate = delayed_loss.best_rate(runs, "delayed", first)
    return {run.job.seed: run.curve for run in runs if (run.job.variant, run.job.rate) == ("delayed", rate)}


def reached(curve: Curve, loss: float) -> float | None:
    """Step at which the curve first has a loss, between its points in proportion; None if it never has."""
    if curve[0][1] <= loss:
        return float(curve[0][0])
    for (before, above), (after, below) in pairwise(curve):
        if below <= loss:
            return before + (after - before) * (above - loss) / (above - below)
    return None


def doubling_nats(found: Sequence[Trial]) -> float:
    """Nats that twice the tokens bring without a codec: runs of 600 and of 1,200 steps, each with its whole
    schedule of the learning rate, at the seed that both have."""
    (short,) = (trial for trial in found if trial.result == "wire-loss")
    (long,) = (trial for trial in found if trial.result == "delayed-loss")
    seed = min(short.curves[NONE].keys() & long.curves[NONE].keys())
    losses = [trial.curves[NONE][seed][-1][1] for trial in (short, long)]
    return (losses[0] - losses[1]) / math.log2(long.steps / short.steps)


def shared(trial: Trial, wire: str) -> list[int]:
    """Seeds with which the wire was trained, and none, too."""
    return sorted(trial.curves[wire].keys() & trial.curves[NONE].keys())


def differences(trial: Trial, wire: str) -> list[float]:
    """Nats at the end above none's of the same seed."""
    return [trial.curves[wire][seed][-1][1] - trial.curves[NONE][seed][-1][1] for seed in shared(trial, wire)]


def steps_needed(trial: Trial, wire: str) -> list[float | None]:
    """Steps to the loss with which none ends at the same seed."""
    return [
        reached(trial.curves[wire][seed], trial.curves[NONE][seed][-1][1]) for seed in shared(trial, wire)
    ]


def tokens_factor(trial: Trial, wire: str, doubling: float) -> Estimate | None:
    """Tokens for none's loss over none's, if a doubling brings `doubling` nats. None for trials of less than
    600 steps, where a doubling brings more and the difference is of another kind."""
    if trial.steps < 600:
        return None
    return estimate([2 ** (nats / doubling) for nats in differences(trial, wire)])


# --- report -------------------------------------------------------------------------------------------

Seconds = Mapping[str, Mapping[str, Mapping[int, float]]]


def gain(seconds: Seconds, wire: str, line: str) -> float:
    """Seconds of an iteration without a codec over those of a wire, mean over the seeds that both have."""
    none, own = seconds[NONE][line], seconds[wire][line]
    return fmean(none[seed] / own[seed] for seed in none.keys() & own.keys())


def seconds_table(seconds: Seconds) -> str:
    rows = []
    for wire in WIRES:
        if not any(seconds[wire].values()):
            continue
        work = cell_of(wire, LINES["200 Mbit/s"]).load().work
        cut = (work.activation_bytes + work.gradient_bytes) / work.tokens
        row = [wire, f"{cut:,.0f}", f"{work.reduce_bytes:.1f}"]
        kept = [list(seconds[wire][line].values()) for line in LINES]
        row += [text(estimate(each), "{:.1f}") if each else "–" for each in kept]
        row += [f"{gain(seconds, wire, line):.2f}" if seconds[wire][line] else "–" for line in LINES]
        rows.append([*row, " · ".join(str(len(each)) for each in kept)])
    head = ["wire", "bytes a token and cut", "bytes a parameter", *(f"s, {line}" for line in LINES)]
    head += [f"pays below × tokens, {line}" for line in LINES]
    return harness.table([*head, "seeds, by line"], rows)


def loss_table(found: Sequence[Trial], doubling: float) -> str:
    rows = []
    for trial in found:
        for wire in trial.curves:
            if wire == NONE:
                continue
            needed = [
                f"{steps:,.0f}" if steps else f"not in {trial.steps:,}" for steps in steps_needed(trial, wire)
            ]
            factor = tokens_factor(trial, wire, doubling)
            rows.append([
                f"{trial.steps:,} of {trial.step_tokens:,}", wire, " · ".join(map(str, shared(trial, wire))),
                " · ".join(f"{nats:+.4f}" for nats in differences(trial, wire)), " · ".join(needed),
                text(factor) if factor else "unknown",
            ])  # fmt: skip
    head = ["steps, tokens", "wire", "seeds", "nats at the end above none's", "steps to none's loss"]
    return harness.table([*head, "× tokens by the doubling"], rows)


def saved_text(factor: Estimate, gained: float) -> str:
    """Share of the time that is saved with so many times the tokens, each so much quicker; with its range
    where the factor has one."""
    low, mean, high = (1 - tokens / gained for tokens in (
        factor.mean + factor.half, factor.mean, factor.mean - factor.half
    ))  # fmt: skip
    return f"{mean:+.0%} ({low:+.0%} to {high:+.0%})" if factor.half else f"{mean:+.0%}"


def time_table(found: Sequence[Trial], seconds: Seconds, doubling: float) -> str:
    rows = []
    for trial, line in product(found, LINES):
        there = [wire for wire in trial.curves if seconds[wire][line]]
        if there == [NONE]:
            continue
        for wire in there:
            each_s = fmean(seconds[wire][line].values())
            hours = [
                f"{steps * each_s / 3600:,.1f}" if steps else f"> {trial.steps * each_s / 3600:,.1f}"
                for steps in steps_needed(trial, wire)
            ]
            factor = tokens_factor(trial, wire, doubling)
            saved = saved_text(factor, gain(seconds, wire, line)) if factor else "unknown"
            rows.append([
                f"{trial.steps:,} of {trial.step_tokens:,}", line, wire, " · ".join(hours),
                f"{trial.steps * each_s / 3600:,.1f}", "–" if wire == NONE else saved,
            ])  # fmt: skip
    head = ["steps, tokens", "line", "wire", "hours to none's loss, by seed", "hours for equal tokens"]
    return harness.table([*head, "time saved, by the doubling"], rows)


def draw(found: Sequence[Trial], seconds: Seconds) -> None:
    """Draw the mean curves over hours, a row for each trial with curves of some length and seconds of its
    wires, a column for each line; the loss with which none ends is a dotted line."""
    drawn = [
        trial
        for trial in found
        if trial.result in ("wire-loss-1024", "delayed-loss")
        and any(seconds[wire][line] for wire in trial.curves if wire != NONE for line in LINES)
    ]
    wires = list(dict.fromkeys(wire for trial in drawn for wire in trial.curves))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.2 * len(drawn)), layout="constrained")
        grid = figure.subplots(len(drawn), len(LINES), squeeze=False, sharey="row")
        for (trial, line), axes in zip(product(drawn, LINES), grid.flat, strict=True):
            for wire, runs in trial.curves.items():
                seeds = [seed for seed in shared(trial, wire) if seed in shared_by_all(trial)]
                points = [
                    (steps[0][0], fmean(loss for _, loss in steps))
                    for steps in zip(*(runs[seed] for seed in seeds), strict=True)
                ]
                if not seconds[wire][line]:
                    continue
                hours = [step * fmean(seconds[wire][line].values()) / 3600 for step, _ in points]
                colour = POLICY_COLOURS[wires.index(wire) % len(POLICY_COLOURS)]
                label = wire if line == next(iter(LINES)) else None
                axes.plot(hours, [loss for _, loss in points], color=colour, linewidth=1.6, label=label)
                if wire == NONE:
                    axes.axhline(points[-1][1], color=INK, ls=":", linewidth=1.2)
            axes.set_title(f"{line}: {trial.steps:,} steps of {trial.step_tokens:,} tokens", fontsize=9)
            axes.set_xlim(left=0)
            axes.set_xlabel("simulated hours")
        for axes in grid[:, 0]:
            axes.set_ylabel("held-out nats a token")
            axes.legend(fontsize=8)
        save(figure, PICTURE)


def shared_by_all(trial: Trial) -> set[int]:
    """Seeds with which every wire of the trial was trained."""
    return set.intersection(*(set(runs) for runs in trial.curves.values()))


def report(seconds: Seconds, seeds: int, dry: bool) -> None:
    found = trials()
    doubling = doubling_nats(found)
    setting = (
        f"Seconds of an iteration: llama-350m on `wan10` (16 relays over 6 stages, 48 microbatches of 4,096 "
        f"tokens, fp32), simulated, policy {OURS}, no churn; mean ± half of the 95 % interval over the seeds "
        f"that were simulated, up to {seeds}. {PERIOD} iterations are counted ({2 * PERIOD} with a delay), "
        f"every {PERIOD}th of which sends snapshots of all stages: what they take above the median counts "
        "once in the period of snapshots that a run of this wire chooses. "
        "*Pays below × tokens*: the wire saves time if a run of it needs less than so many times the tokens. "
        "Losses are those of **llama-tiny**; a step of its runs is taken to last as long as one of "
        "llama-350m. So these are times of no run: they are right as far as a codec costs both models the "
        "same share of their tokens."
    )
    steps = (
        "Steps to none's loss: where the held-out loss is that with which the run without a codec ends at "
        "the same seed; each side at its best learning rate of those that were tried. The learning rate "
        "falls to the end of each run, so a shorter run would reach the loss sooner than the step says. *× "
        f"tokens by the doubling*: twice the tokens bring {doubling:.3f} nats (600 and 1,200 steps of 4,096 "
        "tokens, seed 1), so nats above none's are tokens that are missing; ± as above, none with one seed. "
        "The trial of 200 steps is too short for that."
    )
    times = (
        "\\> x: the loss was not reached in all of the run, which takes x hours. *Time saved, by the "
        "doubling*: of the time to none's loss, with the tokens of the table before (and its range, ±)."
    )
    picture = f"![held-out loss over simulated hours](../images/{PICTURE.name})"
    body = "\n\n".join([
        setting, seconds_table(seconds), steps, loss_table(found, doubling), times,
        time_table(found, seconds, doubling), picture,
    ])  # fmt: skip
    data = {
        "seconds": seconds,
        "doubling_nats": doubling,
        "trials": [
            {
                "result": trial.result,
                "wire": wire,
                "seeds": shared(trial, wire),
                "steps_to_loss": steps_needed(trial, wire),
                "nats_above": differences(trial, wire),
                "tokens_factor": tokens_factor(trial, wire, doubling),
            }
            for trial in found
            for wire in trial.curves
        ],
    }
    if not dry:
        draw(found, seconds)
    reproduce = f"python -m benchmarks.wire.time_to_loss --seeds {seeds}"
    title = "Time to the synchronous loss by codec and line"
    harness.write("wire-time", title, body, data=data, dry=dry, reproduce=reproduce)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    harness.add_executor(parser)
    parser.add_argument("--kept", action="store_true", help="simulate nothing; write what there is")
    args = parser.parse_args()
    if not args.kept:
        simulate_missing(args.seeds, executor(args.executor, args.processes))
        seconds: Seconds = {
            wire: {line: seconds_of(wire, bps, args.seeds) for line, bps in LINES.items()} for wire in WIRES
        }
    else:
        seconds = data_of("wire-time")["seconds"]
    report(seconds, args.seeds, args.dry)


if __name__ == "__main__":
    main()
