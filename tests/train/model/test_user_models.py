"""Models of users: planted faults are found; sound ones train to the reference's bits, in real swarms too."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import anabranch
from anabranch.checkpoint.hf import export_hf
from anabranch.cli.main import main
from anabranch.config import RunConfig, render_run_file
from anabranch.errors import ConfigError
from anabranch.train.model.check import check_model
from anabranch.train.model.interface import build
from anabranch.train.model.registry import VARIABLE, counts_of, register_model
from anabranch.train.model.sizes import ModelConfig, block_parameters, end_parameters, total_parameters
from anabranch.train.reference.reference import Reference
from support.api_runs import small_settings, texts_in, verified_losses
from support.small_training import MadeUpBatches, SmallSwarm, small_model, small_run

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
FAULTS = {
    "dropout": "draws random numbers",
    "state": "changes a buffer",
    "in_place": "changes its input in place",
    "future": "lets a token see later ones",
    "unused": "gets no gradient",
    "shape": "returns (2, 12, 15)",
    "mean": "return a sum, not a mean",
    "head": "RuntimeError: no head for this",
    "passing": "something passes from block to block",
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted models, and the example of the documentation, by their names."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv(VARIABLE, "moe=mixture_of_experts:build,series=time_series:build")
    for name in ("sound", "wrong", *FAULTS):
        register_model(name.replace("_", "-"), f"support.planted_models:{name}")
    counts_of.cache_clear()


def shape_of(architecture: str) -> ModelConfig:
    return ModelConfig(architecture, 16, 3, 2, 2, 24, 50, 16, tied=True)


def run_of(architecture: str, stages: int = 2) -> RunConfig:
    run = small_run("gpt", stages)
    return replace(run, model=replace(run.model, architecture=architecture))


@pytest.mark.parametrize("name", ["sound", "moe", "series", "llama", "gpt", "mistral", "qwen2", "gemma"])
def test_a_sound_model_has_no_finding(name: str) -> None:
    assert [finding for finding in check_model(shape_of(name)) if finding.problem] == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found(name: str) -> None:
    problems = [finding.problem for finding in check_model(shape_of(name.replace("_", "-")))]
    assert any(FAULTS[name] in problem for problem in problems), problems


@pytest.mark.parametrize("name", ["sound", "moe"])
@pytest.mark.parametrize("stages", [1, 4])
def test_every_value_equals_the_reference(name: str, stages: int) -> None:
    """A model of torch modules, cut (I3)."""
    run = run_of(name, stages)
    swarm, reference = SmallSwarm(run, seed=2), Reference(run, small_model(run), MadeUpBatches(run))
    losses = []
    for t in (1, 2, 3):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()
        losses.append(sum(step.losses.values()))
    assert losses[-1] < losses[0]


def test_counts_are_those_of_the_modules() -> None:
    config = shape_of("moe")
    model = build(config, torch.device("cpu"), torch.float32)
    sizes = [sum(map(_elements, model.block_shapes(block).values())) for block in range(3)]
    ends = sum(map(_elements, model.end_shapes().values()))
    assert block_parameters(config) == max(sizes) and end_parameters(config) == ends
    assert total_parameters(config) == sum(sizes) + ends
    assert "head.1.weight" not in model.end_shapes(), "the head is tied"


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def test_what_is_not_registered_is_refused_and_never_imported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must return a CausalModel"):
        check_model(shape_of("wrong"))
    for name in ("os", "os.path", "unheard-of"):
        with pytest.raises(ConfigError, match="architecture"):
            anabranch.Run.create({"model.architecture": name}, tmp_path / "run")
    with pytest.raises(ConfigError, match="small letters"):
        register_model("x", "no place")
    with pytest.raises(ConfigError, match="'llama' is a built-in architecture"):
        register_model("llama", "support.planted_models:sound")
    with pytest.raises(anabranch.UserError, match="cannot be exported"):
        export_hf({}, shape_of("moe"), tmp_path / "tokenizer.json", tmp_path / "out")


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    for name, status in (("sound", 0), ("dropout", 1)):
        file.write_text(render_run_file(run_of(name)))
        assert main(["check-model", str(file)]) == status
        assert main(["check-model", str(file), "--json"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sound: 4 blocks, ")
    assert "FAILED the same input gives the same bits" in "".join(lines)
    assert json.loads(lines[-1])["holds"] is False


@pytest.mark.slow
def test_a_mixture_of_experts_trains_in_a_real_swarm_with_a_kill(tmp_path: Path) -> None:
    """Zero bits differ from a single process (I3)."""
    model = {"architecture": "moe", "dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 24}
    shape = small_settings(texts_in(tmp_path), stages=1, relays=2, sequence=16)
    run, _ = verified_losses({**shape, "model": model, "run.steps": 4}, tmp_path / "run", "relay-1.1")
    assert run.load().generate("text", tokens=3, temperature=0).startswith("text")


@pytest.mark.costly
@pytest.mark.slow
def test_a_time_series_trains_in_a_real_swarm_with_a_kill(tmp_path: Path) -> None:
    """No language model, and a loss of its own: zero bits differ from a single process (I3)."""
    lines = [
        "".join(chr(32 + round(47 + 46 * math.sin(0.3 * step + phase))) for step in range(80))
        for phase in range(60)
    ]
    (tmp_path / "series.txt").write_text("\n".join(lines) + "\n")
    model = {"architecture": "series", "dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 24}
    optimizer = {"lr": 2e-2, "warmup_steps": 1}
    shape = small_settings(tmp_path / "series.txt", stages=2, relays=4, sequence=32)
    settings = {**shape, "model": model, "optimizer": optimizer, "run.steps": 8}
    _, losses = verified_losses(settings, tmp_path / "run", "relay-1.1")
    assert losses[-1] < losses[0] / 2
