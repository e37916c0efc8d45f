"""Gradient sums with a coarser unit: fewer bytes on the line, and still no trace of order or owners.

`CoarseAccumulator` rounds a microbatch's contribution to a parameter to a multiple of 2^e instead of 2⁻⁴⁸.
The exponent e is one for each segment of up to 64 parameters, and a pure function of the state before the
step: a fixed share of the root mean square that Adam's second moment remembers. So every replica has the same
exponents without a message, and the sums remain plain integer sums in units of 2⁻⁴⁸, exact in any order.
Their low bits are zero. `net.scaled_packing` sends no zero bits: one byte for most sums.

Nothing saturates: a sum that is larger than expected takes more bytes. Where Adam has seen no gradient yet
(before the first step) the unit is 2⁻⁴⁸.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.train.devices.placement import SplitVector, Where, put
from anabranch.train.model.layout import Layout
from anabranch.train.numerics.exact import BLOCK, UNIT_EXPONENT, ExactAccumulator, check_range

#: Parameters that share an exponent: a block of `net.scaled_packing`.
SEGMENT = 64
#: Largest exponent of a unit over 2⁻⁴⁸: sums of 2¹⁵ rounded contributions stay far inside int64.
MOST_DROPPED = 46
#: Segments that are summed at a time, so that their elements stay in the cache. No bit depends on it.
_TOGETHER = 4096


class CoarseAccumulator(ExactAccumulator):
    """Gradient sums (int64, units of 2⁻⁴⁸) of a run with coarse sums: each contribution is first rounded to
    the unit of its segment (up to 64 adjacent parameters, `Segments`). `prepare` must be called with the
    exponents of the state before each step. For a table (token embedding, learned positions) the gradients of
    one microbatch's tokens are added exactly and rounded by row."""

    def __init__(
        self, layout: Layout, contributions: Mapping[str, int], dtype: torch.dtype, device: Where
    ) -> None:
        super().__init__(layout, contributions, dtype, device)
        # Segments cross the bounds of devices: their units are made in host memory if there are several.
        self._where = device
        one = device if isinstance(device, torch.device) else torch.device("cpu")
        self._lengths = segments(layout, one).lengths
        self._unit = put(torch.ones(layout.elements, dtype=dtype, device=one), device)
        """Unit of each parameter over 2⁻⁴⁸, a power of two."""

    def prepare(self, exponents: Tensor | None) -> None:
        assert exponents is not None, "a coarse sum has the exponents of its state"
        exponents = exponents.to(self._lengths.device)
        units = torch.ldexp(torch.ones_like(exponents, dtype=self._unit.dtype), exponents)
        self._unit = put(torch.repeat_interleave(units, self._lengths), self._where)

    def add(self, name: str, gradient: Tensor, sign: int = 1, most: int = 0) -> None:
        limit = math.ldexp(1.0, 62 - UNIT_EXPONENT) / most if most else self._limit[name]
        check_range(name, gradient, limit)
        values, units = gradient.reshape(-1), self._layout.flat(self._unit, name)
        for begin, some_sums in zip(range(0, len(values), BLOCK), self._sums[name], strict=True):
            some = units[begin : begin + BLOCK]
            # Powers of two: product and quotient are exact, and only `round` rounds.
            scaled = values[begin : begin + BLOCK].to(some.dtype) * 2.0**UNIT_EXPONENT
            some_sums.add_(scaled.div_(some).round_().mul_(some).to(torch.int64), alpha=sign)

    def add_rows(self, name: str, rows: Tensor, gradient: Tensor, sign: int = 1) -> None:
        check_range(name, gradient, self._limit[name])
        touched, places = torch.unique(rows, return_inverse=True)
        dim = gradient.shape[1]
        exact = torch.zeros((len(touched), dim), dtype=torch.int64, device=gradient.device)
        step = max(1, BLOCK // dim)
        for begin in range(0, len(rows), step):
            end = begin + step
            exact.index_add_(0, places[begin:end], self._round(gradient[begin:end].reshape(-1)).view(-1, dim))
        units = self._layout.view(self._unit, name)[touched].to(torch.int64)
        rounded = exact.add_(units >> 1).bitwise_and_(-units)  # half of a unit upwards
        self._layout.view(self.flat, name).index_add_(0, touched, rounded, alpha=sign)


def unit_exponents(layout: Layout, exp_avg_sq: Tensor, beta2: float, steps: int, digits: int) -> Tensor:
    """Rounding unit of each segment (up to 64 adjacent parameters) for the next step's contributions, as an
    int32 exponent e: the unit is 2^(e - 48). It lies `digits` binary digits below the root mean square of the
    segment's gradient, estimated from Adam's second moment `exp_avg_sq` (flat, of decay rate `beta2`) after
    `steps` steps, but 0 <= e <= MOST_DROPPED. e = 0 where Adam has seen no gradient, or the moment is not
    finite."""
    if isinstance(exp_avg_sq, SplitVector):
        exp_avg_sq = exp_avg_sq.cpu()
    found = segments(layout, exp_avg_sq.device)
    # Divisors are tensors: an accelerator multiplies by the reciprocal of a plain number.
    mean = found.sums(exp_avg_sq) / found.lengths
    mean = mean / torch.full_like(mean, _seen(beta2, steps)) if steps else torch.zeros_like(mean)
    mantissa, exponent = torch.frexp(mean)
    root = torch.div(exponent - 1, 2, rounding_mode="floor")  # 2^root <= root mean square < 2^(root + 1)
    exponents = (root - digits + UNIT_EXPONENT).clamp(0, MOST_DROPPED)
    return torch.where((mantissa > 0) & torch.isfinite(mean), exponents, 0).to(torch.int32)


def _seen(beta2: float, steps: int) -> float:
    """1 - beta2^steps, the share of a second moment that is of gradients and not of its initial zero. More
    than 10,000 steps count as 10,000."""
    left = 1.0
    for _ in range(min(steps, 10_000)):  # not a power, which differs between libraries
        left *= beta2
    return 1.0 - left


@dataclass(frozen=True)
class Segments:
    """Segments of a stage's flat vector, whose parameters share an exponent: blocks of 64 elements, divided
    where a tensor begins inside a block. All are tensors. lengths: parameters of every segment (int64).
    alone: for every segment, True if it is a whole block. blocks: for each of these its block's number.
    pieces: for each other segment its elements' numbers, a row of 64, filled up with the vector's length."""

    lengths: Tensor
    blocks: Tensor
    alone: Tensor
    pieces: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Sums (segments,) in fp64 of a flat vector's values, one for each segment. Each is taken in a fixed
        order, so its bits are the same everywhere."""
        missing = -len(values) % SEGMENT
        table = torch.cat((values, values.new_zeros(missing))) if missing else values
        parts = [_row_sums(some) for some in torch.split(table.view(-1, SEGMENT), _TOGETHER)]
        sums = torch.empty(len(self.lengths), dtype=torch.float64, device=values.device)
        sums[self.alone] = torch.cat(parts)[self.blocks]
        if len(self.pieces):
            sums[~self.alone] = _row_sums(torch.cat((values, values.new_zeros(1)))[self.pieces])
        return sums


def segments(layout: Layout, device: torch.device) -> Segments:
    """Division of a stage's parameters into segments that share a rounding unit in coarse sums (up to 64
    adjacent parameters of one tensor), with its tensors on `device`."""
    begins = tuple(sorted({begin for begin, end in layout.bounds.values() if begin < end}))
    return _segments(begins, layout.elements, device)


@functools.lru_cache(maxsize=8)
def _segments(begins: tuple[int, ...], elements: int, device: torch.device) -> Segments:
    """Segments of a vector of `elements` elements. begins: first element of every tensor."""
    starts = np.union1d(np.arange(0, elements, SEGMENT), np.array(begins, dtype=np.int64))
    ends = np.append(starts[1:], elements)[: len(starts)]
    alone = (starts % SEGMENT == 0) & ((ends % SEGMENT == 0) | (ends == elements))
    pieces = starts[~alone, None] + np.arange(SEGMENT)
    pieces = np.where(pieces < ends[~alone, None], pieces, elements)
    arrays = ends - starts, starts[alone] // SEGMENT, alone, pieces
    return Segments(*(torch.from_numpy(array).to(device) for array in arrays))


def _row_sums(table: Tensor) -> Tensor:
    """Sums in fp64 of rows of 64: halves are added until one column is left."""
    table = table.double()
    while table.shape[1] > 1:
        half = table.shape[1] // 2
        table = table[:, :half] + table[:, half:]
    return table[:, 0]
