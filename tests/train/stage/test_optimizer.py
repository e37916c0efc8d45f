"""AdamW against torch's own; the schedule's scalars."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from anabranch.config import OptimizerSection, RunConfig, RunSection
from anabranch.train.model.layout import Layout
from anabranch.train.numerics.exact import BLOCK
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.stage.optimizer import StepScalars, adamw
from anabranch.train.stage.state import StageState

LAYOUT = Layout({"matrix": (BLOCK // 64 + 3, 64), "gain": (64,), "bias": (5,)})


@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_adamw_equals_torch_in_fp64(clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = OptimizerSection(weight_decay=0.2, eps=1e-9)
    flat = torch.randn(LAYOUT.elements, generator=generator, dtype=torch.float64)
    state = StageState.initial(LAYOUT, flat.clone())
    theirs = {name: view.clone().requires_grad_() for name, view in LAYOUT.views(flat)}
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.2},
        {"params": [theirs["gain"], theirs["bias"]], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
    for step in range(1, 31):
        rate = 1e-2 / step
        gradient = torch.randn(LAYOUT.elements, generator=generator, dtype=torch.float64)
        adamw(state, gradient, StepScalars(rate, clip, *bias_corrections(optimizer, step)), optimizer)
        for name, parameter in theirs.items():
            parameter.grad = LAYOUT.view(gradient, name) * clip
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    assert state.adam_step == 30
    for name, view in LAYOUT.views(state.weights):
        assert float((view - theirs[name].detach()).abs().max()) < 1e-12
        moments = adam.state[theirs[name]]
        assert torch.allclose(LAYOUT.view(state.exp_avg, name), moments["exp_avg"], rtol=1e-12, atol=1e-15)
        assert torch.allclose(LAYOUT.view(state.exp_avg_sq, name), moments["exp_avg_sq"], rtol=1e-12)


def test_blocks_and_offsets_do_not_change_a_bit() -> None:
    optimizer = OptimizerSection()
    generator = torch.Generator().manual_seed(1)
    values, gradient = (torch.randn(BLOCK + 77, generator=generator) for _ in range(2))
    scalars = StepScalars(1e-3, 0.9, *bias_corrections(optimizer, 1))
    alone = StageState.initial(Layout({"w": (BLOCK + 77, 1)}), values.clone())
    adamw(alone, gradient, scalars, optimizer)
    shifted_layout = Layout({"a": (3,), "w": (BLOCK + 77, 1)})
    pad = torch.zeros(3)
    shifted = StageState.initial(shifted_layout, torch.cat((pad, values)))
    adamw(shifted, torch.cat((pad, gradient)), scalars, optimizer)
    assert torch.equal(shifted_layout.flat(shifted.weights, "w"), alone.weights)


def run_of(steps: int = 100, **optimizer: Any) -> RunConfig:
    return RunConfig(run=RunSection(steps=steps), optimizer=OptimizerSection(**optimizer))


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    run = run_of(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    assert [learning_rate(run, t) for t in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert learning_rate(run, 55) == pytest.approx(0.55)
    assert learning_rate(run, 100) == learning_rate(run, 150) == pytest.approx(0.1)
    rates = [learning_rate(run, t) for t in range(10, 101)]
    assert rates == sorted(rates, reverse=True)


def test_the_cosine_can_end_elsewhere_and_warm_up_can_be_absent() -> None:
    assert learning_rate(run_of(lr=2.0, warmup_steps=0, decay_steps=50), 50) == pytest.approx(0.2)
    assert learning_rate(run_of(lr=2.0, warmup_steps=100), 101) == pytest.approx(0.2)


def test_norm_and_clip_factor() -> None:
    squares = [1.0] * 1000 + [1e16]  # added singly, the ones would be lost beside the large one
    assert global_norm(squares) == global_norm(reversed(squares)) == math.sqrt(1e16 + 1000)
    assert clip_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(1e9, 0.0) == 1.0


def test_linear_and_wsd_schedules() -> None:
    linear = run_of(lr=1.0, warmup_steps=10, min_lr_ratio=0.1, schedule="linear")
    assert [learning_rate(linear, t) for t in (5, 10, 100, 150)] == [0.5, 1.0, 0.1, 0.1]
    assert learning_rate(linear, 55) == pytest.approx(0.55)
    wsd = run_of(lr=1.0, warmup_steps=10, min_lr_ratio=0.0, schedule="wsd", decay_share=0.25)
    assert {learning_rate(wsd, t) for t in range(10, 76)} == {1.0}, "stable to the last bit"
    assert learning_rate(wsd, 80) == pytest.approx(0.8) and learning_rate(wsd, 100) == 0.0
    for run in (linear, wsd):
        rates = [learning_rate(run, t) for t in range(10, 101)]
        assert rates == sorted(rates, reverse=True)
    # A longer run with wsd takes the same steps as long as the shorter one is stable.
    longer = run_of(steps=1000, lr=1.0, warmup_steps=10, min_lr_ratio=0.0, schedule="wsd", decay_share=0.25)
    assert all(learning_rate(longer, t) == learning_rate(wsd, t) for t in range(1, 76))
