"""A checkpoint's weights, all stages together: what export and generation need."""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError

#: Weights are stored as "weights/NAME", beside the moments (train/state.py).
_WEIGHTS = "weights/"


def load_weights(directory: RunDirectory, t: int) -> dict[str, Tensor]:
    """All tensors of the model after step t, by name, in the master dtype, on the CPU.

    Moments are left out. Raises UserError naming the file when one is missing, damaged, or holds a tensor
    that another stage holds too.
    """
    merged: dict[str, Tensor] = {}
    for stage, file in sorted(directory.manifest(t).stages.items()):
        path = directory.checkpoint_path(t) / file.name
        try:
            tensors = load(directory.read_stage(t, stage))
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"{path}: its hash is right, but it is no snapshot of a stage: {error}") from None
        for key, tensor in tensors.items():
            if not key.startswith(_WEIGHTS):
                continue
            name = key.removeprefix(_WEIGHTS)
            if name in merged:
                raise UserError(f"{path}: holds {name}, which another stage of the checkpoint holds too")
            merged[name] = tensor
    return merged
