"""Doors of a run on private data: which machines and folders are turned away, with which words; what a local
swarm's relays are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import anabranch
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.config import DataSection, RunConfig, load_run_file, render_run_file, with_changes
from anabranch.data.corpus import materialise, open_corpus
from anabranch.errors import UserError
from anabranch.node.lifecycle.training_machine import TrainingMachine
from anabranch.node.local_swarm.local_swarm import create_local
from anabranch.node.private_data.machine_data import OwnedData, OwnFolders, own_data_of
from anabranch.node.private_data.relay_corpora import private_options
from anabranch.protocol.log.records import Genesis, Member
from anabranch.train.islands.kept_contributions import files_of
from support.local_swarms import small_run, write_texts


def private_run(texts: Path, **changes: Any) -> RunConfig:
    plain = {"data__private": True, "pipeline__stages": 0, "round__slots": 3, "fleet__relays_per_stage": [3]}
    return small_run(texts, **(plain | changes))


@pytest.fixture(scope="module")
def directory(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return create_local(private_run(texts), tmp_path_factory.mktemp("private") / "run", [texts])


def genesis_of(directory: RunDirectory, **changes: Any) -> Genesis:
    """Genesis record of the run in a directory, as far as a joiner's machine reads it."""
    run, corpus = load_run_file(directory.run_file), open_corpus(directory.corpus)
    config = render_run_file(with_changes(run, {k.replace("__", "."): v for k, v in changes.items()}))
    found = SimpleNamespace(
        config=config, run="r", epoch=1, corpus_fingerprint=corpus.fingerprint,
        tokenizer_hash=corpus.tokenizer_hash,
    )  # fmt: skip
    return cast(Genesis, found)


def machine(tmp_path: Path, corpus: Path | None, public: Path | None = None) -> TrainingMachine:
    told = OwnFolders(corpus, tmp_path / "contributions", 1 << 20)
    return TrainingMachine(Member("me", 1, 1, "", 1), public, own=told)


def test_a_machine_without_data_is_told_what_to_do(directory: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="join with --private-data FOLDER, a corpus of your own text"):
        machine(tmp_path, None).describe(genesis_of(directory))


def test_a_machine_with_data_builds_a_worker_that_has_them(directory: RunDirectory, tmp_path: Path) -> None:
    own = directory.peers_path / "relay-1.1" / "private"
    made = machine(tmp_path, own)
    made.describe(genesis_of(directory))
    worker = cast(Any, made.build(1)[0])
    assert worker._own.step_rows(2, 5).shape == (2, 17)


def test_data_of_another_tokenizer_are_refused(
    directory: RunDirectory, texts: Path, tmp_path: Path
) -> None:
    section = DataSection(source="text", path=str(texts), tokenizer="bpe", vocab_size=260)
    materialise(section, tmp_path / "bpe")
    with pytest.raises(UserError, match="its tokenizer is not the run's"):
        machine(tmp_path, tmp_path / "bpe").describe(genesis_of(directory))


def test_other_runs_and_data_nodes_take_no_private_data(directory: RunDirectory, tmp_path: Path) -> None:
    own = directory.peers_path / "relay-1.0" / "private"
    with pytest.raises(UserError, match="this run sends its machines the tokens to train on: leave it out"):
        machine(tmp_path, own).describe(genesis_of(directory, data__private=False))
    with pytest.raises(UserError, match="for machines that take inner steps: leave it out here"):
        machine(tmp_path, own, directory.corpus).describe(genesis_of(directory))
    machine(tmp_path, None, directory.corpus).describe(genesis_of(directory))
    machine(tmp_path, None).describe(genesis_of(directory, data__private=False))


def test_a_disk_that_refuses_is_told_once_and_stops_nothing(directory: RunDirectory, tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "contributions").write_text("a file where the folder would be")
    own = directory.peers_path / "relay-1.0" / "private"
    folders = OwnFolders(own, tmp_path / "contributions", 1 << 20, told.append)
    run = load_run_file(directory.run_file)
    data = own_data_of(folders, run, genesis_of(directory), "me", relay=True)
    assert isinstance(data, OwnedData) and "they stay here" in told[0]
    for t in (3, 4):
        data.keep(t, 0, "0" * 64, torch.zeros(70))
    data.wait()
    assert len(told) == 2 and "the contribution to round 3 cannot be kept" in told[1]
    there = replace(folders, contributions=tmp_path / "kept")
    other = own_data_of(there, run, genesis_of(directory), "me", relay=True)
    assert other is not None
    other.keep(5, 1, "1" * 64, torch.ones(70))
    other.wait()
    [path] = files_of(tmp_path / "kept")
    assert path.name == f"round-000005-slot-001-{'1' * 16}.contribution"


