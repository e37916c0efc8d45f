"""Agreed moments: what they follow from the islands' mean change, beside AdamW's on the mean gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anabranch.config import OptimizerSection, PipelineSection, RoundSection, RunConfig
from anabranch.train.islands.agreed_moments import Course, rebase, round_scalars, update_moments
from anabranch.train.model.interface import DTYPES, build, stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.step_scalars import bias_corrections
from anabranch.train.stage.inner_steps import Island, contribution_of, slot_tokens
from anabranch.train.stage.optimizer import decays
from anabranch.train.stage.outer_step import begin_rounds, end_rounds, outer_step
from anabranch.train.stage.run_objects import initial_state
from anabranch.train.stage.state import StageState
from support.small_training import MadeUpBatches, small_model, small_run

DEVICE = torch.device("cpu")
FIRST = 3
"""First round."""


def agreeing(
    slots: int = 2, steps: int = 4, optimizer: dict[str, object] | None = None, **rounds: object
) -> RunConfig:
    """Run in double precision that agrees on its moments, with exact contributions."""
    run = small_run(dtype="fp64")
    part = RoundSection(
        slots=slots, steps=steps, outer_lr=1.0, outer_momentum=0.0, first_moment="agree",
        contributions="exact", results="exact", start=2 / run.run.steps,
    )  # fmt: skip
    return replace(
        run,
        batch=replace(run.batch, microbatches=4),
        pipeline=PipelineSection(stages=0),
        round=replace(part, **rounds),  # type: ignore[arg-type]
        optimizer=replace(run.optimizer, clip=0.0, **(optimizer or {})),  # type: ignore[arg-type]
    )


def state_of(run: RunConfig, second: float = 1e4) -> StageState:
    """State after the synchronous steps of which every square was `second`; the first moment differs."""
    model = build(small_model(run), DEVICE, DTYPES[run.compute.dtype])
    layout = stage_layout(model, partition(small_model(run), run.pipeline)[1])
    state = initial_state(run, model, layout, None, DEVICE)
    state.adam_step = rounds_of(run).start
    state.exp_avg.copy_(torch.linspace(-1.0, 1.0, len(state.exp_avg)))
    state.exp_avg_sq.fill_(second * bias_corrections(run.optimizer, state.adam_step)[1])
    return state


def given(run: RunConfig, state: StageState, gradient: torch.Tensor, steps: int = 0) -> torch.Tensor:
    """Change of the first round of an island whose gradient is the same in all its steps."""
    steps = steps or run.round.steps
    island = Island(run, state, FIRST, steps)
    for _ in range(steps):
        island.gradient.copy_(gradient)
        island.step()
    return island.close().change / steps


def corrected(run: RunConfig) -> float:
    """Sum of the learning rates of the first round, each over its bias correction."""
    course = round_scalars(run, FIRST).course
    return course.moment + course.gradient


@pytest.mark.parametrize("slots", [(1, 7), (2, 6), (16, 4)])
def test_slots_of_other_lengths_say_the_same_of_the_moments(slots: tuple[int, int]) -> None:
    """Without it the moments of the run grow by a factor in each round where machines differ in speed."""
    run = agreeing(steps=4, optimizer={"weight_decay": 0.3, "lr": 1e-6})
    state = state_of(run, second=1e8)
    torch.manual_seed(1)
    gradients = torch.randn(2, len(state.weights), dtype=torch.float64)
    alike = [given(run, state, gradient) for gradient in gradients]
    others = [given(run, state, gradient, steps) for gradient, steps in zip(gradients, slots, strict=True)]
    for one, other in zip(alike, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-13)
        assert float(one.abs().max()) > 1e-11


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("slots", [(1, 7), (2, 2, 2, 10), (4, 4)])
def test_unequal_machines_keep_the_moments_bounded(slots: tuple[int, ...]) -> None:
    """Forty rounds of noise: the second moment stays near that of the noise of the mean gradient."""
    run = agreeing(slots=len(slots), steps=4, optimizer={"lr": 1e-4})
    run = replace(run, run=replace(run.run, steps=400))
    run = replace(run, round=replace(run.round, start=2 / 400))
    state = state_of(run, second=1.0 / len(slots))
    state.exp_avg.zero_()
    torch.manual_seed(2)
    for t in range(FIRST, FIRST + 40):
        total = torch.zeros_like(state.weights)
        for steps in slots:
            island = Island(run, state, t, steps)
            for _ in range(steps):
                island.gradient.normal_()
                island.step()
            total += island.close().change
        outer_step(run, state, total, 1.0, 1.0 / sum(slots), t)
    assert 0.2 < float(state.exp_avg_sq.mean()) * len(slots) < 5.0
    assert float(state.exp_avg.square().mean()) * len(slots) < 1.0


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_mean_gradient_of_a_round_is_found_again(steps: int, decay: float) -> None:
    """Islands with constant gradients: the moments are those of H steps with their mean, whose square
    counts H times."""
    run = agreeing(steps=steps, optimizer={"weight_decay": decay, "lr": 1e-6})
    assert rounds_of(run).has(FIRST) and not rounds_of(run).has(FIRST - 1)
    state = state_of(run, second=1e8)  # beside it the islands' own squares are nothing
    torch.manual_seed(1)
    one, two = torch.randn(2, len(state.weights), dtype=torch.float64)
    first, second, optimizer = state.exp_avg.clone(), state.exp_avg_sq.clone(), run.optimizer
    total = sum(given(run, state, gradient) * steps for gradient in (one, two))
    before = state.weights.clone()
    outer_step(run, state, total, 1.0, 0.5 / steps, FIRST)
    mean = (one + two) / 2.0
    kept = optimizer.beta1**steps
    assert torch.allclose(state.exp_avg, kept * first + (1.0 - kept) * mean, rtol=0, atol=1e-3)
    kept = optimizer.beta2**steps
    expected = kept * second + (1.0 - kept) * steps * mean.square()
    assert torch.allclose(state.exp_avg_sq - kept * second, expected - kept * second, rtol=1e-2, atol=1e-3)
    assert torch.allclose(before - state.weights, total / (2.0 * steps), rtol=0, atol=1e-15)


def test_a_round_of_one_step_is_adamw_on_the_mean_gradient() -> None:
    run = agreeing(steps=1)
    state, model = state_of(run), build(small_model(run), DEVICE, torch.float64)
    batches = MadeUpBatches(run)
    changes = [
        contribution_of(
            run, model, Island(run, state, FIRST, 1), slot_tokens(batches, run, slot, 0, 1)
        ).change
        for slot in (0, 1)
    ]
    optimizer, rate = run.optimizer, round_scalars(run, FIRST).course.rates
    one, two = bias_corrections(optimizer, FIRST)[0], bias_corrections(optimizer, FIRST - 1)[1]
    before, first = state.weights.clone(), state.exp_avg.clone()
    scale = torch.sqrt(state.exp_avg_sq / two) + optimizer.eps
    outer_step(run, state, changes[0] + changes[1], 1.0, 0.5, FIRST)
    shrunk = before.clone()
    for name, (begin, end) in state.layout.bounds.items():
        if decays(state.layout.shapes[name]):
            shrunk[begin:end] *= 1.0 - rate * optimizer.weight_decay
    assert torch.allclose(state.weights, shrunk - rate / one * state.exp_avg / scale, rtol=0, atol=1e-9)
    assert not torch.allclose(state.exp_avg, optimizer.beta1 * first, rtol=0, atol=1e-6)


def test_a_first_gradient_of_an_element_moves_it_no_further_than_adam_would() -> None:
    """The run's second moment is zero; one island of K has a gradient. Its K-th in the mean is one step of
    Adam's."""
    run = agreeing(steps=1, slots=4, optimizer={"weight_decay": 0.0})
    state = state_of(run, second=0.0)
    state.exp_avg.zero_()
    change = given(run, state, torch.full_like(state.weights, 7.0))
    optimizer, rate = run.optimizer, corrected(run)
    two = bias_corrections(optimizer, FIRST - 1)[1]
    most = rate * (1.0 - optimizer.beta1) / ((1.0 - optimizer.beta2) / two) ** 0.5
    assert torch.allclose(change / 4.0, torch.full_like(change, most), rtol=1e-4, atol=0)
    outer_step(run, state, change, 1.0, 0.25, FIRST)
    assert bool(torch.isfinite(state.exp_avg).all() and torch.isfinite(state.exp_avg_sq).all())


