"""Residual stream in a fixed subspace: its constants, token ids at a cut, and the reference's very steps."""

from __future__ import annotations

from dataclasses import replace

import blake3
import numpy as np
import pytest
import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.train.model.residual import (
    SubspaceStream,
    fixed_embedding,
    fixed_std,
    residual_stream,
    subspace_basis,
)
from anabranch.train.model.sizes import cut_columns, named_size
from anabranch.train.reference.independent import IndependentReference
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.worker import Worker
from support.small_training import MadeUpBatches, SmallSwarm, bits_equal, done, small_model, small_run

CPU = torch.device("cpu")
K = 8
#: BLAKE3 (16 hex characters) of the basis (96, 24) in fp64 and of 70 rows of the fixed embedding in fp32.
CONSTANTS = ["2b67c372a0bc4826", "479d07ef2748af3f"]


def thin_run(architecture: str, stages: int = 2, dtype: str = "fp32", reduction: str = "exact") -> RunConfig:
    run = small_run(architecture, stages, dtype, reduction, tied=False)
    return replace(run, model=replace(run.model, subspace=K))


def stream(vocabulary: int, dtype: torch.dtype) -> SubspaceStream:
    config = replace(named_size("llama-tiny"), subspace=K, tied=False, vocab_size=vocabulary)
    found = residual_stream(config, CPU, dtype)
    assert isinstance(found, SubspaceStream)
    assert found.columns == cut_columns(config, dtype.itemsize)
    return found


def test_the_basis_is_orthonormal() -> None:
    basis = subspace_basis(96, 24)
    assert np.abs(basis.T @ basis - np.eye(24)).max() < 1e-14


def test_constants_are_the_same_bits_everywhere() -> None:
    """Drawn by one machine, kept here: a machine on which this fails computes other models than the rest."""
    bits = [
        blake3.blake3(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
        for values in (subspace_basis(96, 24), fixed_embedding(70, 96))
    ]
    assert bits == CONSTANTS


def test_rows_of_the_fixed_embedding_do_not_depend_on_the_vocabulary() -> None:
    many = fixed_embedding(70, 96)
    assert np.array_equal(many[:51], fixed_embedding(51, 96))
    assert many.std() == pytest.approx(fixed_std(96), rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 2, 256, 257, 50_257, 1 << 24, (1 << 24) + 5, 1 << 40])
