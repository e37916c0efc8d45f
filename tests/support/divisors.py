"""Divisions of torch by plain numbers: an accelerator multiplies by the reciprocal instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Divisors(TorchDispatchMode):
    """Context that notes the divisions by plain numbers. plain: operation and divisor of each."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        divides = func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_)
        if divides and not isinstance(args[1], Tensor) and not (kwargs or {}).get("rounding_mode"):
            self.plain.append((str(func), args[1]))
        return func(*args, **(kwargs or {}))
