"""Delayed iterations: workers with two iterations in flight, the reference, snapshots, and the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anabranch.config import ConfigError, RunConfig, config_from_dict, config_to_dict, with_changes
from anabranch.protocol.interface import tasks
from anabranch.train.model.rounds import delay_of
from anabranch.train.reference.independent import IndependentReference
from anabranch.train.reference.reference import Reference, Share
from anabranch.train.stage.delayed import snapshot_form
from anabranch.train.stage.state import SnapshotError, parse_snapshot
from anabranch.train.stage.worker import Worker
from support.grids import every_value
from support.small_training import MadeUpBatches, SmallSwarm, Step, done, small_model, small_run

STEPS, START = 7, 2


def delayed_run(architecture: str = "llama", dtype: str = "fp32", **changes: Any) -> RunConfig:
    changes = {"run.steps": STEPS, "iteration.delay": 1, "iteration.delay_from": 0.3, **changes}
    return with_changes(small_run(architecture, 2, dtype), changes)


def reference_of(run: RunConfig) -> Reference:
    return Reference(run, small_model(run), MadeUpBatches(run))


class OverlappingSwarm(SmallSwarm):
    """Swarm that sends the microbatches of the next iteration out before the step of the open one is taken,
    if the run delays it."""

    def __init__(self, run: RunConfig, seed: int) -> None:
        super().__init__(run, seed)
        self._begun: dict[int, tuple[dict[int, float], list[Any]]] = {}
        self.overlapped = 0

    def step(self, t: int) -> Step:
        losses, waiting = self._begun.pop(t) if t in self._begun else self._begin(t)
        ahead: tuple[dict[int, float], list[Any]] = {}, []
        if delay_of(self.run).has(t + 1):
            ahead = self._begun[t + 1] = self._begin(t + 1)
            self.overlapped += 1
        for _ in range(len(ahead[1]) // 2):
            self._add_one(ahead[1])
        while waiting:
            self._add_one(waiting)
        return self._commit(t, losses)

    def _begin(self, t: int) -> tuple[dict[int, float], list[Any]]:
        losses, waiting = {}, []
        for index in self._shuffled(range(self.run.batch.microbatches)):
            losses[index], later = self.pass_through(t, index)
            waiting += later
        return losses, waiting


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("architecture", "dtype", "changes"),
    [
        ("llama", "fp32", {}),
        ("gpt", "bf16", {}),
        ("llama", "fp32", {"wire.reduce": "coarse", "wire.activations": "int8", "wire.gradients": "int8"}),
    ],
)
def test_two_iterations_in_flight_equal_the_reference(
    architecture: str, dtype: str, changes: dict[str, Any]
) -> None:
    run = delayed_run(architecture, dtype, **changes)
    swarm, reference = OverlappingSwarm(run, seed=3), reference_of(run)
    for t in range(1, STEPS + 1):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(run.batch.microbatches)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()
    assert swarm.overlapped == STEPS - START + 1


def test_delayed_steps_differ_from_synchronous_ones_only_after_the_start() -> None:
    run = delayed_run()
    delayed, plain = reference_of(run), reference_of(with_changes(run, {"iteration.delay": 0}))
    for t in range(1, STEPS + 1):
        records = [each.step(each.share(t, range(run.batch.microbatches))) for each in (delayed, plain)]
        assert (records[0].losses == records[1].losses) == (t <= START), t


def test_the_independent_implementation_predicts_alike() -> None:
    """Written with torch's optimizer and by another formula, in fp64."""
    run = with_changes(delayed_run(dtype="fp64"), {"run.reduction": "fast"})
    reference = reference_of(run)
    initial = {name.removeprefix("weights/"): tensor for name, tensor in reference.tensors().items()}
    independent = IndependentReference(run, small_model(run), MadeUpBatches(run), initial)
    for t in range(1, STEPS + 1):
        record, step = reference.step(reference.share(t, range(5))), independent.step(t)
        assert record.loss == pytest.approx(step.loss, rel=1e-12), t
        assert record.norm == pytest.approx(step.norm, rel=1e-9), t


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("skipped", [3, 4])
def test_a_skipped_step_passes_like_any_other(skipped: int) -> None:
    run = delayed_run()
    swarm, reference = OverlappingSwarm(run, seed=1), reference_of(run)
    for t in range(1, STEPS + 1):
        if t != skipped:
            step = swarm.step(t)
            record = reference.step(reference.share(t, range(5)))
            assert (step.losses, step.fingerprints) == (record.losses, reference.fingerprints()), t
            continue
        reference.skip(Share(t, []))
        swarm._begun.pop(t, None)
        for worker in swarm.workers():
            before = worker.state.fingerprint()
            done(worker.run(tasks.Skip(t)))
            assert worker.state.fingerprint() != before  # the weights that it predicted are others


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("at", "reduce"), every_value((1, START, 4), ("exact", "coarse")))
def test_a_snapshot_holds_what_a_restart_needs(at: int, reduce: str) -> None:
    """A worker and a reference that begin from the snapshots go on with the same bits (I3)."""
    run = delayed_run(**{"wire.reduce": reduce})
    swarm, reference = OverlappingSwarm(run, seed=2), reference_of(run)
    for t in range(1, at + 1):
        swarm.step(t)
    again = OverlappingSwarm(run, seed=8)
    snapshots = []
    for stage, replicas in enumerate(swarm.stages):
        pieces = done(replicas[0].run(tasks.Snapshot(at))).outputs
        snapshots.append(replicas[0].state.to_bytes())
        for worker in again.stages[stage]:
            done(worker.run(tasks.LoadState(at), pieces))
    again.adam_step = at
    reference.restore(snapshots)
    for t in range(at + 1, STEPS + 1):
        step = again.step(t)
        record = reference.step(reference.share(t, range(5)))
        assert step.losses == record.losses and step.fingerprints == reference.fingerprints()
        swarm.step(t)
        assert {w.state.fingerprint() for w in swarm.stages[1]} == {step.fingerprints[1]}


