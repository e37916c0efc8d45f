"""Counter-based draws for stochastic rounding: the draw of an element is a hash of a key and its number.

Integer operations alone, so that every device and every number of threads gives the same draws.
"""

from __future__ import annotations

import hashlib
from functools import cache

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
    word = _numbered(key, first // 2, (first + count + 1) // 2, device)
    word.mul_(_signed(0x7FEB352D))
    word.bitwise_xor_((word >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF)).bitwise_xor_(_signed(key >> 32))
    draws = word.view(torch.int16)[:count].to(torch.float32)
    return torch.add(_middle(device), draws, alpha=2.0**-16, out=draws)


def _numbered(key: int, begin: int, end: int, device: torch.device) -> Tensor:
    """First step of `lowbias32`, w ^ (w >> 16), for the words from number `begin` to before `end`. w: the
    word's number ^ the key's lower half. The numbers of a table of 2^16 words share their upper bits, so the
    step is one XOR with a constant."""
    lower, parts = _lower(device), []
    while begin < end:
        within, upper = begin & 0xFFFF, begin & ~0xFFFF
        count = min(end - begin, len(lower) - within)
        other = (key ^ upper) & 0xFFFFFFFF
        parts.append(lower[within : within + count] ^ _signed(other ^ (other >> 16)))
        begin += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def _lower(device: torch.device) -> Tensor:
    """All numbers of 16 bits, in order (int32, on `device`)."""
    return torch.arange(1 << 16, dtype=torch.int32, device=device)


@cache
def _middle(device: torch.device) -> Tensor:
    """Scalar tensor 0.5 + 2⁻¹⁷ on `device`, to which `dither` adds a signed multiple of 2⁻¹⁶ for each
    draw."""
    return torch.tensor(0.5 + 2.0**-17, device=device)


def _signed(word: int) -> int:
    """Lowest 32 bits of a number as a signed integer."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
