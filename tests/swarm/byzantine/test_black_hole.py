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

STEPS = 40


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


@pytest.mark.costly
@pytest.mark.parametrize("hole", ["r1.1", "r2.0"])
def test_work_goes_elsewhere(hole: str) -> None:
    """All steps are committed, in 1.8 times the usual virtual time at most (2.1 where each peer before the
    hole finds it for itself), and nobody is removed. It holds up the first steps, whose usual time nobody
    knows yet, and one more: then the leader takes it for a standby."""
    took_s, world, swallowed = seconds(1, hole)
    assert 0 < swallowed <= 6 and took_s <= 1.8 * calm_s()
    assert world.history().t == len(world.history().commits) == STEPS and wrong_states(world) == {}
    records = (decode_entry(line).record for line in world.log)
    assert not any(record.removed for record in records if isinstance(record, Members))


@pytest.mark.costly
def test_one_that_gives_most_back_is_avoided_longer_each_time() -> None:
    """It keeps one microbatch of each iteration and gives all others back. What it gave back ended each
    series, so that every second step took five times as long for ever."""
    settings = Settings("most", 1, 2, 12, STEPS, min_replicas=2)
    machines = [Machine(f"r{s}.{n}", s, capacity=3) for s in (1, 2) for n in range(3)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *machines], 1)
    Invariants(world)
    carry, kept = world.carry, dict[int, int]()

    def keep(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        returns = sender.id == "r1.1" and isinstance(said, msg.Backward) and said.fence.t > 3
        if returns and kept.setdefault(said.fence.t, said.index) == said.index:  # type: ignore[attr-defined]
            return
        carry(sender, peer, message, payload)

    world.carry = keep  # type: ignore[method-assign]
    world.run(until_s=600.0)
    assert world.history().t == STEPS and wrong_states(world) == {} and 0 < len(kept) < 12


def test_a_peer_that_gives_back_just_in_time_does_not_stretch_the_time() -> None:
    """It keeps each microbatch for nine tenths of what its sender allows. Its times entered the usual one, so
    that the sender allowed more each time: a step of 0.3 s took 317 s."""
    settings = Settings("drip", 1, 2, 3, STEPS, min_replicas=2, policy="swarm")
    machines = [Machine("d0", 0), *(Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(2))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    carry, paces, committed_at = world.carry, [0.0], [0.0]

    def keep(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said, wait_s = msg.decode(message), 0.0
        if sender.id == "r1.1" and isinstance(said, msg.Backward) and world.history().t >= 3:
            for iteration in world.nodes[peer].peer.iterations.in_flight:
                if item := iteration.sender.items.get(said.index):
                    due_at = min(iteration.sender.overdue_at(item), 1e6)
                    wait_s = max(0.0, item.sent_at + 0.9 * (due_at - item.sent_at) - world.clock.now)
        world.clock.after(wait_s, lambda: carry(sender, peer, message, payload))

    def watch(node: Node, event: object) -> None:
        if world.log and world.history().t >= len(paces):
            paces.append(world.clock.now - committed_at[-1])
            committed_at.append(world.clock.now)

    world.carry = keep  # type: ignore[method-assign]
    world.watchers.append(watch)
    world.run(until_s=20_000.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    usual_s = max(paces[2:4])
    assert 3.0 < max(paces) < 60.0 * usual_s
