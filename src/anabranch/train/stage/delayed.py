"""Weights of delayed iterations: prediction, and the steps of a state that keeps them.

A delayed iteration t computes on weights predicted from the state after step t - 2, as if the update of the
last step were repeated once: with the moments, and the learning rate and bias corrections of that step, which
are in the log. The prediction is kept in the state after step t - 1, so a state alone tells what the two
iterations after it compute with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.config import OptimizerSection, RunConfig
from anabranch.protocol.interface.delay import Delay
from anabranch.train.model.layout import Layout
from anabranch.train.model.rounds import delay_of
from anabranch.train.numerics.coarse_sums import segments
from anabranch.train.stage.optimizer import Scratch, StepScalars, blocks_of
from anabranch.train.stage.run_objects import is_coarse, units_of
from anabranch.train.stage.state import Ahead, SnapshotForm, StageState


def snapshot_form(run: RunConfig, layout: Layout) -> SnapshotForm:
    """Contents that snapshots of a run's stage have besides weights and moments, for `parse_snapshot`.
    layout: of the stage."""
    units = len(segments(layout, torch.device("cpu")).lengths) if is_coarse(run) else 0
    return SnapshotForm(delay_of(run), units)


def ahead_of(run: RunConfig, delay: Delay, state: StageState) -> Ahead | None:
    """Weights, predicted from `state`, and rounding units of coarse sums with which iteration state.t + 2
    computes; None unless that iteration is delayed."""
    if not delay.has(state.t + 2):
        return None
    return Ahead(predicted(state, run.optimizer), units_of(run, state))


def advance_state(
    delay: Delay, state: StageState, t: int, ahead: Ahead | None, taken: StepScalars | None
) -> None:
    """Set a state's t after step t was taken with the scalars `taken`, or skipped (None), and give the state
    what iteration t + 1 computes with, if delayed: `ahead`, the result of `ahead_of` for the state before
    step t. In runs with delay the step's scalars are kept for the next prediction. Weights, moments and
    Adam's counter stay: the optimizer has changed them."""
    state.t, state.ahead = t, ahead
    if delay.start and taken is not None:
        state.rate = taken.learning_rate
        state.corrections = taken.bias_correction1, taken.bias_correction2


def predicted(state: StageState, optimizer: OptimizerSection) -> Tensor:
    """Weights after a repetition of the last update: w·(1 − lr·decay) − (lr/c₁)·m / (√v/√c₂ + ε). Flat, in
    the master dtype; equal to the state's weights if no step was taken, or the run has no delay."""
    step_size, root2 = state.rate / state.corrections[0], state.corrections[1] ** 0.5
    shrink = 1.0 - state.rate * optimizer.weight_decay
    weights = state.weights.clone()
    if not state.rate:
        return weights
    scratch = Scratch(weights.dtype)
    for part, decay in blocks_of(optimizer, state):
        w = weights[part]
        change, root = scratch.blocks(w)
        torch.sqrt(state.exp_avg_sq[part], out=root).div_(root2).add_(optimizer.eps)
        torch.mul(state.exp_avg[part], step_size, out=change).div_(root)
        if decay:
            w.mul_(shrink)
        w.sub_(change)
    return weights
