"""Held-out loss of the tiny model by codec at the cuts and unit of the gradient sums, and bytes of a token.

    python -m benchmarks.wire.loss [--steps 3000] [--seeds 1 2 3] [--rates 0.0025 0.005] [--microbatches 8]

The single-process reference trains llama-tiny with the run file of `anabranch train`; it applies the codecs
at the run's cuts as a swarm does, to the bit. Each side has the learning rate of `--rates` that is best for
it by held-out loss at the first seed; the other seeds have that rate. Fewer microbatches make a step smaller
and quicker. Every run is kept in build/ until it is deleted, so a table that was cut off goes on where it
was, and `--kept` writes what there is. Writes the result `wire-loss`, or `wire-loss-TOKENS` of smaller steps.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict
from typing import Any

from anabranch.train.numerics.numerics_class import configure

configure(1)  # before torch is imported

import msgspec  # noqa: E402

from anabranch.config import (  # noqa: E402
    BatchSection,
    DataSection,
    EvaluationSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    WireSection,
)
from anabranch.data.batches import Batches  # noqa: E402
from anabranch.data.corpus import materialise, open_corpus  # noqa: E402
from anabranch.node.driver.tensor_codec import to_blob  # noqa: E402
from anabranch.train.codec.sizes import encoded_bytes  # noqa: E402
from anabranch.train.model.sizes import model_config  # noqa: E402
from anabranch.train.reference.reference import Reference  # noqa: E402
from benchmarks import harness  # noqa: E402

STEPS, SEEDS, WINDOWS = 3000, 3, 64
#: Points of a curve of held-out loss.
POINTS = 15
#: Replicas of a stage among which the sums' bytes are measured: each has every so-many-th microbatch.
REPLICAS = 2
VARIANTS = {
    "none": WireSection(),
    "bf16": WireSection(activations="bf16", gradients="bf16"),
    "int8": WireSection(activations="int8", gradients="int8"),
    "int8, stochastic": WireSection(activations="int8", gradients="int8", gradient_rounding="stochastic"),
    "int4, gradients int8": WireSection(activations="int4", gradients="int8"),
    "coarse sums": WireSection(reduce="coarse"),
    "int8, coarse sums": WireSection(activations="int8", gradients="int8", reduce="coarse"),
}
FOLDER = harness.CACHE / "wire-loss"
#: Largest loss of int8 cuts over that of none, and of coarse sums over that of exact ones.
COARSE_LIMIT = 0.005
BYTES_SHARE, REDUCE_BYTES = 0.27, 2.5


class Job(msgspec.Struct, frozen=True):
    variant: str
    rate: float
    seed: int
    steps: int
    microbatches: int = 8

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.rate:g}-{self.seed}-{self.steps}-{self.microbatches}".replace(", ", "_")


class Outcome(msgspec.Struct, frozen=True):
    """curve: (step, held-out nats a token). sum_bytes, result_bytes: of a parameter, mean over the steps at
    which the curve has points."""

    job: Job
    curve: list[tuple[int, float]]
    sum_bytes: float
    result_bytes: float

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def run_of(job: Job) -> RunConfig:
    return RunConfig(
        run=RunSection(seed=job.seed, steps=job.steps),
        batch=BatchSection(microbatches=job.microbatches),
        optimizer=OptimizerSection(lr=job.rate),
        evaluation=EvaluationSection(windows=WINDOWS),
        wire=VARIANTS[job.variant],
    )


def train(job: Job) -> Outcome:
    """Train to the end, with the held-out loss at `POINTS` steps."""
    run = run_of(job)
    corpus = open_corpus(FOLDER / "corpus")
    model = model_config(run.model, corpus.vocab_size)
    reference = Reference(run, model, Batches(corpus, run.batch, run.run.seed))
    curve, sizes = [], []
    every = max(1, job.steps // POINTS)
    for t in range(1, job.steps + 1):
        if t % every == 0 and t > 1:
            sizes.append(_reduce_bytes(reference, t))
        reference.step(reference.share(t, range(run.batch.microbatches)))
        if t % every == 0 or t == job.steps:
            found = reference.evaluate(WINDOWS)
            curve.append((t, sum(loss for loss, _ in found) / sum(tokens for _, tokens in found)))
    sums, results = (statistics.mean(each) for each in zip(*sizes, strict=True))
    return Outcome(job, curve, sums, results)


def _reduce_bytes(reference: Reference, t: int) -> tuple[float, float]:
    """Bytes of a parameter's sum from one replica, and of its reduced gradient, at step t (before it)."""
    run = reference._run
    parts = [sums.clone() for sums in reference.share(t, range(0, run.batch.microbatches, REPLICAS)).sums]
    whole = [sums.clone() for sums in reference.share(t, range(run.batch.microbatches)).sums]
    elements = sum(map(len, whole))
    sent = sum(len(to_blob(part).data) for part in parts) / elements
    if run.wire.reduce == "exact":
        return sent, 4.0
    return sent, sum(len(to_blob(total).data) for total in whole) / elements


