"""Gradient sums that do not depend on the order of addition or on who adds which part.

`ExactAccumulator`: a contribution g to a parameter is added as the integer round(g · 2⁴⁸), half to even.
Integer sums are associative and invertible: every order gives the same bits, and a contribution that was
counted wrongly is recomputed and subtracted. docs/explanation/numerics.md derives precision and range.
`FastAccumulator` adds floats: half the memory, but another order gives other bits, and subtracting a
contribution leaves a rounding error in its last bits.

A contribution is defined so that every peer computes the same integers. For a linear weight, a bias or a norm
gain it is the gradient over all tokens of one microbatch, rounded once. For an embedding or a learned
position each *token's* gradient is its own contribution, rounded by itself and added to its row: no dense V×D
tensor is made, and the order of the tokens does not matter. A tied weight follows both rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import blake3
import torch
from torch import Tensor

from anabranch.protocol.interface.tasks import part_bounds
from anabranch.train.devices.placement import Where, zeros
from anabranch.train.model.layout import Layout, raw_bytes

#: Binary exponent of the unit of exact sums, 2⁻⁴⁸; docs/explanation/numerics.md derives it.
UNIT_EXPONENT = 48
#: Elements handled at a time: few enough that intermediate results stay in cache, enough that starting an
#: operation costs little in comparison. No bit depends on it.
BLOCK = 1 << 17
#: Elements of a block of the sums of squares; the last block is zero-padded. Part of the numerics.
SQUARES_BLOCK = 4096
#: Binary exponents of the greatest magnitude that a replica's sum of floats may have, in fp32 and in fp64. A
#: replica may lie: as plain choices, sums of 256 such sums stay in the range of floats, and their squares
#: below the greatest that are believed.
FLOAT_EXPONENTS = 118, 472


class Overflow(ArithmeticError):
    """Non-finite or out-of-range value in `tensor`."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"non-finite or out-of-range values in {tensor}")
        self.tensor = tensor


class Accumulator(Protocol):
    """Sum of a stage's contributions over the microbatches that a replica serves. `flat` is the sum, in the
    stage's `Layout`. A refused contribution (Overflow) leaves it unchanged."""

    flat: Tensor

    def add(self, name: str, gradient: Tensor, sign: int = 1, most: int = 0) -> None:
        """Add (`sign` 1) or take back (-1) a contribution to the tensor `name`, of its shape. most: in a
        round, the most contributions that the tensor may get, which bounds each (0: as in a synchronous
        iteration). Raises Overflow, and adds nothing, if a value is not finite or beyond the bound."""
        ...

    def add_rows(self, name: str, rows: Tensor, gradient: Tensor, sign: int = 1) -> None:
        """Add row j of `gradient` (tokens, dim) to row rows[j] (tokens,) of the table `name`, `sign` times,
        ±1. Each row is a contribution of its own: it is rounded by itself. Raises Overflow, and adds nothing,
        if a value is not finite or beyond the limit."""
        ...

    def clear(self) -> None: ...

    def prepare(self, exponents: Tensor | None) -> None:
        """Set the units of the contributions to come, by the exponents of `coarse_sums.unit_exponents`; None
        where units do not depend on the state."""
        ...


