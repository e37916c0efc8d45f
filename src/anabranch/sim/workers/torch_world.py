"""Simulated swarm whose workers train a model with torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from msgspec import structs

from anabranch.config import RunConfig
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.sim.kernel.founder import populate
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, member_of
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.stage.protocol_inputs import (
    Manifest,
    genesis_of,
    initial_fingerprints,
    schedule_of,
)
from anabranch.train.stage.run_objects import Batches
from anabranch.train.stage.worker import Worker
from anabranch.train.workers.workers import make_worker

#: Data and numerics class (kinds of devices with equal rounding) in the log of a simulated run by default.
SIMULATED = Manifest("simulated corpus", "simulated tokenizer")
ONE_CLASS = "one class"


def torch_world(
    run: RunConfig,
    model: ModelConfig,
    batches: Batches,
    settings: Settings,
    founder: str,
    machines: Callable[[random.Random], Iterable[tuple[Member, float]]],
    seed: int,
    times: Model | None = None,
    *,
    manifest: Manifest = SIMULATED,
    manifest_hash: Callable[[int], str] = "batch {}".format,
    numerics_class: str = ONE_CLASS,
) -> World:
    """World of these machines that trains with torch, not yet running. model, batches: shape of the model,
    and what stage 0 reads. founder: name of the first machine, a data node. machines: (random numbers) ->
    (member, slowness) pairs; slowness: factor on the seconds of tasks. times: seconds of tasks and links
    (None: the default). manifest_hash: iteration -> hash of its batch. The log passes `anabranch verify` if
    manifest, manifest_hash and numerics_class are the true ones."""

    def make_computer(stage: int) -> Worker:
        return make_worker(run, model, stage, batches if stage == 0 else None)

    fingerprints = initial_fingerprints(run, model)
    genesis = genesis_of(run, settings.run, model, founder, manifest, numerics_class, fingerprints)
    world = World(seed, settings, genesis, make_computer, times)
    schedule = schedule_of(run, manifest_hash, batches.tokens_per_iteration)
    populate(world, schedule, machines(world.random))
    return world


def node_member(peer: str, stage: int, capacity: int = 4, numerics_class: str = ONE_CLASS) -> Member:
    """Member record with which a simulated machine joins."""
    return structs.replace(member_of(Machine(peer, stage, capacity)), numerics_class=numerics_class)