def kept_or_trained(job: Job) -> Outcome:
    path = FOLDER / f"{job.name}.json"
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    outcome = train(job)
    harness.write_whole(path, msgspec.json.encode(outcome))
    print(f"{job.name}: {outcome.loss:.4f}", flush=True)
    return outcome


def kept(steps: int, microbatches: int) -> list[Outcome]:
    paths = sorted(FOLDER.glob(f"*-{steps}-{microbatches}.json"))
    return [msgspec.json.decode(path.read_bytes(), type=Outcome) for path in paths]


def tuned_at(outcomes: list[Outcome], variant: str, first: int) -> dict[float, float]:
    """Loss of `variant` at the seed `first`, by learning rate."""
    return {o.job.rate: o.loss for o in outcomes if (o.job.variant, o.job.seed) == (variant, first)}


def best_rate(outcomes: list[Outcome], variant: str, first: int) -> float:
    """Learning rate with the least loss of `variant` at the seed `first`."""
    losses = tuned_at(outcomes, variant, first)
    return min(losses, key=losses.__getitem__)


def token_bytes(wire: WireSection) -> float:
    """Bytes of a token at one cut, both ways."""
    model = model_config(RunConfig().model, 512)
    return sum(
        encoded_bytes(codec, wire.block, 1024 * model.dim, 4) / 1024
        for codec in (wire.activations, wire.gradients)
    )


def at_best_rate(outcomes: list[Outcome], variant: str, first: int) -> dict[int, Outcome]:
    """Runs of `variant` by seed at its best rate; empty if it has no run at the seed `first`."""
    if not tuned_at(outcomes, variant, first):
        return {}
    rate = best_rate(outcomes, variant, first)
    return {o.job.seed: o for o in outcomes if (o.job.variant, o.job.rate) == (variant, rate)}


def goals_of(
    variant: str, runs: dict[int, Outcome], base: dict[int, Outcome], steps: int
) -> list[harness.Goal]:
    """Goals on the loss of a variant over that of the seeds in common without a codec (`base`)."""
    shared = sorted(runs.keys() & base.keys())
    if not shared:
        return []
    none = [run.loss for run in base.values()]
    ratios = [runs[seed].loss / base[seed].loss for seed in shared]
    enough = steps >= STEPS and len(shared) >= SEEDS  # fewer decide nothing about losses
    if variant in ("int8", "int8, stochastic"):
        spread = max(none) - min(none)
        more = statistics.mean(runs[seed].loss - base[seed].loss for seed in shared)
        value = f"{more:+.4f} nats, spread {spread:.4f} of {len(none)} seeds"
        held = more <= spread if enough else None
        return [harness.goal(f"loss of {variant}", "no worse than the seeds' spread", value, held)]
    if not variant.endswith("coarse sums"):
        return []
    half = 2 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 2 else 0.0
    more = statistics.mean(ratios) - 1
    held = None if not enough or abs(more - COARSE_LIMIT) < half else more <= COARSE_LIMIT
    name, limit = f"loss of {variant} over none", f"at most {COARSE_LIMIT:.2%}"
    return [harness.goal(name, limit, f"{more:+.2%} ± {half:.2%}", held)]


