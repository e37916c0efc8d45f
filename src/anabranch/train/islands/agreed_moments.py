"""Moments that the islands of a run agree on in each round (`round.first_moment = "agree"`).

An island that normalises by its own second moment takes small, even steps: with few tokens a step, such a
moment is mostly noise, of which the mean gradient of K islands has a K-th. Here every island begins a round
with the moments of the run and holds the second one. So the mean change of the islands says what the mean
gradient of the round was, and the moments of the run go on from it, as in a synchronous step on the batch of
all islands. Nothing but the change is exchanged, and no island has moments of its own.

In a round of H optimizer steps with learning rates rₕ, the mean change without decay is Σ qₕ·mₕ / D, where
qₕ = rₕ/c₁ₕ and D = √v/√c₂ + ε. If g is the mean gradient of the round, the mean of mₕ weighted by qₕ is
S·m + (1 − S)·g with S = Σ qₕ·β₁ʰ / Σ qₕ; m is the moment at its beginning. g is the mean over H batches, of
which each step would have had one, so its square counts H times. Slots of other lengths than H are taken for
such of H steps.

In the second moment that an island holds its own squares count with weight 1/K², as they would in that of
the mean gradient: else a first gradient of a seldom element would be divided by almost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.config import OptimizerSection, RunConfig
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.step_scalars import bias_corrections, learning_rate


@dataclass(frozen=True)
class RoundScalars:
    """Scalars of a round, equal for all elements. steps: H. rates: Σ rₕ. corrected: Σ qₕ. root2: √c₂
    of the second moment at the beginning. share: S. first, second: β₁ᴴ, β₂ᴴ."""

    steps: int
    rates: float
    corrected: float
    root2: float
    share: float
    first: float
    second: float


def round_scalars(run: RunConfig, t: int) -> RoundScalars:
    """Scalars of round t. Adam's counter is the number of optimizer steps so far, skipped ones included."""
    rounds, optimizer = rounds_of(run), run.optimizer
    begun, steps = rounds.progress(t - 1), rounds.length(t)
    rates = [learning_rate(run, begun + h) for h in range(1, steps + 1)]
    corrected = [rate / bias_corrections(optimizer, begun + h)[0] for h, rate in enumerate(rates, 1)]
    powers = [math.prod([optimizer.beta1] * h) for h in range(1, steps + 1)]
    total = math.fsum(corrected)
    return RoundScalars(
        steps=steps,
        rates=math.fsum(rates),
        corrected=total,
        root2=bias_corrections(optimizer, begun)[1] ** 0.5,
        share=math.fsum(q * power for q, power in zip(corrected, powers, strict=True)) / (total or 1.0),
        first=powers[-1],
        second=math.prod([optimizer.beta2] * steps),
    )


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

    g = ((change − decay·Σr·w)·D / Σq − S·m) / (1 − S);  m = β₁ᴴm + (1 − β₁ᴴ)g;
    v = β₂ᴴv + (1 − β₂ᴴ)·H·g²
    """
    if not scalars.corrected:
        return
    scale = torch.sqrt(second).div_(scalars.root2).add_(eps)
    mean = change.sub(weights.mul(decay * scalars.rates)) if decay else change.clone()
    mean.mul_(scale).div_(scalars.corrected)
    mean.sub_(first.mul(scalars.share)).div_(1.0 - scalars.share)
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
