"""Gradient sums with a coarser unit: fewer bytes on the line, and still no trace of order or owners.

`CoarseAccumulator` rounds a microbatch's contribution to a parameter to a multiple of 2^e instead of 2⁻⁴⁸.
The exponent e is one for each segment of up to 1,024 parameters, and a pure function of the state before the
step: a fixed share of the root mean square that Adam's second moment remembers. So every replica has the same
exponents without a message, and the sums remain plain integer sums in units of 2⁻⁴⁸, exact in any order.
Their low bits are zero. `net.packing` sends no zero bits: one byte for most sums.

Nothing saturates: a sum that is larger than expected takes more bytes. Where Adam has seen no gradient yet
(before the first step) the unit is 2⁻⁴⁸.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.train.model.layout import Layout
from anabranch.train.numerics.exact import BLOCK, UNIT_EXPONENT, ExactAccumulator, check_range

#: Parameters that share an exponent: a chunk of `net.packing`.
SEGMENT = 1024
#: Largest exponent of a unit over 2⁻⁴⁸: sums of 2¹⁵ rounded contributions stay far inside int64.
MOST_DROPPED = 46


class CoarseAccumulator(ExactAccumulator):
    """int64 sums in units of 2⁻⁴⁸ of contributions that are rounded to their segment's unit.

    `prepare` must be called with the exponents of the state before each step. For an embedding or a learned
    position the gradients of one microbatch's tokens are added exactly, and each row's sum is rounded.
    """

    def __init__(
        self, layout: Layout, contributions: Mapping[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layout, contributions, dtype, device)
        self._lengths = segment_lengths(layout).to(device)
        self._unit = torch.ones(layout.elements, dtype=dtype, device=device)
        """Unit of each parameter over 2⁻⁴⁸, a power of two."""

    def prepare(self, exponents: Tensor | None) -> None:
        assert exponents is not None, "a coarse sum has the exponents of its state"
        exponents = exponents.to(self._unit.device)
        units = torch.ldexp(torch.ones_like(exponents, dtype=self._unit.dtype), exponents)
        self._unit = torch.repeat_interleave(units, self._lengths)

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
    """Exponent of each segment's unit over 2⁻⁴⁸ (int32), from Adam's second moment after `steps` steps; 0,
    the unit 2⁻⁴⁸ itself, where Adam has seen no gradient.

    digits: binary digits by which the unit lies below the root mean square of the segment's gradient.
    """
    squares = segment_sums(exp_avg_sq, segment_starts(layout))
    left = 1.0
    for _ in range(min(steps, 10_000)):  # not a power, which differs between libraries
        left *= beta2
    lengths = segment_lengths(layout).to(squares.device)
    mean = squares / lengths / (1.0 - left) if steps else torch.zeros_like(squares)
    mantissa, exponent = torch.frexp(mean)
    root = torch.div(exponent - 1, 2, rounding_mode="floor")  # 2^root <= root mean square < 2^(root + 1)
    exponents = (root - digits + UNIT_EXPONENT).clamp(0, MOST_DROPPED)
    return torch.where((mantissa > 0) & torch.isfinite(mean), exponents, 0).to(torch.int32)


def segment_starts(layout: Layout) -> tuple[int, ...]:
    """First element of every segment: of each tensor, and of each 1,024 elements of the stage."""
    starts = {begin for begin, end in layout.bounds.values() if begin < end}
    return tuple(sorted(starts | set(range(0, layout.elements, SEGMENT))))


def segment_lengths(layout: Layout) -> Tensor:
    """Parameters of every segment."""
    starts = segment_starts(layout)
    return torch.tensor(
        [end - begin for begin, end in zip(starts, (*starts[1:], layout.elements), strict=False)],
        dtype=torch.int64,
    )


def segment_sums(values: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Sum in fp64 of every segment. A sum of so few elements does not depend on the number of threads."""
    elements, sums = len(values), torch.empty(len(starts), dtype=torch.float64, device=values.device)
    ends = (*starts[1:], elements)
    aligned = [
        number
        for number, (begin, end) in enumerate(zip(starts, ends, strict=True))
        if begin % SEGMENT == 0 and end - begin == SEGMENT
    ]
    table = values[: elements // SEGMENT * SEGMENT].view(-1, SEGMENT)
    where = torch.tensor([starts[number] // SEGMENT for number in aligned], dtype=torch.int64)
    for begin in range(0, len(aligned), 64):
        some = torch.tensor(aligned[begin : begin + 64], device=values.device)
        sums[some] = table[where[begin : begin + 64].to(values.device)].double().sum(1)
    for number in set(range(len(starts))) - set(aligned):
        sums[number] = values[starts[number] : ends[number]].double().sum()
    return sums
