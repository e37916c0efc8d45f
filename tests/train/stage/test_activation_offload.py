"""Activations that wait in host memory: moved once each, and the same bits when they come back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.train.stage.activation_offload import OffloadedActivations
from anabranch.train.stage.worker import Worker
from anabranch.train.workers import machine_capacity as machine
from support.small_training import MadeUpBatches, bits_equal, done, small_model, small_run


def relay(run: RunConfig, resident: int | None) -> Worker:
    worker = Worker(run, small_model(run), 1, resident=resident)
    done(worker.run(tasks.InitState(0)))
    return worker


def made_up(run: RunConfig, seed: int) -> Tensor:
    shape = (run.batch.rows, run.batch.sequence, small_model(run).dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}[run.compute.dtype]
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_what_was_parked_gives_the_same_bits(
    architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    move: Callable[[OffloadedActivations], int] = OffloadedActivations.move_to_host
    monkeypatch.setattr(
        OffloadedActivations, "move_to_host", lambda activations: moved.append(move(activations))
    )
    run = small_run(architecture, dtype=dtype)
    plain, parking = relay(run, None), relay(run, 1)
    seen = []
    for worker in (plain, parking):
        out = [done(worker.run(tasks.Forward(1, i, train=True), (made_up(run, i),))) for i in range(3)]
        out += [done(worker.run(tasks.InputGradient(1, i), (made_up(run, 100 + i) / 100,))) for i in range(3)]
        for i in range(3):
            done(worker.run(tasks.WeightGradient(1, i)))
        sums = done(worker.run(tasks.Freeze(1, 1))).outputs
        seen.append([*(tensor for result in out for tensor in result.outputs), *sums])
    assert all(map(bits_equal, *seen)) and seen[0][-1].any()
    assert len(moved) == 2 and all(moved)  # the first of the three stayed


def test_each_storage_is_moved_once_and_weights_never() -> None:
    rng = torch.Generator().manual_seed(0)  # now and then a number is so great that the two orders differ
    weight = torch.randn(7, 5, generator=rng).requires_grad_()
    x = torch.randn(3, 5, generator=rng)
    parking = OffloadedActivations([weight])
    with parking.hooks():
        inside = torch.exp(x @ weight.t())  # exp saves its result, the product its two inputs
        y = (inside[:, :3] * inside[:, 3:6]).sum() + inside.square().sum()
    assert parking.move_to_host() == x.nbytes + inside.nbytes
    expected = torch.autograd.grad(
        (torch.exp(x @ weight.t())[:, :3] * torch.exp(x @ weight.t())[:, 3:6]).sum()
        + torch.exp(x @ weight.t()).square().sum(),
        weight,
    )
    (gradient,) = torch.autograd.grad(y, weight)
    assert torch.allclose(gradient, expected[0])


def test_what_was_parked_leaves_the_device() -> None:
    weight = torch.randn(4, 4).requires_grad_()
    parking = OffloadedActivations([weight])
    with parking.hooks():
        inside = torch.exp(torch.randn(2, 4) @ weight)
        y = inside.sum()
    storage = weakref.ref(inside)
    del inside
    parking.move_to_host()
    gc.collect()
    assert storage() is None
    assert torch.autograd.grad(y, weight)[0].isfinite().all()


def test_a_machine_offers_parked_places_only_where_it_computes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run()
    run = replace(run, fleet=replace(run.fleet, capacity=4, park=1.5))
    model = small_model(run)
    assert machine.parked_places(run, model, 4) == 0
    monkeypatch.setattr(machine, "device_of", lambda section: torch.device("cuda"))
    assert machine.parked_places(run, model, 4) == 6
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 6 * 2 * machine._held_bytes(run, model))
    assert machine.parked_places(run, model, 4) == 3  # half of what is free; stages have two blocks
    assert machine.parked_places(replace(run, fleet=replace(run.fleet, park=0.0)), model, 4) == 0


def test_data_nodes_park_nothing() -> None:
    run = small_run()
    worker = Worker(run, small_model(run), 0, MadeUpBatches(run), resident=0)
    done(worker.run(tasks.InitState(0)))
    assert done(worker.run(tasks.Embed(1, 0))).outputs
