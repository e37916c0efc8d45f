"""Outer step of a round: the summed contributions of all islands change the agreed state.

The outer optimizer is SGD with Nesterov momentum (Douillard et al., "DiLoCo", arXiv 2311.08105); its momentum
takes the place of the first moment in the state, from the last synchronous iteration to the last round. Where
moments are agreed on (`train.islands.agreed_moments`), they stay in the state, and there is no outer
momentum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.train.islands.agreed_moments import rebase, round_scalars, update_moments
from anabranch.train.islands.fragments import fragment_bounds, turn
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.step_scalars import bias_corrections, learning_rate
from anabranch.train.stage.optimizer import blocks_of
from anabranch.train.stage.state import StageState


def exchange_moments(run: RunConfig, state: StageState, t: int) -> None:
    """Exchange the two meanings of the state's first moment after iteration t, skipped or not: Adam's becomes
    the outer momentum before the first round, and the reverse after the last one. Moments that are agreed on
    are scaled instead."""
    rounds = rounds_of(run)
    if t == rounds.start:
        begin_rounds(run, state)
    elif rounds.has(t) and t == rounds.last:
        end_rounds(run, state)


def begin_rounds(run: RunConfig, state: StageState) -> None:
    """Put the outer momentum in place of Adam's first moment, after the last synchronous iteration.

    It begins at zero, or (`round.first_moment = "estimate"`) at the value that many rounds in the direction
    of Adam's last step would give it. Moments that are agreed on ("agree") stay in the state, scaled to the
    counter of optimizer steps in place of Adam's.
    """
    if run.round.first_moment == "agree":
        rebase(run.optimizer, state.exp_avg, state.exp_avg_sq, state.adam_step, rounds_of(run).start)
    elif run.round.first_moment == "estimate":
        scale = outer_scale(run, rounds_of(run).start + 1)
        state.exp_avg.mul_(scale).div_(adam_scale(run, state))
    else:
        state.exp_avg.zero_()


def end_rounds(run: RunConfig, state: StageState) -> None:
    """Put Adam's first moment in place of the outer momentum, after the last round, skipped or not. It begins
    at zero, or (`round.first_moment = "estimate"` or "agree") as `begin_rounds` inverted."""
    rounds = rounds_of(run)
    if run.round.first_moment == "agree":
        at = rounds.progress(rounds.last)
        rebase(run.optimizer, state.exp_avg, state.exp_avg_sq, at, state.adam_step)
    elif run.round.first_moment == "estimate":
        scale = outer_scale(run, rounds.last + 1)
        state.exp_avg.mul_(adam_scale(run, state)).div_(scale)
    else:
        state.exp_avg.zero_()


def adam_scale(run: RunConfig, state: StageState) -> Tensor:
    """Ratio of Adam's first moment to the direction of its step, c₁ · (√v/√c₂ + ε), flat: converts one to the
    other where the outer momentum is estimated."""
    first, second = bias_corrections(run.optimizer, max(1, state.adam_step))
    return torch.sqrt(state.exp_avg_sq).div_(second**0.5).add_(run.optimizer.eps).mul_(first)


def outer_scale(run: RunConfig, t: int) -> float:
    """Ratio by which `begin_rounds` and `end_rounds` (and islands that estimate their first moment) convert a
    step's direction to outer momentum before round t: the sum of a round's learning rates / (1 - outer
    momentum), as of a constant direction."""
    rounds = rounds_of(run)
    last, length = rounds.progress(t - 1), rounds.length(t - 1 if rounds.has(t - 1) else t)
    rates = (learning_rate(run, at) for at in range(max(1, last - length + 1), last + 1))
    return math.fsum(rates) / (1.0 - run.round.outer_momentum)


def outer_step(
    run: RunConfig, state: StageState, total: Tensor, learning_rate: float, factor: float, t: int = 0
) -> None:
    """Take the outer step of round t in place: g = factor · total; b = μb + g; w = w - learning_rate · (g +
    μb). With fragments only the one whose turn it is moves. total: summed contributions (flat).
    learning_rate: of the outer step. factor: 1 / all inner steps. b is kept in place of the first moment.
    Where moments are agreed on, w = w - learning_rate · g, and both moments are brought past the round."""
    if run.round.first_moment == "agree":
        _agreed_step(run, state, total, learning_rate, factor, t)
        return
    momentum, fragments = run.round.outer_momentum, run.round.fragments
    fragment = turn(t - rounds_of(run).start, fragments)
    for begin, end in fragment_bounds(state.layout, fragments, fragment):
        mean, b = total[begin:end].mul(factor), state.exp_avg[begin:end]
        b.mul_(momentum).add_(mean)
        state.weights[begin:end].sub_(mean.add_(b.mul(momentum)).mul_(learning_rate))


def _agreed_step(
    run: RunConfig, state: StageState, total: Tensor, learning_rate: float, factor: float, t: int
) -> None:
    """Outer step of round t of a run that agrees on its moments (see `outer_step`)."""
    scalars, eps = round_scalars(run, t), run.optimizer.eps
    for part, decay in blocks_of(run.optimizer, state):
        change, weights = total[part].mul(factor), state.weights[part]
        update_moments(state.exp_avg[part], state.exp_avg_sq[part], change, weights, scalars, eps, decay)
        weights.sub_(change.mul_(learning_rate))
