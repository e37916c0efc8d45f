"""Codecs: sizes, error, exact bytes, values that cannot be encoded, payloads that are no tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.train.codec import codecs
from anabranch.train.codec.codecs import (
    LARGEST,
    SMALLEST_SCALE,
    TOGETHER,
    BadPayload,
    BlockCodec,
    Codec,
    NotRepresentable,
    codec_named,
)
from anabranch.train.codec.dither import dither, draw_key
from anabranch.train.codec.sizes import BITS, encoded_bytes
from support.divisors import Divisors

NAMES = tuple(name for name in BITS if name != "none")
#: Largest relative L2 error of normal values by codec: half a step of the scale, which is the largest of 64.
ERRORS = {"bf16": 2e-3, "fp16": 3e-4, "int8": 1e-2, "int4": 0.15}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def codec_of(name: str, block: int = 64) -> Codec:
    codec = codec_named(name, block)
    assert codec is not None
    return codec


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def crossed(codec: Codec, x: Tensor, key: int | None = None) -> Tensor:
    return codec.decode(codec.encode(x, key), x.shape, x.dtype)


def test_none_is_no_codec() -> None:
    assert codec_named("none", 64) is None
    assert encoded_bytes("none", 64, 10, 4) == 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 96), (64,), (1, 1, 1), (3, 7, 11), (0, 4), (2, TOGETHER)])
def test_shapes_and_dtypes_come_back(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    codec, x = codec_of(name), normal(*shape, dtype=dtype)
    payload = codec.encode(x)
    assert (payload.dtype, payload.dim()) == (torch.uint8, 1)
    assert len(payload) == codec.encoded_bytes(x.numel()) == encoded_bytes(name, 64, x.numel(), 4)
    y = codec.decode(payload, x.shape, x.dtype)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert float((x - y).double().norm()) <= ERRORS[name] * float(x.double().norm()) * 1.3


def test_bytes_of_a_value() -> None:
    """int8 is at most 0.27 of fp32's bytes at the default block."""
    assert codec_of("int8").encoded_bytes(1 << 16) == (1 << 16) * (1 + 2 / 64)
    assert codec_of("int4").encoded_bytes(1 << 16) == (1 << 16) * (0.5 + 2 / 64)
    assert codec_of("int8").encoded_bytes(65) == 2 * 66


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks_by_hand(name: str) -> None:
    """Every value is the nearest multiple of its block's scale, the smallest bf16 that holds the largest."""
    levels, x, block = {"int8": 127, "int4": 7}[name], normal(10, 16).view(-1) * 3.0, 16
    x[16:32] = 0.0
    y = crossed(codec_of(name, block), x)
    for begin in range(0, 160, block):
        mine = x[begin : begin + block].double()
        least = float(mine.abs().max()) / levels
        exponent = math.frexp(least)[1]
        scale = math.ldexp(math.ceil(math.ldexp(least, 8 - exponent)), exponent - 8)
        steps = torch.round(mine / scale) if scale else mine * 0.0
        assert int(steps.abs().max()) <= levels
        assert torch.equal(y[begin : begin + block].double(), steps * scale)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_decoded_is_encoded_without_a_further_error(name: str) -> None:
    """Encoding is idempotent for casts; a second pass in blocks has no larger error than the first."""
    codec, x = codec_of(name), normal(4, 64)
    once = crossed(codec, x)
    twice = crossed(codec, once)
    if name in ("bf16", "fp16"):
        assert torch.equal(once, twice)
    assert float((twice - once).norm()) <= float((once - x).norm())


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("key", [None, 7])
def test_the_way_of_handling_blocks_leaves_no_trace(
    name: str, key: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(9, 64)
    whole = codec_of(name).encode(x, key)
    monkeypatch.setattr("anabranch.train.codec.codecs.TOGETHER", 128)
    assert torch.equal(codec_of(name).encode(x, key), whole)
    assert torch.equal(codec_of(name).encode(x.t().contiguous().t(), key), whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_what_is_not_finite_is_refused(name: str, value: float, place: int) -> None:
    x = normal(100)
    x[place] = value
    with pytest.raises(NotRepresentable):
        codec_of(name).encode(x)


def test_largest_and_smallest_values() -> None:
    eight = codec_of("int8")
    with pytest.raises(NotRepresentable):
        eight.encode(torch.tensor([2.0 * LARGEST]))
    with pytest.raises(NotRepresentable):
        eight.encode(torch.tensor([1e300], dtype=torch.float64))
    for codec in (eight, codec_of("int4")):
        y = crossed(codec, torch.tensor([LARGEST, -LARGEST, 1.0]))
        assert torch.allclose(y, torch.tensor([LARGEST, -LARGEST, 0.0]), rtol=1e-2)
    with pytest.raises(NotRepresentable):
        codec_of("fp16").encode(torch.tensor([1e6]))
    with pytest.raises(NotRepresentable):
        codec_of("bf16").encode(torch.tensor([3.4e38]))
    # The last block that is not zero, and the first that is.
    least = 127 * SMALLEST_SCALE
    assert float(crossed(eight, torch.tensor([least]))) == pytest.approx(least, rel=1e-2)
    assert float(crossed(eight, torch.tensor([least / 2]))) == 0.0
    assert float(crossed(eight, torch.tensor([1e-45]))) == 0.0
    for key in (None, 3):
        assert not crossed(eight, torch.zeros(200), key).any()
        assert not crossed(codec_of("int4"), torch.full((200,), 1e-40), key).any()


def test_a_large_value_costs_its_own_block_alone() -> None:
    x = torch.cat((normal(64), torch.tensor([1e30]), normal(63, seed=2)))
    y = crossed(codec_of("int8"), x)
    assert torch.allclose(y[:64], x[:64], atol=0.02)
    assert not y[65:].any()


@pytest.mark.parametrize("name", NAMES)
def test_garbage_is_refused(name: str) -> None:
    codec, x = codec_of(name), normal(2, 70)
    payload = codec.encode(x)
    wrong: list[Any] = [payload[:-1], torch.cat((payload, payload[:1])), payload.to(torch.int32), x]
    for each in (*wrong, payload.view(2, -1), payload[:0]):
        with pytest.raises(BadPayload):
            codec.decode(each, x.shape, x.dtype)
    with pytest.raises(BadPayload):
        codec.decode(torch.full_like(payload, 255), x.shape, x.dtype)  # scales or values of NaN


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_is_accepted_is_finite(name: str, dtype: torch.dtype) -> None:
    codec, draws = codec_of(name, 8), torch.Generator().manual_seed(3)
    accepted = 0
    for _ in range(300):
        payload = torch.randint(0, 256, (codec.encoded_bytes(8),), dtype=torch.uint8, generator=draws)
        try:
            y = codec.decode(payload, (2, 4), dtype)
        except BadPayload:
            continue
        accepted += 1
        assert bool(torch.isfinite(y).all())
    assert accepted


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, 2.0**125])
def test_scales_that_no_tensor_has_are_refused(scale: float) -> None:
    for bits, codec in ((8, BlockCodec(8, 8)), (4, BlockCodec(4, 8))):
        payload = codec.encode(torch.ones(8))
        payload[:2] = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8)
        with pytest.raises(BadPayload, match="scale"):
            codec.decode(payload, (8,), torch.float32)
        assert bits in (4, 8)


