"""A worker's tasks one by one: what they refuse, undo, keep and forget."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anabranch.config import ConfigError, RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import KEPT_GRADIENTS, PIECE_BYTES, embed_unit, head_unit
from anabranch.train.numerics import exact
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.worker import Worker
from support.small_training import (
    MadeUpBatches,
    SmallSwarm,
    bits_equal,
    done,
    small_model,
    small_run,
    with_section,
)


def worker_of(run: RunConfig, stage: int, initial: dict[str, Tensor] | None = None) -> Worker:
    worker = Worker(run, small_model(run), stage, MadeUpBatches(run) if stage == 0 else None, initial)
    done(worker.run(tasks.InitState(0)))
    return worker


def activation(run: RunConfig, seed: int = 0, scale: float = 1.0) -> Tensor:
    shape = (run.batch.rows, run.batch.sequence, small_model(run).dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def sums(worker: Worker, parts: int = 1) -> Tensor:
    return torch.cat(done(worker.run(tasks.Freeze(1, parts))).outputs)


def relay_adds(worker: Worker, run: RunConfig, index: int) -> None:
    done(worker.run(tasks.Forward(1, index, train=True), (activation(run, index),)))
    done(worker.run(tasks.InputGradient(1, index), (activation(run, index + 100, 1e-3),)))
    done(worker.run(tasks.WeightGradient(1, index)))


def test_recount_subtracts_a_relay_unit_exactly_and_disturbs_nothing() -> None:
    run = small_run("gpt")
    worker = worker_of(run, 1)
    relay_adds(worker, run, 0)
    before = sums(worker)
    done(worker.run(tasks.Forward(1, 1, train=True), (activation(run, 1),)))
    relay_adds(worker, run, 2)
    boundaries = (activation(run, 2), activation(run, 102, 1e-3))
    done(worker.run(tasks.Recount(1, 2, -1), boundaries))
    assert bits_equal(sums(worker), before) and before.any()
    done(worker.run(tasks.Recount(1, 2, 1), boundaries))
    assert not bits_equal(sums(worker), before)
    done(worker.run(tasks.InputGradient(1, 1), (activation(run, 101, 1e-3),)))


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_a_forward_that_was_not_kept_and_is_computed_again_gives_the_same_bits(architecture: str) -> None:
    run = small_run(architecture)
    kept, again = worker_of(run, 1), worker_of(run, 1)
    x, dy = activation(run, 1), activation(run, 101, 1e-3)
    (y,) = done(kept.run(tasks.Forward(1, 1, train=True), (x,))).outputs
    (y_again,) = done(again.run(tasks.Forward(1, 1, train=True, keep=False), (x,))).outputs
    assert bits_equal(y, y_again)
    assert "no forward" in again.run(tasks.InputGradient(1, 1), (dy,)).error
    (dx,) = done(kept.run(tasks.InputGradient(1, 1), (dy,))).outputs
    (dx_again,) = done(again.run(tasks.InputGradient(1, 1, again=True), (dy, x))).outputs
    assert bits_equal(dx, dx_again) and dx.any()
    for worker in (kept, again):
        done(worker.run(tasks.WeightGradient(1, 1)))
    assert bits_equal(sums(kept), sums(again)) and sums(kept).any()


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_recount_subtracts_head_and_embed_units_exactly(architecture: str) -> None:
    run = small_run(architecture)
    worker = worker_of(run, 0)
    x, dx = activation(run), activation(run, 1, 1e-3)
    done(worker.run(tasks.Head(1, 3, train=True), (x,)))
    done(worker.run(tasks.WeightGradient(1, head_unit(3))))
    head_alone = sums(worker)
    done(worker.run(tasks.WeightGradient(1, embed_unit(3)), (dx,)))
    assert not bits_equal(sums(worker), head_alone)
    done(worker.run(tasks.Recount(1, embed_unit(3), -1), (dx,)))
    assert bits_equal(sums(worker), head_alone) and head_alone.any()
    done(worker.run(tasks.Recount(1, head_unit(3), -1), (x,)))
    assert not sums(worker).any()


def test_discard_forgets_and_a_missing_microbatch_is_an_error() -> None:
    run = small_run()
    relay, data_node = worker_of(run, 1), worker_of(run, 0)
    done(relay.run(tasks.Forward(1, 4, train=True), (activation(run),)))
    done(relay.run(tasks.Discard(1, 4)))
    refused = relay.run(tasks.InputGradient(1, 4), (activation(run),))
    assert refused.error == "no forward of microbatch 4 is held"
    done(data_node.run(tasks.Head(1, 4, train=True), (activation(run),)))
    done(data_node.run(tasks.Discard(1, 4)))
    assert "unit 8 is waiting" in data_node.run(tasks.WeightGradient(1, head_unit(4))).error


def test_an_evaluation_forward_keeps_nothing_and_has_the_same_bits() -> None:
    run = small_run()
    worker = worker_of(run, 2)
    (trained,) = done(worker.run(tasks.Forward(1, 0, train=True), (activation(run),))).outputs
    (evaluated,) = done(worker.run(tasks.Forward(1, 9, train=False), (activation(run),))).outputs
    assert bits_equal(trained, evaluated)
    assert worker.run(tasks.InputGradient(1, 9), (activation(run),)).error


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (torch.zeros(2, 12, 31), "not torch.float32 (2, 12, 32)"),
        (torch.zeros(2, 12, 32, dtype=torch.float64), "is torch.float64"),
        (torch.full((2, 12, 32), float("nan")), "not finite"),
        ("text", "a payload is a str"),
    ],
)
def test_what_a_neighbour_must_not_send_is_refused(payload: object, message: str) -> None:
    run = small_run()
    assert message in worker_of(run, 1).run(tasks.Forward(1, 0, train=True), (payload,)).error
    assert message in worker_of(run, 0).run(tasks.Head(1, 0, train=True), (payload,)).error


def test_a_missing_input_and_a_missing_state_are_errors() -> None:
    run = small_run()
    assert "0 came" in worker_of(run, 1).run(tasks.Forward(1, 0, train=True)).error
    assert "1 came" in worker_of(run, 1).run(tasks.Recount(1, 0, -1), (activation(run),)).error
    fresh = Worker(run, small_model(run), 1)
    assert "no state yet" in fresh.run(tasks.Forward(1, 0, train=True), (activation(run),)).error


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    run = with_section(small_run(), "batch", sequence=17)
    with pytest.raises(ConfigError, match=r"batch.sequence: 17 .* model.max_sequence = 16"):
        Worker(run, small_model(run), 1)


def test_an_overflow_in_forward_and_in_backward_is_named() -> None:
    run = small_run()
    worker = worker_of(run, 1)
    worker.state.weights.mul_(1e30)
    assert worker.run(tasks.Forward(1, 0, train=True), (activation(run),)).overflow == "activation"
    assert worker.run(tasks.Forward(1, 0, train=False), (activation(run),)).overflow == "activation"
    worker = worker_of(run, 1)
    done(worker.run(tasks.Forward(1, 0, train=True), (activation(run),)))
    huge = torch.full_like(activation(run), torch.finfo(torch.float32).max)
    assert worker.run(tasks.InputGradient(1, 0), (huge,)).overflow == "input gradient"


def test_an_overflow_of_a_weight_gradient_leaves_the_sums_untouched() -> None:
    run = small_run()
    worker = worker_of(run, 1)
    relay_adds(worker, run, 0)
    before = sums(worker)
    # 2**14 / 5 is the most that one contribution may be. The three products of the last feed-forward layer
    # come first and are in range; the attention's output is not: what had been added is taken back.
    done(worker.run(tasks.Forward(1, 1, train=True), (activation(run),)))
    done(worker.run(tasks.InputGradient(1, 1), (activation(run, 5, 1e4),)))
    added: list[str] = []
    accumulator = worker._stage.accumulator
    add = accumulator.add

    def counting(name: str, gradient: Tensor, sign: int = 1) -> None:
        add(name, gradient, sign)
        added.append(name)

    accumulator.add = counting  # type: ignore[method-assign]
    result = worker.run(tasks.WeightGradient(1, 1))
    assert result.overflow == "model.layers.1.self_attn.o_proj.weight"
    assert len(added) == 2 * 3
    assert bits_equal(sums(worker), before)


def test_skip_keeps_the_state_and_clears_the_work() -> None:
    run = small_run()
    worker = worker_of(run, 1)
    before = worker.state.fingerprint()
    relay_adds(worker, run, 0)
    result = done(worker.run(tasks.Skip(1)))
    assert (result.fingerprint, worker.state.t, worker.state.adam_step) == (before, 1, 0)
    assert not sums(worker).any()
    assert "does not follow" in worker.run(tasks.Skip(1)).error


def test_swarm_and_reference_skip_alike_and_the_reference_finds_the_witness() -> None:
    run = small_run("gpt")
    swarm = SmallSwarm(run, seed=3)
    reference = Reference(run, swarm.model, swarm.batches)
    swarm.step(1)
    reference.step(reference.share(1, range(5)))
    assert reference.witnesses(2, 0) == frozenset()
    poisoned = "transformer.h.3.mlp.c_proj.weight"
    clean = []
    for state in [*reference.states, *(worker.state for worker in swarm.workers())]:
        if poisoned in state.layout.names:
            clean.append((state, state.layout.view(state.weights, poisoned)[0, 0].item()))
            state.layout.view(state.weights, poisoned)[0, 0] = float("inf")
    (x,) = done(swarm.stages[0][0].run(tasks.Embed(2, 0))).outputs
    (x,) = done(swarm.stages[1][0].run(tasks.Forward(2, 0, train=True), (x,))).outputs
    overflow = swarm.stages[2][0].run(tasks.Forward(2, 0, train=True), (x,)).overflow
    assert (2, overflow) in reference.witnesses(2, 0)
    for state, value in clean:
        state.layout.view(state.weights, poisoned)[0, 0] = value
    record = reference.skip(reference.share(2, range(5)))
    assert record.skipped and record.fingerprints == reference.fingerprints()
    for worker in swarm.workers():
        done(worker.run(tasks.Skip(2)))
    swarm.step(3)
    third = reference.step(reference.share(3, range(5)))
    fingerprints = tuple(replicas[0].state.fingerprint() for replicas in swarm.stages)
    assert fingerprints == reference.fingerprints()
    assert not third.skipped and reference.states[0].adam_step == 2


def test_the_reference_skips_a_step_that_overflows() -> None:
    run = small_run()
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    reference.states[2].weights[0] = float("nan")
    record = reference.step(reference.share(1, range(5)))
    assert record.skipped and reference.t == 1 and reference.states[0].adam_step == 0


def test_freeze_copies_and_can_clear() -> None:
    run = small_run()
    worker = worker_of(run, 1)
    relay_adds(worker, run, 0)
    frozen = done(worker.run(tasks.Freeze(1, 3, clear=True))).outputs
    assert [len(part) for part in frozen] == [
        end - begin for begin, end in tasks.part_bounds(worker.layout.elements, 3)
    ]
    assert any(part.any() for part in frozen) and not sums(worker).any()


def test_reduced_gradients_serve_a_replica_that_missed_steps_until_they_are_dropped() -> None:
    run = small_run()
    swarm = SmallSwarm(run, seed=0, replicas=(1, 1, 1))
    late, ahead = worker_of(run, 1), swarm.stages[1][0]
    steps = KEPT_GRADIENTS + 2
    applies = {}
    for t in range(1, steps + 1):
        original = ahead.run

        def noting(task: tasks.Task, inputs: tuple[object, ...] = ()) -> tasks.Result:
            if isinstance(task, tasks.Apply):
                applies[task.t] = task
            return original(task, inputs)  # noqa: B023

        ahead.run = noting  # type: ignore[method-assign]
        swarm.step(t)
        ahead.run = original  # type: ignore[method-assign]
        if t <= 2:
            (gradient,) = done(ahead.run(tasks.ReadGradient(t))).outputs
            result = done(late.run(applies[t], (gradient,)))
            assert result.fingerprint == ahead.state.fingerprint()
    for t in range(3, steps + 1):
        (gradient,) = done(ahead.run(tasks.ReadGradient(t))).outputs
        fingerprint = done(late.run(applies[t], (gradient,))).fingerprint
    assert fingerprint == ahead.state.fingerprint()
    assert done(ahead.run(tasks.ReadGradient(2))).outputs == ()
    assert "does not follow" in late.run(applies[2], (gradient,)).error


def test_apply_and_assemble_refuse_what_does_not_fit() -> None:
    run = small_run()
    worker = worker_of(run, 1)
    apply = tasks.Apply(1, 1e-3, 1.0, 0.1, 0.05)
    assert "no reduced gradient of step 1" in worker.run(apply).error
    assert "a reduced gradient of this stage" in worker.run(apply, (torch.zeros(3),)).error
    assert "a reduced gradient of this stage" in worker.run(tasks.Assemble(1)).error
    flat = torch.zeros(worker.layout.elements, dtype=torch.float64)
    assert "torch.float32" in worker.run(tasks.Assemble(1), (flat,)).error
    assert "parts" in worker.run(tasks.SumPart(1), (torch.zeros(4), torch.zeros(4))).error
    infinite = torch.zeros(worker.layout.elements)
    infinite[0] = float("inf")
    assert worker.run(tasks.Assemble(1), (infinite,)).overflow == worker.layout.names[0]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_a_snapshot_restores_the_state_and_the_next_step(dtype: str) -> None:
    run = small_run(dtype=dtype)
    swarm = SmallSwarm(run, seed=4, replicas=(1, 1, 1))
    swarm.step(1)
    joiners = []
    for stage, (worker,) in enumerate(swarm.stages):
        result = done(worker.run(tasks.Snapshot(1)))
        assert all(piece.dtype == torch.uint8 and len(piece) <= PIECE_BYTES for piece in result.outputs)
        joiner = Worker(run, swarm.model, stage, swarm.batches if stage == 0 else None)
        assert done(joiner.run(tasks.LoadState(1), result.outputs)).fingerprint == result.fingerprint
        joiners.append([joiner])
    expected = swarm.step(2)
    swarm.stages = joiners
    swarm.adam_step = 1
    assert swarm.step(2).fingerprints == expected.fingerprints


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((), "truncated"),
        ((torch.zeros(0, dtype=torch.uint8),), "truncated"),
        ((torch.full((50,), 255, dtype=torch.uint8),), "truncated"),
        ((torch.zeros(50),), "are bytes"),
    ],
)
def test_an_unreadable_snapshot_is_an_error_and_the_state_stays(
    pieces: tuple[Tensor, ...], message: str
) -> None:
    worker = worker_of(small_run(), 1)
    before = worker.state.fingerprint()
    assert message in worker.run(tasks.LoadState(1), pieces).error
    assert worker.state.fingerprint() == before


def test_a_snapshot_of_another_step_or_stage_is_an_error() -> None:
    run = small_run()
    worker, other = worker_of(run, 1), worker_of(run, 2)
    pieces = done(worker.run(tasks.Snapshot(0))).outputs
    assert "after step 0, not 4" in worker.run(tasks.LoadState(4), pieces).error
    assert "of another model or stage" in other.run(tasks.LoadState(0), pieces).error
    assert "after step 0, not 2" in worker.run(tasks.Snapshot(2)).error


def test_init_from_given_tensors() -> None:
    run = small_run()
    other = Reference(with_section(run, "run", seed=8), small_model(run), MadeUpBatches(run))
    tensors = {
        name.removeprefix("weights/"): tensor
        for name, tensor in other.tensors().items()
        if name.startswith("weights/")
    }
    for stage in range(3):
        assert worker_of(run, stage, tensors).state.fingerprint() == other.fingerprints()[stage]
    del tensors["model.norm.weight"]
    refused = Worker(run, small_model(run), 0, MadeUpBatches(run), tensors).run(tasks.InitState(0))
    assert "lack the tensor model.norm.weight" in refused.error


def test_fast_mode_subtracts_up_to_rounding() -> None:
    run = small_run(reduction="fast")
    worker = worker_of(run, 1)
    relay_adds(worker, run, 0)
    before = sums(worker)
    done(worker.run(tasks.Recount(1, 7, 1), (activation(run, 7), activation(run, 8, 1e-3))))
    done(worker.run(tasks.Recount(1, 7, -1), (activation(run, 7), activation(run, 8, 1e-3))))
    assert before.dtype == torch.float32
    assert float((sums(worker) - before).norm() / before.norm()) < 1e-6


def test_a_result_tells_how_long_it_took() -> None:
    run = small_run()
    assert worker_of(run, 1).run(tasks.Forward(1, 0, train=True), (activation(run),)).seconds > 0


def test_the_digest_is_that_of_the_reduced_tensors() -> None:
    """Every replica announces the digest of what it holds (R8)."""
    run = small_run()
    worker = worker_of(run, 1)
    flat = torch.randn(worker.layout.elements)
    result = done(worker.run(tasks.Assemble(1), (flat[:100], flat[100:])))
    assert result.digest == exact.digest(worker.layout, flat)
    assert result.squares == exact.squares(worker.layout, flat)


def test_a_worker_of_any_stage_checks_the_snapshot_of_any_other() -> None:
    """Before it has a state of its own, too; and it is told which piece is not what it was."""
    run = small_run("llama")
    taken = done(worker_of(run, 2).run(tasks.Snapshot(0)))
    keeper = Worker(run, small_model(run), 1)
    found = done(keeper.run(tasks.CheckState(0, 2), taken.outputs))
    assert (found.fingerprint, found.hashes) == (taken.fingerprint, taken.hashes)
    assert len(set(found.hashes)) == len(taken.outputs)
    assert "not 3" in keeper.run(tasks.CheckState(3, 2), taken.outputs).error

    damaged = [piece.clone() for piece in taken.outputs]
    damaged[-1][-1] ^= 1
    wrong = keeper.run(tasks.CheckState(0, 2), tuple(damaged))
    assert [a == b for a, b in zip(wrong.hashes, taken.hashes, strict=True)][-1] is False
    assert wrong.fingerprint != taken.fingerprint
    assert keeper.run(tasks.CheckState(0, 1), taken.outputs).error


def test_replicas_have_the_same_bytes() -> None:
    run = small_run("llama")
    first, second = (done(worker_of(run, 1).run(tasks.Snapshot(0))) for _ in range(2))
    assert first.hashes == second.hashes