class ExactAccumulator:
    """Exact gradient sums: int64 in units of 2⁻⁴⁸, on `device`. `contributions[name]` is how many may be
    added to a tensor in one iteration; they are not counted. A contribution with a value beyond
    2⁶²/contributions units (in a round, beyond 2⁶²/`most`), or one that is not finite, raises Overflow and
    adds nothing. So no sum can leave int64 even if every contribution is added twice. dtype: type in which
    contributions are scaled."""

    def __init__(
        self, layout: Layout, contributions: Mapping[str, int], dtype: torch.dtype, device: Where
    ) -> None:
        self._layout = layout
        self._limit = {
            name: math.ldexp(1.0, 62 - UNIT_EXPONENT) / contributions[name] for name in layout.names
        }
        self._dtype = dtype
        # Device -> scaled values and units of a block.
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.flat = zeros(layout.elements, torch.int64, device)
        # Views of every tensor's blocks, made once: slicing costs as much as adding a small block.
        self._sums: dict[str, tuple[Tensor, ...]] = {
            name: torch.split(layout.flat(self.flat, name), BLOCK) for name in layout.names
        }

    def add(self, name: str, gradient: Tensor, sign: int = 1, most: int = 0) -> None:
        limit = math.ldexp(1.0, 62 - UNIT_EXPONENT) / most if most else self._limit[name]
        check_range(name, gradient, limit)
        sums, values = self._sums[name], gradient.reshape(-1)
        for some_sums, some_values in zip(sums, torch.split(values, BLOCK), strict=True):
            some_sums.add_(self._round(some_values), alpha=sign)

    def add_rows(self, name: str, rows: Tensor, gradient: Tensor, sign: int = 1) -> None:
        check_range(name, gradient, self._limit[name])
        table = self._layout.view(self.flat, name)
        dim = gradient.shape[1]
        step = max(1, BLOCK // dim)
        for begin in range(0, len(rows), step):
            end = begin + step
            units = self._round(gradient[begin:end].reshape(-1)).view(-1, dim)
            table.index_add_(0, rows[begin:end], units, alpha=sign)

    def clear(self) -> None:
        self.flat.zero_()

    def prepare(self, exponents: Tensor | None) -> None:
        """Do nothing: the unit is the same for every state."""

    def _round(self, values: Tensor) -> Tensor:
        """values · 2⁴⁸ to the nearest integers. The product is exact: a power of two, in range. The result of
        up to BLOCK values is memory that the next call for the device overwrites."""
        count = values.numel()
        if count > BLOCK:  # a single row that is wider
            return torch.mul(values, 2.0**UNIT_EXPONENT).round_().to(torch.int64)
        if values.device not in self._scratch:
            scaled = torch.empty(BLOCK, dtype=self._dtype, device=values.device)
            self._scratch[values.device] = scaled, torch.empty_like(scaled, dtype=torch.int64)
        scaled, units = self._scratch[values.device]
        if count < BLOCK:
            scaled, units = scaled[:count], units[:count]
        return units.copy_(torch.mul(values, 2.0**UNIT_EXPONENT, out=scaled).round_())


class FastAccumulator:
    """Floating-point sums in the master dtype. `contributions` is the most that may be added to any tensor in
    one iteration. Each must be small enough that their sum is at most `float_limit`, so that neither that
    of all replicas nor its square can leave the range of floats; else Overflow is raised. `most` does not
    change that bound. So here, too, an overflow is a property of a single contribution, found by the peer
    that computes it."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: Where, contributions: int = 1
    ) -> None:
        self._layout = layout
        self._limit = float_limit(dtype) / contributions
        self.flat = zeros(layout.elements, dtype, device)

    def add(self, name: str, gradient: Tensor, sign: int = 1, most: int = 0) -> None:
        check_range(name, gradient, self._limit)
        self._layout.view(self.flat, name).add_(gradient, alpha=sign)

    def add_rows(self, name: str, rows: Tensor, gradient: Tensor, sign: int = 1) -> None:
        check_range(name, gradient, self._limit)
        self._layout.view(self.flat, name).index_add_(0, rows, gradient.to(self.flat.dtype), alpha=sign)

    def clear(self) -> None:
        self.flat.zero_()

    def prepare(self, exponents: Tensor | None) -> None:
        """Do nothing: sums of floats have no unit."""


def float_limit(dtype: torch.dtype) -> float:
    """Greatest magnitude that a replica's sum may have in a run whose sums are floats."""
    return math.ldexp(1.0, FLOAT_EXPONENTS[dtype == torch.float64])


def check_range(name: str, values: Tensor, limit: float) -> None:
    """Raise Overflow(name) unless every |value| <= limit; NaN raises it, too."""
    low, high = torch.aminmax(values.detach())
    if not (-limit <= float(low) and float(high) <= limit):
        raise Overflow(name)


def check_finite(name: str, values: Tensor) -> None:
    """Raise Overflow(name) if any value is NaN or infinite."""
    # A sum is not finite if a value is not, and is cheaper than a check of each; huge finite values that only
    # overflow together are told apart by the second test.
    if not math.isfinite(float(values.detach().sum())) and not bool(torch.isfinite(values).all()):
        raise Overflow(name)


def cut(flat: Tensor, parts: int, align: int = 1) -> tuple[Tensor, ...]:
    """Copy of a flat vector on the CPU, cut into `parts` contiguous parts of about equal length
    (`part_bounds`). align: number of elements; where `flat` has enough, each part begins at a multiple of
    it."""
    copy = flat.to("cpu", copy=True)
    groups = -(-len(copy) // align)
    if groups < parts:
        groups, align = len(copy), 1
    return tuple(copy[begin * align : end * align] for begin, end in part_bounds(groups, parts))


def sum_part(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum in `dtype` of one part of a stage's gradient; `parts` has that part of each replica's sums (in a
    reduce by cells, of the replicas of a cell, or of the sums of all cells). Integer parts (units of 2⁻⁴⁸)
    are added exactly; a float `dtype` gets the sum, rounded through fp64, an integer one the exact sum. Float
    parts are added in their order and rounded after each addition. Raises ValueError if the parts differ in
    length or type."""
    first = parts[0]
    if any(part.shape != first.shape or part.dtype != first.dtype for part in parts):
        raise ValueError("the members' parts differ in length or type")
    result = torch.empty(first.shape, dtype=dtype, device=first.device)
    for begin in range(0, len(first), BLOCK):
        end = begin + BLOCK
        total = first[begin:end]
        if len(parts) > 1:
            total = total + parts[1][begin:end]  # not in place: the caller owns the parts
            for part in parts[2:]:
                total.add_(part[begin:end])
        result[begin:end] = _in_full(total) if dtype.is_floating_point else total
    return result


def reduced(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Finished sum, of integers in units of 2⁻⁴⁸ or of floats, as new values of `dtype` (the master
    dtype)."""
    return sum_part((total,), dtype)


def _in_full(total: Tensor) -> Tensor:
    """Value of a finished sum before it is rounded to the master dtype; that of integers in fp64."""
    return total.double().mul_(2.0**-UNIT_EXPONENT) if total.dtype == torch.int64 else total


def digest(layout: Layout, gradient: Tensor) -> str:
    """BLAKE3 (hex) of names and shapes, then of the reduced gradient, flat in `layout`, in name order."""
    hasher = blake3.blake3(layout.header())
    hasher.update(raw_bytes(gradient))
    return str(hasher.hexdigest())


def squares(layout: Layout, gradient: Tensor) -> dict[str, float]:
    """Name -> sum of squares of each tensor of a flat gradient, correctly rounded from fp64 sums over fixed
    blocks. Within a numerics class it depends on the values alone, not on the number of threads (as a plain
    sum would) or the partition. Infinite if it overflows."""
    return {name: sum_of_squares(layout.flat(gradient, name)) for name in layout.names}


def sum_of_squares(values: Tensor) -> float:
    """Sum of squares of a vector: fp64 sums over fixed blocks of 4,096 elements, added by `math.fsum`.
    Infinite if it overflows."""
    sums: list[float] = []
    step = 16 * SQUARES_BLOCK
    for begin in range(0, len(values), step):
        wide = values[begin : begin + step].double()
        missing = -len(wide) % SQUARES_BLOCK
        if missing:
            wide = torch.cat((wide, wide.new_zeros(missing)))
        wide = wide.view(-1, SQUARES_BLOCK)
        sums.extend((wide * wide).sum(1).tolist())
    try:
        return math.fsum(sums)
    except OverflowError:  # finite, but not their sum
        return math.inf
