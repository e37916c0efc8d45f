"""Small models, made-up batches and the comparison with the reference, for simulated training."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from anabranch.config import (
    BatchSection,
    CheckpointSection,
    ComputeSection,
    EvaluationSection,
    FleetSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RoutingSection,
    RunConfig,
    RunSection,
)
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.sim.fuzz.tensor_world import VOCABULARY, MadeUpBatches
from anabranch.sim.kernel.simulated_peer import TaskExecutor
from anabranch.sim.kernel.swarm_world import World
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.sizes import ModelConfig, model_config
from anabranch.train.reference.reference import Reference, StepRecord
from anabranch.train.stage.delayed import snapshot_form
from anabranch.train.stage.run_objects import master_dtype
from anabranch.train.stage.state import parse_snapshot
from support.swarms.training_world import training_world


def small_run(
    architecture: str = "llama",
    stages: int = 2,
    steps: int = 3,
    microbatches: int = 6,
    policy: str = "greedy",
    minimum: int = 1,
    checkpoint_every: int = 2,
    evaluate_every: int = 2,
    blocks: int = 0,
) -> RunConfig:
    """Narrow blocks, microbatches of 1×8 tokens; gradients are above `clip`. blocks: 0 for two, or one a
    stage if these are more."""
    return RunConfig(
        run=RunSection(seed=7, steps=steps),
        model=ModelSection(
            size=f"{architecture}-tiny",
            dim=16,
            blocks=blocks or max(2, stages),
            heads=2,
            ffn=24,
            max_sequence=8,
        ),
        batch=BatchSection(microbatches=microbatches, rows=1, sequence=8),
        optimizer=OptimizerSection(lr=1e-2, warmup_steps=2, clip=0.2),
        pipeline=PipelineSection(stages=stages),
        compute=ComputeSection(device="cpu"),
        evaluation=EvaluationSection(every=evaluate_every, windows=3),
        checkpoint=CheckpointSection(every=checkpoint_every),
        fleet=FleetSection(minimum=minimum),
        routing=RoutingSection(policy=policy),
    )


def small_model(run: RunConfig) -> ModelConfig:
    return model_config(run.model, VOCABULARY)


class Truth:
    """Steps of the reference for a run, computed once as far as they are asked for."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._reference = Reference(run, small_model(run), MadeUpBatches(run))
        self._records: list[StepRecord] = []
        windows = run.evaluation.windows
        self._evaluations = [tuple(self._reference.evaluate(windows))]
        self._fingerprints = [self._reference.fingerprints()]
        self._tensors = [self._copy()]

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._reference.tensors().items()}

    def _reach(self, t: int) -> None:
        while len(self._records) < t:
            following = len(self._records) + 1
            share = self._reference.share(following, range(self._run.batch.microbatches))
            self._records.append(self._reference.step(share))
            self._evaluations.append(tuple(self._reference.evaluate(self._run.evaluation.windows)))
            self._fingerprints.append(self._reference.fingerprints())
            self._tensors.append(self._copy())

    def step(self, t: int) -> StepRecord:
        self._reach(t)
        return self._records[t - 1]

    def evaluation(self, t: int) -> tuple[tuple[float, int], ...]:
        self._reach(t)
        return self._evaluations[t]

    def fingerprints(self, t: int) -> tuple[str, ...]:
        self._reach(t)
        return self._fingerprints[t]

    def tensors(self, t: int) -> dict[str, torch.Tensor]:
        self._reach(t)
        return self._tensors[t]


@cache
def _truth(run: RunConfig) -> Truth:
    return Truth(run)


def truth_of(run: RunConfig) -> Truth:
    """The reference of a run; runs that differ only in how they are carried out share it."""
    plain = RunConfig()
    same = replace(run, routing=plain.routing, fleet=plain.fleet, checkpoint=plain.checkpoint)
    return _truth(same)


def check_equal(world: World, run: RunConfig, steps: int | None = None) -> LogReplay:
    """Every committed value and every checkpoint equals the reference, to the bit."""
    history, truth = world.history(), truth_of(run)
    assert history.t == (run.run.steps if steps is None else steps)
    assert [commit.t for commit in history.commits] == list(range(1, history.t + 1))
    for commit in history.commits:
        step = truth.step(commit.t)
        assert commit.verdict == "step"
        assert commit.loss_sums == tuple(step.losses[i] for i in range(run.batch.microbatches))
        assert tuple(stage.digest for stage in commit.stages) == step.digests
        assert tuple(stage.fingerprint_before for stage in commit.stages) == step.fingerprints
        assert {k: v for stage in commit.stages for k, v in stage.squares.items()} == step.squares
        assert (commit.norm, commit.clip_factor) == (step.norm, step.clip_factor)
        assert commit.learning_rate == step.learning_rate
        assert (commit.bias_correction1, commit.bias_correction2) == step.bias_corrections
    _check_evaluations(world, history, truth)
    for t in world.checkpoints:
        check_checkpoint(world, run, t)
    for node in world.nodes.values():
        replica = node.peer.replica
        if node.alive and replica.t >= 0:
            assert replica.fingerprint == truth.fingerprints(replica.t)[node.peer.ctx.run.stage]
    return history


def _check_evaluations(world: World, history: LogReplay, truth: Truth) -> None:
    settings = world.settings
    ended = history.t == settings.steps
    for t in range(history.t + 1 if ended else history.t):
        if settings.evaluates(t, settings.steps):
            sums = truth.evaluation(t)
            evaluation = history.evaluations[t]
            assert evaluation.loss_sums == tuple(loss for loss, _ in sums)
            assert evaluation.tokens == sum(tokens for _, tokens in sums)


def check_checkpoint(world: World, run: RunConfig, t: int) -> None:
    """Weights, moments and counters on disk after t."""
    wanted = truth_of(run).tensors(t)
    found: dict[str, torch.Tensor] = {}
    for stage, (pieces, fingerprint) in world.checkpoints[t].items():
        data = b"".join(bytes(piece.numpy().data) for piece in pieces)
        worker = world.make_computer(stage)
        master = master_dtype(DTYPES[run.compute.dtype])
        form = snapshot_form(run, worker.layout)
        state = parse_snapshot(data, worker.layout, master, torch.device("cpu"), form)
        assert (state.t, state.fingerprint()) == (t, fingerprint)
        found.update(state.tensors())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def small_world(run: RunConfig, replicas: list[int], data_nodes: int = 1, seed: int = 0) -> World:
    """replicas: of each stage."""
    return training_world(run, small_model(run), MadeUpBatches(run), replicas, data_nodes, seed, capacity=3)


class Overflowing:
    """A worker that finds an overflow in chosen microbatches, as a property of the microbatch."""

    def __init__(self, worker: TaskExecutor, bad: set[tuple[int, int]]) -> None:
        self._worker = worker
        self._bad = bad

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if isinstance(task, tasks.InputGradient) and (task.t, task.index) in self._bad:
            return Result(overflow="blocks.0.attention.wq")
        return self._worker.run(task, inputs)
