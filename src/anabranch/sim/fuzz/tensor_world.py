"""Simulated swarms that train a tiny model (dim 16, a block per stage, 8 tokens), and a reference machine.

Tokens are random, so nothing is read from disk. The reference is computed once per shape.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from anabranch.config import (
    BatchSection,
    CheckpointSection,
    ComputeSection,
    EvaluationSection,
    IterationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RoutingSection,
    RunConfig,
    RunSection,
    WireSection,
)
from anabranch.protocol.interface.delay import LEAST_START
from anabranch.protocol.log.records import Member
from anabranch.protocol.rounds.plan import Plan, Slots
from anabranch.sim.fuzz.seed_drawing import DrawnSeed
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.torch_world import node_member, torch_world
from anabranch.train.model.sizes import ModelConfig, model_config
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.reference.reference import Reference, StepRecord
from anabranch.train.stage.protocol_inputs import settings_of
from anabranch.train.stage.run_objects import Ids

#: Codecs and units of sums that seeds with tensors draw, each as often as the others; plain choices.
WIRES = (
    WireSection(),
    WireSection(activations="int8", gradients="int8", block=40),
    WireSection(activations="int8", gradients="int8", gradient_rounding="stochastic", reduce="coarse"),
    WireSection(activations="bf16", gradients="int4", gradient_rounding="stochastic"),
    WireSection(activations="fp16", reduce="coarse"),
)
#: Widths of the residual stream at the cuts that seeds with tensors draw; 0: full width. An odd number, which
#: neither the blocks of a codec nor the heads divide.
SUBSPACES = (0, 0, 5)
#: Number of token ids (a choice: small, and no multiple of anything).
VOCABULARY = 31


class MadeUpBatches:
    """Batches and evaluation windows of random tokens, each a pure function of (iteration, index) or of the
    window. All weights are 1."""

    def __init__(self, run: RunConfig) -> None:
        self._batch = run.batch
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
        ids = np.random.default_rng(key).integers(0, VOCABULARY, (self._batch.rows, self._batch.sequence + 1))
        return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])


def small_run(
    stages: int,
    microbatches: int,
    steps: int,
    wire: WireSection = WIRES[0],
    subspace: int = 0,
    delayed: bool = False,
) -> RunConfig:
    """Run file of a tiny model with one narrow block per relay stage, microbatches of 1 x 8 tokens, and
    clipped gradients. wire: codecs. subspace: width of the residual stream at the cuts (0: full width).
    delayed: True if two iterations are in flight from as early as may be."""
    return RunConfig(
        run=RunSection(seed=7, steps=steps),
        model=ModelSection(
            size="llama-tiny",
            dim=16,
            blocks=stages,
            heads=2,
            ffn=24,
            max_sequence=8,
            subspace=subspace or None,
            tied=False if subspace else None,
        ),
        batch=BatchSection(microbatches=microbatches, rows=1, sequence=8),
        optimizer=OptimizerSection(lr=1e-2, warmup_steps=2, clip=0.2),
        pipeline=PipelineSection(stages=stages),
        compute=ComputeSection(device="cpu"),
        evaluation=EvaluationSection(every=2, windows=3),
        checkpoint=CheckpointSection(every=2),
        routing=RoutingSection(policy="greedy"),
        wire=wire,
        iteration=IterationSection(delay=int(delayed), delay_from=LEAST_START / steps),
    )


def tensor_world(drawn: DrawnSeed) -> tuple[World, Tensors]:
    """(world of a drawn swarm whose workers train with torch, results of a single machine to compare with).
    From this call on torch has one thread in this process."""
    wanted = drawn.settings
    configure(threads=1)
    # Drawn apart from all else in the seed.
    wire = random.Random(f"wire {drawn.seed}").choice(WIRES)
    subspace = random.Random(f"subspace {drawn.seed}").choice(SUBSPACES)
    delayed = bool(wanted.delay.start)
    run = small_run(wanted.stages, wanted.microbatches, wanted.steps, wire, subspace, delayed)
    model = model_config(run.model, VOCABULARY)
    batches = MadeUpBatches(run)
    settings = replace(
        settings_of(run, wanted.run, model),
        evaluate_every=wanted.evaluate_every,
        checkpoint_every=wanted.checkpoint_every,
        min_replicas=wanted.min_replicas,
        policy=wanted.policy,
        returns=wanted.returns,
        voters=wanted.voters,
        audit_share=wanted.audit_share,
    )

    def machines(rng: random.Random) -> Iterator[tuple[Member, float]]:
        for machine in drawn.machines:
            yield node_member(machine.id, machine.stage, machine.capacity), machine.slowness

    founder = drawn.machines[0].id
    world = torch_world(run, model, batches, settings, founder, machines, drawn.seed, drawn.model)
    return world, _single_machine(run, model)


class Tensors:
    """Results of a single machine that trains with torch (methods: see `GroundTruth`), computed when they are
    asked for. The key of a state is its last iteration, as no step is skipped in these seeds."""

    first: object = 0

    def __init__(self, run: RunConfig, model: ModelConfig) -> None:
        self._batch = range(run.batch.microbatches)
        self._reference = Reference(run, model, MadeUpBatches(run))
        self._records: list[StepRecord] = []
        self._fingerprints = [self._reference.fingerprints()]

    def after(self, key: object, t: int, stepped: bool, slots: Slots, plan: Plan) -> object:
        return t

    def fingerprints(self, key: object, t: int) -> tuple[str, ...]:
        while len(self._records) < t:
            share = self._reference.share(len(self._records) + 1, self._batch)
            self._records.append(self._reference.step(share))
            self._fingerprints.append(self._reference.fingerprints())
        return self._fingerprints[t]

    def step(self, key: object, t: int, slots: Slots) -> tuple[tuple[str, ...], tuple[float, ...]]:
        self.fingerprints(key, t)
        record = self._records[t - 1]
        return record.digests, tuple(record.losses[index] for index in sorted(record.losses))


_single_machine = cache(Tensors)
