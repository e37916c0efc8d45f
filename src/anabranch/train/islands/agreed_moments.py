"""Moments that the islands of a run agree on in each round (`round.first_moment = "agree"`).

An island that normalises by its own second moment takes small, even steps: with few tokens a step, such a
moment is mostly noise, of which the mean gradient of K islands has a K-th. Here every island begins a round
with the moments of the run and holds the second one. So the mean change of the islands says what the mean
gradient of the round was, and the moments of the run go on from it, as in a synchronous step on the batch of
all islands. Nothing but the change is exchanged, and no island has moments of its own.

In a round of H optimizer steps with learning rates rₕ, the mean change without decay is Σ qₕ·mₕ / D, where
qₕ = rₕ/c₁ₕ and D = √v/√c₂ + ε. If g is the mean gradient of the round, the mean of mₕ weighted by qₕ is
S·m + (1 − S)·g with S = Σ qₕ·β₁ʰ / Σ qₕ; m is the moment at its beginning. g is the mean over H batches, of
which each step would have had one, so its square counts H times.

An island with another number of steps sends the change that H steps with its own mean gradient would have
made (`normalise`): quick machines give better gradients, not longer ways, and every change says the same of
the moment at the beginning. Steps taken in advance divide by a moment of the round before, which cannot be
told from the change, so there are none (`round.overlap` = 0).

In the second moment that an island holds its own squares count with weight 1/K², as they would in that of
the mean gradient: else a first gradient of a seldom element would be divided by almost nothing.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from anabranch.config import OptimizerSection, RunConfig
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.step_scalars import bias_corrections, learning_rate


@dataclass(frozen=True)
class Course:
    """Sums over the steps h of a slot in a round. They give its change without weight decay, (moment · m +
    gradient · g) / D, with the symbols of this module's head. rates: Σ rₕ. moment: Σ qₕ·β₁ʰ. gradient: Σ
    qₕ·(1 − β₁ʰ)."""

    rates: float
    moment: float
    gradient: float


@dataclass(frozen=True)
class RoundScalars:
    """Scalars of a round, equal for all elements. steps: H. course: of these steps. root2: √c₂ of the second
    moment at the beginning. first, second: β₁ᴴ, β₂ᴴ."""

    steps: int
    course: Course
    root2: float
    first: float
    second: float


def course(run: RunConfig, t: int, steps: int) -> Course:
    """Course of a slot of `steps` steps in round t. Adam's counter is the number of optimizer steps so far,
    skipped ones included."""
    rounds, optimizer = rounds_of(run), run.optimizer
    begun, length = rounds.progress(t - 1), rounds.length(t)
    rates = [learning_rate(run, begun - (-h * length // steps)) for h in range(1, steps + 1)]
    corrected = [rate / bias_corrections(optimizer, begun + h)[0] for h, rate in enumerate(rates, 1)]
    powers = accumulate([optimizer.beta1] * steps, operator.mul)
    pairs = list(zip(corrected, powers, strict=True))
    moment = math.fsum(q * power for q, power in pairs)
    return Course(math.fsum(rates), moment, math.fsum(q * (1.0 - power) for q, power in pairs))


def round_scalars(run: RunConfig, t: int) -> RoundScalars:
    """Scalars of round t."""
    rounds, optimizer = rounds_of(run), run.optimizer
    steps = rounds.length(t)
    return RoundScalars(
        steps=steps,
        course=course(run, t, steps),
        root2=bias_corrections(optimizer, rounds.progress(t - 1))[1] ** 0.5,
        first=math.prod([optimizer.beta1] * steps),
        second=math.prod([optimizer.beta2] * steps),
    )


def normalise(
    local: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    own: Course,
    scalars: RoundScalars,
    eps: float,
    decay: float,
) -> None:
    """Move the weights `local` of an island, after steps of the course `own`, to where the round's course
    with the same mean gradient ends, in place; nothing if the courses are equal, or all learning rates of
    `own` are zero. All vectors are flat, of the same elements. weights, first, second: those of the run,
    before the round. decay: weight decay; 0: these elements have none."""
    whole = scalars.course
    if own == whole or not own.gradient:
        return
    ratio = whole.gradient / own.gradient
    change = weights.sub(local).mul_(ratio)
    scale = torch.sqrt(second).div_(scalars.root2).add_(eps)
    change.add_(first.mul(whole.moment - ratio * own.moment).div_(scale))
    if decay:
        change.add_(weights.mul(decay * (whole.rates - ratio * own.rates)))
    local.copy_(weights).sub_(change)


def update_moments(
    first: Tensor,
    second: Tensor,
    change: Tensor,
    weights: Tensor,
    scalars: RoundScalars,
    eps: float,
    decay: float,
) -> None:
    """Bring both moments past a round in place; all vectors are flat, of the same elements. Nothing if all
    learning rates of the round are zero: its change says nothing then. change: mean of the slots' changes
    (weights before less weights after). weights: those before the round. decay: weight decay; 0: these
    elements have none.

    g = ((change − decay·Σr·w)·D − Σqβ₁ʰ·m) / Σq(1 − β₁ʰ);  m = β₁ᴴm + (1 − β₁ᴴ)g;
    v = β₂ᴴv + (1 − β₂ᴴ)·H·g²
    """
    whole = scalars.course
    if not whole.gradient:
        return
    scale = torch.sqrt(second).div_(scalars.root2).add_(eps)
    mean = change.sub(weights.mul(decay * whole.rates)) if decay else change.clone()
    mean.mul_(scale).sub_(first.mul(whole.moment)).div_(whole.gradient)
    first.mul_(scalars.first).add_(mean.mul(1.0 - scalars.first))
    mean.mul_(mean).mul_(scalars.steps * (1.0 - scalars.second))
    second.mul_(scalars.second).add_(mean)


def rebase(optimizer: OptimizerSection, first: Tensor, second: Tensor, before: int, after: int) -> None:
    """Scale both moments in place so that, divided by the bias corrections of Adam's counter `after`, they
    are what they were by those of `before`. Nothing if the counters are equal."""
    if before != after:
        old, new = bias_corrections(optimizer, max(1, before)), bias_corrections(optimizer, max(1, after))
        first.mul_(new[0] / old[0])
        second.mul_(new[1] / old[1])
