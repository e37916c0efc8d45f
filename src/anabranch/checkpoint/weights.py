"""Weights of a checkpoint, all stages together, for export and generation."""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError

#: Prefix of weights in a stage's snapshot, which holds the moments too (`train.stage.state`).
_WEIGHTS = "weights/"


def load_weights(directory: RunDirectory, t: int) -> dict[str, Tensor]:
    """All trained weights of the model after step t (of a run with adapters only these), by name, in the
    master dtype, on the CPU. Raises UserError naming the file if one is missing, damaged, or repeats a tensor
    of another stage."""
    merged: dict[str, Tensor] = {}
    for stage, file in sorted(directory.manifest(t).stages.items()):
        path = directory.checkpoint_path(t) / file.name
        try:
            tensors = load(directory.read_stage(t, stage))
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"{path}: right hash, but no snapshot of a stage: {error}") from None
        for key, tensor in tensors.items():
            if not key.startswith(_WEIGHTS):
                continue
            name = key.removeprefix(_WEIGHTS)
            if name in merged:
                raise UserError(f"{path}: holds {name}, which another stage of the checkpoint holds too")
            merged[name] = tensor
    return merged
