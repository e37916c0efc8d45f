"""However the model is split and the microbatches are routed, the swarm takes the reference's very steps."""

from __future__ import annotations

import pytest
import torch

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.train.reference.independent import IndependentReference
from anabranch.train.reference.reference import Reference
from support.grids import every_pair
from support.small_training import MadeUpBatches, SmallSwarm, done, small_model, small_run

STEPS = 4


def reference_of(run: RunConfig) -> Reference:
    return Reference(run, small_model(run), MadeUpBatches(run))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("architecture", "stages", "tied"), every_pair(("llama", "gpt"), (1, 2, 4), (True, False))
)
def test_every_value_equals_the_reference(architecture: str, stages: int, tied: bool) -> None:
    run = small_run(architecture, stages, tied=tied)
    swarm, reference = SmallSwarm(run, seed=stages), reference_of(run)
    clipped = 0
    for t in range(1, STEPS + 1):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert step.losses == record.losses
        assert step.squares == record.squares
        assert step.digests == record.digests
        assert (step.norm, step.clip_factor) == (record.norm, record.clip_factor)
        assert step.fingerprints == reference.fingerprints()
        clipped += record.clip_factor < 1
    assert clipped > 0
    assert reference.states[0].adam_step == STEPS


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_other_dtypes_equal_the_reference(architecture: str, dtype: str) -> None:
    run = small_run(architecture, 2, dtype)
    swarm, reference = SmallSwarm(run, seed=5), reference_of(run)
    for t in (1, 2, 3):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.digests) == (record.losses, record.digests)
        assert step.fingerprints == reference.fingerprints()


def test_partitions_agree_on_squares_norm_and_losses() -> None:
    steps = [SmallSwarm(small_run(stages=stages), seed=9).step(1) for stages in (1, 2, 4)]
    for step in steps[1:]:
        assert step.squares == steps[0].squares
        assert (step.norm, step.losses) == (steps[0].norm, steps[0].losses)


def test_shares_of_several_processes_merge_to_the_same_bits() -> None:
    run = small_run()
    whole, halves, other = reference_of(run), reference_of(run), reference_of(run)
    record = whole.step(whole.share(1, range(5)))
    share, rest = halves.share(1, [3, 0]), other.share(1, [4, 1, 2])
    share.merge(rest)
    merged = halves.step(share)
    assert merged.digests == record.digests
    assert halves.fingerprints() == whole.fingerprints()
    with pytest.raises(ValueError, match="both shares"):
        share.merge(rest)


def test_an_incomplete_share_is_no_step() -> None:
    reference = reference_of(small_run())
    with pytest.raises(ValueError, match=r"lacks microbatches \[1, 4\]"):
        reference.step(reference.share(1, [0, 2, 3]))


def test_a_share_with_microbatches_of_no_step_is_no_step() -> None:
    reference = reference_of(small_run())
    share = reference.share(1, range(5))
    share.losses[7] = share.losses[0]
    with pytest.raises(ValueError, match=r"that the step has not: \[7\]"):
        reference.step(share)


def test_evaluation_through_the_pipeline_equals_the_reference() -> None:
    """Windows are forward-only microbatches (R13)."""
    run = small_run()
    swarm, reference = SmallSwarm(run, seed=1), reference_of(run)
    losses = []
    for window in range(3):
        index = run.batch.microbatches + window
        (x,) = done(swarm.stages[0][0].run(tasks.Embed(1, index))).outputs
        for stage in swarm.stages[1:]:
            (x,) = done(stage[0].run(tasks.Forward(1, index, train=False), (x,))).outputs
        result = done(swarm.stages[0][0].run(tasks.Head(1, index, train=False), (x,)))
        assert result.outputs == ()
        losses.append((result.loss_sum, result.tokens))
    assert losses == reference.evaluate(3)


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_fast_sums_stay_near_the_reference(architecture: str) -> None:
    run = small_run(architecture, dtype="fp64", reduction="fast")
    swarm, reference = SmallSwarm(run, seed=2), reference_of(run)
    for t in range(1, 6):
        swarm.step(t)
        reference.step(reference.share(t, range(5)))
    for stage, replicas in enumerate(swarm.stages):
        ours, theirs = replicas[0].state, reference.states[stage]
        for name in ours.layout.names:
            assert (
                distance(ours.layout.view(ours.weights, name), theirs.layout.view(theirs.weights, name))
                < 1e-12
            )


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_independent_module_with_torchs_optimizer_takes_the_same_steps(
    architecture: str, tied: bool
) -> None:
    run = small_run(architecture, dtype="fp64", reduction="fast", tied=tied)
    reference = reference_of(run)
    tensors = reference.tensors()
    begin = {name.partition("/")[2]: tensors[name] for name in tensors if name.startswith("weights/")}
    independent = IndependentReference(run, small_model(run), MadeUpBatches(run), begin)
    for t in range(1, 11):
        record = reference.step(reference.share(t, range(5)))
        step = independent.step(t)
        assert step.loss == pytest.approx(record.loss, rel=1e-12)
        assert step.norm == pytest.approx(record.norm, rel=1e-10)
        assert step.learning_rate == record.learning_rate
    theirs = independent.tensors()
    assert theirs.keys() == reference.tensors().keys()
    for name, tensor in reference.tensors().items():
        assert distance(tensor, theirs[name]) < 1e-10, name
    for (ours, _), (other, _) in zip(reference.evaluate(2), independent.evaluate(2), strict=True):
        assert ours == pytest.approx(other, rel=1e-12)
