"""Conversion between tensors and payloads of messages: raw bytes with a checked header, never pickled (I7).

Sums of gradients (int64) are packed (`net.packing`), which takes a millisecond or two per million values: for
payloads that `is_slow` names, convert on another thread than the event loop's. All others share memory.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from anabranch.net import scaled_packing
from anabranch.net.framing import DTYPES, PACKED, SCALED, Blob
from anabranch.net.packing import pack, unpack
from anabranch.protocol.interface.tasks import Payload

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def is_slow(payload: Payload | Blob) -> bool:
    """True if converting the payload takes long, because its values are packed or unpacked."""
    if isinstance(payload, Blob):
        return payload.dtype in (PACKED, SCALED)
    return isinstance(payload, torch.Tensor) and payload.dtype == torch.int64


def to_blob(payload: Payload) -> Blob:
    """Payload of a CPU tensor or of bytes; shares memory with a contiguous tensor unless it is packed."""
    if isinstance(payload, bytes):
        return Blob("uint8", (len(payload),), payload)
    if not isinstance(payload, torch.Tensor):
        raise TypeError(f"a payload is a {type(payload).__name__}, not a tensor")
    tensor = payload.detach().contiguous()
    if tensor.dtype == torch.int64:
        values = tensor.reshape(-1).numpy()
        if scaled_packing.pays(values):
            return Blob(SCALED, tuple(tensor.shape), scaled_packing.pack(values).data)
        return Blob(PACKED, tuple(tensor.shape), pack(values).data)
    flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
    return Blob(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data.cast("B"))


def from_blob(blob: Blob) -> torch.Tensor:
    """Tensor over the received buffer, or unpacked from it. Raises FrameError."""
    if blob.dtype == PACKED:
        values = unpack(np.frombuffer(blob.data, dtype=np.uint8), math.prod(blob.shape))
        return torch.from_numpy(values).reshape(blob.shape)
    if blob.dtype == SCALED:
        packed = np.frombuffer(blob.data, dtype=np.uint8)
        return torch.from_numpy(scaled_packing.unpack(packed, math.prod(blob.shape))).reshape(blob.shape)
    dtype = _DTYPES[blob.dtype]
    if 0 in blob.shape:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.frombuffer(blob.data, dtype=dtype).reshape(blob.shape)
