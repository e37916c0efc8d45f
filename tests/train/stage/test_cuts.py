"""Codecs at the cuts: swarm and reference round alike, whoever computes and however often."""

from __future__ import annotations

import math

import pytest
import torch

from anabranch.config import ConfigError, RunConfig, config_from_dict
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import embed_unit
from anabranch.train.codec.codecs import CastCodec, NotRepresentable
from anabranch.train.codec.sizes import encoded_bytes
from anabranch.train.reference.independent import IndependentReference
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.cuts import ACTIVATION, GRADIENT, Cuts
from anabranch.train.stage.protocol_inputs import settings_of
from anabranch.train.stage.worker import Worker
from support.grids import every_value
from support.small_training import MadeUpBatches, SmallSwarm, done, small_model, small_run, with_section

#: (activations, gradients, rounding of gradients).
WIRES = [
    ("bf16", "bf16", "nearest"),
    ("fp16", "none", "nearest"),
    ("none", "int8", "stochastic"),
    ("int8", "int8", "nearest"),
    ("int4", "int8", "stochastic"),
]


def wired(
    run: RunConfig, activations: str, gradients: str, rounding: str = "nearest", block: int = 64
) -> RunConfig:
    return with_section(
        run, "wire", activations=activations, gradients=gradients, gradient_rounding=rounding, block=block
    )


def reference_of(run: RunConfig) -> Reference:
    return Reference(run, small_model(run), MadeUpBatches(run))


@pytest.mark.parametrize(("wire", "stages"), every_value(WIRES, [1, 4]))
def test_every_value_equals_the_reference(wire: tuple[str, str, str], stages: int) -> None:
    """(I3) Blocks of 50 divide neither the rows nor the tensor."""
    run = wired(small_run(stages=stages), *wire, block=50)
    swarm, reference = SmallSwarm(run, seed=stages), reference_of(run)
    for t in (1, 2, 3):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert step.losses == record.losses
        assert step.squares == record.squares
        assert step.digests == record.digests
        assert step.fingerprints == reference.fingerprints()


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_other_dtypes_equal_the_reference(dtype: str) -> None:
    run = wired(small_run("gpt", 2, dtype), "int8", "int8", "stochastic")
    swarm, reference = SmallSwarm(run, seed=5), reference_of(run)
    for t in (1, 2):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.digests) == (record.losses, record.digests)
        assert step.fingerprints == reference.fingerprints()


def test_codecs_change_the_steps() -> None:
    """A codec that did nothing would pass every comparison above."""
    seen = set()
    for wire in [("none", "none", "nearest"), *WIRES, ("int8", "int8", "stochastic")]:
        reference = reference_of(wired(small_run(), *wire))
        seen.add(reference.step(reference.share(1, range(5))).digests)
    assert len(seen) == len(WIRES) + 2


def test_evaluation_passes_the_same_cuts() -> None:
    run = wired(small_run(), "int4", "int8", "stochastic")
    swarm, reference = SmallSwarm(run, seed=1), reference_of(run)
    losses = []
    for window in range(3):
        index = run.batch.microbatches + window
        (x,) = done(swarm.stages[0][0].run(tasks.Embed(1, index))).outputs
        for stage in swarm.stages[1:]:
            (x,) = done(stage[0].run(tasks.Forward(1, index, train=False), (x,))).outputs
        losses.append(done(swarm.stages[0][0].run(tasks.Head(1, index, train=False), (x,))).loss_sum)
    assert losses == [loss for loss, _ in reference.evaluate(3)]
    plain = reference_of(small_run())
    assert losses != [loss for loss, _ in plain.evaluate(3)]