def report(outcomes: list[Outcome], steps: int, microbatches: int, dry: bool) -> None:
    if not outcomes:
        sys.exit(f"no run of {steps} steps is kept in {FOLDER}; run without --kept")
    first = min(outcome.job.seed for outcome in outcomes)
    by_variant = {variant: at_best_rate(outcomes, variant, first) for variant in VARIANTS}
    base = by_variant["none"]
    rows, goals = [], []
    for variant, runs in by_variant.items():
        if not runs:
            continue
        tuned = tuned_at(outcomes, variant, first)
        shared = sorted(runs.keys() & base.keys())
        ratios = [runs[seed].loss / base[seed].loss for seed in shared]
        sent = statistics.mean(run.sum_bytes for run in runs.values())
        back = statistics.mean(run.result_bytes for run in runs.values())
        rows.append([
            variant,
            " · ".join(f"{rate:g}: {loss:.4f}" for rate, loss in sorted(tuned.items())),
            " · ".join(f"{seed}: {run.loss:.4f}" for seed, run in sorted(runs.items())),
            f"{statistics.mean(run.loss for run in runs.values()):.4f}",
            " · ".join(f"{100 * (ratio - 1):+.2f} %" for ratio in ratios),
            f"{token_bytes(VARIANTS[variant]):.0f}",
            f"{sent:.2f} + {back:.2f}",
        ])  # fmt: skip
        goals += goals_of(variant, runs, base, steps)
        if variant.endswith("coarse sums"):
            name = f"bytes of a parameter and step, {variant}"
            goals.append(harness.at_most(name, REDUCE_BYTES, sent + back, "{:.2f}"))
    share = token_bytes(VARIANTS["int8"]) / token_bytes(VARIANTS["none"])
    goals.append(harness.at_most("bytes of int8 cuts over fp32", BYTES_SHARE, share, "{:.3f}"))
    head = [
        "wire", f"by rate, seed {first}", "nats by seed", "mean", "against none, by seed",
        "bytes a token and cut", "bytes a parameter",
    ]  # fmt: skip
    tokens = RunConfig().batch.rows * RunConfig().batch.sequence * microbatches
    body = (
        f"llama-tiny, {steps:,} steps of {tokens:,} tokens, {WINDOWS} held-out windows at the end, three "
        f"stages (four cuts); each side at its best of the learning rates that were tried at seed {first}. "
        "± is twice the standard error over the seeds. *Bytes a parameter*: sum from one of "
        f"{REPLICAS} replicas + reduced gradient.\n\n{harness.table(head, rows)}"
    )
    data = [asdict_of(outcome) for outcome in outcomes]
    rates = " ".join(f"{rate:g}" for rate in sorted({outcome.job.rate for outcome in outcomes}))
    variants = " ".join(f'"{variant}"' for variant, runs in by_variant.items() if runs)
    seeds = " ".join(map(str, sorted({outcome.job.seed for outcome in outcomes})))
    reproduce = (
        f"python -m benchmarks.wire.loss --steps {steps} --microbatches {microbatches} --seeds {seeds} "
        f"--rates {rates} --variants {variants}"
    )
    usual = microbatches == RunConfig().batch.microbatches
    name = "wire-loss" if usual else f"wire-loss-{tokens}"
    title = "Held-out loss and bytes by codec" + ("" if usual else f", steps of {tokens:,} tokens")
    harness.write(name, title, body, goals=goals, data=data, dry=dry, reproduce=reproduce)


def asdict_of(outcome: Outcome) -> dict[str, Any]:
    return {**msgspec.to_builtins(outcome), "wire": asdict(VARIANTS[outcome.job.variant])}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0025, 0.005])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--kept", action="store_true", help="train nothing; write what there is")
    args = parser.parse_args()
    if not args.kept:
        train_missing(args.variants, args.rates, args.seeds, args.steps, args.microbatches)
    report(kept(args.steps, args.microbatches), args.steps, args.microbatches, args.dry)


def train_missing(
    variants: list[str], rates: list[float], seeds: list[int], steps: int, microbatches: int
) -> None:
    """Train what is not kept: all rates at the first seed, each side's best rate at the others."""
    if not (FOLDER / "corpus").is_dir():
        materialise(DataSection(), FOLDER / "corpus")
    first, *others = sorted(seeds)
    tuned = [
        kept_or_trained(Job(variant, rate, first, steps, microbatches))
        for rate in rates
        for variant in variants
    ]
    for seed in others:
        for variant in variants:
            rate = best_rate(tuned, variant, first)
            kept_or_trained(Job(variant, rate, seed, steps, microbatches))


if __name__ == "__main__":
    main()
