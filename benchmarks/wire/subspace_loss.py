"""Held-out loss of the tiny models with and without `model.subspace`, at equal tokens.

    python -m benchmarks.wire.subspace_loss [--steps 3000] [--seeds 1 2 3] [--rates 0.005 0.0025]
        [--microbatches 8] [--kept]

One process takes the steps by the reference trainer, on the default run's corpus and batches. Sides: the
model as it is; with cuts of an eighth and of a quarter of its width. Each side is trained at each learning
rate, and the best one by the held-out loss of the first seed counts. Fewer microbatches make a step smaller
and quicker. A run keeps its state in build/ every hundred steps, so a benchmark that was cut off goes on
where it was; `--kept` writes what there is. Writes the result `subspace-loss`, or `subspace-loss-TOKENS` of
smaller steps.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec

from anabranch.config import ModelSection, RunConfig, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import materialise
from anabranch.train.model.sizes import cut_columns, model_config, total_parameters
from anabranch.train.numerics.numerics_class import configure
from benchmarks import harness

STEPS, WINDOWS, EVERY = 3000, 64, 100
SIDES = ("dense", "eighth", "quarter")
FOLDER = harness.CACHE / "subspace_loss"
#: Raised when kept runs are of no use any more, because the numbers of `train/` changed.
FORM = 2


class Job(msgspec.Struct, frozen=True):
    architecture: str
    side: str
    rate: float
    seed: int
    steps: int
    microbatches: int = 8

    @property
    def folder(self) -> Path:
        words = (self.architecture, self.side, self.rate, self.seed, self.steps, self.microbatches, FORM)
        return FOLDER / "-".join(map(str, words))


class Outcome(msgspec.Struct):
    """losses: step -> held-out nats per token. bytes_per_token: of a cut, forward and backward together."""

    job: Job
    parameters: int
    bytes_per_token: int
    losses: dict[int, float]
    cpu_s: float = 0.0


def run_of(job: Job) -> RunConfig:
    dense = model_config(ModelSection(size=f"{job.architecture}-tiny"), 512)
    model: dict[str, object] = {"model.size": f"{job.architecture}-tiny"}
    if job.side != "dense":
        model["model.subspace"] = dense.dim // (4 if job.side == "quarter" else 8)
    changes = {
        "run.seed": job.seed, "run.steps": job.steps, "optimizer.lr": job.rate, "compute.device": "cpu",
        "model.initial_std": math.sqrt(2 / (5 * dense.dim)), "batch.microbatches": job.microbatches,
    }  # fmt: skip
    return with_changes(RunConfig(), model | changes)


def outcome(job: Job) -> Outcome:
    """Train, or go on with what is kept."""
    configure(1)
    from anabranch.train.reference.reference import Reference

    run, kept = run_of(job), job.folder / "outcome.json"
    corpus = materialise(run.data, FOLDER / "corpus")
    model = model_config(run.model, corpus.vocab_size)
    reference = Reference(run, model, Batches(corpus, run.batch, job.seed))
    if kept.exists():
        result = msgspec.json.decode(kept.read_bytes(), type=Outcome)
        if max(result.losses) == job.steps:
            return result
        at = job.folder / str(max(result.losses))
        reference.restore([(at / f"{stage}.bin").read_bytes() for stage in range(len(reference.states))])
    else:
        result = Outcome(job, total_parameters(model), 4 * (cut_columns(model, 4) + model.stream), {})
    begin = time.process_time()
    for t in range(reference.t + 1, job.steps + 1):
        reference.step(reference.share(t, range(run.batch.microbatches)))
        if t % EVERY == 0 or t == job.steps:
            windows = reference.evaluate(WINDOWS)
            result.losses[t] = math.fsum(some for some, _ in windows) / sum(tokens for _, tokens in windows)
            result.cpu_s += time.process_time() - begin
            begin = time.process_time()
            _keep(job, reference, result)
    return result


def _keep(job: Job, reference: object, result: Outcome) -> None:
    t = max(result.losses)
    for stage, state in enumerate(reference.states):  # type: ignore[attr-defined]
        harness.write_whole(job.folder / str(t) / f"{stage}.bin", state.to_bytes())
    harness.write_whole(job.folder / "outcome.json", msgspec.json.encode(result))
    for old in job.folder.iterdir():
        if old.is_dir() and old.name != str(t):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()


def finished(job: Job) -> bool:
    kept = job.folder / "outcome.json"
    return kept.exists() and max(msgspec.json.decode(kept.read_bytes(), type=Outcome).losses) == job.steps


def tuned(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of the learning rate that is best for the first seed."""
    first = [one for one in outcomes if one.job.seed == outcomes[0].job.seed]
    best = min(first, key=lambda one: one.losses[one.job.steps]).job.rate
    return [one for one in outcomes if one.job.rate == best]


def written(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for architecture in dict.fromkeys(one.job.architecture for one in outcomes):
        dense = math.nan
        for side in SIDES:
            some = [one for one in outcomes if (one.job.architecture, one.job.side) == (architecture, side)]
            if not some:
                continue
            best = tuned(some)
            losses = [one.losses[one.job.steps] for one in best]
            mean = math.fsum(losses) / len(losses)
            dense = mean if side == "dense" else dense
            reached = [f"{step}" for step, loss in sorted(best[0].losses.items()) if loss <= dense]
            rows.append([
                architecture, side, f"{best[0].parameters:,}", best[0].bytes_per_token,
                f"{best[0].job.rate:g}", ", ".join(f"{loss:.3f}" for loss in losses),
                f"{mean / dense - 1:+.1%}", reached[0] if reached else f"not in {best[0].job.steps:,}",
            ])  # fmt: skip
    head = ["model", "cuts", "parameters", "bytes per token and cut", "best rate", "held-out nats by seed",
            "against dense", "step at which it has dense's loss"]  # fmt: skip
    return harness.table(head, rows)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-3, 2.5e-3])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=["llama", "gpt"], choices=["llama", "gpt"])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--kept", action="store_true", help="compute nothing; the table of finished runs")
    args = parser.parse_args()
    orders, size = product(args.seeds, args.models, args.sides, args.rates), (args.steps, args.microbatches)
    jobs = [Job(model, side, rate, seed, *size) for seed, model, side, rate in orders]
    if args.kept:
        jobs = [job for job in jobs if finished(job)]
    materialise(RunConfig().data, FOLDER / "corpus")
    outcomes = list(harness.in_processes(outcome, jobs, args.processes, "runs"))
    batch = RunConfig().batch
    tokens = batch.rows * batch.sequence * args.microbatches
    smaller = "" if args.microbatches == batch.microbatches else f"-{tokens}"
    setting = (
        f"Tiny models (dim 128, 3 blocks), default corpus, {tokens:,} tokens a step, {args.steps:,} "
        f"steps, fp32, {WINDOWS} held-out windows; seeds {', '.join(map(str, args.seeds))}, learning rates "
        f"{', '.join(f'{rate:g}' for rate in args.rates)}. Bytes are of fp32 cuts, token ids included, "
        "forward and backward. Subspace models have an untied head and a free block with it. Two runs that "
        "differ in roundings alone are 0.02 nats apart."
    )
    harness.write(
        f"subspace-loss{smaller}",
        "Loss of subspace models" + (f", steps of {tokens:,} tokens" if smaller else ""),
        f"{setting}\n\n{written(outcomes)}",
        data=outcomes,
        dry=args.dry,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
