"""Forward and backward passes of one stage, with the graphs and stores of its microbatches.

Forward, input gradient and weight gradient are separate operations. Between forward and input gradient a
microbatch keeps its autograd graph; between input gradient and weight gradient the (x, dy) pairs in its
store; after that nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.train.model.interface import Model
from anabranch.train.model.linear import DeferredWeights, PlainWeights, Store
from anabranch.train.model.partition import StageSpec
from anabranch.train.numerics.exact import Accumulator, Overflow, check_finite
from anabranch.train.stage.activation_offload import OffloadedActivations


@dataclass(frozen=True)
class _Forward:
    """Forward pass whose output gradient has not arrived: input x, output y with its graph. weights:
    parameters of this pass; the backward fills their store with what the weight gradients need."""

    x: Tensor
    y: Tensor
    weights: DeferredWeights


class Stage:
    """Passes of one stage. `weights` are in the compute dtype; contributions go to `accumulator`. x and y are
    (rows, sequence, stream.columns), dx and dy (rows, sequence, stream.width). Methods raise Overflow if a
    result is not finite, and KeyError for a microbatch without a graph or store."""

    def __init__(
        self, model: Model, spec: StageSpec, weights: Mapping[str, Tensor], accumulator: Accumulator
    ) -> None:
        self.model = model
        self.spec = spec
        self.weights = weights
        self.accumulator = accumulator
        self._forwards: dict[int, _Forward] = {}
        self._stores: dict[int, Store] = {}

    def embed(self, ids: Tensor) -> Tensor:
        """ids (rows, sequence) -> x. Stage 0."""
        with torch.no_grad():
            return self._finite("activation", self.model.embed(PlainWeights(self.weights), ids))

    def evaluate(self, x: Tensor) -> Tensor:
        """x -> y without keeping a graph."""
        with torch.no_grad():
            return self._finite("activation", self._blocks(PlainWeights(self.weights), x))

    @property
    def graphs(self) -> int:
        """Number of microbatches whose graph is kept."""
        return len(self._forwards)

    def forward(self, index: int, x: Tensor, offload: bool = False) -> Tensor:
        """x -> y, keeping the graph under `index`; with `offload` its saved tensors move to host memory."""
        if offload:
            activations = OffloadedActivations([x, *self.weights.values(), *self.model.constants])
            with activations.hooks():
                forward = self._forward(x)
            activations.move_to_host()
        else:
            forward = self._forward(x)
        self._forwards[index] = forward
        return forward.y.detach()

    def input_gradient(self, index: int, dy: Tensor) -> Tensor:
        """dy -> dx; frees the graph and keeps the inputs of the weight gradient under `index`."""
        forward = self._forwards.pop(index)
        dx = self._input_gradient(forward, dy)
        self._stores[index] = forward.weights.store
        return dx

    def head(
        self, unit: int, x: Tensor, targets: Tensor, scale: float, weight: float = 1.0
    ) -> tuple[Tensor, float]:
        """x -> (dx of scale · loss, loss = sum in nats · `weight`); keeps the store under `unit`. Stage 0."""
        dx, loss_sum, store = self._head(x, targets, scale, weight)
        self._stores[unit] = store
        return dx, loss_sum

    def evaluation_loss(self, x: Tensor, targets: Tensor, weight: float = 1.0) -> float:
        """Loss sum in nats over the tokens, times `weight`, without keeping a graph. Stage 0."""
        with torch.no_grad():
            return self._loss(PlainWeights(self.weights), x, targets, weight)[1]

    def weight_gradient(self, unit: int) -> None:
        """Add the weight gradients of `unit` to the sums; drop its store. On Overflow nothing was added."""
        self._add(self._stores.pop(unit), 1)

    def embed_gradient(self, ids: Tensor, dy: Tensor, sign: int = 1) -> None:
        """Add the gradient of one microbatch's embedding `sign` times (±1), dy being that of `embed`'s
        output. Stage 0. On Overflow nothing was added."""
        # All tables get the same gradient; the first has the most contributions and so the tightest range:
        # a gradient that it accepts is accepted by the others.
        gradient = dy.reshape(-1, dy.shape[-1])
        if self.model.embedding_scale != 1.0:
            gradient = gradient * self.model.embedding_scale
        for table, rows in self.model.embedding_rows(ids):
            self.accumulator.add_rows(table, rows, gradient, sign)

    def recount(self, x: Tensor, dy: Tensor, sign: int) -> None:
        """Recompute a microbatch's weight gradients from the stage's input x and output gradient dy, and add
        them `sign` times (±1). Nothing is kept. On Overflow nothing was added."""
        forward = self._forward(x)
        self._input_gradient(forward, dy)
        self._add(forward.weights.store, sign)

    def recount_head(
        self, x: Tensor, targets: Tensor, scale: float, sign: int, weight: float = 1.0
    ) -> None:
        """Recompute the contribution of the head for one microbatch and add it `sign` times (±1). scale,
        weight: as in `head`. Stage 0. On Overflow nothing was added."""
        self._add(self._head(x, targets, scale, weight)[2], sign)

    def discard(self, unit: int) -> None:
        """Drop the autograd graph and the store that are kept under `unit`, if any."""
        self._forwards.pop(unit, None)
        self._stores.pop(unit, None)

    def clear(self) -> None:
        """Drop all graphs and stores, and reset the gradient sums to zero."""
        self._forwards.clear()
        self._stores.clear()
        self.accumulator.clear()

    def _blocks(self, weights: PlainWeights | DeferredWeights, x: Tensor) -> Tensor:
        for block in self.spec.blocks:
            x = self.model.block(weights, block, x)
        return x

    def _forward(self, x: Tensor) -> _Forward:
        weights = DeferredWeights(self.weights, Store())
        x = x.detach().requires_grad_()
        return _Forward(x, self._finite("activation", self._blocks(weights, x)), weights)

    def _input_gradient(self, forward: _Forward, dy: Tensor) -> Tensor:
        values = self.model.stream.values
        dx = forward.weights.backward(values(forward.y), forward.x, dy)
        return self._finite("input gradient", values(dx))

    def _head(
        self, x: Tensor, targets: Tensor, scale: float, weight: float
    ) -> tuple[Tensor, float, Store]:
        weights = DeferredWeights(self.weights, Store())
        x = x.detach().requires_grad_()
        loss, loss_sum = self._loss(weights, x, targets, weight)
        # The loss is scaled before backward, so that contributions need no weights when they are summed.
        dx = self.model.stream.values(weights.backward(loss * scale, x))
        return self._finite("input gradient", dx), loss_sum, weights.store

    def _loss(
        self, weights: PlainWeights | DeferredWeights, x: Tensor, targets: Tensor, weight: float
    ) -> tuple[Tensor, float]:
        loss = model_loss(self.model, weights, x, targets, weight)
        self._finite("loss", loss)
        return loss, float(loss.detach())

    def _add(self, store: Store, sign: int) -> None:
        added = 0
        try:
            for name, gradient in store.gradients():
                self.accumulator.add(name, gradient, sign)
                added += 1
        except Overflow:
            # Another replica may find no overflow: undo, as if this unit had never been added.
            for name, gradient in islice(store.gradients(), added):
                self.accumulator.add(name, gradient, -sign)
            raise

    @staticmethod
    def _finite(name: str, values: Tensor) -> Tensor:
        check_finite(name, values)
        return values


def model_loss(
    model: Model, weights: PlainWeights | DeferredWeights, x: Tensor, targets: Tensor, weight: float = 1.0
) -> Tensor:
    """Loss of x, the output of the last block, times `weight`: by the model's own loss, or `loss_of`."""
    output = model.head(weights, x)
    own = getattr(model, "loss", None)
    if own is None:
        return loss_of(output, targets, weight)
    loss: Tensor = own(output, targets)
    return loss if weight == 1.0 else loss * weight


def loss_of(logits: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
    """Cross-entropy sum (nats), in fp32 at least, times `weight`. targets (rows, sequence), -100: not
    counted."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide.view(-1, wide.shape[-1]), targets.reshape(-1), reduction="sum")
    return loss if weight == 1.0 else loss * weight
