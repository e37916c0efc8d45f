"""Full disk while a checkpoint is written: the last good one stays, and the room is given back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.node.driver.checkpoint_io import CheckpointIo


def test_a_failed_checkpoint_leaves_the_last_one_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_checkpoint(1, "base", "run", {0: ([b"x" * 100], "f")})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device; make room"):
            directory.write_checkpoint(2, "base", "run", {0: ([b"y" * 100], "f")})
    assert [entry.name for entry in directory.checkpoints_path.iterdir()] == ["step-000001"]
    assert directory.read_stage(1, 0) == b"x" * 100


def test_a_checkpoint_without_room_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    files = CheckpointIo(directory, "run", keep=2, newest=0)
    files.write(1, "base", {})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(UserError, match="needs 4 MB and the disk has 1 MB free; make room"):
        files.write(2, "base", {})
    assert directory.checkpoints() == [1]


def test_a_run_directory_without_room_is_not_there_for_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="cannot create the run directory"):
            RunDirectory.create(tmp_path / "run")
    RunDirectory.create(tmp_path / "run")
