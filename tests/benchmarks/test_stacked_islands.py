"""Stacked runs of the benchmark `time_to_loss` against a run's own modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.config import PipelineSection, RoundSection, with_changes
from anabranch.data.corpus import materialise
from anabranch.train.recipes.recipes import recipe_run
from benchmarks.simulation.stacked_islands import Stack
from benchmarks.simulation.sync_methods import Trainer
from support.grids import first_of

_MEAN = RoundSection(
    slots=4,
    steps=4,
    first_steps=1,
    start=0.2,
    end=0.2,
    outer_lr=1.0,
    outer_momentum=0.0,
    first_moment="estimate",
    contributions="exact",
    results="exact",
)
ROUNDS = {
    "synchronous": RoundSection(),
    "mean, moment estimated": _MEAN,
    "Nesterov, moment zero": replace(_MEAN, outer_lr=0.7, outer_momentum=0.7, first_moment="zero"),
    "moments kept": replace(_MEAN, first_moment="keep"),
    "moments agreed": replace(_MEAN, first_moment="agree"),
    "moments agreed, unequal speeds": replace(_MEAN, first_moment="agree"),
    "moment estimated, unequal speeds": _MEAN,
    "rounded": replace(_MEAN, contributions="int8", results="int8"),
}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", first_of(ROUNDS, 3))
def test_a_stack_takes_the_steps_of_the_run_s_own_modules(
    name: str, sentences: Path, tmp_path: Path
) -> None:
    shape = {"model.dim": 16, "model.blocks": 1, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 24}
    batch = {"batch.microbatches": 4, "batch.rows": 2, "batch.sequence": 16, "run.steps": 20}
    data = {"data.source": "text", "data.path": str(sentences), "data.vocab_size": 257}
    others = {"compute.device": "cpu", "pipeline.stages": 1, "optimizer.lr": 0.01, "run.seed": 3}
    run = with_changes(recipe_run("llama-tiny"), shape | batch | data | others)
    run = replace(run, pipeline=PipelineSection(stages=0), round=ROUNDS[name])
    corpus = materialise(run.data, tmp_path / "corpus")
    lengths = (2, 4, 1, 7) if name.endswith("unequal speeds") else ()
    trainer = Trainer(run, corpus, lengths)
    other = with_changes(run, {"optimizer.lr": 0.02, "run.seed": 5})
    stack = Stack([other, run], corpus, lengths)
    for t in range(1, trainer.rounds.iterations(20) + 1):
        trainer.iterate(t)
        stack.iterate(t)
    moved = (trainer.state.weights - Trainer(run, corpus).state.weights).abs().max()
    # Roundings differ: a value near the middle of two integers may go the other way.
    limit = 0.02 if name == "rounded" else 1e-3
    assert torch.allclose(stack.weights[1], trainer.state.weights, rtol=0, atol=limit * float(moved))
    assert stack.held_out(4)[1] == pytest.approx(trainer.held_out(4), abs=1e-3)