def worker_of(run: RunConfig, stage: int) -> Worker:
    worker = Worker(run, small_model(run), stage, MadeUpBatches(run) if stage == 0 else None)
    done(worker.run(tasks.InitState(0)))
    return worker


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_redo_sends_the_same_bytes(rounding: str) -> None:
    """Another replica, another order, a second forward for the backward: the same payloads (R4, R5)."""
    run = wired(small_run(stages=1), "int8", "int8", rounding)
    first, second, data = worker_of(run, 1), worker_of(run, 1), worker_of(run, 0)
    kept = {}
    for index in (0, 3):
        (x,) = done(data.run(tasks.Embed(1, index))).outputs
        (y,) = done(first.run(tasks.Forward(1, index, train=True), (x,))).outputs
        (dy,) = done(data.run(tasks.Head(1, index, train=True), (y,))).outputs
        (dx,) = done(first.run(tasks.InputGradient(1, index), (dy,))).outputs
        kept[index] = x, y, dy, dx
    for index in (3, 0):
        x, y, dy, dx = kept[index]
        (again,) = done(second.run(tasks.Forward(1, index, train=True, keep=False), (x,))).outputs
        assert torch.equal(again, y)
        redo = tasks.InputGradient(1, index, again=True)
        (gradient,) = done(second.run(redo, (dy, x))).outputs
        assert torch.equal(gradient, dx)
        done(second.run(tasks.WeightGradient(1, index)))
        done(first.run(tasks.WeightGradient(1, index)))
        done(data.run(tasks.WeightGradient(1, embed_unit(index)), (dx,)))
    parts = [done(worker.run(tasks.Freeze(1, 1))).outputs[0] for worker in (first, second)]
    assert torch.equal(parts[0], parts[1])
    x, y, dy, dx = kept[3]
    done(second.run(tasks.Recount(1, 3, -1), (x, dy)))
    done(second.run(tasks.Recount(1, 0, -1), (kept[0][0], kept[0][2])))
    assert not done(second.run(tasks.Freeze(1, 1))).outputs[0].any()


def test_an_audit_computes_the_same_payloads() -> None:
    run = wired(small_run(stages=1), "int8", "int4", "stochastic")
    relay, data = worker_of(run, 1), worker_of(run, 0)
    (x,) = done(data.run(tasks.Embed(1, 2))).outputs
    forward = relay.run(tasks.Forward(1, 2, train=True, hashed=True), (x,))
    (dy,) = done(data.run(tasks.Head(1, 2, train=True), forward.outputs)).outputs
    backward = relay.run(tasks.InputGradient(1, 2, hashed=True), (dy,))
    done(relay.run(tasks.WeightGradient(1, 2)))
    (whole,) = done(relay.run(tasks.Freeze(1, 1))).outputs
    (total,) = done(relay.run(tasks.SumPart(1), (whole,))).outputs
    done(relay.run(tasks.Assemble(1), (total,)))
    done(relay.run(tasks.Apply(1, 1e-3, 1.0, 0.1, 0.05, keep=True)))
    audit = done(relay.run(tasks.AuditUnit(1, 2, first=True, hashed=True), (x, dy)))
    assert audit.hashes == (forward.hashes[0], backward.hashes[0], forward.hashes[1], backward.hashes[1])
    (summed,) = done(relay.run(tasks.AuditSum(1, 1))).outputs
    assert torch.equal(summed, whole)
    done(relay.run(tasks.AuditUnit(1, 2, first=True), (x, dy)))
    without = done(relay.run(tasks.AuditUnit(1, 2, hashed=True), (x,)))  # the gradient never came
    assert without.hashes == (forward.hashes[0], forward.hashes[1])
    assert torch.equal(done(relay.run(tasks.AuditSum(1, 1))).outputs[0], whole)


def test_a_payload_of_another_codec_is_refused() -> None:
    plain, encoded = small_run(stages=1), wired(small_run(stages=1), "int8", "int8")
    relay, data = worker_of(encoded, 1), worker_of(encoded, 0)
    (floats,) = done(worker_of(plain, 0).run(tasks.Embed(1, 0))).outputs
    (x,) = done(data.run(tasks.Embed(1, 0))).outputs
    for bad in (floats, x[:-1], x.view(2, -1), torch.full_like(x, 255), x.to(torch.int64)):
        assert "cannot be used" in relay.run(tasks.Forward(1, 0, train=True), (bad,)).error
    assert "cannot be used" in worker_of(plain, 1).run(tasks.Forward(1, 0, train=True), (x,)).error
    assert relay.run(tasks.Forward(1, 0, train=True), (x,)).outputs


