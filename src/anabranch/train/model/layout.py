"""Flat layout of a stage's parameters: all tensors in name order in one vector.

Weights, moments, accumulators and reduced gradients of a stage all share it, so a reduce is one vector
and a digest or a fingerprint is one pass. Imports no torch at run time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


def raw_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a contiguous tensor, of a dtype that numpy has (not bf16); no copy where it is on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")  # an empty view cannot be cast
    return memoryview(cast(Any, tensor.cpu().numpy())).cast("B")


class Layout:
    """Layout of tensors in a flat vector. names: of the tensors, sorted, the order in which they lie. shapes,
    bounds: by name, the shape and the (begin, end) in the vector. elements: length of the vector."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.names: tuple[str, ...] = tuple(sorted(shapes))
        self.shapes: dict[str, Shape] = {name: tuple(shapes[name]) for name in self.names}
        self.bounds: dict[str, tuple[int, int]] = {}
        begin = 0
        for name in self.names:
            end = begin + math.prod(self.shapes[name])
            self.bounds[name] = (begin, end)
            begin = end
        self.elements = begin

    def header(self) -> bytes:
        """Names and shapes as canonical JSON: hashed ahead of the values."""
        return json.dumps([[name, list(self.shapes[name])] for name in self.names]).encode()

    def flat(self, vector: Tensor, name: str) -> Tensor:
        """Elements of tensor `name` in `vector` (a view, one dimension)."""
        begin, end = self.bounds[name]
        return vector[begin:end]

    def view(self, vector: Tensor, name: str) -> Tensor:
        """Tensor `name` in `vector` (a view in its shape)."""
        return self.flat(vector, name).view(self.shapes[name])

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Every (name, view in its shape) of `vector`, in name order."""
        for name in self.names:
            yield name, self.view(vector, name)
