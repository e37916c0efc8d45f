"""Llama, GPT-2, Mistral, Qwen2, Gemma: logits of transformers after cuts at every block; export, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.checkpoint.hf import CLASSES, export_hf, import_hf
from anabranch.config import DataSection
from anabranch.data.tokenizers import write_tokenizer
from anabranch.errors import ConfigError
from anabranch.train.model.interface import build
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.sizes import (
    ModelConfig,
    block_parameters,
    end_parameters,
    total_parameters,
)

transformers = pytest.importorskip("transformers")
#: The largest logit difference that is allowed.
TOLERANCE = 1e-5
SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
#: Keys of GPT-2's configuration for the same shape.
GPT2_SHAPE = {
    "vocab_size": 300, "n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0,
    "initializer_range": 0.04,
}  # fmt: skip
#: Name -> configuration class, model class, further settings.
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rope_theta": 5e4}),
    "gpt2": ("GPT2", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "rope_theta": 1e6}),
    "mistral-wide-heads": ("Mistral", {"sliding_window": None, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma-untied": ("Gemma", {"head_dim": 16, "tie_word_embeddings": False}),
}


def theirs(name: str) -> Any:
    """Model of transformers with random weights, gains and biases."""
    family, settings = FAMILY[name]
    settings = dict(settings)
    theta = settings.pop("rope_theta", 10_000.0)
    torch.manual_seed(2)
    # transformers 4 reads the first, transformers 5 the second
    rope = {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    shape, head = (GPT2_SHAPE, "LMHeadModel") if family == "GPT2" else (SHAPE | rope, "ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**shape, **settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0
    return model


def ids_of(rows: int, sequence: int) -> Tensor:
    return torch.randint(0, 300, (rows, sequence), generator=torch.Generator().manual_seed(1))


def cut_logits(config: ModelConfig, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits by stages of one block each: every stage has the tensors of its own block alone, and activations
    travel as bytes."""
    model = build(config, torch.device("cpu"), torch.float32)
    ends = PlainWeights({name: tensors[name] for name in model.end_shapes()})
    x = model.embed(ends, ids)
    for block in range(config.blocks):
        own = PlainWeights({name: tensors[name] for name in model.block_shapes(block)})
        sent = x.numpy().tobytes()
        x = model.block(own, block, torch.frombuffer(bytearray(sent), dtype=torch.float32).view(x.shape))
    return model.head(ends, x)


@pytest.mark.parametrize("name", FAMILY)
def test_a_folder_of_transformers_has_the_same_logits_and_returns(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "in")
    config, tensors = import_hf(tmp_path / "in")
    assert CLASSES[config.architecture][0] == type(model).__name__
    assert sum(tensor.numel() for tensor in tensors.values()) == total_parameters(config)
    assert total_parameters(config) == 3 * block_parameters(config) + end_parameters(config)
    ids = ids_of(2, 40)
    with torch.no_grad():
        expected, found = model(ids).logits, cut_logits(config, tensors, ids)
    assert expected.abs().max() > 0.5
    assert (expected - found).abs().max() <= TOLERANCE

    tokenizer = tmp_path / "tokenizer.json"
    section = DataSection(tokenizer="bpe", vocab_size=300)
    write_tokenizer(section, ["the river and its arms\n" * 50], tokenizer)
    export_hf(tensors, config, tokenizer, tmp_path / "out")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert type(again).__name__ == type(model).__name__ == CLASSES[config.architecture][0]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, expected)
    back, copies = import_hf(tmp_path / "out")
    assert back == config and all(torch.equal(copies[key], tensor) for key, tensor in tensors.items())


def test_a_window_hides_what_is_before_it(tmp_path: Path) -> None:
    theirs("mistral-window").save_pretrained(tmp_path)
    config, tensors = import_hf(tmp_path)
    assert config.window == 7
    ids = ids_of(1, 40)
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 300
    with torch.no_grad():
        far = (cut_logits(config, tensors, ids) - cut_logits(config, tensors, changed))[0].abs().amax(-1)
    # Three blocks of windows of seven: the first token reaches 18 tokens further, and no other.
    assert bool((far[:19] > 0).all()) and not far[19:].any()


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen2", "use_sliding_window", True, "use_sliding_window = true cannot"),
        ("qwen2", "hidden_act", "gelu", 'hidden_act = "gelu" cannot'),
        ("gemma", "attention_bias", True, "attention_bias = true cannot"),
        ("gemma", "use_bidirectional_attention", True, "use_bidirectional_attention = true cannot"),
        ("gemma", "rope_parameters", {"rope_type": "yarn"}, "rope_type = 'yarn'"),
        ("mistral", "quantization_config", {"bits": 4}, "quantization_config"),
        ("mistral", "model_type", "mixtral", "model_type = 'mixtral' cannot be represented; 'llama', 'gpt2'"),
    ],
)
def test_others_are_refused_by_name(name: str, key: str, value: object, words: str, tmp_path: Path) -> None:
    theirs(name).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**content, key: value}))
    with pytest.raises(ConfigError, match=words):
        import_hf(tmp_path)
