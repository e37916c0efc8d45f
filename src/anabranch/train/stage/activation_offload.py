"""Offload of an autograd graph's saved tensors to host memory until their gradient arrives.

On a wide-area network a microbatch's gradient arrives seconds later, while its graph fills the accelerator's
memory. `OffloadedActivations` moves the saved tensors to the host after the forward and brings each storage
back when the backward first needs it: the same bytes, so the same bits. A storage that autograd saves several
times (queries, keys and values share their input) is moved once. torch's own `save_on_cpu` moves each saved
tensor separately, weights included.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Storage:
    """Content of a storage (uint8), on `device` or, until the backward needs it, in host memory."""

    device: torch.device
    content: Tensor


@dataclass(frozen=True)
class _Saved:
    """Tensor that autograd saved, as a view of a storage. offset, stride: in elements."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OffloadedActivations:
    """Offload of the tensors that autograd saves in one forward pass, each storage once. Run the forward
    within `hooks()`, then call `move_to_host()`. `resident`: tensors whose storage is never moved: weights
    and constants, which are on the device anyway, and the input that the stage keeps."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        # By address, which is unique until `move_to_host` frees the storages.
        self._storages: dict[int, _Storage] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """Context in which autograd saves tensors through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._restore)

    def move_to_host(self) -> int:
        """Move the storages of the saved tensors, but the resident ones, to host memory; returns their bytes.
        Called once, after the forward. The backward may follow at any time: it brings them back itself."""
        storages = list(self._storages.values())
        self._storages.clear()
        sources = [storage.content for storage in storages]  # freed only when the copies are complete
        for storage in storages:
            pinned = storage.device.type == "cuda"
            host = torch.empty(len(storage.content), dtype=torch.uint8, pin_memory=pinned)
            storage.content = host.copy_(storage.content, non_blocking=True)
        for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return sum(map(len, sources))

    def _save(self, tensor: Tensor) -> Tensor | _Saved:
        untyped = tensor.untyped_storage()
        address = untyped.data_ptr()
        if address in self._resident or not untyped.nbytes():
            return tensor
        if address not in self._storages:
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(untyped)  # type: ignore[call-overload]
            self._storages[address] = _Storage(tensor.device, content)
        storage = self._storages[address]
        return _Saved(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    @staticmethod
    def _restore(saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = saved.storage
        storage.content = storage.content.to(storage.device, non_blocking=True)  # until the graph releases it
        whole = torch.empty(0, dtype=saved.dtype, device=storage.device)
        content = storage.content.untyped_storage()
        return whole.set_(content, saved.offset, saved.size, saved.stride)  # type: ignore[call-overload, no-any-return]
