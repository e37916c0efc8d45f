"""Loss at equal tokens: synchronous steps and islands on one model, computed by one process.

    nice python -m benchmarks.simulation.sync_methods --steps 1200 --rates 0.0025 0.005 --seeds 0 1 2

The batch has 4,096 tokens. All methods see the same batches; four islands have a quarter of each, and agree
every 20 steps (H) after a synchronous quarter. The first seed is run with each learning rate, the others with
the best one of each method. `--processes N` or `--executor ray` computes the rates of the first seed, then
the other seeds, beside each other.
Nothing is simulated but the machines: inner steps, contributions, sums and outer steps are those of a run.
Writes the result `sync-methods`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from anabranch.config import PipelineSection, RoundSection, RunConfig, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import Corpus, materialise, open_corpus
from anabranch.errors import UserError
from anabranch.executors import Executor, executor
from anabranch.train.islands.slot_state import SlotState
from anabranch.train.model.interface import DTYPES, build, stage_layout
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import rounds_of
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, rounded
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.recipes.recipes import DEFAULT_SIZE, recipe_run
from anabranch.train.stage.inner_steps import (
    Island,
    add_gradient,
    contribution_of,
    slot_tokens,
    steps_with_tokens,
)
from anabranch.train.stage.optimizer import StepScalars, adamw
from anabranch.train.stage.outer_step import begin_rounds, end_rounds, outer_step
from anabranch.train.stage.run_objects import initial_state, token_ids, working_weights
from anabranch.train.stage.stage import loss_of
from anabranch.train.stage.state import StageState
from benchmarks import harness
from benchmarks.harness import Goal, at_most, table

_DILOCO = RoundSection(slots=4, steps=20, start=0.25)
_AVERAGE = replace(_DILOCO, outer_lr=1.0, outer_momentum=0.0, first_moment="estimate")
#: Row -> rounds; None: all steps are synchronous. Contributions have 4 bits, results 8, if nothing is said.
METHODS: dict[str, RoundSection | None] = {
    "synchronous": None,
    "mean, moment estimated": _AVERAGE,
    "mean, moments agreed": replace(_AVERAGE, first_moment="agree"),
    "Nesterov 0.9, moment zero": _DILOCO,
    "Nesterov 0.5, moment estimated": replace(_DILOCO, outer_momentum=0.5, first_moment="estimate"),
    "mean, moments agreed, H = 50": replace(_AVERAGE, steps=50, first_moment="agree"),
    "mean, moments agreed, H = 5": replace(_AVERAGE, steps=5, first_moment="agree"),
    "mean, moment estimated, H = 5": replace(_AVERAGE, steps=5),
    "mean, moment zero": replace(_AVERAGE, first_moment="zero"),
    "mean, moment estimated, H = 50": replace(_AVERAGE, steps=50),
    "mean, moment estimated, exact": replace(_AVERAGE, contributions="exact", results="exact"),
}
#: Decay of the second moment, where it is not the recipe's: rounds with agreed moments are bounded by it.
BETA2 = {"mean, moments agreed, H = 50": 0.99}


class Trainer:
    """Training of the whole model of a run file by one process. lengths: inner steps of each slot in a round;
    empty: those of the run."""

    def __init__(self, run: RunConfig, corpus: Corpus, lengths: Sequence[int] = ()) -> None:
        cpu = torch.device("cpu")
        shape = model_config(run.model, corpus.vocab_size)
        self.run, self.batches = run, Batches(corpus, run.batch, run.run.seed)
        self.model, self.rounds = build(shape, cpu, DTYPES[run.compute.dtype]), rounds_of(run)
        layout = stage_layout(self.model, partition(shape, run.pipeline)[1])
        self.state = initial_state(run, self.model, layout, None, cpu)
        self._gradient = torch.zeros_like(self.state.weights)
        self.carried: list[SlotState | None] = [None] * self.rounds.slots
        self._lengths, self.taken = lengths, [0] * self.rounds.slots

    def iterate(self, t: int) -> None:
        """Take iteration t: a step or a round."""
        if self.rounds.has(t):
            self._round(t)
            if t == self.rounds.last:
                end_rounds(self.run, self.state)
        else:
            self._step(t)
            if t == self.rounds.start:
                begin_rounds(self.run, self.state)

    def _ids(self, t: int, index: int) -> Tensor:
        ids, targets = token_ids(self.batches, self.run.batch.microbatches, t, index, torch.device("cpu"))
        return torch.cat((ids, targets[:, -1:]), 1)

    def _step(self, t: int) -> None:
        run, state, gradient = self.run, self.state, self._gradient.zero_()
        leaves = {
            name: weight.detach().requires_grad_()
            for name, weight in working_weights(state, DTYPES[run.compute.dtype]).items()
        }
        for index in range(run.batch.microbatches):
            scale = 1.0 / self.batches.tokens_per_iteration
            add_gradient(self.model, state, leaves, self._ids(t, index), gradient, scale)
        norm, at = global_norm(exact.squares(state.layout, gradient).values()), self.rounds.progress(t)
        corrections = bias_corrections(run.optimizer, state.adam_step + 1)
        factor = clip_factor(norm, run.optimizer.clip)
        adamw(state, gradient, StepScalars(learning_rate(run, at), factor, *corrections), run.optimizer)

    def _round(self, t: int) -> None:
        run, rounds, total = self.run, self.rounds, torch.zeros_like(self.state.weights)
        length = rounds.length(t)
        full = self._lengths if length == run.round.steps else ()
        lengths = full or (length,) * rounds.slots
        for slot, steps in enumerate(lengths):
            tokens = slot_tokens(
                self.batches, run, slot, self.taken[slot], steps_with_tokens(run, steps)
            ).long()
            island = Island(run, self.state, t, steps, self.carried[slot])
            found = contribution_of(run, self.model, island, tokens)
            self.carried[slot] = found.state
            self.taken[slot] += steps
            total += found.change
        bits, factor = BITS[run.round.results], 1.0 / sum(lengths)
        outer_step(run, self.state, rounded(total, bits), run.round.outer_lr, factor, t)

    def held_out(self, windows: int) -> float:
        """Mean loss (nats per token) of the held-out windows."""
        weights, sums = PlainWeights(working_weights(self.state, DTYPES[self.run.compute.dtype])), []
        with torch.no_grad():
            for window in range(windows):
                ids = self._ids(0, self.run.batch.microbatches + window)
                x = self.model.embed(weights, ids[:, :-1])
                for block in range(self.model.config.blocks):
                    x = self.model.block(weights, block, x)
                sums.append(float(loss_of(self.model.head(weights, x), ids[:, 1:])))
        return math.fsum(sums) / (windows * self.run.batch.rows * self.run.batch.sequence)


Curve = list[tuple[int, float]]
Found = dict[str, dict[float, dict[int, Curve]]]
"""Method -> learning rate -> seed -> curve."""
Curves = dict[tuple[str, float, int], Curve]
"""(method, learning rate, seed) -> curve."""


class Bench:
    """Held-out losses of methods, rates and seeds; the synchronous beginning of equal runs is shared."""

    def __init__(self, run: RunConfig, corpus: Corpus, windows: int) -> None:
        self.run, self.corpus, self.windows = run, corpus, windows
        self._begun: dict[tuple[int, float, float, int], tuple[StageState, Curve]] = {}

    def trained(self, method: str, rate: float, seed: int) -> Curve:
        """(optimizer steps, held-out loss) at a third, two thirds, and the end of a run."""
        beta2 = BETA2.get(method, self.run.optimizer.beta2)
        changes = {"optimizer.lr": rate, "optimizer.beta2": beta2, "run.seed": seed}
        run = with_changes(self.run, changes)
        run = replace(run, pipeline=PipelineSection(stages=0), round=METHODS[method] or RoundSection())
        trainer, curve, third = Trainer(run, self.corpus), Curve(), max(1, run.run.steps // 3)
        rounds, first = trainer.rounds, 1
        if rounds.inner:
            key = (seed, rate, beta2, rounds.start)
            if key in self._begun:
                state, curve = deepcopy(self._begun[key])
                trainer.state, first = state, rounds.start
                begin_rounds(run, state)
                first += 1
        last = rounds.iterations(run.run.steps)
        for t in range(first, last + 1):
            if rounds.inner == 0 and t == int(run.run.steps * RoundSection().start) + 1:
                self._begun[seed, rate, beta2, t - 1] = deepcopy((trainer.state, curve))
            trainer.iterate(t)
            if rounds.passes(t, third) or t == last:
                curve.append((rounds.progress(t), trainer.held_out(self.windows)))
        return curve


@dataclass(frozen=True)
class Job:
    """Runs of one seed in one process, which shares their synchronous beginnings. fingerprint: of the corpus.
    until: unix seconds after which no run begins. runs: (method, learning rate) of each."""

    run: RunConfig
    windows: int
    fingerprint: str
    until: float
    seed: int
    runs: tuple[tuple[str, float], ...]


def trained(job: Job) -> dict[tuple[str, float], Curve]:
    """Curve of each run of a job that began in time. Raises UserError if this machine has another corpus."""
    configure(1)
    corpus = corpus_of(job.run)
    if corpus.fingerprint != job.fingerprint:
        raise UserError("this machine makes another corpus (the standard library of another Python?)")
    bench, found = Bench(job.run, corpus, job.windows), dict[tuple[str, float], Curve]()
    for method, rate in job.runs:
        if time.time() < job.until:
            found[method, rate] = curve = bench.trained(method, rate, job.seed)
            print(f"seed {job.seed}, {method}, {rate:g}: {curve}", file=sys.stderr, flush=True)
    return found


def corpus_of(run: RunConfig) -> Corpus:
    """Corpus of the benchmark, which is made once on each machine."""
    folder = harness.CACHE / "sync-methods-corpus"
    if not folder.exists():
        own = folder.with_name(f"{folder.name}-{os.getpid()}")
        materialise(run.data, own, None, lambda text: None)
        try:
            own.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(own)
    return open_corpus(folder)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_SIZE)
    arguments.add_argument("--steps", type=int, default=1200)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.0025])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--windows", type=int, default=32)
    arguments.add_argument("--methods", nargs="+", default=list(METHODS)[:4], choices=list(METHODS))
    arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no row later")
    harness.add_executor(arguments)
    args = arguments.parse_args()
    longest = max((rounds.steps for name in args.methods if (rounds := METHODS[name])), default=1)
    if args.steps < 3 * longest:
        arguments.error(f"--steps {args.steps}: curves have three points, so at least {3 * longest}")
    if "synchronous" not in args.methods:
        arguments.error("--methods: the others are compared with synchronous, which is not among them")
    where = executor(args.executor, args.processes)
    changes = {"run.steps": args.steps, "compute.device": "cpu", "compute.dtype": "bf16"}
    run = with_changes(recipe_run(args.model), changes | {"batch.microbatches": 4, "batch.rows": 8})
    until = time.time() + 60 * args.minutes
    setting = (run, args.windows, corpus_of(run).fingerprint, until)
    first, others = args.seeds[0], args.seeds[1:]
    # Rates are tuned on the first seed.
    jobs = [Job(*setting, first, tuple((method, rate) for method in args.methods)) for rate in args.rates]
    curves = gathered(jobs, where)
    tried = in_rows(curves, args)
    best = tuple((method, best_rate(rates)) for method, rates in tried.items())
    curves |= gathered([Job(*setting, seed, best) for seed in others], where)
    write(args, in_rows(curves, args))
    return 0


def gathered(jobs: Sequence[Job], where: Executor) -> Curves:
    """Curves of all runs of the jobs."""
    found: Curves = {}
    for job, curves in harness.completed(trained, jobs, where, "jobs"):
        found |= {(method, rate, job.seed): curve for (method, rate), curve in curves.items()}
    return found


def in_rows(curves: Curves, args: Namespace) -> Found:
    """Curves in the order of the arguments, whatever came first."""
    found: Found = {}
    for method, rate, seed in product(args.methods, args.rates, args.seeds):
        if (method, rate, seed) in curves:
            found.setdefault(method, {}).setdefault(rate, {})[seed] = curves[method, rate, seed]
    return found


def best_rate(tried: Mapping[float, Mapping[int, Curve]]) -> float:
    """Learning rate with the least loss at the end, on the first seed."""
    return min(tried, key=lambda rate: next(iter(tried[rate].values()))[-1][1])


def write(args: Namespace, found: Found) -> None:
    """Write the result: each method with its best rate, against synchronous steps of the same seeds."""
    rows, goals = list[list[str]](), list[Goal]()
    for method, tried in found.items():
        rate = best_rate(tried)
        curves = tried[rate]
        base = found["synchronous"][best_rate(found["synchronous"])]
        seeds = [seed for seed in curves if seed in base]
        mean = [math.fsum(curves[seed][k][1] for seed in seeds) / len(seeds) for k in range(3)]
        ratios = [curves[seed][-1][1] / base[seed][-1][1] for seed in seeds]
        ratio = math.fsum(ratios) / len(ratios)
        spread = f"{100 * (min(ratios) - 1):+.1f} to {100 * (max(ratios) - 1):+.1f}"
        others = ", ".join(
            f"{each[args.seeds[0]][-1][1]:.3f} with {other:g}"
            for other, each in tried.items()
            if other != rate
        )
        curve = " · ".join(f"{loss:.3f}" for loss in mean)
        rows.append(
            [method, f"{rate:g}", str(len(seeds)), curve, f"{100 * (ratio - 1):+.1f} %", spread, others]
        )
        if method != "synchronous":
            goals.append(at_most(f"loss over synchronous: {method}", 1.02, ratio, "{:.3f}"))
    columns = ["method", "rate", "seeds", "held-out loss", "against synchronous", "seeds, %", "other rates"]
    text = (
        f"{args.model}, {args.steps} optimizer steps of 4,096 tokens, computed in bf16; {args.windows} "
        "held-out windows. Held-out nats per token at a third, two thirds and the end, means over seeds. Two "
        "runs that differ in roundings alone are about 0.02 apart. Rates are tuned on the first seed; the "
        f"last column is that seed's.\n\n{table(columns, rows)}"
    )
    title = "Loss at equal tokens: synchronous steps and islands"
    harness.write("sync-methods", title, text, goals=goals, data=found, dry=args.dry)


if __name__ == "__main__":
    sys.exit(harness.main_by_name())
