"""Worlds that train with torch, by numbers of data nodes and replicas."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from msgspec import UNSET, structs

from anabranch.config import RunConfig
from anabranch.protocol.log.records import Member
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.torch_world import ONE_CLASS, SIMULATED, node_member, torch_world
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.stage.protocol_inputs import Manifest, settings_of
from anabranch.train.stage.run_objects import Batches


def training_world(
    run: RunConfig,
    model: ModelConfig,
    batches: Batches,
    replicas: Sequence[int],
    data_nodes: int = 1,
    seed: int = 0,
    capacity: int = 4,
    times: Model | None = None,
    *,
    manifest: Manifest = SIMULATED,
    manifest_hash: Callable[[int], str] = "batch {}".format,
    numerics_class: str = ONE_CLASS,
    voters: int = 1,
    shared: int = 0,
) -> World:
    """World with `data_nodes` data nodes and `replicas[s-1]` relays at stage s, not yet running.

    Peers are called d0, d1, ... and r<stage>.<number>; d0 founds the run. The last three parameters are
    those of `torch_world`. voters: most voters. shared: capacity of relays for each of two pipeline islands
    (0: they hold one).
    """
    settings = replace(settings_of(run, f"sim-{seed}", model), voters=voters)

    def machines(rng: random.Random) -> Iterator[tuple[Member, float]]:
        for number in range(data_nodes):
            yield node_member(f"d{number}", 0, capacity, numerics_class), 1.0
        for stage, count in enumerate(replicas, start=1):
            for number in range(count):
                member = node_member(f"r{stage}.{number}", stage, capacity, numerics_class)
                yield structs.replace(member, shared=shared or UNSET), rng.uniform(0.5, 2.0)

    return torch_world(
        run, model, batches, settings, "d0", machines, seed, times,
        manifest=manifest, manifest_hash=manifest_hash, numerics_class=numerics_class,
    )  # fmt: skip
