"""Check of a model for what would break exactness: cuts, hidden state, chance, in-place changes, the future.

It computes on this machine's CPU in fp32, with weights and tokens that are drawn from a seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.train.model.interface import Model, all_shapes, build, initial_tensor
from anabranch.train.model.linear import DeferredWeights, PlainWeights, Store
from anabranch.train.model.sizes import ModelConfig

CPU = torch.device("cpu")
#: Rows and tokens of the check's batch: choices, enough for a window and a second row.
ROWS, TOKENS = 2, 12


@dataclass(frozen=True)
class Finding:
    """Result of one check. problem: "" if it passed, else what is wrong and what to do."""

    what: str
    problem: str = ""


def check_model(config: ModelConfig, seed: int = 1) -> list[Finding]:
    """Check the model of `config` on this machine's CPU; one finding for each check, with the first problem
    that it meets, or the exception that the model's code raised. seed: of the weights and tokens. Raises
    ConfigError if the model cannot be built."""
    checker = _Checker(config, seed)
    checks: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("blocks keep the shape of x, the head gives logits", checker.shapes),
        ("a loss of its own is a sum", checker.own_loss),
        ("nothing changes its input in place", checker.in_place),
        ("buffers stay as they are", checker.state),
        ("the same input gives the same bits, and no random number is drawn", checker.chance),
        ("no token sees a later one", checker.future),
        ("every parameter gets a finite gradient", checker.gradients),
        ("cut at every block it has the gradients of the whole, to the bit", checker.cuts),
    ]
    found = []
    for what, check in checks:
        try:
            found.append(Finding(what, next(check(), "")))
        except Exception as error:  # whatever the user's code raises
            found.append(Finding(what, f"{type(error).__name__}: {error}"))
    return found


class _Checker:
    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.model: Model = build(config, CPU, torch.float32)
        shapes = all_shapes(self.model).items()
        self.weights = {name: initial_tensor(self.model, name, s, seed, 0.2) for name, s in shapes}
        generator = torch.Generator().manual_seed(seed)
        size = (ROWS, min(TOKENS, config.max_sequence))
        self.ids = torch.randint(0, config.vocab_size, size, generator=generator)
        self.width = config.vocab_size
        self.loss: Callable[[Tensor, Tensor], Tensor] | None = getattr(self.model, "loss", None)
        if self.loss is not None:  # the head of a loss of one's own has any width
            with contextlib.suppress(Exception):  # whatever the user's code raises; the checks meet it again
                x = self.model.embed(PlainWeights(self.weights), self.ids)
                self.width = self.model.head(PlainWeights(self.weights), x).shape[-1]
        self.dy = torch.randn(*size, self.width, generator=generator)

    def steps(self) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
        """(name, function x -> output) of each block and of the head, in order."""
        plain = PlainWeights(self.weights)
        for block in range(self.config.blocks):
            yield f"block {block}", lambda x, block=block: self.model.block(plain, block, x)  # type: ignore[misc]
        yield "the head", lambda x: self.model.head(plain, x)

    def walk(self) -> Iterator[tuple[str, Callable[[Tensor], Tensor], Tensor]]:
        """Yield name, function and input of each block and of the head in a forward pass of the model. Each
        input is a copy, so a check that changes its input in place does not disturb the next block."""
        x = self.model.embed(PlainWeights(self.weights), self.ids)
        for name, step in self.steps():
            yield name, step, x.clone()
            x = step(x.clone())

    def shapes(self) -> Iterator[str]:
        width = {"the head": self.width}
        for name, step, x in self.walk():
            wanted = (*x.shape[:2], width.get(name, self.config.dim))
            if tuple(step(x).shape) != wanted:
                yield f"{name} returns {tuple(step(x).shape)} for {tuple(x.shape)}, not {wanted}"

    def own_loss(self) -> Iterator[str]:
        """Yield a problem if the model's own loss is not one finite number, or that of a batch is not the sum
        of those of its rows; nothing for a model without a loss of its own."""
        if self.loss is None:
            return
        with torch.no_grad():
            x = self.model.embed(PlainWeights(self.weights), self.ids)
            for _, step in self.steps():
                x = step(x)
            whole = self.loss(x, self.ids)
            parts = [self.loss(x[row : row + 1], self.ids[row : row + 1]) for row in range(len(x))]
        if whole.dim() or not bool(whole.isfinite()):
            yield "the loss is not one finite number"
        elif not torch.allclose(whole, torch.stack(parts).sum(), rtol=1e-4):
            yield "the loss is not the sum of the losses of its rows: return a sum, not a mean"

    def in_place(self) -> Iterator[str]:
        for name, step, x in self.walk():
            before = x.clone()
            step(x)
            if not torch.equal(x, before):
                yield f"{name} changes its input in place; copy it first: others keep it to send it again"

    def state(self) -> Iterator[str]:
        for name, step, x in self.walk():
            before = [tensor.clone() for tensor in self.model.constants]
            step(x)
            after = self.model.constants
            if len(after) != len(before) or not all(map(torch.equal, after, before)):
                yield f"{name} changes a buffer, which no other replica sees: keep state in parameters only"

    def chance(self) -> Iterator[str]:
        for name, step, x in self.walk():
            generator = torch.get_rng_state()
            first, second = step(x.clone()), step(x.clone())
            if not torch.equal(torch.get_rng_state(), generator):
                torch.set_rng_state(generator)
                yield f"{name} draws random numbers (dropout?); two replicas draw others: set it to 0"
            if not torch.equal(first, second):
                yield f"{name} gives other bits for the same input"

    def future(self) -> Iterator[str]:
        half = self.ids.shape[1] // 2
        for name, step, x in self.walk():
            changed = x.clone()
            changed[:, half:] = -changed[:, half:] + 1.0
            if not torch.equal(step(x)[:, :half], step(changed)[:, :half]):
                yield f"{name} lets a token see later ones: it is not causal"

    def gradients(self) -> Iterator[str]:
        for name, gradient in self.whole().items():
            if gradient is None or not bool(gradient.isfinite().all()):
                kind = "no" if gradient is None else "no finite"
                yield f"{name} gets {kind} gradient; every parameter must take part in every forward pass"

    def whole(self) -> dict[str, Tensor | None]:
        """Gradient of each parameter but the tables by one backward through everything; None for one that
        takes no part."""
        names = [name for name in self.weights if name not in self.model.tables]
        leaves = {name: self.weights[name].clone().requires_grad_() for name in names}
        weights = PlainWeights({**self.weights, **leaves})
        x = self.model.embed(weights, self.ids)
        for block in range(self.config.blocks):
            x = self.model.block(weights, block, x)
        y = self.model.head(weights, x)
        found = torch.autograd.grad(y, list(leaves.values()), self.dy, allow_unused=True)
        return dict(zip(leaves, found, strict=True))

    def cuts(self) -> Iterator[str]:
        inputs = [self.model.embed(PlainWeights(self.weights), self.ids)]
        for block in range(self.config.blocks):
            inputs.append(self.model.block(PlainWeights(self.weights), block, inputs[-1].clone()))
        gradients: dict[str, Tensor] = {}
        dy = self.dy
        for block in reversed(range(self.config.blocks + 1)):
            weights = DeferredWeights(self.weights, Store())
            x = inputs[block].detach().clone().requires_grad_()
            head = block == self.config.blocks
            y = self.model.head(weights, x) if head else self.model.block(weights, block, x)
            dy = weights.backward(y, x, dy)
            gradients.update(weights.store.gradients())
        for name, gradient in self.whole().items():
            if gradient is not None and not torch.equal(gradients[name], gradient):
                yield f"the gradient of {name} differs: something passes from block to block besides x"
