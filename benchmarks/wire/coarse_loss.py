"""Held-out loss with coarse gradient sums (`wire.reduce = "coarse"`) against exact ones, pairs of many seeds.

    nice python -m benchmarks.wire.coarse_loss

Two runs that differ in roundings alone are as far apart as what is looked for, so it takes many pairs of
seeds: the model is small (`time_to_loss`: 20 thousand parameters, bytes), and all runs of a side are one
stack. A step has MICROBATCHES microbatches of a row of 64 tokens. Each one's gradient is rounded as a
contribution to a coarse sum is, with the units that follow from Adam's second moment before the step; of a
tied embedding the gradients of both uses are rounded together, once instead of twice. Both sides of a pair
see the same batches. The learning rate of a side is the best of four on TUNED seeds. Runs are kept in
build/coarse-loss; `--kept` trains none and writes what there is. Writes the result `coarse-loss`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from anabranch.config import PipelineSection, RoundSection, RunConfig, with_changes
from anabranch.data.corpus import Corpus, materialise
from anabranch.sim.metrics.iteration_metrics import estimate
from anabranch.train.codec.sizes import coarse_bytes, coarse_digits
from anabranch.train.numerics.coarse_sums import segments, unit_exponents
from anabranch.train.numerics.exact import UNIT_EXPONENT
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.numerics.step_scalars import bias_corrections, learning_rate
from anabranch.train.recipes.recipes import recipe_run
from benchmarks import harness
from benchmarks.harness import at_most, table
from benchmarks.simulation.stacked_islands import CPU, Stack
from benchmarks.simulation.time_to_loss import SEQUENCE, SHAPE

MICROBATCHES, STEPS, HELD_OUT = 4, 3000, 128
RATES, TUNED = (0.005, 0.01, 0.02, 0.04), 4
#: Runs of a stack, beside the tuned ones: few enough that an interrupted run loses little.
TOGETHER = 12
SIDES = "exact", "coarse"


class SummedStack(Stack):
    """Stack whose synchronous steps add up microbatches: in coarse units if `coarse`, else exactly."""

    def __init__(self, runs: Sequence[RunConfig], corpus: Corpus, coarse: bool) -> None:
        super().__init__(runs, corpus)
        self._coarse, self._lengths_of = coarse, segments(self.layout, CPU).lengths

    def _step(self, t: int) -> None:
        gradients = self.sums(t, range(self.run.batch.microbatches)).float()
        self.steps += 1
        rates = torch.tensor([[learning_rate(run, t)] for run in self.runs])
        scalars = bias_corrections(self.run.optimizer, self.steps)
        self._apply(gradients, self.weights, self.first, self.second, rates, scalars)

    def sums(self, t: int, indices: range) -> Tensor:
        """Sums (runs, parameters; fp64) of the gradients of some microbatches of step t, before it."""
        count = len(indices)
        tokens = [self._tokens(k, t, range(i, i + 1)) for k in range(len(self.runs)) for i in indices]
        each = self._gradients(self.weights.repeat_interleave(count, 0), tokens)
        each = each.view(len(self.runs), count, -1) / self.run.batch.microbatches
        return torch.stack([
            (in_units(some, self.units(k)) if self._coarse else some.double()).sum(0)
            for k, some in enumerate(each)
        ])  # fmt: skip

    def units(self, k: int) -> Tensor:
        """Unit of each parameter's contributions to the next step of run k, over 2⁻⁴⁸."""
        digits, beta2 = coarse_digits(self.run.batch.microbatches), self.run.optimizer.beta2
        exponents = unit_exponents(self.layout, self.second[k], beta2, self.steps, digits)
        return torch.ldexp(torch.ones(len(exponents)), exponents).repeat_interleave(self._lengths_of)


def in_units(contributions: Tensor, units: Tensor) -> Tensor:
    """Contributions (microbatches, parameters) rounded to multiples of each parameter's unit, in fp64; the
    formula of `CoarseAccumulator`."""
    scaled = contributions * 2.0**UNIT_EXPONENT
    return scaled.div_(units).round_().mul_(units).double() * 2.0**-UNIT_EXPONENT


def run_file(rate: float, seed: int) -> RunConfig:
    changes = {"compute.device": "cpu", "compute.dtype": "fp32", "run.steps": STEPS, "run.seed": seed}
    changes |= {"batch.microbatches": MICROBATCHES, "batch.rows": 1, "batch.sequence": SEQUENCE}
    changes |= {"optimizer.lr": rate, "optimizer.schedule": "linear", "optimizer.min_lr_ratio": 0.02}
    changes |= {"optimizer.warmup_steps": round(0.03 * STEPS), "optimizer.beta2": 0.95}
    config = with_changes(recipe_run("llama-tiny"), SHAPE | changes)
    return replace(config, pipeline=PipelineSection(stages=0), round=RoundSection())


