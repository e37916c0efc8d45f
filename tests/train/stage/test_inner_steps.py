"""Inner steps and outer steps: the properties that define local training with an outer optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.protocol.interface import tasks
from anabranch.train.model.interface import DTYPES, build, stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.block_float import BLOCK, aligned_bounds, rounded, rounded_sums
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, learning_rate
from anabranch.train.stage.inner_steps import Island, add_gradient, contribution_of, slot_tokens
from anabranch.train.stage.optimizer import StepScalars, adamw
from anabranch.train.stage.outer_step import begin_rounds, outer_step
from anabranch.train.stage.run_objects import initial_state
from anabranch.train.stage.state import StageState
from anabranch.train.workers.whole_worker import WholeWorker
from support.small_training import MadeUpBatches, small_model, small_run

DEVICE = torch.device("cpu")


def island_run(slots: int, **changes: object) -> RunConfig:
    plain = RoundSection(slots=slots, steps=4, start=0.1, contributions="exact", results="exact")
    run = small_run(dtype="fp64")
    batch = replace(run.batch, microbatches=4)
    rounds = replace(plain, **changes)  # type: ignore[arg-type]
    return replace(run, batch=batch, pipeline=PipelineSection(stages=0), round=rounds)


def state_of(run: RunConfig) -> StageState:
    model = build(small_model(run), DEVICE, DTYPES[run.compute.dtype])
    spec = partition(small_model(run), run.pipeline)[1]
    return initial_state(run, model, stage_layout(model, spec), None, DEVICE)


def contributions(run: RunConfig, state: StageState, steps: int) -> list[torch.Tensor]:
    model, batches = build(small_model(run), DEVICE, DTYPES[run.compute.dtype]), MadeUpBatches(run)
    found = []
    for slot in range(run.round.slots):
        tokens = slot_tokens(batches, run, slot, 0, steps)
        found.append(contribution_of(run, model, Island(run, state, 3, steps), tokens)[0])
    return found


def test_plain_outer_sgd_is_averaging() -> None:
    """The defining property of `diloco`: one inner step, outer SGD with rate 1: the mean of the islands."""
    run = island_run(2, outer_lr=1.0, outer_momentum=0.0)
    state = state_of(run)
    before = state.weights.clone()
    changes = contributions(run, state, 1)
    outer_step(run, state, sum(changes[1:], changes[0]), 1.0, 1.0 / len(changes))
    mean = torch.stack([before - change for change in changes]).mean(0)
    assert torch.allclose(state.weights, mean, rtol=0, atol=1e-15)
    assert not torch.equal(changes[0], changes[1])


def test_one_island_is_no_island() -> None:
    """The defining property of `diloco`: one island with outer SGD of rate 1 is where its inner steps end."""
    run = island_run(1, outer_lr=1.0, outer_momentum=0.0)
    state = state_of(run)
    before = state.weights.clone()
    [change] = contributions(run, state, 4)
    outer_step(run, state, change, 1.0, 1.0 / 4)
    assert torch.allclose(state.weights, before - change / 4, rtol=0, atol=1e-15)


def test_the_momentum_is_nesterov_and_begins_at_zero() -> None:
    run = island_run(2)
    state, mirror = state_of(run), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    state.exp_avg.fill_(7.0)  # left by the synchronous steps
    mirror = torch.nn.Parameter(state.weights.clone())
    sgd = torch.optim.SGD([mirror], lr=0.7, momentum=0.9, nesterov=True)
    begin_rounds(run, state)
    for _ in range(3):
        total = torch.randn_like(state.weights)
        mirror.grad = 0.25 * total
        sgd.step()
        outer_step(run, state, total, 0.7, 0.25)
    assert torch.allclose(state.weights, mirror.detach(), rtol=0, atol=1e-13)


def test_an_estimated_first_moment_goes_on_from_adams() -> None:
    """The first inner step of the first round is the synchronous step that would have come, and a direction
    that does not change is found again from the outer momentum."""
    run = island_run(1, outer_lr=1.0, outer_momentum=0.5, first_moment="estimate")
    state, model = state_of(run), build(small_model(run), DEVICE, DTYPES[run.compute.dtype])
    t, batches = rounds_of(run).start + 1, MadeUpBatches(run)
    state.adam_step = t - 1
    state.exp_avg.normal_(std=1e-3)
    state.exp_avg_sq.uniform_(1e-6, 1e-4)
    local = StageState(state.layout, *(v.clone() for v in (state.weights, state.exp_avg, state.exp_avg_sq)))
    begin_rounds(run, state)
    tokens = slot_tokens(batches, run, 0, 0, 1)
    change = contribution_of(run, model, Island(run, state, t, 1), tokens).change
    gradient, leaves = (
        torch.zeros_like(local.weights),
        {name: view.detach().requires_grad_() for name, view in local.layout.views(local.weights)},
    )
    for ids in tokens.view(4, run.batch.rows, -1).long():
        add_gradient(model, local, leaves, ids, gradient, 0.25 / ids[:, 1:].numel())
    factor = clip_factor(float(gradient.norm()), run.optimizer.clip)
    rate = learning_rate(run, rounds_of(run).progress(t - 1) + run.round.steps)
    adamw(local, gradient, StepScalars(rate, factor, *bias_corrections(run.optimizer, t)), run.optimizer)
    assert torch.allclose(change, state.weights - local.weights, rtol=1e-6, atol=1e-12)

    flat = island_run(1, outer_lr=1.0, outer_momentum=0.5, first_moment="estimate")
    flat = replace(flat, optimizer=replace(flat.optimizer, min_lr_ratio=1.0, warmup_steps=0))
    state.exp_avg.fill_(1.0)
    once = state.exp_avg.clone()
    begin_rounds(flat, state)
    warm, total = state.exp_avg.clone(), state.exp_avg * 0.5  # contribution of a round in that direction
    outer_step(flat, state, total, 1.0, 1.0)
    assert torch.allclose(state.exp_avg, warm) and not torch.allclose(warm, once)


def test_the_slots_share_the_batches_of_synchronous_steps() -> None:
    run, batches = island_run(2), MadeUpBatches(island_run(2))
    start = 2
    rows = {slot: slot_tokens(batches, run, slot, 1, 2) for slot in range(2)}
    for step in range(2):
        ours = torch.cat([rows[slot].view(2, 4, -1)[step] for slot in range(2)])
        theirs = [batches.microbatch(start + 2 + step, index) for index in range(4)]
        whole = [torch.cat((torch.tensor(ids), torch.tensor(to)[:, -1:]), 1) for ids, to in theirs]
        assert torch.equal(ours.long(), torch.cat(whole))
    later = slot_tokens(batches, run, 0, 2, 1)
    assert torch.equal(later, rows[0].view(2, 4, -1)[1])  # a pure function of slot and counter


def test_the_embeddings_gradient_has_the_models_factor() -> None:
    """Gemma multiplies embeddings by a factor, so the gradient of their table has it, too."""
    run = island_run(1)
    config = replace(small_model(run), architecture="gemma", tied=False)
    model = build(config, DEVICE, torch.float64)
    layout = stage_layout(model, partition(config, run.pipeline)[1])
    state = initial_state(run, model, layout, None, DEVICE)
    [ids] = slot_tokens(MadeUpBatches(run), run, 0, 0, 1).view(4, run.batch.rows, -1).long()[:1]
    row, table = int(ids[0, 3]), layout.view(state.weights, model.tables[0])

    def loss() -> float:
        leaves = {name: view.detach().requires_grad_() for name, view in layout.views(state.weights)}
        return add_gradient(model, state, leaves, ids, gradient, 1.0)

    gradient = torch.zeros_like(state.weights)
    loss()
    found = float(layout.view(gradient, model.tables[0])[row, 5])
    step = 1e-6
    table[row, 5] += step
    above = loss()
    table[row, 5] -= 2 * step
    assert found == pytest.approx((above - loss()) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_idempotent_exact_and_the_same_in_parts(bits: int) -> None:
    values = torch.randn(1000) * torch.logspace(-9, 1, 1000)
    once = rounded(values, bits)
    assert torch.equal(rounded(once, bits), once)
    units = (once.double() * 2.0**48).to(torch.int64)
    assert torch.equal(units.double() * 2.0**-48, once.double())
    assert torch.equal(rounded_sums(units, bits), units)
    scale = values.view(-1)[: 15 * BLOCK].view(-1, BLOCK).abs().amax(1, keepdim=True)
    error = (once - values)[: 15 * BLOCK].view(-1, BLOCK).abs()
    assert bool((error <= scale / ((1 << (bits - 1)) - 1) + 2.0**-48).all())
    for parts in (1, 3, 7):
        cut = torch.cat([rounded(values[a:b], bits) for a, b in aligned_bounds(1000, parts)])
        assert torch.equal(cut, once)


def test_a_result_that_is_fetched_is_the_one_that_was_assembled() -> None:
    """A replica without the parts of a round's result takes the whole result from one that applied it."""
    run = island_run(2, results="int8")
    workers = [WholeWorker(run, small_model(run), 1, None, None) for _ in range(2)]
    for worker in workers:
        assert not worker.run(tasks.InitState(0)).error
    t = 50  # a round
    total = torch.randint(-9, 9, (workers[0].layout.elements,), dtype=torch.int64) << 40
    made = workers[0].run(tasks.Assemble(t), (rounded_sums(total, 8),))
    [fetched] = workers[0].run(tasks.ReadGradient(t)).outputs
    again = workers[1].run(tasks.Assemble(t), (fetched,))
    assert not again.error and again.digest == made.digest
