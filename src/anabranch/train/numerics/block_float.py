"""Rounding of vectors to integers of few bits with a power-of-two scale for each block of 64 values.

A rounded value is a small integer times a power of two, so it is exact in fp32, in the 64-bit sums of
`exact`, and in the packed form in which these travel (`net.scaled_packing`): what is sent is what is added.
Blocks lie at multiples of 64 of the flat vector, whatever part of it a peer holds. A vector of 8-bit values
has a form in bytes (`to_bytes`), too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.protocol.interface.tasks import part_bounds
from anabranch.train.numerics.exact import UNIT_EXPONENT

#: Values of a block, which share a scale.
BLOCK = 64
#: Blocks that are converted at a time; bounds the memory of intermediate results. A choice: no bit depends on
#: it.
BLOCKS_AT_ONCE = 1 << 14
#: Name in the run file -> bits of a value, sign included; 0: not rounded.
BITS = {"exact": 0, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}


def rounded(values: Tensor, bits: int) -> Tensor:
    """Vector of floats with each block of 64 rounded to integers of `bits` bits times a power of two (half to
    even).

    The scale is the least power of two with which the block's greatest magnitude fits, at least the unit of
    exact sums. The vector is new, but for bits = 0 `values` itself. With bits = 16 each value is rounded to
    fp16, infinite beyond its range.
    """
    if not bits or not len(values):
        return values
    if bits == 16:
        return values.half().to(values.dtype)
    missing = -len(values) % BLOCK
    table = torch.cat((values, values.new_zeros(missing))) if missing else values
    table = table.view(-1, BLOCK)
    most = (1 << (bits - 1)) - 1
    # greatest = mantissa · 2^exponent with a mantissa in [0.5, 1): it fits with 2^exponent / 2^(bits-1), or
    # twice that if it would be rounded to most + 1.
    mantissa, exponent = torch.frexp(table.abs().amax(1))
    exponent = exponent - (bits - 1) + (mantissa * (most + 1) > most + 0.49).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(min=-UNIT_EXPONENT))[:, None]
    return (table / scale).round_().mul_(scale).view(-1)[: len(values)]


def rounded_sums(sums: Tensor, bits: int) -> Tensor:
    """Finished sums (int64, units of 2⁻⁴⁸) with each block rounded as by `rounded`; unchanged if bits = 0."""
    if not bits:
        return sums
    values = sums.double().mul_(2.0**-UNIT_EXPONENT)
    return rounded(values, bits).mul_(2.0**UNIT_EXPONENT).to(torch.int64)


def to_bytes(values: Tensor) -> Tensor:
    """Bytes (uint8 vector) of a vector of floats that `rounded` gave with 4 or 8 bits: 65 for each block of
    64, the last of which is filled up with zeros. First the exponents of all blocks, then the values as
    integers, both as signed bytes: `from_bytes` has the same values, to the bit (but no zero below zero)."""
    blocks = -(-len(values) // BLOCK)
    made = torch.zeros(blocks * (1 + BLOCK), dtype=torch.int8)
    exponents, integers = made[:blocks], made[blocks:]
    for begin in range(0, blocks, BLOCKS_AT_ONCE):
        part = values[BLOCK * begin : BLOCK * (begin + BLOCKS_AT_ONCE)].cpu().double()
        missing = -len(part) % BLOCK
        table = (torch.cat((part, part.new_zeros(missing))) if missing else part).view(-1, BLOCK)
        # The greatest magnitude is 64 to 127 units then; a block whose unit was larger has multiples of it.
        exponent = torch.frexp(table.abs().amax(1)).exponent - 7
        small = table * _powers_of_two(-exponent)[:, None]
        exponents[begin : begin + len(table)] = exponent.to(torch.int8)
        integers[BLOCK * begin : BLOCK * (begin + len(table))] = small.view(-1).to(torch.int8)
    return made.view(torch.uint8)


def from_bytes(data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Vector of `count` floats from its bytes (`to_bytes`), which may come from anybody. Raises ValueError if
    their number is wrong; other wrong bytes are other values, some of which may not be finite."""
    blocks = -(-count // BLOCK)
    if data.dtype != torch.uint8 or tuple(data.shape) != (blocks * (1 + BLOCK),):
        raise ValueError(f"{tuple(data.shape)} {data.dtype} are not the bytes of {count} values of 8 bits")
    signed, made = data.view(torch.int8), torch.empty(count, dtype=dtype)
    exponents, integers = signed[:blocks], signed[blocks:]
    for begin in range(0, blocks, BLOCKS_AT_ONCE):
        first, end = BLOCK * begin, min(count, BLOCK * (begin + BLOCKS_AT_ONCE))
        scale = _powers_of_two(exponents[begin : begin + BLOCKS_AT_ONCE])[:, None]
        table = integers[first : first + BLOCK * len(scale)].view(-1, BLOCK)
        made[first:end] = (table.double() * scale).view(-1)[: end - first]
    return made


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Powers of two in fp64, exact, made of their bits. exponents: integers of -128 to 127."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def aligned_bounds(elements: int, parts: int) -> list[tuple[int, int]]:
    """(Begin, end) of `parts` contiguous ranges that together have all `elements` elements and begin at
    multiples of 64; the last ranges are empty if there are fewer blocks than parts."""
    blocks = part_bounds(-(-elements // BLOCK), parts)
    return [(min(BLOCK * begin, elements), min(BLOCK * end, elements)) for begin, end in blocks]