def overflowing(run: RunConfig, activations: str) -> tuple[Reference, Worker, Worker]:
    """Reference and workers whose embedding is too large for fp16, but not for fp32."""
    run = wired(run, activations, "none")
    reference, data, relay = reference_of(run), worker_of(run, 0), worker_of(run, 1)
    for state in (reference.states[0], data.state):
        state.layout.view(state.weights, "model.embed_tokens.weight").mul_(1e7)
    return reference, data, relay


def test_an_overflow_of_the_codec_is_one_of_the_microbatch() -> None:
    """The sender reports it, and the reference finds the same witness (DESIGN: a skipped step)."""
    reference, data, _ = overflowing(small_run(stages=1), "fp16")
    result = data.run(tasks.Embed(1, 0))
    assert (result.overflow, result.outputs) == ("activation", ())
    assert (0, "activation") in reference.witnesses(1, 0)
    record = reference.step(reference.share(1, range(5)))
    assert record.skipped
    plain, data, _ = overflowing(small_run(stages=1), "none")
    assert data.run(tasks.Embed(1, 0)).outputs
    assert (0, "activation") not in plain.witnesses(1, 0)


def test_an_overflow_of_a_gradient_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = wired(small_run(stages=1), "none", "fp16")
    relay, data, reference = worker_of(run, 1), worker_of(run, 0), reference_of(run)
    (x,) = done(data.run(tasks.Embed(1, 0))).outputs
    (y,) = done(relay.run(tasks.Forward(1, 0, train=True), (x,))).outputs
    (dy,) = done(data.run(tasks.Head(1, 0, train=True), (y,))).outputs

    def encode(self: CastCodec, values: torch.Tensor, key: int | None = None) -> torch.Tensor:
        raise NotRepresentable

    monkeypatch.setattr(CastCodec, "encode", encode)
    result = relay.run(tasks.InputGradient(1, 0), (dy,))
    assert result.overflow == "input gradient"
    assert "is waiting" in relay.run(tasks.WeightGradient(1, 0)).error
    assert data.run(tasks.Head(1, 1, train=True), (y,)).overflow == "input gradient"
    assert {(0, "input gradient"), (1, "input gradient")} <= reference.witnesses(1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("wire", [("int8", "int8", "nearest"), ("bf16", "int4", "stochastic")])
def test_an_independent_implementation_rounds_alike(wire: tuple[str, str, str]) -> None:
    run = wired(small_run(dtype="fp64", reduction="fast"), *wire, block=40)
    reference = reference_of(run)
    tensors = reference.tensors()
    begin = {name.partition("/")[2]: tensors[name] for name in tensors if name.startswith("weights/")}
    independent = IndependentReference(run, small_model(run), MadeUpBatches(run), begin)
    for t in range(1, 4):
        record = reference.step(reference.share(t, range(5)))
        step = independent.step(t)
        assert step.loss == pytest.approx(record.loss, rel=1e-12)
        assert step.norm == pytest.approx(record.norm, rel=1e-10)
    for (ours, _), (other, _) in zip(reference.evaluate(2), independent.evaluate(2), strict=True):
        assert ours == pytest.approx(other, rel=1e-12)


def test_settings_know_the_bytes() -> None:
    """The meter's formula: a byte a value and two for each block of 64."""
    run = small_run()
    values = run.batch.rows * run.batch.sequence * 32
    assert settings_of(run, "r", small_model(run)).activation_bytes == 4 * values
    eight = settings_of(wired(run, "int8", "int8"), "r", small_model(run))
    assert eight.activation_bytes == values + 2 * math.ceil(values / 64)
    mixed = settings_of(wired(run, "int4", "bf16"), "r", small_model(run))
    assert mixed.activation_bytes == 2 * values
    cuts = Cuts(wired(run, "int4", "bf16"), small_model(run))
    for kind, codec in ((ACTIVATION, "int4"), (GRADIENT, "bf16")):
        payload = cuts.encode(kind, torch.ones(2, 12, 32), cuts.place(1, 0, 0))
        assert len(payload) == encoded_bytes(codec, 64, values, 4)


def test_an_odd_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wire.block 63 is odd"):
        config_from_dict({"anabranch": {"version": 1}, "wire": {"block": 63}}, "run.toml")
