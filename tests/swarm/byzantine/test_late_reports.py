"""Replicas that are late in a reduce whose parts the coordinator sums (R8)."""

from __future__ import annotations

from functools import partial

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 6


def swarm(late: type[msg.Message], late_s: float, longer: float = 1.0) -> tuple[World, list[int]]:
    """Stage of two whose reduce of iteration 2 lost a part, so that the coordinator sums the next ones.
    r1.1's messages of type `late` are late by `late_s` seconds from iteration 4 on, and in each later one
    `longer` times as much. Returns the iterations of the late messages, too."""
    settings = Settings("late", 1, 1, 6, STEPS, min_replicas=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)], 1)
    Invariants(world)
    carry, lost, told = world.carry, list[str](), list[int]()

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.ReducePart) and said.fence.t == 2 and not lost:
            lost.append(peer)
        elif sender.id == "r1.1" and isinstance(said, late) and said.fence.t > 3:  # type: ignore[attr-defined]
            told.append(said.fence.t)  # type: ignore[attr-defined]
            delay_s = late_s * longer ** (said.fence.t - 4)  # type: ignore[attr-defined]
            world.clock.after(delay_s, partial(carry, sender, peer, message, payload))
        else:
            carry(sender, peer, message, payload)

    world.carry = deliver  # type: ignore[method-assign]
    return world, told


def removed(world: World) -> dict[str, str]:
    records = [r for line in world.log if isinstance(r := decode_entry(line).record, Members)]
    return {peer: reason for record in records for peer, reason in record.removed.items()}


@pytest.mark.parametrize("late", [msg.Prepared, msg.ReducePart])
def test_an_honest_replica_that_is_late_keeps_its_seat(late: type[msg.Message]) -> None:
    """Its report, or its sum, takes longer than a stall, but comes."""
    world, told = swarm(late, 9.0)
    world.run(until_s=600.0)
    assert {4, STEPS} <= set(told) and removed(world) == {}
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_replica_that_is_late_again_and_again_loses_its_seat() -> None:
    """It waits a little longer in each step than the leader's patience, which grows with the steps."""
    world, told = swarm(msg.Prepared, 9.0, longer=8.0)
    world.run(until_s=600.0)
    assert set(told) == {4, 5} and set(removed(world)) == {"r1.1"}
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert world.clock.now < 120.0


def test_a_replica_whose_report_never_comes_loses_its_seat() -> None:
    world, told = swarm(msg.Prepared, 1e6)
    world.run(until_s=600.0)
    assert told and set(removed(world)) == {"r1.1"}
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_replica_that_opens_the_iteration_after_its_result_came_keeps_its_seat() -> None:
    """It hears of a step late, so that the other replica computes the whole next one. Nobody sends it the
    parts of the result again."""
    world, _ = swarm(msg.Vouch, 0.0)
    carry, delayed = world.carry, list[float]()

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if peer == "r1.1" and 7.0 < world.clock.now < 9.0 and isinstance(msg.decode(message), msg.Announce):
            delayed.append(world.clock.now)
            world.clock.after(9.0 - world.clock.now, partial(carry, sender, peer, message, payload))
        else:
            carry(sender, peer, message, payload)

    world.carry = deliver  # type: ignore[method-assign]
    world.run(until_s=600.0)
    assert delayed and removed(world) == {}
    assert world.history().t == STEPS and world.clock.now < 12.0  # no stall after the delay
