"""Codecs of a tensor: pure functions of its values, of the run's keys and, if asked for, of a counter.

An encoded tensor is one flat uint8 vector without a header: codec, shape and block size are properties of the
run, so the receiver knows the exact size and refuses any other.

    bf16, fp16  the values, rounded to the nearest
    int8, int4  a bf16 scale for each block, then the blocks; the last block is padded with zeros

Every operation is exact or correctly rounded (maximum, division, rounding to integers, product), so the bytes
do not depend on threads, on the order of operations, or on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from anabranch.train.codec.dither import dither
from anabranch.train.codec.sizes import encoded_bytes

#: Largest magnitude that a block codec takes. A choice: scales and their products stay far inside fp32.
LARGEST = math.ldexp(1.0, 126)
#: Smallest scale, the smallest normal number of bf16. A block with a smaller one is encoded as zeros, so that
#: no device that flushes subnormal numbers can differ.
SMALLEST_SCALE = math.ldexp(1.0, -126)
#: Elements handled at a time: few enough that intermediate results (2 MiB each) stay in the last cache, and
#: enough that operations take longer than their calls. On a busy core stochastic int8 took 0.19 of the line's
#: time (`benchmarks.wire.codecs`) with 2^16, 0.12 with 2^17, 0.09 with 2^18 to 2^20. No bit depends on it.
TOGETHER = 1 << 19
#: Bytes of the widest number that a payload holds: bf16 and fp16.
_WIDEST = 2


class NotRepresentable(ArithmeticError):
    """Value that a codec cannot encode: NaN, infinite, or too large."""


class BadPayload(ValueError):
    """Bytes that are no tensor in a codec; the message says why."""


class Codec(Protocol):
    """Encoding of a tensor as a flat uint8 vector."""

    def encoded_bytes(self, elements: int) -> int:
        """Bytes of an encoded tensor of so many elements."""
        ...

    def encode(self, values: Tensor, key: int | None = None) -> Tensor:
        """Encoded values (any shape; fp32, fp64 or bf16). key: round stochastically by the draws of this key;
        None: to the nearest. Raises NotRepresentable for a value that is not finite or too large."""
        ...

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decoded tensor, of `shape` and `dtype`, of what `encode` returned; always finite. Raises BadPayload
        if the payload has another size, a value that is not finite, or a scale out of range."""
        ...


