"""Rounds of an island: inner optimizer steps, the contribution that they give, the outer step.

A contribution is a pure function of the run file, the state at the beginning of the round, the round, the
slot, and the slot's counters: whoever fills the slot computes the same bits (within a numerics class). The
inner optimizer is AdamW. It begins each round without a first moment, and with the second moment that the
synchronous steps left in the state. The outer optimizer is SGD with Nesterov momentum (Douillard et al.,
"DiLoCo", arXiv 2311.08105); its momentum takes the place of the first moment in the state.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.train.model.interface import DTYPES, Model
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.rounds import inner_microbatches, rounds_of
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, rounded
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.stage.optimizer import StepScalars, adamw
from anabranch.train.stage.run_objects import Batches, working_weights
from anabranch.train.stage.stage import model_loss
from anabranch.train.stage.state import StageState


def slot_tokens(batches: Batches, run: RunConfig, slot: int, first: int, steps: int) -> Tensor:
    """Token ids (int32) of a slot's inner steps first+1 to first+steps, (steps · microbatches · rows,
    sequence+1).

    Inner step c of slot k has microbatches k·n to k·n + n - 1 of the batch of iteration start + c: the K
    slots together pass through the batches that synchronous steps would have had.
    """
    count, start = inner_microbatches(run), rounds_of(run).start
    rows = []
    for step in range(first + 1, first + steps + 1):
        for index in range(slot * count, (slot + 1) * count):
            ids, targets = batches.microbatch(start + step, index)
            rows.append(np.concatenate((ids, targets[:, -1:]), axis=1))
    return torch.from_numpy(np.concatenate(rows).astype(np.int32))


def contribution(
    run: RunConfig, model: Model, state: StageState, t: int, steps: int, tokens: Tensor
) -> tuple[Tensor, float]:
    """(contribution to round t, loss sum in nats) of a slot that takes `steps` inner steps on `tokens`.

    The contribution is flat, in the state's layout: steps · (weights before - weights after), rounded as the
    run file says. Raises Overflow.
    """
    rounds, rows = rounds_of(run), run.batch.rows
    local = StageState(
        state.layout,
        state.weights.clone(),
        torch.zeros_like(state.weights),
        state.exp_avg_sq.clone(),
        adam_step=state.adam_step,
    )
    if estimated := run.round.first_moment == "estimate":
        local.exp_avg.copy_(state.exp_avg).mul_(_adam_scale(run, state)).div_(_outer_scale(run, t))
    gradient = torch.zeros_like(local.weights)
    of_step = tokens.view(steps, inner_microbatches(run), rows, -1)
    total = 0.0
    for step, microbatches in enumerate(of_step):
        gradient.zero_()
        leaves = {
            name: weight.detach().requires_grad_()
            for name, weight in working_weights(local, DTYPES[run.compute.dtype]).items()
        }
        for ids in microbatches.long():
            total += add_gradient(model, local, leaves, ids, gradient, 1.0 / microbatches[..., 1:].numel())
        norm = global_norm(exact.squares(local.layout, gradient).values())
        # Slots of all speeds follow the schedule from the round's first to its last optimizer step.
        at = rounds.progress(t - 1) + -(-(step + 1) * rounds.length(t) // steps)
        first, second = bias_corrections(run.optimizer, state.adam_step + step + 1)
        if not estimated:
            first, _ = bias_corrections(run.optimizer, step + 1)
        factor = clip_factor(norm, run.optimizer.clip)
        scalars = StepScalars(learning_rate(run, at), factor, first, second)
        adamw(local, gradient, scalars, run.optimizer)
    change = torch.sub(state.weights, local.weights).mul_(float(steps))
    exact.check_finite("contribution", change)
    return rounded(change, BITS[run.round.contributions]), total


def add_gradient(
    model: Model, state: StageState, leaves: dict[str, Tensor], ids: Tensor, gradient: Tensor, scale: float
) -> float:
    """Add the gradient of scale · loss of one microbatch to the flat vector `gradient`; returns the loss sum
    (nats).

    leaves: working weights that require gradients. ids: (rows, sequence + 1). Raises Overflow if the loss is
    not finite.
    """
    inputs, targets = ids[:, :-1], ids[:, 1:].contiguous()
    weights = PlainWeights(leaves)
    x = begin = model.embed(weights, inputs).detach().requires_grad_()
    for block in range(model.config.blocks):
        x = model.block(weights, block, x)
    loss = model_loss(model, weights, x, targets)
    exact.check_finite("loss", loss)
    dx, *found = torch.autograd.grad(loss * scale, [begin, *leaves.values()], allow_unused=True)
    for name, one in zip(leaves, found, strict=True):
        if one is not None:
            state.layout.view(gradient, name).add_(one)
    dx = dx.reshape(-1, dx.shape[-1]).to(gradient.dtype)
    for table, rows in model.embedding_rows(inputs):
        state.layout.view(gradient, table).index_add_(0, rows, dx)
    return float(loss.detach())


def begin_rounds(run: RunConfig, state: StageState) -> None:
    """Put the outer momentum in place of Adam's first moment, after the last synchronous iteration.

    It begins at zero, or (`round.first_moment = "estimate"`) where the last steps' direction, kept for ever,
    would have brought it.
    """
    if run.round.first_moment == "estimate":
        scale = _outer_scale(run, rounds_of(run).start + 1)
        state.exp_avg.mul_(scale).div_(_adam_scale(run, state))
    else:
        state.exp_avg.zero_()


def end_rounds(run: RunConfig, state: StageState) -> None:
    """Put Adam's first moment in place of the outer momentum, after the last round, skipped or not: zero, or
    as a further round would have estimated it."""
    if run.round.first_moment == "estimate":
        scale = _outer_scale(run, rounds_of(run).last + 1)
        state.exp_avg.mul_(_adam_scale(run, state)).div_(scale)
    else:
        state.exp_avg.zero_()


def _adam_scale(run: RunConfig, state: StageState) -> Tensor:
    """Adam's first moment divided by the direction of its step: c₁ · (√v/√c₂ + ε), flat."""
    first, second = bias_corrections(run.optimizer, max(1, state.adam_step))
    return torch.sqrt(state.exp_avg_sq).div_(second**0.5).add_(run.optimizer.eps).mul_(first)


def _outer_scale(run: RunConfig, t: int) -> float:
    """Outer momentum before round t divided by the direction of an inner step: the learning rates of a round
    of optimizer steps / (1 - outer momentum), as if the direction had always been the same."""
    rounds = rounds_of(run)
    last, length = rounds.progress(t - 1), rounds.length(t - 1 if rounds.has(t - 1) else t)
    rates = (learning_rate(run, at) for at in range(max(1, last - length + 1), last + 1))
    return math.fsum(rates) / (1.0 - run.round.outer_momentum)


def outer_step(run: RunConfig, state: StageState, total: Tensor, learning_rate: float, factor: float) -> None:
    """Take an outer step in place: g = factor · total; b = μb + g; w = w - learning_rate · (g + μb).

    total: summed contributions (flat). factor: 1 / all inner steps. b is kept in place of the first moment.
    """
    mean, momentum = total.mul(factor), run.round.outer_momentum
    state.exp_avg.mul_(momentum).add_(mean)
    state.weights.sub_(mean.add_(state.exp_avg.mul(momentum)).mul_(learning_rate))