def kept(side: str, rate: float, seed: int) -> Path:
    return harness.CACHE / "coarse-loss" / f"{side}-{rate:g}-{seed}.json"


def train(side: str, pairs: Sequence[tuple[float, int]], corpus: Corpus) -> None:
    """Train those of the runs (learning rate, seed) of a side that are not kept, as one stack."""
    missing = [pair for pair in pairs if not kept(side, *pair).exists()]
    if not missing:
        return
    stack = SummedStack([run_file(*pair) for pair in missing], corpus, side == "coarse")
    for t in range(1, STEPS + 1):
        stack.iterate(t)
        if t % 500 == 0:
            print(f"{side}, {len(missing)} runs: step {t}", file=sys.stderr, flush=True)
    for pair, loss in zip(missing, stack.held_out(HELD_OUT), strict=True):
        harness.write_whole(kept(side, *pair), json.dumps({"loss": loss}).encode())


def loss(side: str, rate: float, seed: int) -> float:
    return float(json.loads(kept(side, rate, seed).read_text())["loss"])


def tuned(side: str) -> dict[float, float]:
    """Mean loss of a side on the tuned seeds, by learning rate."""
    return {rate: statistics.mean(loss(side, rate, seed) for seed in range(TUNED)) for rate in RATES}


def train_missing(pairs: int) -> None:
    """Train the runs that are not kept: all rates on the tuned seeds, the best rate on the others."""
    data = with_changes(recipe_run("llama-tiny"), SHAPE).data
    corpus = materialise(data, harness.CACHE / "time-to-loss-bytes", None, lambda text: None)
    for side in SIDES:
        train(side, [(rate, seed) for rate in RATES for seed in range(TUNED)], corpus)
        means = tuned(side)
        rate = min(means, key=means.__getitem__)
        for begin in range(TUNED, pairs, TOGETHER):
            train(side, [(rate, seed) for seed in range(begin, min(begin + TOGETHER, pairs))], corpus)


def write(pairs: int, dry: bool) -> None:
    """Write the result from the kept runs, of the seeds that both sides have."""
    means = {side: tuned(side) for side in SIDES}
    rates = {side: min(of_rate, key=of_rate.__getitem__) for side, of_rate in means.items()}
    seeds = [
        seed for seed in range(pairs) if all(kept(side, rates[side], seed).exists() for side in SIDES)
    ]
    both = {side: [loss(side, rates[side], seed) for seed in seeds] for side in SIDES}
    more = estimate([
        100.0 * (coarse / exact - 1.0)
        for exact, coarse in zip(both["exact"], both["coarse"], strict=True)
    ])  # fmt: skip
    rows = [
        [
            side, f"{rates[side]:g}", f"{statistics.mean(found):.4f}", f"{statistics.stdev(found):.4f}",
            ", ".join(f"{mean:.4f} ({rate:g})" for rate, mean in means[side].items()),
        ]
        for side, found in both.items()
    ]  # fmt: skip
    goals = [
        at_most("loss of coarse sums over that of exact ones", 0.5, more.mean, "{:.2f} %", more.half),
        at_most("bytes of a parameter and step (as of llama-tiny)", 2.5, sum(coarse_bytes(MICROBATCHES)),
                "{:.2f}"),
    ]  # fmt: skip
    head = ["sums", "rate", "held-out loss, nats", "deviation of seeds", f"rates, {TUNED} seeds"]
    text = (
        f"LLaMA of 20 thousand parameters (dim 32, one block, bytes), fp32, {STEPS:,} steps of "
        f"{MICROBATCHES} microbatches of {SEQUENCE} tokens; {len(seeds)} seeds, both sides of a pair on the "
        f"same batches. Coarse sums cost {more.mean:+.2f} % ± {more.half:.2f} % of the held-out loss, by "
        "pairs, with a 95 % interval. The bytes are those that were measured on llama-tiny with sums of as "
        f"many digits.\n\n{table(head, rows)}"
    )
    title = "Held-out loss with coarse gradient sums, pairs of seeds"
    command = f"python -m benchmarks.wire.coarse_loss --seeds {len(seeds)}"
    data = {"seeds": seeds, **both}
    harness.write("coarse-loss", title, text, goals=goals, data=data, dry=dry, reproduce=command)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=40, help="pairs of seeds")
    arguments.add_argument("--kept", action="store_true", help="train nothing; write what there is")
    args = arguments.parse_args()
    configure(1)
    if not args.kept:
        train_missing(args.seeds)
    write(args.seeds, args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