def test_decoding_leaves_the_payload_as_it_is() -> None:
    """A boundary that is kept must be the one that was received."""
    for name in NAMES:
        codec, x = codec_of(name), normal(3, 50, dtype=torch.bfloat16)
        payload = codec.encode(x)
        before = payload.clone()
        y = codec.decode(payload, x.shape, x.dtype)
        y.add_(1.0)
        assert torch.equal(payload, before)


def test_encoding_leaves_the_values_as_they_are() -> None:
    for name in NAMES:
        for dtype in DTYPES:
            x = normal(3, 64, dtype=dtype)
            before = x.clone()
            codec_of(name).encode(x, 5)
            assert torch.equal(x, before)


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    codec, x = codec_of("int4"), normal(2, 64)
    assert torch.equal(codec.encode(x, 5), codec.encode(x, 5))
    assert not torch.equal(codec.encode(x, 5), codec.encode(x, 6))
    passes = torch.stack([crossed(codec, x, key) for key in range(400)])
    step = float((crossed(codec, x) - x).abs().max()) * 2
    assert float((passes.mean(0) - x).abs().max()) < 0.15 * step
    assert float((passes - x).abs().max()) < 1.1 * step


def test_draws_by_hand() -> None:
    """The draw of an element depends on key and number alone."""

    def mixed(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        word = (word ^ (word >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return word ^ (word >> 16)

    key = draw_key("wire", 7, 1, 2, 3)
    for first in (10, 131072 - 10, 131072, 3 * 131072 + 8):
        found = dither(key, first, 51, torch.device("cpu")).tolist()
        assert len(found) == 51
        for number, draw in enumerate(found, start=first):
            word = mixed((number // 2) ^ (key & 0xFFFFFFFF)) ^ (key >> 32)
            half = word >> 16 if number % 2 else word & 0xFFFF
            signed = half - 65536 if half > 32767 else half
            assert draw == (signed + 0.5) / 65536 + 0.5
    many = dither(key, 0, 1 << 16, torch.device("cpu"))
    assert 0.0 < float(many.min()) < 1e-3 < 0.999 < float(many.max()) < 1.0
    assert float(many.mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draw", [2.0**-17, 1.0 - 2.0**-17])
def test_no_draw_leaves_the_range(
    name: str, dtype: torch.dtype, draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Largest magnitudes of a block near a multiple of each scale, with the least and the greatest draw:
    a step beyond the range would come back with another sign."""
    monkeypatch.setattr(codecs, "dither", lambda key, first, count, device: torch.full((count,), draw))
    levels = {"int8": 127, "int4": 7}[name]
    around = 1.0 + torch.arange(-8, 9, dtype=torch.float64) * 2.0**-25
    largest = ((1.0 + torch.arange(128) / 128)[:, None] * levels * around).to(dtype).view(-1, 1)
    x = torch.cat((largest, -largest, torch.zeros(len(largest), 62, dtype=dtype)), 1)
    codec = codec_named(name, 64)
    assert codec is not None
    back = codec.decode(codec.encode(x, 1), x.shape, dtype)
    assert float(((back - x).abs()[:, :2] / largest).max()) < 1.1 / levels


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_division_by_a_plain_number(name: str, dtype: torch.dtype) -> None:
    """CUDA multiplies by the reciprocal instead, which rounds otherwise than a CPU."""
    with Divisors() as divisors:
        crossed(codec_of(name), normal(3, 50, dtype=dtype), 3)
    assert divisors.plain == []


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_lies_anywhere_in_memory(name: str) -> None:
    """At an odd offset, or with gaps."""
    codec, x = codec_of(name), normal(3, 50)
    payload = codec.encode(x)
    room = torch.zeros(2 * len(payload) + 1, dtype=torch.uint8)
    for view in (room[1 : 1 + len(payload)], room[1::2]):
        view.copy_(payload)
        assert torch.equal(codec.decode(view, x.shape, x.dtype), codec.decode(payload, x.shape, x.dtype))


def test_a_block_codec_has_4_or_8_bits_and_an_even_block() -> None:
    for bits, block in ((5, 64), (8, 63), (4, 0)):
        with pytest.raises(ValueError, match="block codec"):
            BlockCodec(bits, block)
