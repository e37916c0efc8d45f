"""Run directories, models and tasks of other people: links out of them, files that never end, and sizes
without bounds are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anabranch.checkpoint.directory import RunDirectory
from anabranch.checkpoint.hf import import_hf
from anabranch.errors import ConfigError, UserError
from anabranch.evaluation.task_file import read_task

FILES = ("events.jsonl", "wishes.jsonl", ".vote.json.unfinished", "checkpoints/step-000001", "peers/a/key")


@pytest.mark.parametrize("name", [*FILES, "version"])
@pytest.mark.parametrize("kind", ["link", "fifo", "broken link"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("mine")
    path = directory.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(secret if kind == "link" else tmp_path / "nothing")
    with pytest.raises(UserError, match="run directory"):
        RunDirectory.open(directory.path)
    assert secret.read_text() == "mine"


def test_a_folder_may_be_on_another_disk_and_other_folders_are_not_looked_at(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    directory.checkpoints_path.rename(tmp_path / "other")
    directory.checkpoints_path.symlink_to(tmp_path / "other")
    (directory.path / "wandb").mkdir()
    (directory.path / "wandb" / "latest.log").symlink_to(tmp_path / "log")
    assert RunDirectory.open(directory.path).checkpoints() == []


SHAPE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"max_position_embeddings": 10**12},
        {"hidden_size": 2**40},
        {"vocab_size": 10**13},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 2**24},
        {"model_type": "qwen3", "head_dim": -64},
    ],
)
def test_a_model_without_bounds_is_refused_before_it_is_built(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """A folder of a billion blocks took all memory while the names of its tensors were listed."""
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **change}))
    with pytest.raises(ConfigError):
        import_hf(tmp_path)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "task.jsonl"):
        (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is damaged"):
        import_hf(tmp_path)
    with pytest.raises(UserError, match="is not JSON"):
        read_task(tmp_path / "task.jsonl")
