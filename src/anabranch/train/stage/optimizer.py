"""AdamW built from separate +, −, ×, ÷ and √ only.

Each of these is correctly rounded on every machine, so equal inputs give equal bits (fused kernels differ).

Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019). Learning rate, bias corrections and
clip factor come from the log and are never recomputed here (see `train.numerics.step_scalars`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.config import OptimizerSection
from anabranch.train.numerics.exact import BLOCK
from anabranch.train.stage.state import StageState


@dataclass(frozen=True)
class StepScalars:
    """Scalars of one step: of an inner step of an island, or of an iteration as its commit record carries
    them. Those of a round are for `outer_step`: learning_rate is that of the outer step, clip_factor 1 / all
    inner steps."""

    learning_rate: float
    clip_factor: float
    bias_correction1: float
    bias_correction2: float


class Scratch:
    """Two blocks of memory on each device of a stage, for intermediate results."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._blocks: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def blocks(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two vectors of any content, of the length and on the device of `like`, which has at most BLOCK
        elements. The next call for the device returns the same memory."""
        if like.device not in self._blocks:
            a = torch.empty(BLOCK, dtype=self._dtype, device=like.device)
            self._blocks[like.device] = a, torch.empty_like(a)
        a, b = self._blocks[like.device]
        return a[: len(like)], b[: len(like)]


def decays(shape: tuple[int, ...]) -> bool:
    """True if weight decay applies: to matrices (the embedding too), not to norm gains and biases."""
    return len(shape) >= 2


def blocks_of(
    optimizer: OptimizerSection, state: StageState, leave: frozenset[str] = frozenset()
) -> Iterator[tuple[slice, float]]:
    """Yield the bounds of each block in the state's flat vectors (at most BLOCK elements, all of one tensor
    that is not in `leave`) and its weight decay (0 where none applies)."""
    for name in state.layout.names:
        if name in leave:
            continue
        begin, end = state.layout.bounds[name]
        decay = optimizer.weight_decay if decays(state.layout.shapes[name]) else 0.0
        for start in range(begin, end, BLOCK):
            yield slice(start, min(start + BLOCK, end)), decay


def adamw(
    state: StageState,
    gradient: Tensor,
    scalars: StepScalars,
    optimizer: OptimizerSection,
    leave: frozenset[str] = frozenset(),
    held: float = 0.0,
) -> None:
    """Take one step in place and raise Adam's counter. `gradient` is flat, in the state's layout. Tensors in
    `leave` stay as they are. held: if positive, the second moment does not fade, and squares count with this
    weight in it.

    g = clip·grad;  m = β₁m + (1−β₁)g;  v = β₂v + (1−β₂)g²;
    w = w·(1 − lr·decay) − (lr/c₁)·m / (√v/√c₂ + ε)
    """
    step_size = scalars.learning_rate / scalars.bias_correction1
    root2 = scalars.bias_correction2**0.5
    shrink = 1.0 - scalars.learning_rate * optimizer.weight_decay
    scratch = Scratch(gradient.dtype)
    for part, decay in blocks_of(optimizer, state, leave):
        w, m, v = state.weights[part], state.exp_avg[part], state.exp_avg_sq[part]
        g, a = scratch.blocks(w)
        torch.mul(gradient[part], scalars.clip_factor, out=g)
        m.mul_(optimizer.beta1).add_(torch.mul(g, 1.0 - optimizer.beta1, out=a))
        g.mul_(g).mul_((1.0 - optimizer.beta2) * (held or 1.0))
        if not held:
            v.mul_(optimizer.beta2)
        v.add_(g)
        torch.sqrt(v, out=g).div_(root2).add_(optimizer.eps)
        torch.mul(m, step_size, out=a).div_(g)
        if decay:
            w.mul_(shrink)
        w.sub_(a)
    state.adam_step += 1
