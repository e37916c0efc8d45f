"""Forward and backward passes of a whole model at one peer, from token ids to weight gradients.

The same three operations as of a pipeline stage (`stage.Stage`): forward, input gradient, weight gradient.
Here the output is the loss, and the input gradient stays at the peer, for the rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.train.model.interface import Model
from anabranch.train.model.linear import DeferredWeights, PlainWeights, Store
from anabranch.train.model.partition import StageSpec
from anabranch.train.numerics.exact import Accumulator, Overflow
from anabranch.train.stage.stage import Stage, model_loss


@dataclass(frozen=True)
class _Pass:
    """Forward pass of a microbatch whose gradients are not computed yet. x: output of the embedding. loss:
    with its graph, which begins at x. weights: as in `stage._Forward`."""

    ids: Tensor
    x: Tensor
    loss: Tensor
    weights: DeferredWeights


class WholeModel(Stage):
    """Passes of a whole model, from token ids to the loss and back. ids, targets: (rows, sequence). Methods
    raise Overflow as those of `Stage`."""

    def __init__(
        self, model: Model, spec: StageSpec, weights: Mapping[str, Tensor], accumulator: Accumulator
    ) -> None:
        super().__init__(model, spec, weights, accumulator)
        self._passes: dict[int, _Pass] = {}
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        """Microbatch -> (ids, gradient of the embedding's output), until the weight gradient is added."""

    def loss(self, index: int, ids: Tensor, targets: Tensor) -> float:
        """Loss sum (nats) of a microbatch; its graph is kept under `index` for `gradient`."""
        self._passes[index] = forward = self._whole_pass(ids, targets)
        return float(forward.loss.detach())

    def evaluate_tokens(self, ids: Tensor, targets: Tensor) -> float:
        """Loss sum (nats) without keeping a graph."""
        with torch.no_grad():
            weights = PlainWeights(self.weights)
            x = self._blocks(weights, self.model.embed(weights, ids))
            return float(self._finite("loss", model_loss(self.model, weights, x, targets)))

    def gradient(self, index: int, scale: float) -> None:
        """Compute the input gradient of scale · loss of microbatch `index`; frees its graph, and keeps what
        `weight_gradient` needs. Raises KeyError if `loss` kept no graph, and Overflow."""
        forward = self._passes.pop(index)
        self._inputs[index] = forward.ids, self._whole_gradient(forward, scale)
        self._stores[index] = forward.weights.store

    def weight_gradient(self, unit: int) -> None:
        self._add_whole(*self._inputs.pop(unit), self._stores.pop(unit), 1)

    def recount_tokens(self, ids: Tensor, targets: Tensor, scale: float, sign: int) -> None:
        """Recompute a microbatch's weight gradients of scale · loss, the embedding's included, and add them
        `sign` times (±1). Nothing is kept. On Overflow nothing was added."""
        forward = self._whole_pass(ids, targets)
        self._add_whole(ids, self._whole_gradient(forward, scale), forward.weights.store, sign)

    def discard(self, unit: int) -> None:
        super().discard(unit)
        self._passes.pop(unit, None)
        self._inputs.pop(unit, None)

    def clear(self) -> None:
        super().clear()
        self._passes.clear()
        self._inputs.clear()

    def _whole_pass(self, ids: Tensor, targets: Tensor) -> _Pass:
        weights = DeferredWeights(self.weights, Store())
        x = self.model.embed(PlainWeights(self.weights), ids).detach().requires_grad_()
        loss = model_loss(self.model, weights, self._blocks(weights, x), targets)
        return _Pass(ids, x, self._finite("loss", loss), weights)

    def _whole_gradient(self, forward: _Pass, scale: float) -> Tensor:
        """Backward of scale · loss through the whole model: returns the gradient with respect to the
        embedding's output; the store gets gradients of norm gains and biases, and linear layers' inputs."""
        return self._finite("input gradient", forward.weights.backward(forward.loss * scale, forward.x))

    def _add_whole(self, ids: Tensor, dx: Tensor, store: Store, sign: int) -> None:
        self.embed_gradient(ids, dx, sign)
        try:
            self._add(store, sign)
        except Overflow:
            self.embed_gradient(ids, dx, -sign)
            raise
