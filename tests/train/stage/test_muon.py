"""Muon against torch's own; whole matrices at every partition; refusals; a real swarm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import anabranch
from anabranch.config import OptimizerSection, RunConfig
from anabranch.errors import ConfigError
from anabranch.train.model.layout import Layout
from anabranch.train.numerics.step_scalars import bias_corrections
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.muon import orthogonal, take_step
from anabranch.train.stage.optimizer import StepScalars
from anabranch.train.stage.state import StageState
from support.api_runs import small_settings, texts_in, verified_losses
from support.grids import every_value
from support.small_training import MadeUpBatches, SmallSwarm, small_model, small_run, with_section

LAYOUT = Layout({"wide": (24, 40), "tall": (40, 24), "gain": (24,)})
MATRICES = frozenset(("wide", "tall"))


def muon_run(architecture: str = "llama", stages: int = 2) -> RunConfig:
    return with_section(small_run(architecture, stages), "optimizer", kind="muon")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon (2.9 does)")
def test_muon_equals_torch() -> None:
    """torch orthogonalises in bf16, which is where they differ. Ours needs no Muon of torch."""
    generator = torch.Generator().manual_seed(0)
    optimizer = OptimizerSection(kind="muon", weight_decay=0.2)
    flat = torch.randn(LAYOUT.elements, generator=generator)
    state = StageState.initial(LAYOUT, flat.clone())
    theirs = {name: LAYOUT.view(flat, name).clone().requires_grad_() for name in sorted(MATRICES)}
    other = torch.optim.Muon(
        theirs.values(), lr=1e-2, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(1, 9):
        gradient = torch.randn(LAYOUT.elements, generator=generator)
        scalars = StepScalars(1e-2, 0.7, *bias_corrections(optimizer, step))
        take_step(state, gradient, scalars, optimizer, MATRICES)
        for name, parameter in theirs.items():
            parameter.grad = LAYOUT.view(gradient, name) * 0.7
        other.step()
    assert state.adam_step == 8
    for name, parameter in theirs.items():
        mine = LAYOUT.view(state.weights, name)
        moved = (LAYOUT.view(flat, name) - parameter).norm()
        assert (mine - parameter).norm() < 0.02 * moved
        assert torch.allclose(LAYOUT.view(state.exp_avg, name), other.state[parameter]["momentum_buffer"])
        assert not LAYOUT.view(state.exp_avg_sq, name).any()
    assert LAYOUT.view(state.exp_avg_sq, "gain").all(), "vectors have AdamW"


def test_singular_values_come_near_one() -> None:
    generator = torch.Generator().manual_seed(3)
    for shape in ((30, 50), (50, 30), (1, 7)):
        matrix = torch.randn(shape, generator=generator)
        values = torch.linalg.svdvals(orthogonal(matrix))
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
    assert not orthogonal(torch.zeros(3, 4)).any()


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("architecture", "stages"), every_value(["llama", "gpt"], [1, 2, 4]))
def test_every_value_equals_the_reference(architecture: str, stages: int) -> None:
    """A reduce in parts over replicas, at several partitions (I3)."""
    run = muon_run(architecture, stages)
    swarm, reference = SmallSwarm(run, seed=stages), Reference(run, small_model(run), MadeUpBatches(run))
    losses = []
    for t in range(1, 5):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()
        losses.append(record.loss)
    assert losses[-1] < losses[0]


def test_the_partition_does_not_change_a_bit() -> None:
    """A matrix is orthogonalised whole, wherever it lies in its stage."""
    found = []
    for stages in (1, 2, 4):
        run = muon_run(stages=stages)
        reference = Reference(run, small_model(run), MadeUpBatches(run))
        for t in (1, 2, 3):
            reference.step(reference.share(t, range(run.batch.microbatches)))
        found.append(reference.tensors())
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_where_it_cannot_be_exact_it_is_refused_by_name(tmp_path: Path) -> None:
    base = {"optimizer.kind": "muon"}
    for changes, problem in (
        ({"run.numerics": "mixed"}, r'needs run\.numerics = "strict"'),
        ({"wire.reduce": "coarse"}, r'wire\.reduce = "coarse"'),
        ({"pipeline.stages": 0, "round.slots": 2}, r"does not work with round\.slots"),
        ({"lora.rank": 2, "model.initial_weights": "x"}, r"does not work with lora\.rank"),
    ):
        with pytest.raises(ConfigError, match=problem):
            anabranch.Run.create({**base, **changes}, tmp_path / "run")


@pytest.mark.costly
@pytest.mark.slow
def test_it_trains_in_a_real_swarm_with_a_kill(tmp_path: Path) -> None:
    """Zero bits differ from one process (I3)."""
    model = {"dim": 32, "blocks": 2, "heads": 2, "kv_heads": 2, "ffn": 48}
    optimizer = {"kind": "muon", "warmup_steps": 2}
    shape = small_settings(texts_in(tmp_path), stages=2, relays=4, sequence=32)
    settings = {**shape, "model": model, "optimizer": optimizer, "run.steps": 6}
    _, losses = verified_losses(settings, tmp_path / "run", "relay-2.1")
    assert losses[-1] < losses[0]
