"""A stage on several devices: where its tensors lie, and that no bit changes. The devices are parts of the
host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch.config import PipelineSection, RoundSection, RunConfig, with_changes
from anabranch.errors import ConfigError
from anabranch.protocol.interface import tasks
from anabranch.train.devices.placement import Placement, SplitVector, shared_out
from anabranch.train.model.layout import Layout
from anabranch.train.stage.state import StageState
from anabranch.train.stage.worker import Worker
from anabranch.train.workers.workers import make_worker
from support.pretend_devices import pretended
from support.small_training import SmallSwarm, bits_equal, done, small_model, small_run, with_section

ZERO, ONE, TWO = (torch.device("cpu", number) for number in range(3))


def split(run: RunConfig, devices: str = "cpu:0,cpu:1") -> RunConfig:
    return with_section(run, "compute", device=devices)


def long_run(devices: str) -> RunConfig:
    """Run with a stage of twelve blocks, whose names are not in the order of their numbers."""
    run = small_run("llama", stages=1)
    return split(replace(run, model=replace(run.model, blocks=12)), devices)


def ready(run: RunConfig, stage: int = 1) -> Worker:
    worker = make_worker(run, small_model(run), stage)
    done(worker.run(tasks.InitState(0)))
    return worker


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("architecture", "dtype", "changes"),
    [
        ("llama", "fp32", {}),
        ("gpt", "bf16", {}),
        ("llama", "fp32", {"optimizer.kind": "muon"}),
        ("gpt", "fp32", {"wire.reduce": "coarse", "wire.activations": "int8", "wire.gradients": "int8"}),
        ("llama", "fp32", {"model.subspace": 8, "model.tied": False}),
    ],
)
def test_steps_on_two_devices_have_the_bits_of_steps_on_one(
    architecture: str, dtype: str, changes: dict[str, Any]
) -> None:
    run = with_changes(small_run(architecture, dtype=dtype), changes)
    one, two = SmallSwarm(run, 1), SmallSwarm(split(run), 2)
    for t in range(1, 4):
        assert two.step(t) == one.step(t)
    for worker in two.stages[1]:
        assert isinstance(worker.state.weights, SplitVector)
    assert not isinstance(two.stages[0][0].state.weights, SplitVector), "stage 0 has no blocks to lay out"


def test_every_operation_is_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, both backward passes, sums, reduce and step; each of two stages has a block on each device."""
    run = small_run("llama")
    expected = SmallSwarm(run, 1, (1, 1, 1)).step(1)
    with pretended(monkeypatch) as mode:
        assert SmallSwarm(split(run), 1, (1, 1, 1)).step(1) == expected
        with pytest.raises(AssertionError, match=r"add\.? is given|aten::add"):
            torch.ones(2, device="cpu:0") + torch.ones(2, device="cpu:1")
    assert min(mode.operations[device] for device in ("cpu:0", "cpu:1")) > 100


def test_each_tensor_lies_with_its_block() -> None:
    worker = ready(long_run("cpu:0,cpu:1,cpu:2"))
    for vector in (worker.state.weights, worker.state.exp_avg, worker._stage.accumulator.flat):
        assert isinstance(vector, SplitVector)
        assert sum(run.end - run.begin for run in vector.runs) == worker.layout.elements
        for name in worker.layout.names:
            begin, end = worker.layout.bounds[name]
            (run,) = (run for run in vector.runs if run.begin <= begin and end <= run.end)
            assert run.device.index == int(name.split(".")[2]) // 4
    numbers = [run.device.index for run in worker.state.weights.runs]  # type: ignore[attr-defined]
    assert numbers == [0, 2, 0, 1, 2], "layers 0 and 1, 10 and 11, 2 and 3, 4 to 7, 8 and 9"


def test_blocks_are_shared_out_by_memory() -> None:
    def counts(blocks: int, *sizes: int) -> list[int]:
        at = shared_out(range(10, 10 + blocks), (ZERO, ONE, TWO)[: len(sizes)], sizes)
        assert list(at) == list(range(10, 10 + blocks))
        numbers = [device.index for device in at.values()]
        assert numbers == sorted(numbers)
        return [numbers.count(number) for number in range(len(sizes))]

    assert counts(12, 1, 1, 1) == [4, 4, 4]
    assert counts(12, 24, 12) == [8, 4]
    assert counts(3, 80, 1, 1) == [1, 1, 1]
    assert counts(5, 1, 80) == [1, 4]


def test_a_vector_on_several_devices_refuses_what_it_cannot_do() -> None:
    layout = Layout({"a": (70,), "b": (30,), "c": (40,)})
    whole = torch.arange(140.0)
    placement = Placement(layout, {"b": ONE}, ZERO)
    vector = placement.put(whole)
    assert bits_equal(vector.cpu(), whole) and bits_equal(vector.to(torch.bfloat16).cpu(), whole.bfloat16())
    assert not torch.zeros_like(vector).cpu().any() and bits_equal(vector.clone().cpu(), whole)
    assert bits_equal(layout.view(vector, "b"), whole[70:100]) and vector.numel() == 140
    layout.view(vector, "b").mul_(2)
    assert bits_equal(vector.cpu()[70:100], 2 * whole[70:100])
    # Tensors begin at the same place of a cache line as in a vector on one device.
    assert vector[70:80].data_ptr() % 64 == 70 * 4 % 64
    with pytest.raises(TypeError, match="not on one device"):
        vector[60:80]
    for operation in (lambda: torch.add(vector, vector), lambda: vector.sum(), lambda: vector.mul_(2.0)):
        with pytest.raises(TypeError, match="not defined for a vector on several devices"):
            operation()
    assert repr(vector) == "SplitVector(0:70 on cpu:0, 70:100 on cpu:1, 100:140 on cpu:0)"


