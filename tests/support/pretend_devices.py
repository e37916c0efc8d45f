"""Parts of the host that pretend to be devices: an operation on tensors of two of them fails, as on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anabranch.train.devices import split_model
from anabranch.train.devices.placement import SplitVector

#: Operations that read one device and write another.
COPIES = ("aten::_to_copy", "aten::copy_")


class PretendDevices(TorchDispatchMode):
    """Mode in which what was made on, or moved to, "cpu:N" belongs there, and so do results of operations on
    it. What was made on plain "cpu" belongs nowhere and may be used with anything."""

    def __init__(self) -> None:
        super().__init__()
        self._place: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no address is used again
        self.operations: dict[str, int] = {}
        """Device -> number of operations on it."""

    def place(self, tensor: Tensor) -> str:
        """Device to which a tensor belongs; "" for none."""
        return self._place.get(tensor.untyped_storage()._cdata, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(isinstance(each, SplitVector) for each in given):
            with self:  # it does the same to each run
                return SplitVector.__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        name, device = func._schema.name, (kwargs or {}).get("device")
        places = {self.place(each) for each in given if each.dim() or name not in COPIES} - {""}
        if name == "aten::copy_":
            places = {self.place(args[0])} - {""}
        elif device is not None:
            places = {str(device)} if device.index is not None else set()
        assert len(places) < 2, f"{name} is given tensors on {' and '.join(sorted(places))}"
        for place in places:
            self.operations[place] = self.operations.get(place, 0) + 1
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                if not any(made is each for each in given) and storage._cdata not in self._place:
                    self._kept.append(storage)
                    self._place[storage._cdata] = next(iter(places), "")
        return result


class _Move(torch.autograd.Function):
    """Move to a part of the host whose gradient goes back to where x was, as torch does between GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: PretendDevices, device: torch.device) -> Tensor:
        ctx.back = torch.device(mode.place(x) or "cpu")
        return x.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return gradients[0].to(ctx.back, copy=True), None, None


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevices]:
    """Context in which parts of the host are devices."""
    mode = PretendDevices()
    monkeypatch.setattr(split_model, "moved", lambda x, device: _Move.apply(x, mode, device))
    with mode:
        yield mode
