"""Loss at equal tokens: synchronous steps and islands on one model, computed by one process.

    nice python -m benchmarks.simulation.sync_methods --steps 1200 --rates 0.0025 0.005

The model is llama-tiny on the default corpus and batch (4,096 tokens a step). All methods see the same
batches; islands have a quarter of each. Every row is run with each learning rate, and the best counts.
Nothing is simulated but the machines: inner steps, contributions, sums and outer steps are those of a run.
Writes the result `sync-methods`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from anabranch.config import PipelineSection, RoundSection, RunConfig, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import Corpus, materialise, open_corpus
from anabranch.train.model.interface import build, stage_layout
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import rounds_of
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, rounded
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.recipes.recipes import DEFAULT_SIZE, recipe_run
from anabranch.train.stage.inner_steps import add_gradient, contribution, outer_step, slot_tokens
from anabranch.train.stage.optimizer import StepScalars, adamw
from anabranch.train.stage.run_objects import initial_state, token_ids
from anabranch.train.stage.stage import loss_of
from benchmarks import harness
from benchmarks.harness import Goal, at_most, table

#: Row -> rounds; None: all steps are synchronous.
METHODS: dict[str, RoundSection | None] = {
    "synchronous": None,
    "4 islands, H = 20, int4": RoundSection(slots=4, steps=20, start=0.25),
    "4 islands, H = 20, exact": RoundSection(
        slots=4, steps=20, start=0.25, contributions="exact", results="exact"
    ),
}


class Trainer:
    """Training of the whole model of a run file by one process."""

    def __init__(self, run: RunConfig, corpus: Corpus) -> None:
        cpu = torch.device("cpu")
        shape = model_config(run.model, corpus.vocab_size)
        self.run, self.batches = run, Batches(corpus, run.batch, run.run.seed)
        self.model, self.rounds = build(shape, cpu, torch.float32), rounds_of(run)
        layout = stage_layout(self.model, partition(shape, run.pipeline)[1])
        self.state = initial_state(run, self.model, layout, None, cpu)
        self._gradient = torch.zeros_like(self.state.weights)

    def iterate(self, t: int) -> None:
        """Take iteration t: a step or a round."""
        if self.rounds.has(t):
            self._round(t)
        else:
            self._step(t)

    def _ids(self, t: int, index: int) -> Tensor:
        ids, targets = token_ids(self.batches, self.run.batch.microbatches, t, index, torch.device("cpu"))
        return torch.cat((ids, targets[:, -1:]), 1)

    def _step(self, t: int) -> None:
        run, state, gradient = self.run, self.state, self._gradient.zero_()
        leaves = {name: view.detach().requires_grad_() for name, view in state.layout.views(state.weights)}
        for index in range(run.batch.microbatches):
            scale = 1.0 / self.batches.tokens_per_iteration
            add_gradient(self.model, state, leaves, self._ids(t, index), gradient, scale)
        norm = global_norm(exact.squares(state.layout, gradient).values())
        factor, corrections = clip_factor(norm, run.optimizer.clip), bias_corrections(run.optimizer, t)
        adamw(state, gradient, StepScalars(learning_rate(run, t), factor, *corrections), run.optimizer)

    def _round(self, t: int) -> None:
        run, rounds, total = self.run, self.rounds, torch.zeros_like(self.state.weights)
        for slot in range(rounds.slots):
            first = (t - rounds.start - 1) * rounds.inner
            tokens = slot_tokens(self.batches, run, slot, first, rounds.inner).long()
            total += contribution(run, self.model, self.state, t, rounds.inner, tokens)[0]
        bits, factor = BITS[run.round.results], 1.0 / (rounds.slots * rounds.inner)
        outer_step(run, self.state, t, rounded(total, bits), run.round.outer_lr, factor)

    def held_out(self, windows: int) -> float:
        """Mean loss (nats per token) of the held-out windows."""
        weights, sums = PlainWeights(dict(self.state.layout.views(self.state.weights))), []
        with torch.no_grad():
            for window in range(windows):
                ids = self._ids(0, self.run.batch.microbatches + window)
                x = self.model.embed(weights, ids[:, :-1])
                for block in range(self.model.config.blocks):
                    x = self.model.block(weights, block, x)
                sums.append(float(loss_of(self.model.head(weights, x), ids[:, 1:])))
        return math.fsum(sums) / (windows * self.run.batch.rows * self.run.batch.sequence)


def trained(run: RunConfig, corpus: Corpus, windows: int) -> list[tuple[int, float]]:
    """(optimizer steps, held-out loss) at a third, two thirds, and the end of a run."""
    trainer, found = Trainer(run, corpus), []
    rounds = trainer.rounds
    last = rounds.iterations(run.run.steps)
    for t in range(1, last + 1):
        trainer.iterate(t)
        if rounds.passes(t, max(1, run.run.steps // 3)) or t == last:
            found.append((rounds.progress(t), trainer.held_out(windows)))
    return found


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1200)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.0025, 0.005])
    arguments.add_argument("--windows", type=int, default=16)
    arguments.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = arguments.parse_args()
    configure(1)
    plain = with_changes(recipe_run(DEFAULT_SIZE), {"run.steps": args.steps, "compute.device": "cpu"})
    folder: Path = harness.CACHE / "sync-methods-corpus"
    if not folder.exists():
        materialise(plain.data, folder, None, lambda text: None)
    corpus = open_corpus(folder)
    found: dict[str, dict[float, list[tuple[int, float]]]] = {}
    for name in args.methods:
        rounds = METHODS[name] or RoundSection()
        for rate in args.rates:
            run = with_changes(plain, {"optimizer.lr": rate})
            run = replace(run, pipeline=PipelineSection(stages=0), round=rounds)
            found.setdefault(name, {})[rate] = trained(run, corpus, args.windows)
            print(f"{name}, {rate:g}: {found[name][rate]}", file=sys.stderr, flush=True)
    best = {name: min(each.values(), key=lambda curve: curve[-1][1]) for name, each in found.items()}
    base = best["synchronous"][-1][1] if "synchronous" in best else math.nan
    rows = []
    for name, each in found.items():
        rate = min(each, key=lambda lr: each[lr][-1][1])
        curve = " · ".join(f"{loss:.3f}" for _, loss in each[rate])
        rows.append([name, f"{rate:g}", curve, f"{100 * (best[name][-1][1] / base - 1):+.1f} %"])
    text = (
        f"{args.steps} optimizer steps of 4,096 tokens, one seed. Held-out nats per token at a third, two "
        "thirds and the end. Two runs that differ in roundings alone are about 0.02 apart.\n\n"
        + table(["method", "best rate", "held-out loss", "against synchronous"], rows)
    )
    goals: list[Goal] = [
        at_most(f"loss over synchronous: {name}", 1.02, best[name][-1][1] / base, "{:.3f}")
        for name in best
        if name != "synchronous"
    ]
    title = "Loss at equal tokens: synchronous steps and islands"
    harness.write("sync-methods", title, text, goals=goals, data=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
