"""Held-out loss at equal tokens: synchronous steps and delayed ones (`iteration.delay = 1`) of one model.

    python -m benchmarks.wire.delayed_loss [--steps 1200] [--seeds 1 2 3] [--rates 0.0025 0.005]
        [--microbatches 8] [--synchronous wire-loss-1024] [--kept]

The single-process reference trains llama-tiny with the run file of `anabranch train`, on the same batches for
all; a delayed step is that of a swarm, to the bit where sums are exact (here they are `fast`, for time). Each
side has the learning rate of `--rates` that is best for it by held-out loss at the first seed. Fewer
microbatches make a step smaller and quicker. `--synchronous` takes the synchronous runs, those without a
codec, from a result of `benchmarks.wire.loss`, whose sums are exact; they differ from `fast` ones by rounding
alone. Every run is kept in build/ until it is deleted; `--kept` writes what there is. Writes the result
`delayed-loss`, or `delayed-loss-TOKENS` of smaller steps.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

from anabranch.train.numerics.numerics_class import configure

configure(1)  # before torch is imported

import msgspec  # noqa: E402

from anabranch.config import (  # noqa: E402
    BatchSection,
    ComputeSection,
    DataSection,
    EvaluationSection,
    IterationSection,
    OptimizerSection,
    RunConfig,
    RunSection,
)
from anabranch.data.batches import Batches  # noqa: E402
from anabranch.data.corpus import materialise, open_corpus  # noqa: E402
from anabranch.train.model.sizes import model_config  # noqa: E402
from anabranch.train.reference.reference import Reference  # noqa: E402
from benchmarks import harness  # noqa: E402
from benchmarks.wire.loss import Job  # noqa: E402

STEPS, WINDOWS = 1200, 64
#: Seeds of a goal that is met: a seed moves the loss by more than a delay does.
SEEDS = 3
#: Points of a curve of held-out loss.
POINTS = 4
SYNCHRONOUS = "synchronous"
VARIANTS = {
    SYNCHRONOUS: IterationSection(),
    "delayed": IterationSection(delay=1),
    "delayed from a quarter": IterationSection(delay=1, delay_from=0.25),
}
FOLDER = harness.CACHE / "delayed-loss"
#: Largest loss of delayed steps over that of synchronous ones.
LIMIT = 1.015


class Outcome(msgspec.Struct, frozen=True):
    """curve: (step, held-out nats a token)."""

    job: Job
    curve: list[tuple[int, float]]

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def train(job: Job) -> Outcome:
    """Train to the end, with the held-out loss at `POINTS` steps."""
    run = RunConfig(
        run=RunSection(seed=job.seed, steps=job.steps, reduction="fast"),
        batch=BatchSection(microbatches=job.microbatches),
        optimizer=OptimizerSection(lr=job.rate),
        evaluation=EvaluationSection(windows=WINDOWS),
        compute=ComputeSection(device="cpu"),
        iteration=VARIANTS[job.variant],
    )
    corpus = open_corpus(FOLDER / "corpus")
    model = model_config(run.model, corpus.vocab_size)
    reference = Reference(run, model, Batches(corpus, run.batch, run.run.seed))
    curve = []
    for t in range(1, job.steps + 1):
        reference.step(reference.share(t, range(run.batch.microbatches)))
        if t % max(1, job.steps // POINTS) == 0 or t == job.steps:
            found = reference.evaluate(WINDOWS)
            curve.append((t, sum(loss for loss, _ in found) / sum(tokens for _, tokens in found)))
    return Outcome(job, curve)


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


def of_result(name: str, steps: int, microbatches: int) -> list[Outcome]:
    """Synchronous runs of this size in the result `name` of `benchmarks.wire.loss`."""
    found = msgspec.json.decode((harness.RESULTS / f"{name}.json").read_bytes())["data"]
    runs = [msgspec.convert(each, Outcome) for each in found if each["job"]["variant"] == "none"]
    same = [run for run in runs if (run.job.steps, run.job.microbatches) == (steps, microbatches)]
    return [Outcome(msgspec.structs.replace(run.job, variant=SYNCHRONOUS), run.curve) for run in same]


def best_rate(outcomes: list[Outcome], variant: str, first: int) -> float:
    """Learning rate with the least loss of `variant` at the seed `first`."""
    losses = {o.job.rate: o.loss for o in outcomes if (o.job.variant, o.job.seed) == (variant, first)}
    return min(losses, key=losses.__getitem__)


def report(
    outcomes: list[Outcome], steps: int, microbatches: int, dry: bool, synchronous: str = ""
) -> None:
    if not any(outcome.job.variant == SYNCHRONOUS for outcome in outcomes):
        sys.exit(f"no synchronous run of {steps} steps is kept in {FOLDER} or in the result of --synchronous")
    first = min(outcome.job.seed for outcome in outcomes)
    loss = {(o.job.variant, o.job.rate, o.job.seed): o.loss for o in outcomes}
    variants = [v for v in VARIANTS if any(key[0] == v and key[2] == first for key in loss)]
    rates = {variant: best_rate(outcomes, variant, first) for variant in variants}
    base = {
        seed: found for (v, r, seed), found in loss.items() if (v, r) == (SYNCHRONOUS, rates[SYNCHRONOUS])
    }
    at_first = {v: {rate for each, rate, seed in loss if (each, seed) == (v, first)} for v in variants}
    rows, goals = [], []
    for variant in variants:
        own = {s: found for (v, r, s), found in loss.items() if (v, r) == (variant, rates[variant])}
        ratios = [own[seed] / base[seed] for seed in sorted(own.keys() & base.keys())]
        tuned = ", ".join(
            f"{rate:g}: {found:.4f}"
            for (v, rate, s), found in sorted(loss.items())
            if (v, s) == (variant, first)
        )
        by_seed = " · ".join(f"{seed}: {own[seed]:.4f}" for seed in sorted(own))
        apart = " · ".join(f"{100 * (ratio - 1):+.2f} %" for ratio in ratios)
        rows.append(
            [variant, tuned, f"{rates[variant]:g}", by_seed, f"{statistics.mean(own.values()):.4f}", apart]
        )
        if variant != SYNCHRONOUS and ratios:
            half = 2 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 2 else 0.0
            own_rates, base_rates = (len(at_first[v]) for v in (variant, SYNCHRONOUS))
            how = f"at the best of {own_rates} rates, those at the best of {base_rates}"
            name = f"loss over synchronous steps, {variant}, {how}, {len(ratios)} seeds"
            found = harness.at_most(name, LIMIT, statistics.mean(ratios), "{:.4f}", half)
            few = len(ratios) < SEEDS and found.met == "met"
            goals.append(found._replace(met="open") if few else found)
    head = [
        "steps",
        f"by rate, seed {first}",
        "best rate",
        "nats by seed",
        "mean",
        "against synchronous, by seed",
    ]
    tokens = RunConfig().batch.rows * RunConfig().batch.sequence * microbatches
    taken = f" The synchronous runs are those of `{synchronous}`, with exact sums." if synchronous else ""
    body = (
        f"llama-tiny, {steps:,} steps of {tokens:,} tokens, {WINDOWS} held-out windows at the end, in nats a "
        "token. Delayed runs begin with a synchronous tenth (or quarter) and compute on weights that are "
        "predicted one step ahead. Each side has the rate that is best for it at the first seed. ± is twice "
        f"the standard error over the seeds.{taken}\n\n{harness.table(head, rows)}"
    )
    data = [msgspec.to_builtins(outcome) for outcome in outcomes]
    usual = microbatches == RunConfig().batch.microbatches
    name = "delayed-loss" if usual else f"delayed-loss-{tokens}"
    title = "Loss at equal tokens: synchronous and delayed steps"
    title += "" if usual else f" of {tokens:,} tokens"
    reproduce = command_of(outcomes, variants, steps, microbatches, synchronous)
    harness.write(name, title, body, goals=goals, data=data, dry=dry, reproduce=reproduce)


def command_of(
    outcomes: list[Outcome], variants: list[str], steps: int, microbatches: int, synchronous: str
) -> str:
    """Command that makes the result again. synchronous: result with the synchronous runs ("": none)."""
    trained = [o.job for o in outcomes if not synchronous or o.job.variant != SYNCHRONOUS]
    used = " ".join(f"{rate:g}" for rate in sorted({job.rate for job in trained}))
    seeds = " ".join(map(str, sorted({outcome.job.seed for outcome in outcomes})))
    ran = " ".join(f'"{variant}"' for variant in variants if not synchronous or variant != SYNCHRONOUS)
    return (
        f"python -m benchmarks.wire.delayed_loss --steps {steps} --microbatches {microbatches} "
        f"--seeds {seeds} --rates {used} --variants {ran}"
        + (f" --synchronous {synchronous}" if synchronous else "")
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0025, 0.005, 0.00125])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--synchronous", default="", metavar="RESULT", help="result with synchronous runs")
    parser.add_argument("--kept", action="store_true", help="train nothing; write what there is")
    args = parser.parse_args()
    size = (args.steps, args.microbatches)
    base = of_result(args.synchronous, *size) if args.synchronous else []
    if args.kept:
        report(base + kept(*size), *size, args.dry, args.synchronous)
        return
    if not (FOLDER / "corpus").is_dir():
        materialise(replace(DataSection()), FOLDER / "corpus")
    first, *others = args.seeds
    tuned = [kept_or_trained(Job(v, r, first, *size)) for r in args.rates for v in args.variants]
    for seed in others:
        for variant in args.variants:
            kept_or_trained(Job(variant, best_rate(tuned, variant, first), seed, *size))
    report(base + kept(*size), *size, args.dry, args.synchronous)


if __name__ == "__main__":
    main()
