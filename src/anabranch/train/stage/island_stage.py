"""Passes of one stage of a pipeline island: ordinary autograd with the island's weights.

Between synchronous steps weight gradients wait, as any peer may compute them; here one machine computes them
all, so each backward pass adds its weight gradients to the island's at once. They are sums of floats: heads
and backward passes come in order of their microbatches, which makes them functions of the inputs alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.train.model.interface import Model
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.partition import StageSpec
from anabranch.train.numerics.exact import check_finite
from anabranch.train.stage.inner_steps import Contribution, Island, add_embedding_gradient, add_gradients
from anabranch.train.stage.stage import model_loss


class OutOfOrder(ValueError):
    """Pass that does not follow the passes before it; the message says which one is next."""


class IslandStage:
    """Passes of one stage with the weights of `island`, for the microbatches 0 to `count` - 1 of its present
    inner step. Heads and backward passes add weight gradients to the island's at once, so each kind comes in
    the order of the microbatches. Shapes are those of `Stage`. Methods raise Overflow if a result is not
    finite, after which the island is void, and OutOfOrder, which changes nothing."""

    def __init__(self, model: Model, spec: StageSpec, island: Island, count: int, tokens: int) -> None:
        """tokens: number of tokens of an inner step, by which its loss sum is divided before the backward."""
        self._model, self._island, self._spec = model, island, spec
        self._count, self._scale = count, 1.0 / tokens
        self._forwards: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Microbatch whose output gradient has not arrived -> x, y with its graph (None: not kept)."""
        self._heads = self._backwards = 0
        self._loss = 0.0
        # A tied table has gradients of head and embedding. They are summed apart: how many heads are done
        # before a backward pass arrives is a matter of speed.
        tied = spec.ends and model.config.tied
        self._rows = torch.zeros_like(island.gradient) if tied else island.gradient
        self._leaves = island.leaves()

    @property
    def taken(self) -> int:
        """Inner steps of the round that were taken."""
        return self._island.taken

    def embed(self, ids: Tensor) -> Tensor:
        """ids (rows, sequence) -> x. Stage 0."""
        with torch.no_grad():
            x = self._model.embed(PlainWeights(self._leaves), ids)
        check_finite("activation", x)
        return x

    def forward(self, number: int, x: Tensor, keep: bool = True) -> Tensor:
        """x -> y, keeping the graph of microbatch `number`, or without `keep` only x, from which `backward`
        computes the graph again. Relay stages."""
        if not self._backwards <= number < self._count or number in self._forwards:
            raise OutOfOrder(f"a forward pass of microbatch {number} is not awaited")
        begin, y = self._passed(x)
        check_finite("activation", y)
        self._forwards[number] = begin, y if keep else None
        return y.detach()

    def _passed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x as a leaf, and y with its graph."""
        weights, begin = PlainWeights(self._leaves), x.detach().requires_grad_()
        y = begin
        for block in self._spec.blocks:
            y = self._model.block(weights, block, y)
        return begin, y

    def head(self, number: int, x: Tensor, targets: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
        """x -> (gradient by x of the loss over the inner step's tokens, loss sum in nats · `weight`); adds
        the gradients of the head's weights, and the loss to the step's. Stage 0."""
        if number != self._heads or number >= self._count:
            raise OutOfOrder(f"the head of microbatch {number} does not follow {self._heads} others")
        x = x.detach().requires_grad_()
        loss = model_loss(self._model, PlainWeights(self._leaves), x, targets, weight)
        check_finite("loss", loss)
        dx = self._gradients(loss * self._scale, x)
        self._heads, self._loss = number + 1, self._loss + (loss_sum := float(loss.detach()))
        return dx, loss_sum

    def backward(self, number: int, dy: Tensor) -> Tensor:
        """dy -> dx; adds the weight gradients and frees the graph of microbatch `number`. If the graph was
        not kept, the forward is computed again. Relay stages."""
        self._expect_backward(number, number in self._forwards)
        x, y = self._forwards.pop(number)
        if y is None:
            x, y = self._passed(x)
        dx = self._gradients(self._model.stream.values(y), x, dy)
        self._backwards += 1
        return dx

    def embedding_gradient(self, number: int, ids: Tensor, dx: Tensor) -> None:
        """Add the gradient of the embedding of microbatch `number`'s token ids to the island's, dx being the
        gradient of `embed`'s output. Stage 0, after the head of the same microbatch."""
        self._expect_backward(number, number < self._heads)
        add_embedding_gradient(self._model, self._island.local.layout, ids, dx, self._rows)
        self._backwards += 1

    def step(self) -> None:
        """Take the inner step with the gradients of all its microbatches; their passes then begin anew with
        the new weights. Raises OutOfOrder while a backward pass is missing."""
        if self._backwards < self._count:
            raise OutOfOrder(f"backward passes are done of {self._backwards} microbatches of {self._count}")
        self.gradient()
        self._island.step(self._loss)
        self._heads, self._backwards, self._loss = 0, 0, 0.0
        self._leaves = self._island.leaves()

    def gradient(self) -> Tensor:
        """Gradient of the present inner step's microbatches so far: the island's own flat vector."""
        if self._rows is not self._island.gradient:
            self._island.gradient.add_(self._rows)
            self._rows.zero_()
        return self._island.gradient

    def close(self) -> Contribution:
        """Contribution of this stage to the round, after its inner steps (`Island.close`)."""
        return self._island.close()

    def _expect_backward(self, number: int, ready: bool) -> None:
        if number != self._backwards or not ready:
            raise OutOfOrder(f"backward passes are done of {self._backwards} microbatches, not of {number}")

    def _gradients(self, output: Tensor, x: Tensor, dy: Tensor | None = None) -> Tensor:
        """Gradient by x of `output`, whose own gradient is dy; adds those of the weights to the island's."""
        dx, *found = torch.autograd.grad(output, [x, *self._leaves.values()], dy, allow_unused=True)
        dx = self._model.stream.values(dx)
        check_finite("input gradient", dx)
        add_gradients(self._island.local.layout, self._leaves, found, self._island.gradient)
        return dx