def test_held_out_windows_are_by_the_weights_of_the_state() -> None:
    run = delayed_run()
    swarm, reference = OverlappingSwarm(run, seed=4), reference_of(run)
    for t in range(1, 5):
        swarm.step(t)
        reference.step(reference.share(t, range(5)))
    window = run.batch.microbatches
    (x,) = done(swarm.stages[0][0].run(tasks.Embed(5, window))).outputs
    for stage in (1, 2):
        (x,) = done(swarm.stages[stage][0].run(tasks.Forward(5, window, train=False), (x,))).outputs
    result = done(swarm.stages[0][0].run(tasks.Head(5, window, train=False), (x,)))
    assert [(result.loss_sum, result.tokens)] == reference.evaluate(1)
    refused = swarm.stages[0][0].run(tasks.Embed(6, window))
    assert "iteration 6" in refused.error  # the state after step 5 is not there yet


def test_a_worker_has_two_iterations_open_and_no_third() -> None:
    run = delayed_run()
    worker = Worker(run, small_model(run), 0, MadeUpBatches(run))
    done(worker.run(tasks.InitState(0)))
    assert not worker.run(tasks.Embed(1, 0)).error
    assert worker.run(tasks.Embed(2, 0)).error  # synchronous
    swarm = OverlappingSwarm(run, seed=6)
    for t in range(1, START + 1):
        swarm.step(t)
    worker = swarm.stages[0][0]
    assert not worker.run(tasks.Embed(START + 2, 0)).error
    assert worker.run(tasks.Embed(START + 3, 0)).error
    assert worker.run(tasks.Embed(START, 0)).error
    assert worker.run(tasks.Freeze(START + 2, 1)).error  # reduced in its turn


def test_a_snapshot_of_another_kind_of_run_is_refused() -> None:
    run = delayed_run()
    swarm = OverlappingSwarm(run, seed=5)
    for t in range(1, 4):
        swarm.step(t)
    state = swarm.stages[1][0].state
    data, layout, cpu = state.to_bytes(), state.layout, torch.device("cpu")
    form = snapshot_form(run, layout)
    again = parse_snapshot(data, layout, torch.float32, cpu, form)
    assert again.fingerprint() == state.fingerprint()
    again.rate *= 2
    assert again.fingerprint() != state.fingerprint()
    with pytest.raises(SnapshotError, match="delay"):
        parse_snapshot(data, layout, torch.float32, cpu)
    state.ahead = None
    with pytest.raises(SnapshotError, match="lacks ahead"):
        parse_snapshot(state.to_bytes(), layout, torch.float32, cpu, form)


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline.stages": 0},
        {"audit.share": 0.5},
        {"iteration.delay": 2},
        {"optimizer.kind": "muon"},
        {"lora.rank": 2, "model.initial_weights": "x"},
    ],
    ids=str,
)
def test_what_cannot_be_delayed_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"iteration\.delay|delay"):
        config_from_dict(config_to_dict(with_changes(delayed_run(), changes)))
