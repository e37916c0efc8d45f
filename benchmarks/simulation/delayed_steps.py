"""Loss at equal tokens: synchronous steps and delayed ones on one model, computed by one process.

    nice python -m benchmarks.simulation.delayed_steps --steps 1200 --rates 0.0025

The model is llama-tiny on the default corpus and batch (4,096 tokens a step), in fp32. Both sides see the
same batches. A delayed step is that of a run (`iteration.delay = 1`): after a synchronous tenth, on weights
that are predicted one step ahead. Every row is run with each learning rate, and the best counts. Writes the
result `delayed-steps`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from anabranch.config import RunConfig, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import Corpus, materialise, open_corpus
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.recipes import DEFAULT_SIZE, recipe_run
from anabranch.train.reference.reference import Reference
from benchmarks import harness
from benchmarks.harness import at_most, table


def trained(run: RunConfig, corpus: Corpus, windows: int) -> list[tuple[int, float]]:
    """(steps, held-out loss in nats per token) at a third, two thirds, and the end of a run."""
    batches = Batches(corpus, run.batch, run.run.seed)
    reference = Reference(run, model_config(run.model, corpus.vocab_size), batches)
    last, found = run.run.steps, []
    for t in range(1, last + 1):
        reference.step(reference.share(t, range(run.batch.microbatches)))
        if t % max(1, last // 3) == 0 or t == last:
            sums, tokens = zip(*reference.evaluate(windows), strict=True)
            found.append((t, math.fsum(sums) / sum(tokens)))
    return found


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1200)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.0025])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments.add_argument("--windows", type=int, default=16)
    args = arguments.parse_args()
    configure(1)
    fixed = {"run.steps": args.steps, "compute.device": "cpu", "run.reduction": "fast"}
    plain = with_changes(recipe_run(DEFAULT_SIZE), fixed)
    folder: Path = harness.CACHE / "sync-methods-corpus"
    if not folder.exists():
        materialise(plain.data, folder, None, lambda text: None)
    corpus = open_corpus(folder)
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for seed in args.seeds:
        for rate in args.rates:
            for delay, name in enumerate(("synchronous", "delayed")):
                keys = {"optimizer.lr": rate, "run.seed": seed, "iteration.delay": delay}
                curve = trained(with_changes(plain, keys), corpus, args.windows)
                found.setdefault(name, {})[f"{rate:g}, seed {seed}"] = curve
                print(f"{name}, {rate:g}, seed {seed}: {curve}", file=sys.stderr, flush=True)
    rows, ratios = [], []
    for key, curve in found["delayed"].items():
        before = found["synchronous"][key]
        ratios.append(curve[-1][1] / before[-1][1])
        pairs = [" · ".join(f"{loss:.3f}" for _, loss in each) for each in (before, curve)]
        rows.append([key, *pairs, f"{100 * (ratios[-1] - 1):+.1f} %"])
    text = (
        f"{args.steps} steps of 4,096 tokens; the first tenth of the delayed runs is synchronous. Held-out "
        "nats per token at a third, two thirds and the end. Two runs that differ in roundings alone are "
        "about 0.02 apart.\n\n" + table(["rate", "synchronous", "delayed", "at the end"], rows)
    )
    worst = max(ratios)
    goals = [at_most("loss of delayed over synchronous steps", 1.015, worst, "{:.3f}")]
    title = "Loss at equal tokens: synchronous and delayed steps"
    harness.write("delayed-steps", title, text, goals=goals, data=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
