"""Fine-tuning by adapters in a real swarm: kills, the proof, logits of PEFT and of the merged folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import anabranch
from anabranch.cli.main import main
from anabranch.errors import ConfigError

STEPS = 10


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a llama with its tokenizer, trained for a few steps by one process."""
    root = tmp_path_factory.mktemp("pretrained")
    texts = root / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"text {number}: the quick brown fox\n" * 40)
    config = {
        "model": {"dim": 64, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 96},
        "data": {"source": "text", "path": str(texts), "vocab_size": 300},
        "batch": {"microbatches": 4, "rows": 2, "sequence": 32},
        "pipeline": {"stages": 1},
        "fleet": {"data_nodes": 1, "relays": 1},
        "evaluation": {"every": 0},
        "compute": {"device": "cpu"},
        "run.steps": 3,
    }
    with anabranch.Run.create(config, root / "run") as run:
        for _ in run.metrics():
            pass
    return run.load().export(root / "base")


def settings(pretrained: Path, **changes: object) -> dict[str, object]:
    texts = pretrained.parent / "texts"
    for path in texts.iterdir():
        path.write_text(path.read_text().replace("brown fox", "lazy dogs"))
    return {
        "model.initial_weights": str(pretrained),
        "lora": {"rank": 4, "alpha": 8.0},
        "optimizer": {"lr": 1e-2, "warmup_steps": 1},
        "data": {"source": "text", "path": str(texts)},
        "batch": {"microbatches": 4, "rows": 2, "sequence": 32},
        "pipeline": {"stages": 2},
        "fleet": {"data_nodes": 2, "relays": 4},
        "evaluation": {"every": 0},
        "compute": {"device": "cpu"},
        "run.steps": STEPS,
        "snapshots.every": 2,
        **changes,
    }


@pytest.mark.soak  # train/adapters has their bits, test_kills.py real kills
@pytest.mark.slow
def test_adapters_train_in_a_real_swarm_with_a_kill(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zero bits differ from one process (I3), the loss falls, PEFT and transformers get the same logits."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    with anabranch.Run.create(settings(pretrained), tmp_path / "run") as run:
        losses = []
        for step in run.metrics():
            losses.append(step.loss)
            if step.t == 3:
                run.kill("relay-1.1")
            if step.t == 5:
                run.kill("data-1")
    assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0]
    report = run.verify()
    assert report.holds and report.promise == "bits" and report.steps == STEPS

    frozen = {path.name for path in (run.path / "frozen").iterdir()}
    assert frozen == {f"{each}.bin" for each in run.config.lora.frozen} and len(frozen) == 3
    fetched = {path.name for path in run.path.glob("peers/relay-*/frozen/*.bin")}
    assert fetched == {f"{each}.bin" for each in run.config.lora.frozen[1:]}, "by their hash, over the swarm"
    checkpoint = sum(path.stat().st_size for path in run.path.glob("checkpoints/*/*.safetensors"))
    assert checkpoint < sum(path.stat().st_size for path in (run.path / "frozen").iterdir()) / 2

    trained = run.load()
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert main(["export", str(run.path), "--to", "hf", str(merged)]) == 0
    assert main(["export", str(run.path), "--to", "peft", str(adapter)]) == 0
    assert "adapters after step" in capsys.readouterr().out
    ids = torch.arange(40).view(2, 20)
    base = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    before = base(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        assert (trained(ids) - theirs(ids).logits).abs().max() < 1e-4
        whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
        assert (trained(ids) - whole(ids).logits).abs().max() < 1e-4
        assert (trained(ids) - before).abs().max() > 0.1, "training changed something"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.slow
def test_a_gpt_adapter_loads_in_peft(tmp_path: Path) -> None:
    """GPT-2 keeps its linear weights as (in, out)."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from anabranch.checkpoint.peft import export_peft
    from anabranch.config import LoraSection
    from anabranch.train.adapters.lora import LoraModel, merged
    from anabranch.train.model.interface import build, initial_tensor
    from anabranch.train.model.sizes import ModelConfig

    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    base = transformers.GPT2LMHeadModel(config).eval()
    base.save_pretrained(tmp_path / "base")
    from anabranch.checkpoint.hf import import_hf

    shape, tensors = import_hf(tmp_path / "base")
    assert isinstance(shape, ModelConfig)
    cpu, lora = torch.device("cpu"), LoraSection(rank=3, alpha=5.0)
    model = LoraModel(build(shape, cpu, torch.float32), lora)
    model.use(tensors)
    shapes = {name: s for block in range(2) for name, s in model.block_shapes(block).items()}
    adapters = {name: initial_tensor(model, name, s, 1) + 0.02 for name, s in shapes.items()}
    export_peft(adapters, model, str(tmp_path / "base"), tmp_path / "adapter")
    ids = torch.arange(20).view(2, 10)
    ours = anabranch.api.model.TrainedModel(tmp_path, shape, 0, merged(model, adapters), tmp_path)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        assert (ours(ids) - theirs).abs().max() < 1e-4
        assert (ours(ids) - base.base_model(ids)[0].new_zeros(1)).abs().max() > 0


def test_adapters_need_trained_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank needs trained weights"):
        anabranch.Run.create({"lora.rank": 2}, tmp_path / "run")