def test_a_state_moves_between_one_device_and_several() -> None:
    """A replacement may have another number of devices than the peer that it replaces."""
    one, three = ready(long_run("cpu")), ready(long_run("cpu:0,cpu:1,cpu:2"))
    x, dy = torch.randn(2, 2, 12, 32).unbind(0)
    for worker in (one, three):
        done(worker.run(tasks.Forward(1, 0, train=True), (x,)))
        done(worker.run(tasks.InputGradient(1, 0), (dy,)))
        done(worker.run(tasks.WeightGradient(1, 0)))
        frozen = done(worker.run(tasks.Freeze(1, 1))).outputs
        done(worker.run(tasks.Assemble(1), done(worker.run(tasks.SumPart(1), frozen)).outputs))
        done(worker.run(tasks.Apply(1, 0.01, 1.0, 0.1, 0.001)))
    of_one, of_three = (done(worker.run(tasks.Snapshot(1))) for worker in (one, three))
    assert of_one.hashes == of_three.hashes and of_one.fingerprint == of_three.fingerprint
    for worker, snapshot in ((one, of_three), (three, of_one)):
        loaded = done(ready(worker._run).run(tasks.LoadState(1), snapshot.outputs))
        assert loaded.fingerprint == of_one.fingerprint


def test_an_audit_of_a_split_stage_finds_what_one_device_computed() -> None:
    """Replicas and auditors may have any number of devices."""
    one, two = ready(small_run()), ready(split(small_run()))
    x, dy = torch.randn(2, 2, 12, 32).unbind(0)
    audits = []
    for worker in (one, two):
        done(worker.run(tasks.Forward(1, 0, train=True), (x,)))
        done(worker.run(tasks.InputGradient(1, 0), (dy,)))
        done(worker.run(tasks.WeightGradient(1, 0)))
        frozen = done(worker.run(tasks.Freeze(1, 1))).outputs
        done(worker.run(tasks.Assemble(1), done(worker.run(tasks.SumPart(1), frozen)).outputs))
        done(worker.run(tasks.Apply(1, 0.01, 1.0, 0.1, 0.001, keep=True)))
        again = done(worker.run(tasks.AuditUnit(1, 0, first=True), (x, dy))).outputs
        (whole,) = done(worker.run(tasks.AuditSum(1, 1))).outputs
        assert bits_equal(whole, *frozen)
        audits.append((*again, whole))
    assert all(bits_equal(a, b) for a, b in zip(*audits, strict=True))


def test_a_unit_is_taken_back_and_an_overflow_is_named() -> None:
    worker = ready(split(small_run()))
    x, dy = torch.randn(2, 2, 12, 32).unbind(0)
    done(worker.run(tasks.Recount(1, 0, 1), (x, dy)))
    assert worker._stage.accumulator.flat.cpu().any()
    done(worker.run(tasks.Recount(1, 0, -1), (x, dy)))
    assert not worker._stage.accumulator.flat.cpu().any()
    for view in _weights(worker.state):
        view.mul_(1e30)
    assert worker.run(tasks.Forward(1, 0, train=True), (x,)).overflow == "activation"


def _weights(state: StageState) -> list[torch.Tensor]:
    return [view for _, view in state.layout.views(state.weights)]


def test_a_whole_model_lies_on_several_devices() -> None:
    run = replace(small_run(), pipeline=PipelineSection(stages=0))
    one, two = ready(run), ready(split(run))
    ids = torch.randint(0, 30, (2, 13, 1), dtype=torch.uint8)
    sums = []
    for worker in (one, two):
        done(worker.run(tasks.Forward(1, 0, train=True), (ids,)))
        done(worker.run(tasks.InputGradient(1, 0), (torch.zeros(1),)))
        done(worker.run(tasks.WeightGradient(1, 0)))
        sums.append(torch.cat(done(worker.run(tasks.Freeze(1, 1))).outputs))
    assert bits_equal(*sums) and sums[0].any()


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("cpu:0,cpu:0", "names cpu:0 twice"),
        ("cuda:1,cuda:01", "names cuda:01 twice"),
        ("cpu:0,cuda:0", "mixes cpu and cuda"),
        ("cpu,cuda", 'must be "auto"'),
        ("cuda:0,", 'must be "auto"'),
    ],
)
def test_devices_that_no_stage_can_lie_on_are_refused_by_name(devices: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"compute.device.*{words}"):
        with_changes(small_run(), {"compute.device": devices})


def test_more_devices_than_blocks_and_islands_are_refused_by_name() -> None:
    run = split(small_run(), "cpu:0,cpu:1,cpu:2")
    with pytest.raises(ConfigError, match=r"cpu:0,cpu:1,cpu:2: 3 devices .* stage 1 .* at most 2"):
        Worker(run, small_model(run), 1)
    island = replace(small_run(), pipeline=PipelineSection(stages=0), round=RoundSection(slots=1))
    with pytest.raises(ConfigError, match="an island computes on one device"):
        Worker(split(island), small_model(run), 1)
