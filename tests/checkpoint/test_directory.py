"""The run directory: whole checkpoints or none, and damage found before it is used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anabranch.checkpoint import directory as module
from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError

STAGES = {0: b"embedding", 1: b"blocks" * 1000, 2: b""}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs" / "tiny")


def write(run: RunDirectory, t: int, mark: bytes = b"") -> Path:
    pieces = {s: (iter([data[:5], memoryview(data[5:]), mark]), f"print-{s}") for s, data in STAGES.items()}
    return run.write_checkpoint(t, base="b" * 64, run_id="run", stages=pieces)


def test_a_checkpoint_is_read_back(run: RunDirectory) -> None:
    path = write(run, 400)
    assert path.name == "step-000400"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "stage-0.safetensors",
        "stage-1.safetensors",
        "stage-2.safetensors",
    ]
    again = RunDirectory.open(run.path)
    assert again.checkpoints() == [400] and again.latest_checkpoint() == 400
    manifest = again.manifest(400)
    assert (manifest.t, manifest.base, manifest.run_id) == (400, "b" * 64, "run")
    for stage, data in STAGES.items():
        assert again.read_stage(400, stage) == data
        assert manifest.stages[stage].fingerprint == f"print-{stage}"


def test_numpy_pieces_are_written_as_bytes(run: RunDirectory) -> None:
    piece = np.arange(300, dtype=np.uint8)
    run.write_checkpoint(1, "base", "run", {1: ([memoryview(piece)], "f")})
    assert run.read_stage(1, 1) == piece.tobytes()


def test_writing_again_replaces(run: RunDirectory) -> None:
    write(run, 7)
    write(run, 7, mark=b"!")
    assert run.read_stage(7, 2) == b"!"
    assert sorted(p.name for p in run.checkpoints_path.iterdir()) == ["step-000007"]


def test_a_writer_that_dies_leaves_no_checkpoint(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, 1)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        write(run, 2)
    monkeypatch.undo()
    assert run.checkpoints() == [1]
    assert len(list(run.checkpoints_path.iterdir())) == 2
    assert run.prune(keep=2) == []
    assert [p.name for p in run.checkpoints_path.iterdir()] == ["step-000001"]


def test_pruning_keeps_the_newest(run: RunDirectory) -> None:
    for t in (1, 5, 1_000_000, 999_999):
        write(run, t)
    assert run.checkpoints() == [1, 5, 999_999, 1_000_000]
    assert run.prune(keep=2) == [1, 5]
    assert run.checkpoints() == [999_999, 1_000_000]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "has 5999 bytes instead of 6000"),
        (lambda p: p.write_bytes(b"B" + p.read_bytes()[1:]), "does not have the hash"),
        (lambda p: p.unlink(), "No such file"),
    ],
)
def test_a_damaged_stage_is_refused(run: RunDirectory, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    write(run, 1)
    write(run, 2)
    damage(run.checkpoint_path(2) / "stage-1.safetensors")
    with pytest.raises(UserError) as caught:
        run.read_stage(2, 1)
    message = str(caught.value)
    assert "step-000002/stage-1.safetensors" in message and words in message
    assert "go on from the checkpoint of step 1" in message
    assert run.read_stage(2, 0) == STAGES[0]
    assert run.read_stage(1, 1) == STAGES[1]


def test_damage_without_an_earlier_checkpoint_says_so(run: RunDirectory) -> None:
    path = write(run, 2) / "manifest.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=r"manifest\.json: is not a manifest .* no earlier checkpoint"):
        run.manifest(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "a checkpoint of version 2"),
        ({"t": 3}, "is of step 3"),
        ({"extra": 1}, "is not a manifest"),
    ],
)
def test_a_strange_manifest_is_refused(run: RunDirectory, change: dict[str, object], words: str) -> None:
    path = write(run, 2) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=words):
        run.read_stage(2, 1)


def test_a_manifest_cannot_name_a_file_elsewhere(run: RunDirectory, tmp_path: Path) -> None:
    path = write(run, 2) / "manifest.json"
    path.write_text(path.read_text().replace("stage-1.safetensors", "../../run.toml"))
    with pytest.raises(UserError, match="leads out of its folder"):
        run.read_stage(2, 1)


def test_a_manifest_with_a_name_that_no_file_can_have_is_refused(run: RunDirectory) -> None:
    path = write(run, 2) / "manifest.json"
    path.write_text(path.read_text().replace("stage-1.safetensors", "stage\\u0000"))
    with pytest.raises(UserError, match="names a file that no file system has"):
        run.read_stage(2, 1)


def test_what_is_not_there_is_named(run: RunDirectory) -> None:
    with pytest.raises(UserError, match="no checkpoint yet"):
        run.latest_checkpoint()
    write(run, 3)
    with pytest.raises(UserError, match="no such checkpoint; checkpoints of this run: 3"):
        run.manifest(4)
    with pytest.raises(UserError, match="no stage 9"):
        run.read_stage(3, 9)


def test_a_directory_is_not_taken_twice(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already; continue it with `anabranch resume"):
        RunDirectory.create(run.path)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        RunDirectory.create(file)
    with pytest.raises(UserError, match="cannot create"):
        RunDirectory.create(file / "below")
    assert file.read_text() == "mine"


def test_another_version_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    (run.path / "version").write_text("2\n")
    with pytest.raises(UserError, match=r"run directory of version 2.*reads version 1"):
        RunDirectory.open(run.path)
    with pytest.raises(UserError, match="is not a run directory"):
        RunDirectory.open(tmp_path)


def test_a_peers_folder_is_its_owners_alone(run: RunDirectory) -> None:
    path = run.peer("relay-1")
    assert path.is_dir() and path.stat().st_mode & 0o077 == 0
    assert run.peer("relay-1") == path


def test_one_process_leads(run: RunDirectory) -> None:
    with run.led(), pytest.raises(UserError, match="another process leads the run"), run.led():
        pass
    with run.led():  # the first has let go
        pass
