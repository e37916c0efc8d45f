"""Audits at a worker that holds the whole model: an earlier step or round computed again gives the same
bits, however far the state has gone on since."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch.config import RoundSection, RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import AUDIT_STEPS, Payload, embed_unit
from anabranch.train.stage.worker import Worker
from anabranch.train.workers.workers import make_worker
from support.small_training import MadeUpBatches, done, small_model, small_run, with_section

#: Inner steps of each slot in each round.
INNER = 3
PARTS = 3


def whole_run(dtype: str = "fp32", **rounds: Any) -> RunConfig:
    """A first synchronous step, then rounds of two islands."""
    run = small_run(stages=0, dtype=dtype)
    part = replace(RoundSection(slots=2, steps=INNER, start=0.05), **rounds)
    return with_section(replace(run, round=part), "batch", microbatches=4)


class Machine:
    """Worker of a whole model and of its data node, and what each contribution was made of."""

    def __init__(self, run: RunConfig) -> None:
        model = small_model(run)
        self.run, self.worker = run, make_worker(run, model, 1)
        self.data: Worker = make_worker(run, model, 0, MadeUpBatches(run))
        for worker in (self.worker, self.data):
            done(worker.run(tasks.InitState(0)))

    def contribute(self, t: int, units: tuple[int, ...]) -> Contributed:
        """Compute the microbatches or slots `units` of iteration t."""
        steps, kept = (INNER if t > 1 else 0), {}
        for unit in units:
            (tokens,) = done(self.data.run(tasks.Embed(t, unit, INNER * (t - 2), steps))).outputs
            forward = done(self.worker.run(tasks.Forward(t, unit, True, steps=steps, hashed=True), (tokens,)))
            (answer,) = done(self.data.run(tasks.Head(t, unit, True, steps), forward.outputs)).outputs
            backward = done(self.worker.run(tasks.InputGradient(t, unit, hashed=True), (answer,)))
            done(self.worker.run(tasks.WeightGradient(t, unit)))
            done(self.data.run(tasks.WeightGradient(t, embed_unit(unit)), backward.outputs))
            hashes = forward.hashes[0], backward.hashes[0], forward.hashes[1], backward.hashes[1]
            kept[unit] = (tokens, answer), hashes
        parts = done(self.worker.run(tasks.Freeze(t, PARTS, hashed=True)))
        return Contributed(t, steps, kept, parts.hashes, parts.outputs)

    def step(self, t: int, parts: tuple[Payload, ...], keep: bool = True) -> None:
        """Take iteration t with the sum `parts`."""
        summed = tuple(done(self.worker.run(tasks.SumPart(t), (part,))).outputs[0] for part in parts)
        done(self.worker.run(tasks.Assemble(t), summed))
        scalars = (0.7, 1.0 / (2 * INNER), 1.0, 1.0) if t > 1 else (1e-2, 1.0, 0.1, 0.05)
        done(self.worker.run(tasks.Apply(t, *scalars, keep=keep)))
        done(self.data.run(tasks.Skip(t)))  # it has no parameters


class Contributed:
    """Contribution to iteration t. units: microbatch or slot -> inputs, and hashes as its receipt has them.
    hashes: of its parts."""

    def __init__(
        self,
        t: int,
        steps: int,
        units: dict[int, tuple[tuple[Payload, ...], tuple[str, ...]]],
        hashes: tuple[str, ...],
        parts: tuple[Payload, ...],
    ) -> None:
        self.t, self.steps, self.units, self.hashes, self.parts = t, steps, units, hashes, parts

    def check(self, worker: Worker) -> None:
        """Have `worker` compute the contribution again, and find the same."""
        for unit, (inputs, hashes) in self.units.items():
            first = unit == min(self.units)
            again = done(worker.run(tasks.AuditUnit(self.t, unit, first, self.steps, hashed=True), inputs))
            assert again.hashes == hashes
        assert done(worker.run(tasks.AuditSum(self.t, PARTS, hashed=True))).hashes == self.hashes


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("dtype", "rounds"),
    [
        pytest.param("fp32", {}, marks=pytest.mark.soak),
        ("bf16", {"contributions": "exact", "results": "exact"}),
        ("fp32", {"first_moment": "estimate", "contributions": "int8"}),
        ("fp32", {"first_moment": "agree", "outer_momentum": 0.0, "outer_lr": 1.0}),
        pytest.param("fp32", {"first_steps": 1, "late": "wait"}, marks=pytest.mark.soak),
    ],
)
def test_an_auditor_finds_the_same_bits(dtype: str, rounds: dict[str, Any]) -> None:
    """The auditor follows with the results, and audits the steps it may before they are too old."""
    run = whole_run(dtype, **rounds)
    machine, auditor = Machine(run), Machine(run)
    made: list[Contributed] = []
    for t in range(1, 7):
        made.append(contributed := machine.contribute(t, (0, 1) if t > 1 else (0, 2, 3)))
        machine.step(t, contributed.parts)
        auditor.step(t, contributed.parts)
        for each in made[-AUDIT_STEPS:]:
            each.check(auditor.worker)
        for each in made[:-AUDIT_STEPS]:
            (inputs, _), *_ = each.units.values()
            gone = auditor.worker.run(tasks.AuditUnit(each.t, 0, True, each.steps), inputs)
            assert gone.error == tasks.WEIGHTS_GONE
    fingerprints = {done(each.worker.run(tasks.Snapshot(6))).fingerprint for each in (machine, auditor)}
    assert len(fingerprints) == 1


def test_a_false_contribution_differs() -> None:
    """Other tokens, or an inner step alone."""
    machine = Machine(whole_run())
    machine.step(1, machine.contribute(1, (0,)).parts)
    contributed = machine.contribute(2, (0,))
    machine.step(2, contributed.parts)
    inputs, hashes = contributed.units[0]
    tokens, answer = inputs
    assert isinstance(tokens, torch.Tensor)
    other = tokens.roll(1, 0)
    for given, steps in (((other, answer), INNER), ((tokens[:4], answer), 1)):
        again = machine.worker.run(tasks.AuditUnit(2, 0, True, steps, hashed=True), given)
        assert again.hashes[2:3] != hashes[2:3]
        assert machine.worker.run(tasks.AuditSum(2, PARTS, hashed=True)).hashes != contributed.hashes
    machine.worker.run(tasks.AuditUnit(2, 0, True, INNER), (tokens,))  # without an answer nothing is added
    (flat,) = done(machine.worker.run(tasks.AuditSum(2, 1))).outputs
    assert isinstance(flat, torch.Tensor) and not flat.any()


def test_what_is_kept_is_void_with_another_state() -> None:
    machine = Machine(whole_run())
    contributed = machine.contribute(1, (0,))
    before = done(machine.worker.run(tasks.Snapshot(0))).outputs
    machine.step(1, contributed.parts)
    contributed.check(machine.worker)
    done(machine.worker.run(tasks.LoadState(0), before))
    (inputs, _), *_ = contributed.units.values()
    assert machine.worker.run(tasks.AuditUnit(1, 0, True), inputs).error == tasks.WEIGHTS_GONE
    assert "audited" in machine.worker.run(tasks.AuditSum(1, PARTS)).error


def test_only_what_may_be_audited_is_kept() -> None:
    machine = Machine(whole_run())
    contributed = machine.contribute(1, (0,))
    machine.step(1, contributed.parts, keep=False)
    (inputs, _), *_ = contributed.units.values()
    assert machine.worker.run(tasks.AuditUnit(1, 0, True), inputs).error == tasks.WEIGHTS_GONE


def test_an_auditor_on_two_devices_finds_what_one_device_computed() -> None:
    """In a run without rounds: an island computes on one device."""
    one = replace(whole_run(), round=RoundSection())
    machine, auditor = Machine(one), Machine(with_section(one, "compute", device="cpu:0,cpu:1"))
    contributed = machine.contribute(1, (0, 2))
    for each in (machine, auditor):
        each.step(1, contributed.parts)
    contributed.check(auditor.worker)
