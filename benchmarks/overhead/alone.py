"""CPU time of `anabranch train --alone` over that of plain PyTorch on the same model and batches.

    nice python -m benchmarks.overhead.alone

Plain PyTorch is the independent implementation of `verify --independent`: an ordinary module with torch's own
layers, attention and AdamW. Steps of the two alternate in one process. Writes the result `alone`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from anabranch.config import with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import materialise, open_corpus
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.recipes import DEFAULT_SIZE, recipe_run
from anabranch.train.reference.alone import Alone
from anabranch.train.reference.independent import IndependentReference
from benchmarks import harness
from benchmarks.harness import at_most

#: First steps, which load kernels, are not counted.
WARM_UP = 2


def cpu_s(step: Callable[[int], object], t: int) -> float:
    """CPU seconds of one step."""
    begin = time.process_time()
    step(t)
    return time.process_time() - begin


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    args = arguments.parse_args()
    configure(1)
    run = with_changes(recipe_run(DEFAULT_SIZE), {"compute.device": "cpu"})
    folder = harness.CACHE / "sync-methods-corpus"
    if not folder.exists():
        materialise(run.data, folder, None, lambda text: None)
    corpus = open_corpus(folder)
    batches, model = Batches(corpus, run.batch, run.run.seed), model_config(run.model, corpus.vocab_size)
    alone = Alone(run, model, batches)
    initial = {
        name: view.clone() for state in alone.states for name, view in state.layout.views(state.weights)
    }
    plain = IndependentReference(run, model, batches, initial)
    ratios = []
    for t in range(1, args.steps + WARM_UP + 1):
        ours, theirs = cpu_s(alone.step, t), cpu_s(plain.step, t)
        if t > WARM_UP:
            ratios.append(ours / theirs)
    middle = statistics.median(ratios)
    text = (
        f"{args.steps} steps of llama-tiny (4,096 tokens, one thread), alternating. CPU time of a step over "
        f"that of plain PyTorch: median {middle:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}."
    )
    goals = [at_most("CPU time over plain PyTorch", 1.05, middle, "{:.3f}")]
    title = "One process alone against plain PyTorch"
    harness.write("alone", title, text, goals=goals, data={"ratios": ratios}, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
