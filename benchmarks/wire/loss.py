"""Held-out loss of the tiny model by codec at the cuts and unit of the gradient sums, and bytes of a token.

    python -m benchmarks.wire.loss [--steps 3000] [--seeds 1 2 3] [--rates 0.0025 0.005] [--kept]

The single-process reference trains llama-tiny with the run file of `anabranch train`; it applies the codecs
at the run's cuts as a swarm does, to the bit. Each side has the learning rate of `--rates` that is best for
it by held-out loss. Every run is kept in build/ until it is deleted, so a table that was cut off goes on
where it was, and `--kept` writes what there is. Writes the result `wire-loss`.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from typing import Any

from anabranch.train.numerics.numerics_class import configure

configure(1)  # before torch is imported

import msgspec  # noqa: E402

from anabranch.config import (  # noqa: E402
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
POINTS = 10
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

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.rate:g}-{self.seed}-{self.steps}".replace(" ", "_").replace(",", "")


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


def kept_or_trained(job: Job, train_it: bool) -> Outcome | None:
    path = FOLDER / f"{job.name}.json"
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    if not train_it:
        return None
    outcome = train(job)
    harness.write_whole(path, msgspec.json.encode(outcome))
    print(f"{job.name}: {outcome.loss:.4f}", flush=True)
    return outcome


def token_bytes(wire: WireSection) -> float:
    """Bytes of a token at one cut, both ways."""
    model = model_config(RunConfig().model, 512)
    return sum(
        encoded_bytes(codec, wire.block, 1024 * model.dim, 4) / 1024
        for codec in (wire.activations, wire.gradients)
    )


def best(outcomes: list[Outcome], variant: str) -> tuple[float, list[Outcome]] | None:
    """Learning rate with the least mean loss, and its runs by seed; None if there is no run."""
    by_rate: dict[float, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.job.variant == variant:
            by_rate.setdefault(outcome.job.rate, []).append(outcome)
    most = max(map(len, by_rate.values()), default=0)
    full = {rate: runs for rate, runs in by_rate.items() if len(runs) == most}
    if not full:
        return None
    return min(full.items(), key=lambda item: statistics.mean(run.loss for run in item[1]))


def report(outcomes: list[Outcome], steps: int, dry: bool) -> None:
    rows, goals, means = [], [], {}
    base = best(outcomes, "none")
    for variant, wire in VARIANTS.items():
        if (found := best(outcomes, variant)) is None:
            continue
        rate, runs = found
        losses = [run.loss for run in runs]
        means[variant] = statistics.mean(losses)
        apart = "" if base is None else f"{100 * (means[variant] / means['none'] - 1):+.2f} %"
        sent = statistics.mean(run.sum_bytes for run in runs)
        back = statistics.mean(run.result_bytes for run in runs)
        by_seed = " · ".join(f"{loss:.4f}" for loss in losses)
        sizes = [f"{token_bytes(wire):.0f}", f"{sent:.2f} + {back:.2f}"]
        rows.append([variant, f"{rate:g}", by_seed, f"{means[variant]:.4f}", apart, *sizes])
        if variant.endswith("coarse sums"):
            name = f"bytes of a parameter and step, {variant}"
            goals.append(harness.at_most(name, REDUCE_BYTES, sent + back, "{:.2f}"))
    if base is not None:
        none = [run.loss for run in base[1]]
        spread = max(none) - min(none)
        enough = steps >= STEPS and len(none) >= SEEDS  # fewer decide nothing about losses
        for variant in [each for each in ("int8", "int8, stochastic") if each in means]:
            held = means[variant] - means["none"] <= spread if enough else None
            value = f"{means[variant] - means['none']:+.4f} nats, spread {spread:.4f} of {len(none)} seeds"
            goals.append(harness.goal(f"loss of {variant}", "no worse than the seeds' spread", value, held))
        if "coarse sums" in means:
            more = means["coarse sums"] / means["none"] - 1
            held = more <= COARSE_LIMIT if enough else None
            limit = f"at most {COARSE_LIMIT:.2%}"
            goals.append(harness.goal("loss of coarse sums over exact", limit, f"{more:.2%}", held))
    share = token_bytes(VARIANTS["int8"]) / token_bytes(VARIANTS["none"])
    goals.append(harness.at_most("bytes of int8 cuts over fp32", BYTES_SHARE, share, "{:.3f}"))
    head = ["wire", "rate", "nats by seed", "mean", "against none", "bytes a token and cut"]
    rates = ", ".join(sorted({f"{outcome.job.rate:g}" for outcome in outcomes}))
    body = (
        f"llama-tiny, {steps:,} steps of 4,096 tokens, {WINDOWS} held-out windows at the end, three stages "
        f"(four cuts); each side at its best learning rate of {rates}. *Bytes a parameter*: sum from one of "
        f"{REPLICAS} replicas + reduced gradient.\n\n{harness.table([*head, 'bytes a parameter'], rows)}"
    )
    data = [asdict_of(outcome) for outcome in outcomes]
    jobs = [outcome.job for outcome in outcomes]
    seeds = " ".join(map(str, sorted({job.seed for job in jobs})))
    options = f"--steps {steps} --seeds {seeds} --rates {rates.replace(',', '')}"
    reproduce = f"python -m benchmarks.wire.loss {options}"
    title = "Held-out loss and bytes by codec"
    harness.write("wire-loss", title, body, goals=goals, data=data, dry=dry, reproduce=reproduce)


def asdict_of(outcome: Outcome) -> dict[str, Any]:
    return {**msgspec.to_builtins(outcome), "wire": asdict(VARIANTS[outcome.job.variant])}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0025, 0.005])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--kept", action="store_true", help="train nothing; write what there is")
    args = parser.parse_args()
    if not (FOLDER / "corpus").is_dir():
        materialise(replace(DataSection()), FOLDER / "corpus")
    jobs = [
        Job(variant, rate, seed, args.steps)
        for seed in args.seeds
        for rate in args.rates
        for variant in args.variants
    ]
    found = [kept_or_trained(job, not args.kept) for job in jobs]
    if not any(found):
        parser.error("no run is kept; leave --kept out")
    report([outcome for outcome in found if outcome is not None], args.steps, args.dry)


if __name__ == "__main__":
    main()
