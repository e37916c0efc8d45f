"""Finished run directories: of a real run, and without one (initial weights as the checkpoint of step 3)."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, render_run_file, with_changes
from anabranch.data.batches import Batches
from anabranch.data.corpus import materialise
from anabranch.protocol.interface.tasks import InitState, Snapshot
from anabranch.train.model.sizes import model_config
from anabranch.train.stage.worker import Worker
from support.api_runs import small_settings, texts_in


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    texts = root / "texts"
    texts.mkdir()
    for number in range(40):
        body = "".join(f"line {line} of text {number}: the quick brown fox\n" for line in range(30))
        (texts / f"{number:02}.txt").write_text(body)
    config = with_changes(
        RunConfig(),
        {
            "data.source": "text",
            "data.path": str(texts),
            "data.tokenizer": "bytes",
            "model.dim": 16,
            "model.heads": 2,
            "model.kv_heads": 1,
            "model.ffn": 24,
            "batch.sequence": 32,
        },
    )
    run = RunDirectory.create(root / "run")
    run.run_file.write_text(render_run_file(config))
    corpus = materialise(config.data, run.corpus)
    shape = model_config(config.model, corpus.vocab_size)
    stages = {}
    for stage in range(config.pipeline.stages + 1):
        batches = Batches(corpus, config.batch, config.run.seed) if stage == 0 else None
        worker = Worker(config, shape, stage, batches)
        fingerprint = worker.run(InitState(0)).fingerprint
        snapshot = worker.run(Snapshot(0))
        stages[stage] = ([piece.numpy() for piece in snapshot.outputs], fingerprint)  # type: ignore[attr-defined]
    run.write_checkpoint(3, "base", "run", stages)
    return run.path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a real run of four steps."""
    root = tmp_path_factory.mktemp("finished")
    settings = small_settings(texts_in(root), stages=1, relays=1, sequence=16)
    shape = {"dim": 16, "blocks": 1, "heads": 2, "kv_heads": 2, "ffn": 24}
    settings |= {"checkpoint": {"every": 2}, "evaluation": {"every": 0}, "model": shape, "run.steps": 4}
    with anabranch.Run.create(settings, root / "run") as run:
        run.wait()
    return run.path