def test_a_round_without_a_learning_rate_leaves_the_moments() -> None:
    scalars = replace(round_scalars(agreeing(), FIRST), course=Course(0.0, 0.0, 0.0))
    first, second = torch.ones(3), torch.full((3,), 2.0)
    update_moments(first, second, torch.zeros(3), torch.ones(3), scalars, 1e-8, 0.1)
    assert first.tolist() == [1.0] * 3 and second.tolist() == [2.0] * 3


def test_moments_keep_their_size_where_the_counter_changes() -> None:
    """Before the first and after the last round, whatever steps were skipped."""
    run = agreeing(end=0.25)
    state = state_of(run)
    state.adam_step = 1  # a synchronous step was skipped
    before = [state.exp_avg.clone(), state.exp_avg_sq.clone()]
    old = bias_corrections(run.optimizer, 1)
    begin_rounds(run, state)
    for moment, kept, count, new in zip(
        (state.exp_avg, state.exp_avg_sq), before, old, bias_corrections(run.optimizer, 2), strict=True
    ):
        assert torch.allclose(moment / new, kept / count)
    outer_step(run, state, torch.zeros_like(state.weights), 1.0, 0.125, FIRST)
    corrected = bias_corrections(run.optimizer, rounds_of(run).progress(rounds_of(run).last))
    inside = state.exp_avg / corrected[0]
    end_rounds(run, state)
    assert torch.allclose(state.exp_avg / old[0], inside)


def test_equal_counters_change_no_bit() -> None:
    first, second = torch.rand(5), torch.rand(5)
    kept = first.clone(), second.clone()
    rebase(OptimizerSection(), first, second, 7, 7)
    assert torch.equal(first, kept[0]) and torch.equal(second, kept[1])
