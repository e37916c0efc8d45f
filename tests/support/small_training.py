"""Small run, made-up batches, and a swarm of workers driven at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.config import (
    BatchSection,
    ComputeSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunConfig,
    RunSection,
)
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Result, Task, embed_unit, head_unit
from anabranch.train.model.sizes import ModelConfig, model_config
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.stage.run_objects import Ids
from anabranch.train.stage.worker import Worker

VOCABULARY = 61


def small_run(
    architecture: str = "llama",
    stages: int = 2,
    dtype: str = "fp32",
    reduction: str = "exact",
    tied: bool = True,
    clip: float = 0.2,
) -> RunConfig:
    """Four narrow blocks, five microbatches of 2×12 tokens; the norm is above `clip` at first."""
    return RunConfig(
        run=RunSection(seed=7, steps=20, reduction=reduction),
        model=ModelSection(size=f"{architecture}-tiny", dim=32, blocks=4, ffn=48, max_sequence=16, tied=tied),
        batch=BatchSection(microbatches=5, rows=2, sequence=12),
        optimizer=OptimizerSection(lr=1e-2, warmup_steps=2, clip=clip),
        pipeline=PipelineSection(stages=stages),
        compute=ComputeSection(device="cpu", dtype=dtype),
    )


def small_model(run: RunConfig) -> ModelConfig:
    return model_config(run.model, VOCABULARY)


class MadeUpBatches:
    """Tokens drawn from (t, index), with some structure to learn."""

    def __init__(self, run: RunConfig, vocabulary: int = VOCABULARY) -> None:
        self._batch = run.batch
        self._vocabulary = vocabulary
        self.tokens_per_iteration = run.batch.microbatches * run.batch.rows * run.batch.sequence

    def microbatch(self, t: int, index: int) -> tuple[Ids, Ids]:
        return self._draw(1, t, index)

    def evaluation_window(self, window: int) -> tuple[Ids, Ids]:
        return self._draw(2, 0, window)

    def weight(self, t: int) -> float:
        return 1.0

    def window_weight(self, window: int) -> float:
        return 1.0

    def _draw(self, *key: int) -> tuple[Ids, Ids]:
        rows, sequence = self._batch.rows, self._batch.sequence
        ids = np.random.default_rng(key).integers(0, self._vocabulary // 2, (rows, sequence + 1))
        return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


@dataclass
class Step:
    """Step as the log would have it."""

    losses: dict[int, float]
    squares: dict[str, float]
    digests: tuple[str, ...]
    fingerprints: tuple[str, ...]
    """After the step, by stage."""
    norm: float
    clip_factor: float


def done(result: Result) -> Result:
    """The result, if the task could be done."""
    assert not result.error, result.error
    assert not result.overflow, result.overflow
    return result


class SmallSwarm:
    """Several workers per stage. Who serves a microbatch, when its weight gradient is added, and in how
    many parts a stage reduces are drawn from `seed`."""

    def __init__(self, run: RunConfig, seed: int, replicas: tuple[int, ...] | None = None) -> None:
        self.run, self.model = run, small_model(run)
        self.batches = MadeUpBatches(run)
        self._draw = random.Random(seed)
        counts = replicas or tuple(self._draw.randint(1, 3) for _ in range(run.pipeline.stages + 1))
        self.stages = [
            [Worker(run, self.model, stage, self.batches if stage == 0 else None) for _ in range(count)]
            for stage, count in enumerate(counts)
        ]
        self.adam_step = 0
        for worker in self.workers():
            done(worker.run(tasks.InitState(0)))

    def workers(self) -> list[Worker]:
        return [worker for replicas in self.stages for worker in replicas]

    def step(self, t: int) -> Step:
        losses, waiting = {}, []
        for index in self._shuffled(range(self.run.batch.microbatches)):
            losses[index], later = self.pass_through(t, index)
            waiting += later
            while waiting and self._draw.random() < 0.5:
                self._add_one(waiting)
        while waiting:
            self._add_one(waiting)
        return self._commit(t, losses)

    def pass_through(self, t: int, index: int) -> tuple[float, list[tuple[Worker, Task, tuple[Any, ...]]]]:
        """Forward and input gradients of one microbatch; its loss sum and the weight gradients to come."""
        path = [self._draw.choice(replicas) for replicas in self.stages]
        embedder, head, relays = self._draw.choice(self.stages[0]), path[0], path[1:]
        (x,) = done(embedder.run(tasks.Embed(t, index))).outputs
        for relay in relays:
            (x,) = done(relay.run(tasks.Forward(t, index, train=True), (x,))).outputs
        result = done(head.run(tasks.Head(t, index, train=True), (x,)))
        (g,) = result.outputs
        later: list[tuple[Worker, Task, tuple[Any, ...]]] = [
            (head, tasks.WeightGradient(t, head_unit(index)), ())
        ]
        for relay in reversed(relays):
            (g,) = done(relay.run(tasks.InputGradient(t, index), (g,))).outputs
            later.append((relay, tasks.WeightGradient(t, index), ()))
        later.append((embedder, tasks.WeightGradient(t, embed_unit(index)), (g,)))
        return result.loss_sum, later

    def reduce(self, t: int, replicas: list[Worker]) -> Result:
        """Reduce one stage among all its replicas, in as many parts as there are members."""
        members = self._shuffled(replicas)
        parts = [done(member.run(tasks.Freeze(t, len(members)))).outputs for member in members]
        reduced = [
            done(member.run(tasks.SumPart(t), tuple(cut[p] for cut in parts))).outputs[0]
            for p, member in enumerate(members)
        ]
        results = [done(member.run(tasks.Assemble(t), tuple(reduced))) for member in members]
        assert len({(r.digest, tuple(r.squares.items())) for r in results}) == 1
        return results[0]

    def _commit(self, t: int, losses: dict[int, float]) -> Step:
        squares: dict[str, float] = {}
        digests = []
        for replicas in self.stages:
            result = self.reduce(t, replicas)
            squares.update(result.squares)
            digests.append(result.digest)
        self.adam_step += 1
        norm = global_norm(squares.values())
        factor = clip_factor(norm, self.run.optimizer.clip)
        corrections = bias_corrections(self.run.optimizer, self.adam_step)
        apply = tasks.Apply(t, learning_rate(self.run, t), factor, *corrections)
        fingerprints = []
        for replicas in self.stages:
            after = {done(worker.run(apply)).fingerprint for worker in replicas}
            assert len(after) == 1
            fingerprints += after
        return Step(losses, squares, tuple(digests), tuple(fingerprints), norm, factor)

    def _add_one(self, waiting: list[tuple[Worker, Task, tuple[Any, ...]]]) -> None:
        worker, task, inputs = waiting.pop(self._draw.randrange(len(waiting)))
        done(worker.run(task, inputs))

    def _shuffled(self, items: Any) -> list[Any]:
        items = list(items)
        self._draw.shuffle(items)
        return items


def with_section(run: RunConfig, section: str, **changes: Any) -> RunConfig:
    """The run with some keys of one section replaced."""
    return replace(run, **{section: replace(getattr(run, section), **changes)})


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors hold the same bits (-0.0 is not 0.0)."""
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
