"""`data`: the corpus of a run file as another machine would make it, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import anabranch
from anabranch.cli.main import main
from anabranch.config import RunConfig, load_run_file, render_run_file, with_changes
from anabranch.data.corpus import materialise, open_corpus
from anabranch.data.corpus_cache import CACHE_VARIABLE, LEAST_BYTES, default_cache


def test_a_corpus_is_told_kept_and_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 20)
    changes = {
        "data.source": "text", "data.path": str(texts), "data.tokenizer": "bytes", "run.steps": 10,
        "batch.microbatches": 2, "batch.rows": 1, "batch.sequence": 16, "model.dim": 16, "model.blocks": 1,
        "pipeline.stages": 1, "fleet.relays": 1,
    }  # fmt: skip
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(with_changes(RunConfig(), changes)))
    assert main(["data", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    kept = tmp_path / "corpus"
    for _ in range(2):  # written, then checked
        assert main(["data", str(file), "--out", str(kept)]) == 0
    out = capsys.readouterr().out
    corpus = open_corpus(kept)
    assert told["fingerprint"] == corpus.fingerprint and corpus.fingerprint in out and f"wrote {kept}" in out
    assert told["documents"] == 40 and told["train_tokens"] == corpus.train.tokens
    assert told["epochs"] == pytest.approx(320 / corpus.train.tokens)
    made = anabranch.Run.create(file, tmp_path / "run")
    assert open_corpus(made.path / "corpus").fingerprint == corpus.fingerprint


def test_what_it_prepares_a_run_does_not_tokenize_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}\n" * (LEAST_BYTES // 40 // 7))
    file = tmp_path / "run.toml"
    changes = {"data.source": "text", "data.path": str(texts), "data.tokenizer": "bytes"}
    file.write_text(render_run_file(with_changes(RunConfig(), changes)))
    assert main(["data", str(file)]) == 0
    said: list[str] = []
    run = load_run_file(file)
    materialise(run.data, tmp_path / "corpus", tell=said.append, cache=default_cache())
    assert "taken from the cache" in said[0]
    assert main(["data", str(file)]) == 0
    assert "taken from the cache" in capsys.readouterr().out
