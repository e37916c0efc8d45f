"""Optimizer parameters of a step, which the leader logs, and the functions that compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepParameters:
    """Parameters of one optimizer step, besides the gradient."""

    clip_factor: float
    learning_rate: float
    bias_correction1: float
    bias_correction2: float


@dataclass(frozen=True)
class Schedule:
    """Parameters of steps as functions of the run's configuration (not only the learning rate), which the
    leader evaluates for each step.

    manifest(t): hash of the iteration's batch; None on peers without the corpus. step(t, adam_step, norm):
    parameters of the step; adam_step counts the steps taken, including this one. tokens: target tokens per
    iteration. window_tokens: target tokens per held-out window. outer(steps): parameters of the outer step of
    a round, from the inner steps of all slots that count; used, and needed, in rounds only. inner_tokens:
    target tokens of an inner step.
    """

    manifest: Callable[[int], str] | None
    step: Callable[[int, int, float], StepParameters]
    tokens: int
    window_tokens: int
    outer: Callable[[int], StepParameters] | None = None
    inner_tokens: int = 0