def test_every_id_of_any_vocabulary_survives_a_cut(vocabulary: int, dtype: torch.dtype) -> None:
    """bf16 holds whole numbers up to 256 and fp32 up to 2²⁴: larger ids take more columns."""
    cut = stream(vocabulary, dtype)
    some = torch.tensor([[0, vocabulary // 3, vocabulary // 2, max(0, vocabulary - 2), vocabulary - 1]])
    x = cut.begin(torch.full((1, 5, K), 0.3, dtype=dtype), some)
    assert x.shape == (1, 5, cut.columns)
    assert x.dtype == dtype
    assert cut._ids(x).equal(some)
    assert cut.problem(x) == ""
    assert bits_equal(cut.moved(x, cut.values(x)), x)


@pytest.mark.parametrize("digit", [-1.0, -0.0, 0.5, 61.0, 255.0, 256.0, 1e9, 3e38])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ids_that_are_none_are_a_problem(digit: float, dtype: torch.dtype) -> None:
    cut = stream(61, dtype)
    x = cut.begin(torch.zeros(2, 3, K, dtype=dtype), torch.zeros(2, 3, dtype=torch.int64))
    x[1, 2, K] = digit
    assert "token ids" in cut.problem(x)


def test_an_id_beyond_the_vocabulary_whose_digits_are_in_range_is_a_problem() -> None:
    cut = stream(50_257, torch.bfloat16)
    assert cut.columns == K + 2
    x = cut.begin(torch.zeros(1, 1, K, dtype=torch.bfloat16), torch.tensor([[50_256]]))
    assert not cut.problem(x)
    x[0, 0, K:] = torch.tensor([81.0, 196.0])  # 50,257
    assert "beyond the vocabulary of 50257" in cut.problem(x)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", ["ids", "wide gradient", "narrow activation", "nan id"])
def test_a_relay_refuses_what_is_no_cut_of_its_model(wrong: str, dtype: str) -> None:
    run = thin_run("llama", dtype=dtype)
    worker = Worker(run, small_model(run), 1)
    done(worker.run(tasks.InitState(0)))
    before = worker.state.fingerprint()
    columns, kind = worker.model.stream.columns, worker.dtype
    x = torch.zeros(2, 12, columns, dtype=kind)
    if wrong == "wide gradient":
        done(worker.run(tasks.Forward(1, 0, train=True), (x,)))
        result = worker.run(tasks.InputGradient(1, 0), (torch.zeros(2, 12, columns, dtype=kind),))
    else:
        given: Tensor = x[..., :K].contiguous() if wrong == "narrow activation" else x
        if wrong != "narrow activation":
            given[0, 0, K] = float("nan") if wrong == "nan id" else 61.0
        result = worker.run(tasks.Forward(1, 0, train=True), (given,))
        audited = worker.run(tasks.AuditUnit(1, 0, first=True), (given, x[..., :K].contiguous()))
        assert audited.error
    assert result.error.startswith("the received")
    assert worker.state.fingerprint() == before


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
@pytest.mark.parametrize(
    ("stages", "dtype"), [(1, "fp32"), (2, "fp32"), (4, "fp32"), (2, "bf16"), (2, "fp64")]
)
def test_every_value_equals_the_reference(architecture: str, stages: int, dtype: str) -> None:
    run = thin_run(architecture, stages, dtype)
    swarm = SmallSwarm(run, seed=stages)
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    for t in (1, 2, 3):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()


def test_cuts_are_narrow_and_a_redo_sees_the_same_bits() -> None:
    run = thin_run("gpt", stages=2, dtype="bf16")
    swarm = SmallSwarm(run, seed=3, replicas=(1, 2, 1))
    data, first, second = swarm.stages[0][0], swarm.stages[1][0], swarm.stages[1][1]
    (x,) = done(data.run(tasks.Embed(1, 0))).outputs
    (again,) = done(data.run(tasks.Embed(1, 0))).outputs
    assert bits_equal(x, again)
    assert x.shape == (2, 12, K + 1)  # 61 ids: one digit of eight bits
    outputs = [done(relay.run(tasks.Forward(1, 0, train=True), (x,))).outputs[0] for relay in (first, second)]
    assert bits_equal(*outputs)
    dy = torch.ones(2, 12, K, dtype=torch.bfloat16) * 1e-3
    gradients = [done(relay.run(tasks.InputGradient(1, 0), (dy,))).outputs[0] for relay in (first, second)]
    assert gradients[0].shape == (2, 12, K)
    assert bits_equal(*gradients)


def test_offloaded_activations_give_the_same_bits() -> None:
    run = thin_run("llama")
    (x,) = done(SmallSwarm(run, seed=3, replicas=(1, 1, 1)).stages[0][0].run(tasks.Embed(1, 0))).outputs
    found = []
    for resident in (None, 0):
        worker = Worker(run, small_model(run), 1, resident=resident)
        done(worker.run(tasks.InitState(0)))
        (y,) = done(worker.run(tasks.Forward(1, 0, train=True), (x,))).outputs
        dy = torch.full((2, 12, K), 1e-3)
        found.append((y, *done(worker.run(tasks.InputGradient(1, 0), (dy,))).outputs))
    assert all(map(bits_equal, *found))


def test_other_ids_with_the_same_values_give_another_hash() -> None:
    """The ids are part of the payload that is sealed and audited: they cannot be exchanged unseen."""
    run = thin_run("llama")
    swarm = SmallSwarm(run, seed=3, replicas=(1, 1, 1))
    (x,) = done(swarm.stages[0][0].run(tasks.Embed(1, 0))).outputs
    other = x.clone()
    other[0, 0, K] = (x[0, 0, K] + 1) % 61
    results = [done(swarm.stages[1][0].run(tasks.Forward(1, 0, True, hashed=True), (y,))) for y in (x, other)]
    assert results[0].hashes[0] != results[1].hashes[0]
    assert results[0].hashes[1] != results[1].hashes[1]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_an_independent_module_takes_the_same_steps(architecture: str) -> None:
    run = thin_run(architecture, dtype="fp64", reduction="fast")
    model, batches = small_model(run), MadeUpBatches(run)
    reference = Reference(run, model, batches)
    tensors = reference.tensors()
    begin = {name.partition("/")[2]: tensors[name] for name in tensors if name.startswith("weights/")}
    independent = IndependentReference(run, model, batches, begin)
    for t in (1, 2, 3):
        record = reference.step(reference.share(t, range(5)))
        step = independent.step(t)
        assert step.loss == pytest.approx(record.loss, rel=1e-12)
        assert step.norm == pytest.approx(record.norm, rel=1e-10)
    theirs = independent.tensors()
    for name, tensor in reference.tensors().items():
        assert (tensor - theirs[name]).norm() <= 1e-10 * theirs[name].norm(), name
