"""Linear layers with deferred weight gradients.

A model asks its `Weights` for every layer. `PlainWeights` is ordinary autograd: the single-process
reference, evaluation and inference use it. `DeferredWeights` splits a stage's backward in two: the input
gradient first, which is what the upstream neighbour waits for, and the weight gradients later, from the
(input, output gradient) pairs that wait in a `Store`. Nothing is computed twice and every bit equals plain
autograd's: `weight_gradient` is the very product that autograd would have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Weights(Protocol):
    """Access of a model to its parameters."""

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """x (..., in) -> (..., out) by the weight (out, in) and the bias (out,)."""
        ...

    def small(self, name: str) -> Tensor:
        """A parameter used as a tensor: a norm gain or bias; in a user's own module any but the lookups."""
        ...

    def table(self, name: str) -> Tensor:
        """A lookup table (rows, dim). Its gradient never flows through here: see `Model.embedding_rows`."""
        ...


@dataclass
class Store:
    """Inputs and output gradients of the linear layers in one microbatch, kept from its backward until their
    weight gradients are computed; also the finished gradients of norm gains and biases."""

    products: list[tuple[str, str | None, Tensor, Tensor]] = field(default_factory=list)
    """(weight, bias, x (tokens, in), dy (tokens, out)) of every linear layer."""
    smalls: dict[str, Tensor] = field(default_factory=dict)
    """Finished gradients of norm gains and biases."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Compute and yield (name, gradient) of the weights and biases of linear layers and of what is
        finished, one at a time (lookup tables are not here); may be called again, in the same order."""
        for weight, bias, x, dy in self.products:
            yield weight, dy.t().mm(x)
            if bias is not None:
                yield bias, dy.sum(0)
        yield from self.smalls.items()


class _DeferredLinear(torch.autograd.Function):
    """y = x Wᵀ + b whose backward gives dx and hands (x, dy) to the store."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.keep = keep
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        ctx.keep(x.detach().reshape(-1, x.shape[-1]), dy)  # detached: the store must not hold the graph
        return dy.mm(weight).view(x.shape), None, None, None


class DeferredWeights:
    """Parameters of a stage, by name, for the passes of one microbatch. The backward fills `store` with what
    the weight gradients of linear layers need; these are computed later, from the store."""

    def __init__(self, weights: Mapping[str, Tensor], store: Store) -> None:
        self._weights = weights
        self.store = store
        self.smalls: dict[str, Tensor] = {}
        """Leaves whose gradients come with the input gradient."""

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        def keep(x: Tensor, dy: Tensor) -> None:
            self.store.products.append((weight, bias, x, dy))

        b = None if bias is None else self._weights[bias]
        y: Tensor = _DeferredLinear.apply(x, self._weights[weight], b, keep)  # type: ignore[no-untyped-call]
        return y

    def small(self, name: str) -> Tensor:
        if name not in self.smalls:
            self.smalls[name] = self._weights[name].detach().requires_grad_()
        return self.smalls[name]

    def table(self, name: str) -> Tensor:
        return self._weights[name]

    def backward(self, y: Tensor, x: Tensor, dy: Tensor | None = None) -> Tensor:
        """Gradient dx of x from that of y, the outcome of the passes (dy; None: 1, for a loss); fills the
        store."""
        dx, *smalls = torch.autograd.grad(y, [x, *self.smalls.values()], dy)
        self.store.smalls = dict(zip(self.smalls, smalls, strict=True))
        return dx


class PlainWeights:
    """Parameters for ordinary autograd, differentiable where they ask for it; lookup tables never are."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        return F.linear(x, self._weights[weight], None if bias is None else self._weights[bias])

    def small(self, name: str) -> Tensor:
        return self._weights[name]

    def table(self, name: str) -> Tensor:
        return self._weights[name].detach()
