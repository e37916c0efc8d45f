"""Checks of a new run before its corpus is read, and the values that the program chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anabranch.checkpoint.directory import RunDirectory
from anabranch.checkpoint.hf import export_hf
from anabranch.cli.support.create_directory import open_to_others
from anabranch.config import DataSection, RunConfig, load_run_file, with_changes
from anabranch.data.tokenizers import write_tokenizer
from anabranch.errors import ConfigError
from anabranch.node.lifecycle.create_run import create_run, lead_run
from anabranch.node.lifecycle.run_checks import room_warning
from anabranch.node.lifecycle.training_machine import run_of
from anabranch.train.model.interface import build, initial_weights
from anabranch.train.model.layout import Layout
from anabranch.train.model.sizes import named_size
from support.local_swarms import small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folder of a narrow llama with a BPE of 300 ids."""
    root = tmp_path_factory.mktemp("weights")
    write_tokenizer(DataSection(tokenizer="bpe", vocab_size=300), ["the river runs"] * 50, root / "t.json")
    shape = replace(named_size("llama-tiny"), dim=16, heads=2, ffn=24, vocab_size=300, max_sequence=32)
    model = build(shape, torch.device("cpu"), torch.float32)
    shapes = model.end_shapes()
    for block in range(shape.blocks):
        shapes.update(model.block_shapes(block))
    layout = Layout(shapes)
    weights = dict(layout.views(initial_weights(model, layout, 3, torch.float32)))
    export_hf(weights, shape, root / "t.json", root / "hf")
    return root / "hf"


def created(run: RunConfig, path: Path) -> tuple[RunDirectory, list[str]]:
    told: list[str] = []
    return create_run(run, path, tell=told.append), told


def continued(texts: Path, folder: Path, tokenizer: str = "auto") -> RunConfig:
    return small_run(texts, model__initial_weights=str(folder), data__tokenizer=tokenizer, pipeline__stages=2)


def test_trained_weights_come_with_their_tokenizer(tmp_path: Path, texts: Path, folder: Path) -> None:
    directory, told = created(continued(texts, folder), tmp_path / "run")
    tokenizer = folder / "tokenizer.json"
    assert (directory.corpus / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert load_run_file(directory.run_file).data.tokenizer == str(tokenizer)
    assert not any("tokenizer" in line for line in told)


def test_another_tokenizer_has_to_be_said_and_is_warned_about(
    tmp_path: Path, texts: Path, folder: Path
) -> None:
    directory, told = created(continued(texts, folder, "bytes"), tmp_path / "run")
    assert load_run_file(directory.run_file).data.tokenizer == "bytes"
    [warning] = [line for line in told if "tokenizer" in line]
    assert str(folder) in warning and 'data.tokenizer = "auto"' in warning


def test_weights_without_a_tokenizer_are_refused_with_the_way_out(
    tmp_path: Path, texts: Path, folder: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"has no tokenizer.json.*save_pretrained.*data.tokenizer"):
        created(continued(texts, bare), tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no folder gone"):
        created(continued(texts, Path("gone")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch.sequence": 4096}, "batch.sequence: 4096 tokens are more than"),
        ({"model.vocab_size": 100}, "model.vocab_size: 100 is smaller than the tokenizer's 257"),
        ({"data.tokenizer": "/nowhere/tokenizer.json"}, "tokenizer /nowhere/tokenizer.json cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_before_the_corpus_is_read(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    run = with_changes(small_run(tmp_path / "missing"), changes)
    with pytest.raises(ConfigError, match=words):
        created(run, tmp_path / "run")


def test_a_tokenizer_too_large_for_the_weights_is_refused_before_the_corpus_is_read(
    tmp_path: Path, folder: Path
) -> None:
    many, words = tmp_path / "t.json", [f"word{number}" for number in range(500)]
    write_tokenizer(DataSection(tokenizer="bpe", vocab_size=320), words, many)
    with pytest.raises(ConfigError, match=r"320 ids, but the model in .* has 300"):
        created(continued(tmp_path / "missing", folder, str(many)), tmp_path / "run")


def test_documents_tokens_and_epochs_are_told(tmp_path: Path, texts: Path) -> None:
    _, told = created(small_run(texts, run__steps=4000), tmp_path / "run")
    [corpus] = [line for line in told if line.startswith("corpus: ")]
    assert "40 documents; " in corpus and "tokens to train on" in corpus
    assert "epochs: after about 4 a model mostly learns by heart" in corpus


def test_a_disk_without_room_for_the_checkpoints_is_told_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, path = named_size("llama-tiny"), tmp_path / "runs" / "new"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20_000_000))
    told = room_warning(RunConfig(), shape, path)
    assert told.startswith(f"the disk of {tmp_path} has 20 MB free, but checkpoints take up to 2")
    assert room_warning(with_changes(RunConfig(), {"checkpoint.keep": 1}), shape, path) == ""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=30_000_000))
    assert room_warning(RunConfig(), shape, path) == ""


@pytest.mark.parametrize(
    ("changes", "numerics", "words"),
    [
        ({}, "strict", ""),
        ({"network.host": "0.0.0.0", "network.advertise": "my.host:7700"}, "mixed", "counts exactly once"),
        ({"network.host": "192.168.1.5"}, "mixed", "`verify` reports the distance"),
        ({"network.host": "192.168.1.5", "run.numerics": "strict"}, "strict", "will be refused"),
        ({"run.numerics": "mixed"}, "mixed", ""),
    ],
)
def test_tickets_for_other_machines_admit_any_machine(
    changes: dict[str, object], numerics: str, words: str
) -> None:
    told: list[str] = []
    run = open_to_others(with_changes(RunConfig(), changes), told.append)
    assert run.run.numerics == numerics
    assert bool(told) == bool(words) and words in " ".join(told)


def test_the_note_of_a_run_is_told_and_logged(tmp_path: Path, texts: Path) -> None:
    """`plan --wire auto` leaves there why it chose codecs and delay."""
    note = "codecs: int8 cuts; an iteration is 30% shorter than without"
    directory, told = created(small_run(texts, run__note=note), tmp_path / "run")
    assert told[0] == note
    assert run_of(lead_run(directory, "127.0.0.1:1").genesis).run.note == note
    with pytest.raises(ConfigError, match="one line of at most 500 characters"):
        small_run(texts, run__note="two\nlines")
