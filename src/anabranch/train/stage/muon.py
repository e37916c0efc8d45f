"""Muon: the step of a block's matrices is their momentum, orthogonalised as a whole.

Jordan et al., "Muon" (2024), with the update's size of Liu et al., "Muon is Scalable for LLM Training"
(2025), arXiv 2502.16982, which fits the learning rate of AdamW. Embedding, head, norm gains and biases have
AdamW.

A reduce cuts a stage's sum into parts that ignore the matrices' bounds, but every replica has the whole
reduced gradient before it takes the step, and no matrix spans two stages. So each replica orthogonalises
whole matrices, and the partition does not matter. Matrix products differ in their last bits between numerics
classes, which AdamW's step does not: runs of several classes are refused (`config.rules`).
"""

from __future__ import annotations

import math

from torch import Tensor

from anabranch.config import OptimizerSection
from anabranch.train.model.interface import Model
from anabranch.train.model.partition import StageSpec
from anabranch.train.numerics.exact import sum_of_squares
from anabranch.train.stage.optimizer import StepScalars, adamw
from anabranch.train.stage.state import StageState

#: Coefficients and steps of the quintic Newton-Schulz iteration, as published: they bring singular values
#: to between about 0.7 and 1.2.
QUINTIC, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
#: Smallest norm by which a matrix is divided, as in `torch.optim.Muon`.
LEAST_NORM = 1e-7
#: Root mean square of an update's elements, which is about that of AdamW's (Liu et al., section 2.2).
UPDATE_RMS = 0.2


def muon_names(model: Model, spec: StageSpec, optimizer: OptimizerSection) -> frozenset[str]:
    """Tensors of a stage that Muon trains: the matrices of its blocks; none if the optimizer is AdamW."""
    if optimizer.kind != "muon":
        return frozenset()
    shapes = [shape for block in spec.blocks for shape in model.block_shapes(block).items()]
    return frozenset(name for name, shape in shapes if len(shape) == 2)


def take_step(
    state: StageState,
    gradient: Tensor,
    scalars: StepScalars,
    optimizer: OptimizerSection,
    matrices: frozenset[str],
) -> None:
    """Take one optimizer step in place, and raise Adam's counter: Muon's for `matrices`, AdamW's for others.

    `gradient` is flat, in the state's layout. Of a matrix only the first moment is used:

    g = clip·grad;  m = μm + (1−μ)g;  u = μm + (1−μ)g;
    w = w·(1 − lr·decay) − lr · 0.2 √max(rows, columns) · orthogonal(u)
    """
    adamw(state, gradient, scalars, optimizer, leave=matrices)
    momentum, rate = optimizer.momentum, scalars.learning_rate
    shrink = 1.0 - rate * optimizer.weight_decay
    for name in state.layout.names:
        if name not in matrices:
            continue
        weight, mean = state.layout.view(state.weights, name), state.layout.view(state.exp_avg, name)
        # A tensor of its own: products of views could depend on their place in the stage.
        fresh = state.layout.view(gradient, name).mul(scalars.clip_factor).mul_(1.0 - momentum)
        mean.mul_(momentum).add_(fresh)
        direction = orthogonal(fresh.add_(mean.mul(momentum)))
        size = UPDATE_RMS * math.sqrt(max(weight.shape))
        weight.mul_(shrink).sub_(direction.mul_(rate * size))


def orthogonal(matrix: Tensor) -> Tensor:
    """New matrix of the same shape, with the same singular vectors and with singular values between about 0.7
    and 1.2, by Newton-Schulz iterations."""
    a, b, c = QUINTIC
    x = matrix.t().contiguous() if matrix.shape[0] > matrix.shape[1] else matrix.clone()
    x.div_(max(math.sqrt(sum_of_squares(matrix.reshape(-1))), LEAST_NORM))
    for _ in range(ITERATIONS):
        gram = x.mm(x.t())
        x = x.mul(a).add_(gram.mul(b).add_(gram.mm(gram).mul_(c)).mm(x))
    return x.t().contiguous() if matrix.shape[0] > matrix.shape[1] else x

