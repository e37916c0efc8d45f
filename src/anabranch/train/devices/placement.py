"""Placement of a stage's tensors on several devices of one machine.

The blocks of a stage are laid over the devices in order. A stage's flat vectors (weights, moments, sums,
reduced gradients) become `SplitVector`s: each tensor is where its block is computed. Offsets, names and their
order stay those of the whole stage, so that digests, fingerprints and segments do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from anabranch.train.model.layout import Layout

#: Elements to whose multiples, in the whole vector, a run begins in memory. So every tensor has the alignment
#: that it has on one device: 256 bytes of fp32, more than any kernel distinguishes.
ALIGNED = 64


def shared_out(
    blocks: Sequence[int], devices: Sequence[torch.device], sizes: Sequence[int]
) -> dict[int, torch.device]:
    """Device of each block: contiguous shares in proportion to the devices' sizes, at least one block each.
    There must be at least as many blocks as devices. sizes: of each device, in any unit."""
    count, total = len(blocks), sum(sizes)
    ends = [0, *(round(count * upto / total) for upto in accumulate(sizes))]
    for place in range(1, len(ends)):
        ends[place] = max(ends[place - 1] + 1, min(ends[place], count - (len(devices) - place)))
    return {
        block: device
        for device, begin, end in zip(devices, ends, ends[1:], strict=False)
        for block in blocks[begin:end]
    }


@dataclass(frozen=True)
class Run:
    """Elements begin..end of a flat vector, adjacent and on one device. `content` begins at element `base`, a
    multiple of ALIGNED; what it holds before `begin` is of no use."""

    base: int
    begin: int
    end: int
    device: torch.device
    content: Tensor


class Placement:
    """Devices of a stage's tensors. home: device of its input and output, and of tensors of no block."""

    def __init__(self, layout: Layout, at: Mapping[str, torch.device], home: torch.device) -> None:
        """layout: of the stage. at: name -> device, for the tensors of blocks; all others are on `home`."""
        self.home = home
        self._bounds: list[tuple[int, int, torch.device]] = []
        for device, names in groupby(layout.names, lambda name: at.get(name, home)):
            bounds = [layout.bounds[name] for name in names]
            self._bounds.append((bounds[0][0], bounds[-1][1], device))

    def put(self, vector: Tensor) -> Tensor:
        """Copy of a flat vector of the stage, laid over its devices (a `SplitVector`)."""
        return self._made(lambda base, end, device: vector[base:end].to(device, copy=True))

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """Flat vector of zeros for the stage."""
        return self._made(lambda base, end, device: torch.zeros(end - base, dtype=dtype, device=device))

    def _made(self, make: Callable[[int, int, torch.device], Tensor]) -> Tensor:
        runs = []
        for begin, end, device in self._bounds:
            base = begin - begin % ALIGNED
            runs.append(Run(base, begin, end, device, make(base, end, device)))
        return SplitVector(runs)


#: Device of a stage, or its placement on several.
Where = torch.device | Placement


def put(vector: Tensor, where: Where) -> Tensor:
    """Flat vector of a stage where the stage is; on several devices a copy, on one the vector itself if it
    lies there."""
    return where.put(vector) if isinstance(where, Placement) else vector.to(where)


def zeros(elements: int, dtype: torch.dtype, where: Where) -> Tensor:
    """Flat vector of zeros where the stage is. elements: length of the stage's layout."""
    if isinstance(where, Placement):
        return where.zeros(dtype)
    return torch.zeros(elements, dtype=dtype, device=where)


class SplitVector(Tensor):
    """Flat vector of which each run lies on a device. A slice within a run is a plain tensor, a view. `to`
    another dtype, `clone`, `zero_` and `zeros_like` act on each run, `cpu` joins them. All else raises
    TypeError: there is no device on which it could be done. The vector as a whole says that its device is
    `meta`."""

    runs: tuple[Run, ...]

    @staticmethod
    def __new__(cls, runs: Sequence[Run]) -> SplitVector:
        vector: SplitVector = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (runs[-1].end,), dtype=runs[0].content.dtype, device=torch.device("meta")
        )
        vector.runs = tuple(runs)
        return vector

    def __init__(self, runs: Sequence[Run]) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        places = ", ".join(f"{run.begin}:{run.end} on {run.device}" for run in self.runs)
        return f"SplitVector({places})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared without `cls`
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        vector, rest, kwargs = args[0], args[1:], dict(kwargs or {})
        if func is torch.ops.aten.slice.Tensor:
            return vector._slice(*rest)
        if func is torch.ops.aten.zero_.default:
            for run in vector.runs:
                run.content.zero_()
            return vector
        aten = torch.ops.aten
        if func not in (aten._to_copy.default, aten.clone.default, aten.zeros_like.default) or rest:
            raise TypeError(f"{func} is not defined for a vector on several devices")
        if kwargs.get("device") == torch.device("cpu"):
            return vector._joined(kwargs.get("dtype") or vector.dtype)
        return SplitVector([replace(run, content=func(run.content, **kwargs)) for run in vector.runs])

    def _slice(self, dim: int = 0, begin: int = 0, end: int = 0, step: int = 1) -> Tensor:
        end = min(end, len(self))
        for run in self.runs:
            if run.begin <= begin <= end <= run.end and step == 1:
                return run.content[begin - run.base : end - run.base]
        raise TypeError(f"elements {begin} to {end} are not on one device")

    def _joined(self, dtype: torch.dtype) -> Tensor:
        """Copy of the whole vector in host memory."""
        whole = torch.empty(len(self), dtype=dtype)
        for run in self.runs:
            whole[run.begin : run.end] = run.content[run.begin - run.base :]
        return whole
