"""Counts of values and bits that differ, and the relative L2 distance of tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_POPCOUNT = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)
_INTEGERS = {4: torch.int32, 8: torch.int64}


@dataclass
class DifferenceCount:
    """Counts of compared values of one kind, of those that differ, and of differing bits. `first`: place of
    the first difference ("": none). It is also appended to `firsts`, which the counts of all kinds share."""

    compared: int = 0
    differ: int = 0
    bits: int = 0
    """Bits of the IEEE patterns that differ; 0 for words (hashes, counters)."""
    first: str = ""
    firsts: list[str] = field(default_factory=list, repr=False)

    def number(self, ours: float, theirs: float, where: str) -> None:
        """Compare the 64 bits of two floats, and add the result to the counts. where: place of the value."""
        first, second = struct.unpack("<2Q", struct.pack("<2d", ours, theirs))
        bits = (first ^ second).bit_count()
        self._count(1, int(bits > 0), bits, where)

    def numbers(self, ours: Sequence[float], theirs: Sequence[float], where: str, item: str) -> None:
        """Compare two sequences of floats, value by value (`number`), and count the results. Each of the
        longer one's further values counts as one that differs, with no differing bit. Place of a value:
        `where`, `item` and index."""
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            self.number(a, b, f"{where}, {item} {index}")
        shorter, longer = sorted((len(ours), len(theirs)))
        for index in range(shorter, longer):
            self._count(1, 1, 0, f"{where}, {item} {index}")

    def word(self, ours: object, theirs: object, where: str) -> None:
        """Compare two hashes or counters for equality, and count the result, without bits. where: place of
        the value."""
        self._count(1, int(ours != theirs), 0, where)

    def tensor(self, ours: Tensor, theirs: Tensor, where: str) -> None:
        """Compare two tensors of one shape and dtype (fp32 or fp64) bit by bit, and count each value. where:
        place of the tensor."""
        kind = _INTEGERS[ours.element_size()]
        a, b = (tensor.detach().cpu().contiguous().view(kind).reshape(-1) for tensor in (ours, theirs))
        different = torch.bitwise_xor(a, b)
        different = different[different != 0]
        bits = int(_POPCOUNT[different.numpy().view(np.uint8)].sum(dtype=np.int64))
        self._count(len(a), len(different), bits, where)

    def _count(self, compared: int, differ: int, bits: int, where: str) -> None:
        self.compared += compared
        self.differ += differ
        self.bits += bits
        if differ and not self.first:
            self.first = where
            self.firsts.append(where)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative distance ‖ours − theirs‖₂ / ‖theirs‖₂ of two tensors of one shape, in fp64. 0 if they are
    equal, infinite if only `theirs` is zero or a value is not finite."""
    a, b = ours.detach().cpu().double(), theirs.detach().cpu().double()
    apart, length = float(torch.linalg.vector_norm(a - b)), float(torch.linalg.vector_norm(b))
    if apart == 0.0:
        return 0.0
    ratio = apart / length if length else math.inf
    return ratio if math.isfinite(ratio) else math.inf
