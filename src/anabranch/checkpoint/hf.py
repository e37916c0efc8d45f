"""Import and export of Hugging Face `transformers` models: the classes in CLASSES.

A folder has the library's format: config.json, model.safetensors (or shards with an index), tokenizer.json,
tokenizer_config.json, generation_config.json. Neither direction needs `transformers` to be installed.
Parameter names are the same on both sides; only GPT-2's linear weights, which the library keeps as (in, out),
are transposed. Dropout of a folder is not applied: it changes no weight and no result of the finished model.
Features that the models in `train/` lack (rotary scaling other than Llama 3.1's, biases in a llama, ...) are
refused by the name of the key.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabranch.data.tokenizers import TextTokenizer
from anabranch.errors import ConfigError, UserError
from anabranch.train.model.dense_equivalent import dense_equivalent
from anabranch.train.model.interface import all_shapes, build
from anabranch.train.model.sizes import ModelConfig, validate

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Architecture -> class in `transformers`, and its model_type in config.json.
CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "gpt": ("GPT2LMHeadModel", "gpt2"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "gemma": ("GemmaForCausalLM", "gemma"),
}
#: Suffixes of GPT-2's linear weights, which `transformers` stores transposed (its class Conv1D).
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
#: Suffixes of constant tables that older files hold besides the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")

#: Keys with a single supported value: key -> (the library's default if the key is absent, allowed values).
LLAMA_FIXED: dict[str, tuple[object, tuple[object, ...]]] = {
    "hidden_act": ("silu", ("silu",)),
    "attention_bias": (False, (False,)),
    "mlp_bias": (False, (False,)),
    "quantization_config": (None, (None,)),
}
GPT2_FIXED: dict[str, tuple[object, tuple[object, ...]]] = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "scale_attn_weights": (True, (True,)),
    "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "reorder_and_upcast_attn": (False, (False,)),
    "add_cross_attention": (False, (False,)),
    "quantization_config": (None, (None,)),
}
FIXED: dict[str, dict[str, tuple[object, tuple[object, ...]]]] = {
    "llama": LLAMA_FIXED,
    "gpt": GPT2_FIXED,
    "mistral": {"hidden_act": ("silu", ("silu",)), "quantization_config": (None, (None,))},
    "qwen2": {
        "hidden_act": ("silu", ("silu",)),
        "use_sliding_window": (False, (False,)),
        "quantization_config": (None, (None,)),
    },
    # The library reads "gelu" as the tanh form, too.
    "gemma": {
        "hidden_act": ("gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu")),
        "hidden_activation": (None, (None, "gelu_pytorch_tanh")),
        "attention_bias": (False, (False,)),
        "use_bidirectional_attention": (None, (None, False)),
        "quantization_config": (None, (None,)),
    },
}
#: Architecture -> keys of dropout, which an export writes as 0.
_LLAMA_DROPOUT = ("attention_dropout",)
DROPOUT = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _LLAMA_DROPOUT),
    "gpt": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
}
#: Dropout of a GPT-2 whose config.json has no key for it: the library's default.
GPT2_DROPOUT = 0.1
#: Parameters of Llama 3.1's rotary scaling besides its factor, with the values that all its models have.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA_KEYS = {
    "dim": "hidden_size", "blocks": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab_size": "vocab_size",
    "max_sequence": "max_position_embeddings", "tied": "tie_word_embeddings", "norm_eps": "rms_norm_eps",
}  # fmt: skip
#: Architecture -> field of `ModelConfig` -> key of `config.json`.
SHAPE_KEYS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _LLAMA_KEYS),
    "gpt": {
        "dim": "n_embd", "blocks": "n_layer", "heads": "n_head", "ffn": "n_inner", "vocab_size": "vocab_size",
        "max_sequence": "n_positions", "tied": "tie_word_embeddings", "norm_eps": "layer_norm_epsilon",
    },
}  # fmt: skip
#: Architecture -> key -> the library's default if the key is absent.
SHAPE_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
    "gpt": {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    "mistral": {
        "max_position_embeddings": 131_072, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32_768, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
    "gemma": {
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 256,
    },
}  # fmt: skip


# ---- export ---------------------------------------------------------------------------------------


def export_hf(weights: Mapping[str, Tensor], model: ModelConfig, tokenizer_json: Path, out: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load. `weights` are all tensors of the
    model by name, in any floating dtype, which is kept. A subspace model is written as the dense model with
    the same logits (`train.model.dense_equivalent`). `out` must not exist or must be empty; it is written
    atomically. Raises UserError if it is in use or `CLASSES` lacks the architecture, ConfigError for the
    tokenizer, ValueError for the tensors."""
    check_unused(out)
    if model.architecture not in CLASSES:
        raise UserError(f"{model.architecture} is no model of Hugging Face: it cannot be exported")
    _check_tensors(weights, model)
    if model.subspace:
        weights, model = dense_equivalent(weights, model)
    tokenizer = TextTokenizer(tokenizer_json)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    with new_folder(out) as unfinished:
        tensors = {name: _transposed(name, tensor) for name, tensor in weights.items()}
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        _write_json(unfinished / "config.json", _hf_config(model, tokenizer.separator, dtype))
        # safetensors creates files that only their owner can read.
        (unfinished / WEIGHTS).chmod((unfinished / "config.json").stat().st_mode)
        ends = {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}
        _write_json(unfinished / "generation_config.json", {**ends, "pad_token_id": tokenizer.separator})
        (unfinished / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
        _write_json(unfinished / "tokenizer_config.json", _tokenizer_config(tokenizer, model))


def check_unused(out: Path) -> None:
    """Raise UserError if something is at the path `out` that is not an empty folder; nothing is created."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another place for the export")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context manager of a new folder beside `out`, which is renamed to `out` at a good end, and deleted
    after an error. Raises UserError at the beginning if something is at `out` that is not an empty folder."""
    check_unused(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.partial")
    unfinished.mkdir()
    try:
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _hf_config(model: ModelConfig, separator: int, dtype: str) -> dict[str, Any]:
    name, kind = CLASSES[model.architecture]
    fixed = FIXED[model.architecture]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "torch_dtype": dtype,
        "initializer_range": 0.02,
        "use_cache": True,
        **{key: allowed[0] for key, (_, allowed) in fixed.items() if allowed[0] is not None},
        **{key: 0.0 for key in DROPOUT[model.architecture]},
        **{key: getattr(model, field) for field, key in SHAPE_KEYS[model.architecture].items()},
    }
    if model.architecture == "mistral":
        config["sliding_window"] = model.window or None
    if model.architecture != "gpt":
        config["head_dim"] = model.head_dim
        # The first is read by transformers 4, the second by transformers 5.
        config["rope_theta"] = model.rope_theta
        scaling: dict[str, Any] = {"rope_type": "default"}
        if model.rope_factor != 1.0:
            scaling = {"rope_type": "llama3", "factor": model.rope_factor, **LLAMA3_ROPE}
            config["rope_scaling"] = scaling
        config["rope_parameters"] = {**scaling, "rope_theta": model.rope_theta}
    return config


def _tokenizer_config(tokenizer: TextTokenizer, model: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.separator_token,
        "eos_token": tokenizer.separator_token,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.max_sequence,
    }


# ---- import ---------------------------------------------------------------------------------------


def import_hf(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and tensors (by the names used in `train/`, in the dtype of the file) of a saved model. Raises
    ConfigError naming the file and key of anything missing, damaged or unsupported."""
    config = _read_json(folder / "config.json")
    model = _model_config(folder / "config.json", config)
    prefix = "transformer." if model.architecture == "gpt" else "model."
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in _read_tensors(folder).items():
        if stored_name.endswith(BUFFERS):
            continue
        # Files of the bare model (as GPT-2 was published) lack the prefix.
        has_prefix = stored_name.startswith((prefix, "lm_head."))
        name = stored_name if has_prefix else prefix + stored_name
        if name == "lm_head.weight" and model.tied:
            continue  # a copy of the embedding
        if not tensor.is_floating_point():
            raise ConfigError(f"{folder}: tensor {stored_name} holds {tensor.dtype}, not floating point")
        tensors[name] = _transposed(name, tensor)
    try:
        _check_tensors(tensors, model)
    except ValueError as error:
        raise ConfigError(f"{folder} does not hold the model of its config.json: {error}") from None
    return model, tensors


def _model_config(path: Path, config: dict[str, Any]) -> ModelConfig:
    kind = config.get("model_type")
    known = {kind: architecture for architecture, (_, kind) in CLASSES.items()}
    if not isinstance(kind, str) or kind not in known:
        can = ", ".join(map(repr, known))
        raise ConfigError(f"{path}: model_type = {kind!r} cannot be represented; {can} can")
    _check_fixed_keys(path, config, FIXED[known[kind]])
    try:
        model = _shape(path, config, known[kind])
    except KeyError as error:
        raise ConfigError(f"{path} lacks the key {error}; save the model again") from None
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} holds a value of the wrong type: {error}") from None
    try:
        validate(model)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return model


def _shape(path: Path, config: dict[str, Any], architecture: str) -> ModelConfig:
    """Model shape of a `config.json`. architecture: name in `SHAPE_KEYS`. path: named in messages. Raises
    KeyError for a missing key, TypeError, ValueError or OverflowError for a bad value, ConfigError for one
    that the models of `train` cannot have."""
    values: dict[str, Any] = SHAPE_DEFAULTS[architecture] | config
    types = get_type_hints(ModelConfig)
    if architecture == "gpt":
        values["n_inner"] = config.get("n_inner") or 4 * int(config["n_embd"])
    else:
        values["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    keys = SHAPE_KEYS[architecture]
    shape: dict[str, Any] = {field: types[field](values[key]) for field, key in keys.items()}
    if architecture == "gpt":
        return ModelConfig("gpt", kv_heads=shape["heads"], **shape)
    head_dim = values.get("head_dim")
    theta, factor = _rope(path, config)
    if architecture != "llama":
        width = int(head_dim or 0)
        if shape["heads"] * width == shape["dim"]:
            width = 0
        window = int(values.get("sliding_window") or 0) if architecture == "mistral" else 0
        return ModelConfig(
            architecture, rope_theta=theta, rope_factor=factor, head_width=width, window=window, **shape
        )
    if head_dim is not None and shape["heads"] > 0 and shape["heads"] * int(head_dim) != shape["dim"]:
        raise ConfigError(
            f"{path}: head_dim = {head_dim} cannot be represented; only hidden_size / num_attention_heads "
            f"= {shape['dim'] // shape['heads']} can"
        )
    return ModelConfig("llama", rope_theta=theta, rope_factor=factor, **shape)


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, float]:
    """Base and factor of the rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (transformers 4). Raises ConfigError for kinds and parameters that the models of `train`
    lack."""
    new = config.get("rope_parameters") or {}
    section = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # the former counts
    if not isinstance(config.get(section) or {}, dict):
        raise ConfigError(f"{path}: {section} is no object with keys; save the model again")
    parameters = dict(config.get(section) or {})
    old_kind = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", old_kind)
    if kind not in ("default", "llama3"):
        raise ConfigError(
            f"{path}: {section}.rope_type = {kind!r} cannot be represented; 'default' and 'llama3' can: "
            "choose a model that has one of these"
        )
    theta = parameters.pop("rope_theta", new.get("rope_theta", config.get("rope_theta", 10_000.0)))
    fixed = LLAMA3_ROPE if kind == "llama3" else {}
    lacking = [key for key in ("factor", *fixed) if fixed and key not in parameters]
    factor = float(parameters.pop("factor", 1.0)) if kind == "llama3" else 1.0
    for key, value in parameters.items():
        if key not in fixed or value != fixed[key]:
            can = f"{key} = {fixed[key]:g}" if key in fixed else "rope_theta"
            raise ConfigError(f"{path}: {section}.{key} = {value!r} cannot be represented; only {can} can")
    if lacking:
        raise ConfigError(f"{path}: {section} lacks {lacking[0]}, which the kind {kind!r} needs")
    if not factor >= 1:
        raise ConfigError(f"{path}: {section}.factor = {factor:g}; it must be at least 1")
    return float(theta), factor


def dropout_of(folder: Path) -> dict[str, float]:
    """Dropout probabilities above 0 in a folder's config.json, by key; those that the key's absence means
    included. A run trains without dropout. Raises ConfigError if the file cannot be read."""
    config = _read_json(folder / "config.json")
    if config.get("model_type") == "gpt2":
        found = {key: config.get(key, GPT2_DROPOUT) for key in DROPOUT["gpt"]}
    else:
        found = {key: config.get(key, 0.0) for key in _LLAMA_DROPOUT}
    return {key: value for key, value in found.items() if value}


def _check_fixed_keys(
    path: Path, config: dict[str, Any], fixed: dict[str, tuple[object, tuple[object, ...]]]
) -> None:
    for key, (default, allowed) in fixed.items():
        value = config.get(key, default)
        if value not in allowed:
            absent = "" if key in config else " (the library's default for an absent key)"
            raise ConfigError(
                f"{path}: {key} = {json.dumps(value)}{absent} cannot be represented; "
                f"only {' or '.join(json.dumps(choice) for choice in allowed)} can. If the model works "
                "with it, write that value into config.json"
            )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{folder / INDEX} lacks the key 'weight_map'; fetch or save it again")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names a file outside the folder: {name}")
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing; only safetensors are read: save the model again with "
                "save_pretrained(..., safe_serialization=True)"
            )
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); fetch or save it again") from None
    return tensors


# ---- both -----------------------------------------------------------------------------------------


def _check_tensors(tensors: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Raise ValueError unless `tensors` are exactly the parameters of `model` by name and shape."""
    shapes = all_shapes(build(model, torch.device("cpu"), torch.float32))
    for name in shapes.keys() - tensors.keys():
        raise ValueError(f"the tensor {name} is missing")
    for name, tensor in tensors.items():
        if name not in shapes:
            raise ValueError(f"the tensor {name} is not one of the model's")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"the tensor {name} has shape {tuple(tensor.shape)}, not {shapes[name]}")


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Tensor, contiguous and on the CPU, in the other library's layout (an involution): GPT-2's linear
    weights are transposed."""
    tensor = tensor.detach().cpu()
    turn = name.startswith("transformer.h.") and name.endswith(CONV1D) and tensor.dim() == 2
    return (tensor.t() if turn else tensor).contiguous()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); name a folder made by save_pretrained "
            "or by `anabranch export`"
        ) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged: it is not a JSON object; fetch or save it again")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