def test_a_contribution_too_large_for_its_folder_is_told_once(
    directory: RunDirectory, tmp_path: Path
) -> None:
    told: list[str] = []
    own = directory.peers_path / "relay-1.0" / "private"
    folders = OwnFolders(own, tmp_path / "kept", 100, told.append)
    run = load_run_file(directory.run_file)
    data = own_data_of(folders, run, genesis_of(directory), "me", relay=True)
    assert data is not None
    for t in (3, 4):
        data.keep(t, 0, "0" * 64, torch.zeros(70))
    data.wait()
    assert len(told) == 2 and "the contribution to round 3 cannot be kept: it takes" in told[1]
    assert "--keep" in told[1] and not files_of(tmp_path / "kept")


def test_one_text_is_cut_into_a_part_for_each_relay(directory: RunDirectory, texts: Path) -> None:
    parts = [open_corpus(directory.peers_path / f"relay-1.{k}" / "private") for k in range(3)]
    whole = open_corpus(directory.corpus)  # the same texts and tokenizer
    joined = np.concatenate([part.train_tokens for part in parts])
    assert np.array_equal(joined, whole.train_tokens)
    folder = directory.peers_path / "relay-1.2" / "private"
    assert private_options(directory, "relay-1.2") == ["--private-data", str(folder)]
    assert private_options(directory, "data-0") == []


def test_each_relay_may_have_a_text_or_a_corpus_of_its_own(
    directory: RunDirectory, texts: Path, tmp_path: Path
) -> None:
    prepared = directory.peers_path / "relay-1.0" / "private"
    other = write_texts(tmp_path / "other")
    made = create_local(private_run(texts), tmp_path / "run", [texts, prepared, other])
    assert private_options(made, "relay-1.1") == ["--private-data", str(prepared.resolve())]
    assert not (made.peers_path / "relay-1.1" / "private").exists()
    for name in ("relay-1.0", "relay-1.2"):
        corpus = open_corpus(made.peers_path / name / "private")
        assert corpus.tokenizer_hash == open_corpus(made.corpus).tokenizer_hash


def test_a_corpus_that_is_cut_may_be_no_other_than_one_that_is_not(texts: Path, tmp_path: Path) -> None:
    """Its parts have no masks, documents or sources any more by which it would be refused."""
    section = DataSection(source="text", path=str(texts), tokenizer="bytes", packing="whole")
    materialise(section, tmp_path / "whole")
    with pytest.raises(UserError, match="a private corpus is running text of one source"):
        create_local(private_run(texts), tmp_path / "run", [tmp_path / "whole"])
    assert not (tmp_path / "run").exists()


def test_the_python_interface_gives_relays_their_data(texts: Path, tmp_path: Path) -> None:
    run = anabranch.Run.create(private_run(texts), tmp_path / "run", private_data=[texts])
    assert private_options(RunDirectory.open(run.path), "relay-1.0")
    with pytest.raises(UserError, match="give the relays data of their own"):
        anabranch.Run.create(private_run(texts), tmp_path / "other")
    with pytest.raises(UserError, match="private_data is for a local swarm"):
        anabranch.Run.create(private_run(texts), tmp_path / "other", local=False, private_data=[texts])
    assert not (tmp_path / "other").exists()


def test_data_that_do_not_fit_leave_nothing_behind(texts: Path, tmp_path: Path) -> None:
    run, path = private_run(texts), tmp_path / "run"
    for given, words in (
        ([], "give the relays data of their own"),
        ([texts, texts], "names 2 folders for 3 relays: name 3, or one"),
        ([tmp_path / "nowhere"], "there is no such file or folder"),
    ):
        with pytest.raises(UserError, match=words):
            create_local(run, path, given)
    (tmp_path / "short").mkdir()
    for number in range(20):
        (tmp_path / "short" / f"{number:02}.txt").write_text("x")
    with pytest.raises(UserError, match="the corpus is too short"):
        create_local(private_run(texts, batch__rows=2), path, [tmp_path / "short", texts, texts])
    with pytest.raises(UserError, match="this run's data are not private"):
        create_local(small_run(texts), path, [texts])
    assert not path.exists()


def test_commands_refuse_by_name(
    directory: RunDirectory, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(render_run_file(private_run(texts)))
    for arguments, words in (
        (["join", "x", "--private-data", str(tmp_path)], f"--private-data {tmp_path}: there is no corpus"),
        (["join", "x", "--private-data", str(tmp_path), "--corpus", str(tmp_path)], "give one of them"),
        (["join", "x", "--keep", "-1"], "--keep"),
        (["train", str(file), "--run-dir", str(tmp_path / "r")], "give the relays data of their own"),
        (["start", str(file), "--serve", "--run-dir", str(tmp_path / "r")], "needs data of its own"),
        (["chaos", str(file), "--run-dir", str(tmp_path / "r")], "its relays no data of their own"),
        (["verify", str(directory.path), "--contributions", str(tmp_path / "no")], "there is no such folder"),
    ):
        assert main(arguments) == 2, arguments
        assert words in capsys.readouterr().err, arguments
    assert not (tmp_path / "r").exists()
