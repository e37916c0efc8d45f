"""Cuts of a model between stages: codecs of the activations and input gradients that cross them.

Cut c lies between stage c and the next one; the last one lies before the head. Codecs act on the values of
the residual stream; token ids that a subspace model sends along stay as they are. What the receiver computes
with is decode(encode(x)), whoever computes it and however often: a pure function of x, the run file, and for
stochastic rounding of (iteration, microbatch, cut). Workers use the bytes (`encode`, `decode`), the reference
passes through a cut inside its autograd graph (`pass_through`); both call the same codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.train.codec.codecs import BadPayload, Codec, NotRepresentable, codec_named
from anabranch.train.codec.dither import draw_key
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.residual import residual_stream
from anabranch.train.model.sizes import ModelConfig, cut_bytes
from anabranch.train.numerics.exact import Overflow, check_finite

ACTIVATION, GRADIENT = "activation", "gradient"
#: Name of an overflow in each kind of payload, as stages report it.
OVERFLOWS = {ACTIVATION: "activation", GRADIENT: "input gradient"}


@dataclass(frozen=True)
class Place:
    """Crossing of a cut: microbatch `index` in iteration t, at the output of stage `cut`. The key of the
    draws that round its values follows from it. Held-out windows have t = 0."""

    t: int
    index: int
    cut: int


class Cuts:
    """Encoder and decoder, by the run file's codecs, of the activations and input gradients that cross the
    cuts of one run. kind: ACTIVATION or GRADIENT, in all methods."""

    def __init__(self, run: RunConfig, model: ModelConfig) -> None:
        wire, batch = run.wire, run.batch  # without a stage for relays there is no cut: nothing is sent
        self._dtype = DTYPES[run.compute.dtype]
        # Only its layout is used, for which the constants are not drawn.
        self._stream = residual_stream(model, torch.device("cpu"), self._dtype)
        width, columns = self._stream.width, self._stream.columns
        self._values = (batch.rows, batch.sequence, width)
        self._ids = (batch.rows, batch.sequence, columns - width)
        self._shapes = {ACTIVATION: (batch.rows, batch.sequence, columns), GRADIENT: self._values}
        itemsize, tokens = self._dtype.itemsize, batch.rows * batch.sequence
        self._id_bytes = tokens * (columns - width) * itemsize
        self._seed = run.run.seed
        self._microbatches = batch.microbatches
        self._codecs: dict[str, Codec | None] = {
            kind: codec_named(name if run.pipeline.stages else "none", wire.block)
            for kind, name in ((ACTIVATION, wire.activations), (GRADIENT, wire.gradients))
        }
        self._stochastic = wire.gradient_rounding == "stochastic"

    def place(self, t: int, index: int, cut: int) -> Place:
        """Crossing of the cut after stage `cut` by a microbatch, for `encode`. A held-out window (indices
        from the batch's end on) crosses with t = 0, whatever t is."""
        return Place(t if index < self._microbatches else 0, index, cut)

    def encode(self, kind: str, values: Tensor, place: Place) -> Tensor:
        """Payload that is sent for an activation (with its token ids) or a gradient: the bytes of the codec
        of `kind` (flat uint8), or without a codec `values` themselves; contiguous, on their device. Raises
        Overflow if the codec cannot represent a value; without a codec nothing is checked."""
        codec = self._codecs[kind]
        if codec is None:
            return values.contiguous()
        try:
            payload = codec.encode(self._stream.values(values).contiguous(), self._key(kind, place))
        except NotRepresentable:
            raise Overflow(OVERFLOWS[kind]) from None
        if kind == GRADIENT or not self._id_bytes:
            return payload
        ids = values[..., self._stream.width :].contiguous().view(torch.uint8).flatten()
        return torch.cat((payload, ids))

    def decode(self, kind: str, payload: Tensor, device: torch.device) -> Tensor:
        """Activation (rows, sequence, columns) or gradient (rows, sequence, width) in a received payload, in
        the compute dtype on `device`. Raises BadPayload if the payload's size, type or shape is wrong, a
        value is not finite, or its token ids are invalid."""
        codec, shape = self._codecs[kind], self._shapes[kind]
        if codec is not None:
            received = self._decoded(codec, kind, payload.to(device))
        else:
            if tuple(payload.shape) != shape or payload.dtype != self._dtype:
                raise BadPayload(f"it is {payload.dtype} {tuple(payload.shape)}, not {self._dtype} {shape}")
            try:
                check_finite(kind, payload)
            except Overflow:
                raise BadPayload("it is not finite") from None
            received = payload.to(device)
        if kind == ACTIVATION and (problem := self._stream.problem(received)):
            raise BadPayload(f"it {problem}")
        return received

    def _decoded(self, codec: Codec, kind: str, payload: Tensor) -> Tensor:
        if kind == GRADIENT or not self._id_bytes:
            return codec.decode(payload, self._values, self._dtype)
        if payload.dtype != torch.uint8 or payload.dim() != 1 or len(payload) < self._id_bytes:
            raise BadPayload("it has no token ids")
        values = codec.decode(payload[: -self._id_bytes], self._values, self._dtype)
        ids = payload[-self._id_bytes :].clone().view(self._dtype).view(self._ids)
        return torch.cat((values, ids), -1)

    def received(self, kind: str, values: Tensor, place: Place) -> Tensor:
        """Values of the residual stream as the receiver has them: encoded and decoded by the codec of `kind`,
        without one as they are; NaN everywhere if they cannot be encoded."""
        codec = self._codecs[kind]
        if codec is None:
            return values
        values = values.contiguous()
        try:
            payload = codec.encode(values, self._key(kind, place))
        except NotRepresentable:
            return torch.full_like(values, torch.nan)
        return codec.decode(payload, values.shape, values.dtype)

    def pass_through(self, x: Tensor, place: Place) -> Tensor:
        """Activation x as the stage behind a cut receives it, as part of the autograd graph of x: the
        backward encodes and decodes its gradient likewise. x itself if there are no codecs."""
        if self._codecs[ACTIVATION] is None and self._codecs[GRADIENT] is None:
            return x
        values: Tensor = _Crossing.apply(self._stream.values(x), self, place)  # type: ignore[no-untyped-call]
        return self._stream.moved(x, values)

    def _key(self, kind: str, place: Place) -> int | None:
        if kind != GRADIENT or not self._stochastic:
            return None
        return draw_key("wire", self._seed, place.t, place.index, place.cut)


class _Crossing(torch.autograd.Function):
    """Passage of a cut: forward the activation's codec, backward the gradient's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cuts: Cuts, place: Place) -> Tensor:
        ctx.cuts, ctx.place = cuts, place
        received = cuts.received(ACTIVATION, x, place)
        return received.view_as(received) if received is x else received

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.cuts.received(GRADIENT, dy, ctx.place), None, None


def payload_bytes(run: RunConfig, model: ModelConfig) -> int:
    """Bytes on the wire of one microbatch at a cut: of its activation or its input gradient, whichever has
    more."""
    tokens = run.batch.rows * run.batch.sequence
    return max(cut_bytes(model, run.wire, tokens, DTYPES[run.compute.dtype].itemsize))
