"""Rows, curves and goals of the benchmark of presets."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import pytest

from anabranch.config import with_changes
from anabranch.data.corpus import materialise
from anabranch.train.numerics.numerics_class import configure
from benchmarks.simulation import preset_loss
from benchmarks.simulation.preset_loss import loss_goal, run_file, steps_to, train

ARGS = Namespace(steps=8, rows=1, sequence=8, rates=[0.01], seeds=[0, 1], presets=list(preset_loss.ROWS))


def test_steps_to_a_loss_lie_between_the_points_of_a_curve() -> None:
    curve = [(100, 3.0), (200, 2.0), (300, 1.5)]
    assert steps_to(curve, 2.5) == 150
    assert steps_to(curve, 1.5) == 300
    assert steps_to(curve, 3.5) == 100
    assert steps_to(curve, 1.0) is None


def test_a_goal_is_open_where_its_interval_crosses_the_limit() -> None:
    assert loss_goal("loss", []).value == "not run"
    assert loss_goal("loss", [1.0]).met == "open"
    assert loss_goal("loss", [1.01, 1.03, 1.02]).met == "open"
    assert loss_goal("loss", [1.001, 1.002, 1.003]).met == "met"
    assert loss_goal("loss", [1.101, 1.102, 1.103]).met == "missed"


@pytest.mark.parametrize("row", preset_loss.ROWS)
def test_every_row_has_equal_batches_and_whole_models(row: str) -> None:
    for model in preset_loss.MODELS:
        run = run_file(model, row, 0.01, 1, ARGS)
        assert run.pipeline.whole
        assert (run.batch.microbatches, run.batch.rows, run.batch.sequence) == (4, 1, 8)
        assert run.round.slots == (0 if row == preset_loss.SYNCHRONOUS else 4)
        assert run.optimizer.beta2 == (0.99 if row == preset_loss.OURS else 0.95)


@pytest.mark.parametrize("row", ["streaming-diloco", "ravnest"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    row: str, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset_loss, "MOST_STEPS", 6)
    monkeypatch.setattr(preset_loss, "POINTS", 2)
    args = Namespace(**vars(ARGS) | {"steps": 24})
    shape = {"model.dim": 16, "model.blocks": 3, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 24}
    data = {"data.source": "text", "data.path": str(sentences), "data.vocab_size": 257}
    configure(1)
    run = with_changes(run_file("llama-tiny", row, 0.01, 0, args), shape | data)
    corpus = materialise(run.data, tmp_path / "corpus")
    whole = train(run, corpus, tmp_path / "whole.json", 1, math.inf)
    parts = 0
    while train(run, corpus, tmp_path / "parts.json", 1, 0.0) is None:
        parts += 1
    assert parts
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()
    assert whole
