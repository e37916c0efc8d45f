"""Model cards and pushed checkpoints: what they hold, and what they keep to themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import yaml

import anabranch
from anabranch.api.model_card import OPTIMIZERS, _safe, model_card
from anabranch.api.publish import push_new
from anabranch.cli.main import main
from anabranch.config import CONSTRAINTS, load_run_file, render_run_file, with_changes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a real run of four steps."""
    root = tmp_path_factory.mktemp("published")
    texts = root / "secret-folder" / "texts"
    texts.mkdir(parents=True)
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 20)
    config = {
        "model": {"dim": 16, "blocks": 1, "heads": 2, "kv_heads": 2, "ffn": 24},
        "data": {"source": "text", "path": str(texts), "tokenizer": "bytes"},
        "batch": {"microbatches": 2, "rows": 1, "sequence": 16},
        "pipeline": {"stages": 1},
        "fleet": {"data_nodes": 1, "relays": 1},
        "evaluation": {"every": 2, "windows": 1},
        "checkpoint": {"every": 2},
        "compute": {"device": "cpu"},
        "run.steps": 4,
    }
    with anabranch.Run.create(config, root / "mine") as run:
        run.wait()
    return run.path


@pytest.mark.slow
def test_the_card_tells_data_steps_and_contributors(finished: Path, tmp_path: Path) -> None:
    anabranch.export(finished, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text("utf-8")
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["library_name"] == "transformers" and "llama" in head["tags"]
    assert "| Steps | 4 of 4, 32 tokens each, 0 skipped |" in text
    assert "| Data | text `texts`, fingerprint `" in text and "secret-folder" not in text
    assert "| Optimizer | AdamW, peak learning rate" in text
    assert "nats per token" in text and "after step 4" in text
    shares = [float(line.split(": ")[1].split("%")[0]) for line in text.splitlines() if "of the work" in line]
    assert "- relay-1.0: " in text and "- data-0: " in text and sum(shares) == pytest.approx(100, abs=0.2)
    assert "anabranch verify mine" in text and "- stage 1: `" in text
    assert "anabranch1:" not in text and "127.0.0.1" not in text


def test_the_card_names_sources_and_adapters(finished: Path, tmp_path: Path) -> None:
    """Each source of a mixture, without its place on the disk; adapters with their rank and layers."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    file = copy / "run.toml"
    revision = "0123456789" * 4
    changes = {
        "data.source": "stdlib", "data.path": "",
        "data.mixture": ["text:/home/me/code", f"hub:owner/chats@{revision}", "stdlib"],
        "model.initial_weights": f"hub:owner/small@{revision}", "lora.rank": 4, "lora.targets": ["q_proj"],
    }  # fmt: skip
    file.write_text(render_run_file(with_changes(load_run_file(file), changes)))
    text = model_card(copy, 4, 257)
    assert f"| Data | text `code` + hub `owner/chats@{revision}` + stdlib, fingerprint" in text
    assert "/home/me" not in text
    assert f"`hub:owner/small@{revision}`, frozen; LoRA adapters of rank 4 (alpha 16) on q\\_proj |" in text


def test_the_card_of_a_run_on_private_data_says_so(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    file = copy / "run.toml"
    changes = {"data.private": True, "pipeline.stages": 0, "round.slots": 2, "fleet.relays_per_stage": [2]}
    file.write_text(render_run_file(with_changes(load_run_file(file), changes)))
    text = model_card(copy, 4, 257)
    assert "in its rounds each machine trained on data of its own, of which the run knows nothing |" in text
    assert "the run directory and the machines' contributions can compute every step again" in text


def test_every_optimizer_has_a_name_in_the_card() -> None:
    allowed = CONSTRAINTS["optimizer.kind"]
    assert set(OPTIMIZERS) == set(allowed.choices)  # type: ignore[union-attr]


def test_names_of_strangers_do_nothing_in_a_card() -> None:
    assert _safe("<img src=x>[a](http://b)\n# c") == "\\<img src=x\\>\\[a\\]\\(http://b\\) \\# c"


@pytest.mark.slow
def test_checkpoints_are_pushed_and_complete(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = fsspec.filesystem("memory")
    assert anabranch.push(finished, "memory://bucket/mine", 2) == "memory://bucket/mine/step-000002"
    names = {Path(path).name for path in store.ls("/bucket/mine/step-000002", detail=False)}
    local = finished / "checkpoints" / "step-000002"
    assert names == {path.name for path in local.iterdir()} and "manifest.json" in names
    for name in names:
        assert store.cat(f"/bucket/mine/step-000002/{name}") == (local / name).read_bytes()
    assert store.exists("/bucket/mine/run.toml")

    # A complete copy is not written again; the others are.
    store.pipe("/bucket/mine/step-000002/manifest.json", b"kept")
    pushed: list[str] = []
    assert push_new(finished, "memory://bucket/mine", pushed=pushed.append) == 2
    assert [address[-11:] for address in pushed] == ["step-000002", "step-000004"]
    assert store.cat("/bucket/mine/step-000002/manifest.json") == b"kept"

    folder = tmp_path / "store"
    assert main(["push", str(finished), folder.as_uri(), "--as", "hf"]) == 0
    assert f"pushed {folder.as_uri()}" in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == "llama"
    assert (folder / "README.md").is_file()


@pytest.mark.slow
def test_what_cannot_be_pushed_is_said(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(anabranch.UserError, match="nothing://x"):
        anabranch.push(finished, "nothing://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(anabranch.UserError, match="cannot be written"):
        anabranch.push(finished, (tmp_path / "file" / "below").as_uri())
    with pytest.raises(anabranch.UserError, match="no such checkpoint"):
        anabranch.push(finished, tmp_path.as_uri(), 99)
