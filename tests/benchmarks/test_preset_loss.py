"""Rows, curves and goals of the benchmark of presets."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from anabranch.config import with_changes
from anabranch.data.corpus import materialise
from anabranch.train.numerics.numerics_class import configure
from benchmarks.simulation import preset_loss
from benchmarks.simulation.preset_fleets import OURS_STEPS
from benchmarks.simulation.preset_loss import run_file, train

ARGS = Namespace(steps=8, rows=1, sequence=8, rate=0.02, seeds=[0, 1], presets=list(preset_loss.ROWS))


@pytest.mark.parametrize("row", preset_loss.ROWS)
def test_every_row_has_equal_batches_and_whole_models(row: str) -> None:
    for model in preset_loss.MODELS:
        run = run_file(model, row, 0.01, 1, ARGS)
        assert run.pipeline.whole
        assert (run.batch.microbatches, run.batch.rows, run.batch.sequence) == (4, 1, 8)
        assert run.round.slots == (0 if row == preset_loss.SYNCHRONOUS else 4)
        assert run.optimizer.beta2 == (0.99 if row in OURS_STEPS else 0.95)


def test_longer_runs_are_those_of_seeds_that_lack_the_synchronous_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset_loss, "KEPT", tmp_path)
    more = {"longer": [16, 32], "longer_presets": ["anabranch"]}
    args = Namespace(**vars(ARGS) | more)

    def keep(row: str, rate: float, seed: int, steps: int, loss: float) -> None:
        path = preset_loss.kept("llama-tiny", row, rate, seed, Namespace(**vars(args) | {"steps": steps}))
        path.write_text(json.dumps([[steps, loss]]))

    def runs() -> list[tuple[int, float, int]]:
        found = preset_loss.planned_longer(args, "llama-tiny")
        return [(own.steps, rate, seed) for own, row, rate, seed in found]

    for seed in (0, 1):
        keep("synchronous", 0.01, seed, 8, 2.0)
    keep("anabranch", 0.02, 0, 8, 2.5)
    keep("anabranch", 0.01, 0, 8, 3.0)
    assert runs() == []  # rates are not tuned yet
    keep("anabranch", 0.04, 0, 8, 2.6)
    assert runs() == [(16, 0.02, 0), (16, 0.02, 1), (32, 0.02, 0), (32, 0.02, 1)]
    keep("anabranch", 0.02, 1, 16, 1.9)
    assert runs() == [(16, 0.02, 0), (16, 0.02, 1), (32, 0.02, 0)]
    keep("anabranch", 0.02, 0, 8, 1.9)
    assert runs() == [(16, 0.02, 1)]


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
    name = f"llama-tiny-{row}-24x32-0.01-0.json"
    at_once, in_parts = (tmp_path / each / name for each in ("whole", "parts"))
    at_once.parent.mkdir()
    in_parts.parent.mkdir()
    whole = train(run, corpus, at_once, 1, math.inf)
    parts = 0
    while train(run, corpus, in_parts, 1, 0.0) is None:
        parts += 1
    assert parts
    assert in_parts.read_text() == at_once.read_text()
    assert whole
