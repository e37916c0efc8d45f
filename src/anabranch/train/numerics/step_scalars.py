"""Scalars of a step as pure functions of Python floats; computed once and carried in the log.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from anabranch.config import OptimizerSection, RunConfig

#: Added to the norm before dividing, as in torch's `clip_grad_norm_`.
CLIP_EPSILON = 1e-6


def learning_rate(config: RunConfig, t: int) -> float:
    """Learning rate of optimizer step t = 1, 2, ... (in a synchronous run, of iteration t): linear warm-up,
    then the run file's schedule (cosine, linear or wsd) down to lr · min_lr_ratio at step decay_steps (0: the
    run's last), where it stays. Skipped steps count in t; Adam's counter leaves them out."""
    o = config.optimizer
    if t <= o.warmup_steps:
        return o.lr * t / o.warmup_steps
    end = o.decay_steps or config.run.steps
    if o.schedule == "wsd":
        # Hägele et al. 2024, arXiv 2405.18392: a constant rate, then a short linear decay.
        falling = max(1.0, o.decay_share * end)
        progress = min(1.0, max(0.0, (t - (end - falling)) / falling))
    else:
        progress = min(1.0, (t - o.warmup_steps) / max(1, end - o.warmup_steps))
    if o.schedule == "cosine":
        return o.lr * (o.min_lr_ratio + (1.0 - o.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return o.lr * (1.0 - progress + o.min_lr_ratio * progress)  # both ends of the line exactly


def bias_corrections(optimizer: OptimizerSection, step: int) -> tuple[float, float]:
    """(1 − β₁ⁿ, 1 − β₂ⁿ) for Adam's counter n = `step` after this step (1 for the first)."""
    return 1.0 - optimizer.beta1**step, 1.0 - optimizer.beta2**step


def global_norm(squares: Iterable[float]) -> float:
    """Norm of the whole gradient from the sum of squares of each tensor of every stage, in any order."""
    return math.sqrt(math.fsum(squares))


def clip_factor(norm: float, clip: float) -> float:
    """Factor (at most 1) of the gradient that limits its norm to `clip` (0: no clipping, the factor is 1)."""
    return min(1.0, clip / (norm + CLIP_EPSILON)) if clip > 0 else 1.0