class CastCodec:
    """Values in a narrower floating-point type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        #: Bits of the exponent, which are all set in what is not finite.
        self._exponent = 0x7F80 if dtype == torch.bfloat16 else 0x7C00

    def encoded_bytes(self, elements: int) -> int:
        return elements * self._dtype.itemsize

    def encode(self, values: Tensor, key: int | None = None) -> Tensor:
        """Nearest values; `key` is ignored. Raises NotRepresentable if one is not finite in the narrower
        type."""
        narrow = values.detach().contiguous().to(self._dtype).reshape(-1)
        if not self._finite(narrow):
            raise NotRepresentable(f"a value is not finite in {self._dtype}")
        return narrow.view(torch.uint8) if len(narrow) else narrow.to(torch.uint8)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        elements = math.prod(shape)
        payload = checked(payload, self.encoded_bytes(elements))
        narrow = payload.view(self._dtype) if elements else payload.to(self._dtype)
        if not self._finite(narrow):
            raise BadPayload("it has a value that is not finite")
        # A copy even if nothing changes: the payload may be kept, and the result must not share its memory.
        return narrow.to(dtype, copy=True).reshape(tuple(shape))

    def _finite(self, narrow: Tensor) -> bool:
        bits = narrow.view(torch.int16)
        return not len(bits) or int((bits & self._exponent).max()) < self._exponent


class BlockCodec:
    """Integers of 8 or 4 bits, with a scale for each block of `block` elements in order. scale: the smallest
    bf16 number at which the block's largest magnitude fits 127 (or 7) steps; a value is its nearest multiple
    of the scale (with a key: one of the two next to it), or 0 if the scale would be below SMALLEST_SCALE. Two
    values of 4 bits share a byte: element j of a block has the low half, element j + block/2 the high half.
    block: an even number. Raises ValueError for other numbers of bits or an odd block."""

    def __init__(self, bits: int, block: int) -> None:
        if bits not in (4, 8) or block < 2 or block % 2:
            raise ValueError(f"a block codec has 4 or 8 bits and blocks of an even size, not {bits}, {block}")
        self._bits, self._block = bits, block
        self._levels = (1 << (bits - 1)) - 1
        self._together = max(1, TOGETHER // block)

    def encoded_bytes(self, elements: int) -> int:
        return encoded_bytes(f"int{self._bits}", self._block, elements, 0)

    def encode(self, values: Tensor, key: int | None = None) -> Tensor:
        flat = values.detach().reshape(-1)
        wide = flat if flat.dtype == torch.float64 else flat.float()
        missing = -len(wide) % self._block
        if missing:
            wide = torch.cat((wide, wide.new_zeros(missing)))
        table = wide.view(-1, self._block)
        payload = torch.empty(self.encoded_bytes(len(flat)), dtype=torch.uint8, device=flat.device)
        if not len(table):
            return payload
        scales, steps = self._split(payload, len(table))
        for begin in range(0, len(table), self._together):
            end = begin + self._together
            self._encode(table[begin:end], scales[begin:end], steps[begin:end], key, begin * self._block)
        return payload

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        elements = math.prod(shape)
        payload = checked(payload, self.encoded_bytes(elements))
        blocks = -(-elements // self._block)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.empty((blocks, self._block), dtype=wide, device=payload.device)
        if blocks:
            scales, steps = self._split(payload, blocks)
            factors = scales.to(wide)
            if not bool(((factors >= 0) & (factors <= 2 * LARGEST / (self._levels + 1))).all()):
                raise BadPayload("it has a scale that no tensor has")
            for begin in range(0, blocks, self._together):
                end = begin + self._together
                self._decode(steps[begin:end], factors[begin:end], values[begin:end])
        return values.view(-1)[:elements].reshape(tuple(shape)).to(dtype)

    def _split(self, payload: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Views of the scales (blocks,) in bf16 and of the packed steps (blocks, bytes of a block)."""
        return payload[: 2 * blocks].view(torch.bfloat16), payload[2 * blocks :].view(blocks, -1)

    def _encode(self, values: Tensor, scales: Tensor, packed: Tensor, key: int | None, first: int) -> None:
        """Encode some blocks of `values` into `scales` and `packed`. key: as in `encode`. first: number in
        the whole tensor of their first element, which chooses its draw. Raises NotRepresentable as `encode`
        does."""
        largest = values.abs().amax(1)
        if not bool((largest <= LARGEST).all()):  # NaN is not
            raise NotRepresentable("a value is not finite or too large")
        # The divisor is a tensor: an accelerator multiplies by the reciprocal of a plain number.
        scale = _upward((largest / torch.full_like(largest, self._levels)).float())
        scale = torch.where(scale < SMALLEST_SCALE, torch.zeros_like(scale), scale)
        scales.copy_(scale)
        divisor = torch.where(scale == 0.0, torch.inf, scale).to(values.dtype)  # x / inf = 0
        if key is None:
            ratio = (values / divisor[:, None]).round_()
        else:
            # At most `levels` in magnitude: the scale is rounded upward, and no draw is 0 or 1.
            draws = dither(key, first, values.numel(), values.device).view_as(values).to(values.dtype)
            ratio = draws.addcdiv_(values, divisor[:, None]).floor_()
        if self._bits == 8:
            packed.view(torch.int8).copy_(ratio)
        else:
            steps = ratio.to(torch.int8)
            unsigned = steps.add_(8).view(torch.uint8)
            half = self._block // 2
            torch.bitwise_or(unsigned[:, :half], unsigned[:, half:] << 4, out=packed)

    def _decode(self, packed: Tensor, factors: Tensor, values: Tensor) -> None:
        """Decode some blocks into `values`, in place. packed: steps of these blocks. factors: scales of these
        blocks. Nothing is checked."""
        if self._bits == 8:
            values.copy_(packed.view(torch.int8))
        else:
            half = self._block // 2
            values[:, :half].copy_(packed & 15)
            values[:, half:].copy_(packed >> 4)
            values.sub_(8)
        values.mul_(factors[:, None])


def _upward(scale: Tensor) -> Tensor:
    """Smallest bf16 numbers that are not below positive fp32 numbers, in fp32: the upper 16 of their 32 bits,
    and one more if any of the lower bits is set."""
    bits = scale.view(torch.int32)
    return bits.add(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def checked(payload: Tensor, size_bytes: int) -> Tensor:
    """The payload itself, or a copy if its memory is not aligned for wider numbers. Raises BadPayload unless
    it is a flat uint8 vector of `size_bytes` bytes."""
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (size_bytes,):
        raise BadPayload(f"it is {payload.dtype} {tuple(payload.shape)}, not {size_bytes} bytes")
    aligned = payload.is_contiguous() and payload.storage_offset() % _WIDEST == 0
    return payload if aligned else payload.clone(memory_format=torch.contiguous_format)


def codec_named(name: str, block: int) -> Codec | None:
    """Codec by its name in a run file; None for "none". block: elements of a block (int8 and int4). Raises
    KeyError for an unknown name."""
    if name == "none":
        return None
    if name in ("bf16", "fp16"):
        return CastCodec(torch.bfloat16 if name == "bf16" else torch.float16)
    return BlockCodec({"int8": 8, "int4": 4}[name], block)
