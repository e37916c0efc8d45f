"""Counter-based draws for stochastic rounding: the draw of an element is a hash of a key and its number.

Integer operations alone, so that every device and every number of threads gives the same draws.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def draw_key(*parts: int | str) -> int:
    """Key (64 bits) of the draws for one tensor, e.g. from (seed, iteration, microbatch, boundary)."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def dither(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Draws (count,) of the elements from number `first` (even) on, in fp32: odd multiples of 2⁻¹⁷ in [0, 1).
    Two elements share a word of 32 bits: the hash `lowbias32` (C. Wellons, "Prospecting for hash functions",
    2018) of their number and the key's lower half, combined with its upper half."""
    word = torch.arange(first // 2, (first + count + 1) // 2, dtype=torch.int32, device=device)
    halves = (
        _mixed(word.bitwise_xor_(_signed(key))).bitwise_xor_(_signed(key >> 32)).view(torch.int16)[:count]
    )
    return halves.to(torch.float32).mul_(2.0**-16).add_(0.5 + 2.0**-17)


def _signed(word: int) -> int:
    """Lowest 32 bits of a number as a signed integer."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _mixed(word: Tensor) -> Tensor:
    """`lowbias32` of each element, in place."""
    word.bitwise_xor_((word >> 16) & 0xFFFF).mul_(_signed(0x7FEB352D))
    word.bitwise_xor_((word >> 15) & 0x1FFFF).mul_(_signed(0x846CA68B))
    return word.bitwise_xor_((word >> 16) & 0xFFFF)
