"""Tensors as they travel: raw bytes with a checked header, without copies. Never pickled (I7)."""

from __future__ import annotations

import torch

from anabranch.net.framing import Blob
from anabranch.protocol.tasks import Payload

_NAMES: dict[torch.dtype, str] = {
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def to_blob(payload: Payload) -> Blob:
    """The bytes of a contiguous CPU tensor, shared with it."""
    if not isinstance(payload, torch.Tensor):
        raise TypeError(f"a payload is a {type(payload).__name__}, not a tensor")
    tensor = payload.detach().contiguous()
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
    return Blob(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data.cast("B"))


def from_blob(blob: Blob) -> torch.Tensor:
    """A tensor over the received buffer."""
    dtype = _DTYPES[blob.dtype]
    if 0 in blob.shape:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.frombuffer(blob.data, dtype=dtype).reshape(blob.shape)
