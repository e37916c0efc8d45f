"""Swarm of counters for tests of relays that join an open iteration."""

from __future__ import annotations

import msgspec

from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world

SETTINGS = Settings("run", 1, 2, 8, 1_000_000)


MODEL = Model(
    latency_s=(0.01, 0.01),
    bulk_s=0.01,
    task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.1),
)


def swarm(settings: Settings, replicas: list[int], data_nodes: int = 1, seed: int = 0) -> World:
    machines = [Machine(f"d{n}", 0) for n in range(data_nodes)]
    for stage, count in enumerate(replicas, 1):
        machines += [Machine(f"r{stage}.{n}", stage) for n in range(count)]
    world = counting_world(settings, machines, seed, MODEL)
    Invariants(world)
    return world


def again(world: World, peer: str) -> None:
    """The process of a peer dies, and the next one is there at once."""
    world.crash(peer)
    former = world.nodes[peer].member
    world.add(
        msgspec.structs.replace(former, incarnation=former.incarnation + 1), "d0", world.clock.now + 0.01
    )
