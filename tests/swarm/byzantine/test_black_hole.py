"""A relay that takes microbatches, answers heartbeats and inquiries, and never gives anything back."""

from __future__ import annotations

from functools import cache

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 24


def seconds(seed: int, hole: str) -> tuple[float, World, int]:
    """Virtual seconds of the run, the world, and the microbatches that `hole` swallowed."""
    settings = Settings("black hole", 1, 2, 6, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{n}", s, capacity=3) for s in (1, 2) for n in range(3))]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    carry = world.carry
    swallowed: list[int] = []

    def swallow(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == hole and isinstance(said, msg.Forward | msg.Backward):
            swallowed.append(said.index)
            return
        carry(sender, peer, message, payload)

    world.carry = swallow  # type: ignore[method-assign]
    world.run(until_s=600.0)
    return world.clock.now, world, len(swallowed)


@cache
def calm_s() -> float:
    """Virtual seconds of a run in which nobody swallows anything."""
    return seconds(1, "")[0]


@pytest.mark.parametrize("hole", ["r1.1", "r2.0"])
def test_work_goes_elsewhere(hole: str) -> None:
    """All steps are committed, in three times the usual virtual time at most, and nobody is removed. The hole
    is tried again now and then by each peer before it, for three seconds each time."""
    took_s, world, swallowed = seconds(1, hole)
    assert swallowed and took_s <= 3.0 * calm_s()
    assert world.history().t == len(world.history().commits) == STEPS and wrong_states(world) == {}
    records = (decode_entry(line).record for line in world.log)
    assert not any(record.removed for record in records if isinstance(record, Members))
