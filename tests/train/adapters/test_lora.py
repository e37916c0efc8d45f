"""Low-rank adapters: bits of the reference, PEFT's formula and initial values, frozen weights by hash."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from anabranch.config import LoraSection, RunConfig
from anabranch.errors import ConfigError
from anabranch.protocol.interface import tasks
from anabranch.train.adapters.frozen import (
    FrozenError,
    FrozenLoader,
    FrozenStore,
    FrozenWeights,
    frozen_of_folder,
)
from anabranch.train.adapters.lora import LoraModel, merged, run_model
from anabranch.train.model.interface import initial_tensor
from anabranch.train.model.layout import Layout
from anabranch.train.model.linear import PlainWeights
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.protocol_inputs import settings_of, trained_parameters
from anabranch.train.stage.worker import Worker
from support.small_training import MadeUpBatches, SmallSwarm, done, small_model, small_run, with_section

CPU = torch.device("cpu")
FAMILIES = ["llama", "gpt", "mistral", "qwen2", "gemma"]


def lora_run(architecture: str = "llama", stages: int = 2, **lora: object) -> RunConfig:
    named = architecture if architecture in ("llama", "gpt") else "llama"
    run = small_run(named, stages)
    run = replace(run, model=replace(run.model, architecture=architecture))
    return with_section(replace(run, lora=LoraSection(rank=3)), "lora", **lora)


def base_tensors(run: RunConfig) -> dict[str, Tensor]:
    """Weights of the whole model, as a folder would have them."""
    model = run_model(run, small_model(run), CPU)
    assert isinstance(model, LoraModel)
    shapes = model.base.end_shapes()
    for block in range(model.config.blocks):
        shapes |= model.base.block_shapes(block)
    return {name: initial_tensor(model.base, name, shape, 5, 0.1) for name, shape in shapes.items()}


def with_frozen(run: RunConfig, store: FrozenStore | None = None) -> tuple[RunConfig, dict[str, Tensor]]:
    """The run with the hashes of its frozen weights, and these."""
    tensors, model = base_tensors(run), run_model(run, small_model(run), CPU)
    assert isinstance(model, LoraModel)
    return with_section(run, "lora", frozen=frozen_of_folder(run, model, tensors, store)), tensors


def layout_of(run: RunConfig, stage: int) -> Layout:
    model = run_model(run, small_model(run), CPU)
    assert isinstance(model, LoraModel)
    return FrozenLoader(run, model).layout(stage)


def stage_pieces(run: RunConfig, stage: int, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return FrozenWeights.of_tensors(layout_of(run, stage), tensors, torch.float32).pieces()


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_value_equals_the_reference(architecture: str) -> None:
    """Adapters alone are summed, over stages and replicas (I1, I3)."""
    run, tensors = with_frozen(lora_run(architecture))
    swarm = SmallSwarm(run, seed=3)
    for worker in swarm.workers():
        pieces = stage_pieces(run, worker.spec.stage, tensors)
        assert done(worker.run(tasks.LoadFrozen(0), pieces)).fingerprint == run.lora.frozen[worker.spec.stage]
    reference = Reference(run, small_model(run), MadeUpBatches(run), frozen=tensors)
    losses = []
    for t in (1, 2, 3, 4):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()
        losses.append(record.loss)
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in step.squares) and step.squares
    assert swarm.stages[0][0].layout.elements == 0, "data nodes train nothing"


def test_only_adapters_are_summed_sent_and_kept() -> None:
    run = lora_run("llama", targets=("q_proj", "v_proj"))
    model = small_model(run)
    full = settings_of(replace(run, lora=LoraSection()), "r", model)
    lora = settings_of(run, "r", model)
    c = model
    assert trained_parameters(run, model).block == 3 * (2 * c.dim + c.dim + c.kv_dim)
    assert lora.reduced_bytes_of(1) * 10 < full.reduced_bytes_of(1)
    assert lora.state_bytes_of(1) * 10 < full.state_bytes_of(1) and lora.reduced_bytes_of(0) == 0
    worker = Worker(run, model, 1)
    state = done(worker.run(tasks.InitState(0)))
    assert state.fingerprint and worker.state.weights.numel() == 2 * trained_parameters(run, model).block


def test_initial_adapters_change_nothing_and_merge_exactly() -> None:
    run, tensors = with_frozen(lora_run("qwen2"))
    model = run_model(run, small_model(run), CPU)
    assert isinstance(model, LoraModel)
    model.use(tensors)
    shapes = {name: s for block in range(4) for name, s in model.block_shapes(block).items()}
    adapters = {name: initial_tensor(model, name, shape, 1) for name, shape in shapes.items()}
    ids = torch.arange(12).view(1, 12)
    plain, adapted = logits(model.base, tensors, ids), logits(model, adapters, ids)
    assert torch.equal(plain, adapted), "B is zero"
    for name, value in adapters.items():
        if name.endswith("lora_A.weight"):
            assert 0 < float(value.abs().max()) <= value.shape[1] ** -0.5
        else:
            assert not value.any()
            value += 0.05
    changed = logits(model, adapters, ids)
    assert not torch.allclose(plain, changed, atol=1e-3)
    assert torch.allclose(changed, logits(model.base, merged(model, adapters), ids), atol=1e-4)


def logits(model: object, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    plain = PlainWeights(weights)
    x = model.embed(plain, ids)  # type: ignore[attr-defined]
    for block in range(4):
        x = model.block(plain, block, x)  # type: ignore[attr-defined]
    return model.head(plain, x)  # type: ignore[attr-defined]


def test_other_bytes_are_not_the_frozen_weights(tmp_path: Path) -> None:
    """Neither a peer's wrong bytes nor a damaged file are used (I7)."""
    store = FrozenStore(tmp_path / "frozen")
    run, tensors = with_frozen(lora_run(), store)
    pieces = stage_pieces(run, 1, tensors)
    worker = Worker(run, small_model(run), 1)
    assert worker.run(tasks.LoadFrozen(0)).fingerprint == "", "nothing is here yet"
    wrong = pieces[0].clone()
    wrong[7] ^= 1
    assert worker.run(tasks.LoadFrozen(0), (wrong,)).fingerprint == ""
    assert "are" in worker.run(tasks.LoadFrozen(0), (pieces[0][:-4],)).error
    number = run.pipeline.stages + 1 + 1
    assert worker.run(tasks.CheckState(0, number), (wrong,)).fingerprint != run.lora.frozen[1]
    assert worker.run(tasks.CheckState(0, number), pieces).fingerprint == run.lora.frozen[1]
    assert worker.run(tasks.CheckState(0, number + 9), pieces).error
    stored = Worker(run, small_model(run), 1, frozen=store)
    assert stored.run(tasks.LoadFrozen(0)).fingerprint == run.lora.frozen[1]
    path = store.path(run.lora.frozen[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert stored.run(tasks.LoadFrozen(0)).fingerprint == ""
    with pytest.raises(FrozenError, match="remove it"):
        store.get(run.lora.frozen[1], layout_of(run, 1), torch.float32)
    with pytest.raises(FrozenError, match="not the hash"):
        store.path("../../etc/passwd")


def test_a_full_disk_keeps_no_part_of_frozen_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are fetched again by the next process."""
    free = [1 << 20]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[0]))
    store = FrozenStore(tmp_path / "frozen")
    with pytest.raises(OSError, match="no room"):
        with_frozen(lora_run(), store)
    free[0] = 1 << 40
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        with_frozen(lora_run(), store)
    assert not list(store.folder.iterdir())


def test_what_cannot_be_adapted_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no layer 'c_attn'; choose among q_proj, k_proj"):
        run_model(lora_run(targets=("c_attn",)), small_model(lora_run()), CPU)
    subspace = replace(small_model(lora_run()), subspace=8, tied=False)
    with pytest.raises(ConfigError, match="without subspace"):
        run_model(lora_run(), subspace, CPU)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_the_size_of_frozen_weights_is_known_before_they_come(name: str) -> None:
    run, tensors = with_frozen(lora_run(name))
    settings = settings_of(run, "r", small_model(run))
    sizes = [sum(piece.numel() for piece in stage_pieces(run, stage, tensors)) for stage in range(3)]
    assert settings.frozen_bytes == tuple(sizes)
    assert settings.state_bytes_of(settings.frozen_number(1)) == sizes[1]
