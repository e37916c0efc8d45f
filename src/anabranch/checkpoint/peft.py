"""Export of low-rank adapters as a folder of Hugging Face's PEFT. PEFT need not be installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from anabranch.checkpoint.hf import new_folder
from anabranch.train.adapters.lora import LoraModel

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: Beginning of every parameter's name in a file of PEFT.
_PREFIX = "base_model.model."


def export_peft(adapters: Mapping[str, Tensor], model: LoraModel, base: str, out: Path) -> None:
    """Write a folder that `PeftModel.from_pretrained` loads. `adapters` are the trained tensors by name.
    base: name or path of the model that they belong to. `out` must not exist or must be empty. Raises
    UserError if it is in use, and ValueError if names or shapes of the tensors are not those of the model's
    adapters."""
    shapes = {
        name: shape
        for block in range(model.config.blocks)
        for name, shape in model.block_shapes(block).items()
    }
    if {name: tuple(tensor.shape) for name, tensor in adapters.items()} != shapes:
        raise ValueError("the adapters are not those of the run file")
    with new_folder(out) as folder:
        tensors = {_PREFIX + name: tensor.contiguous() for name, tensor in adapters.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": model.rank,
            "lora_alpha": model.alpha,
            "target_modules": model.targets,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": model.config.architecture == "gpt",
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # safetensors creates files that only their owner can read.
        (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)
