"""The first source that a newcomer asks for the newest state of its stage keeps it waiting."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.lost_stages import joiner
from swarm.byzantine.test_review_stalls import removed

LIAR, END_S = "r1.0", 40.0


def swarm() -> World:
    """Two stages of three relays, the first of which lies, and a newcomer to stage 1 after 4 s."""
    settings = Settings("first", 1, 2, 6, 1_000_000, min_replicas=2)
    machines = [Machine(f"d{n}", 0) for n in range(2)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(3)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add(LIAR)
    world.clock.at(4.0, lambda: joiner(world, "late", 0.1, stage=1))
    return world


def serving_s(world: World, end_s: float = END_S) -> float:
    """Time (s) from which the newcomer is among the replicas of a step; end_s if it never is."""
    while world.clock.now < end_s:
        world.clock.step()
        commits = world.history().commits
        if commits and "late" in commits[-1].stages[1].members:
            break
    return world.clock.now


@pytest.mark.parametrize("lie", ["honest", "lacks", "silent", "old", "returns"])
def test_a_newcomer_serves_soon(lie: str) -> None:
    world, deeds = swarm(), list[float]()
    carry = world.carry

    def again(sender: Node) -> None:
        deeds.append(world.clock.now)
        carry(sender, "late", msg.encode(msg.StateOffer(1, 0, "", 0)), None)
        world.clock.after(0.5, partial(again, sender))

    def come_back() -> None:
        deeds.append(world.clock.now)
        world.cut(LIAR, "late", 0.3)
        world.clock.after(5.0, come_back)

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == LIAR and peer == "late" and isinstance(said, msg.StateOffer | msg.Piece):
            if lie == "lacks" and not deeds:
                again(sender)
            if lie == "returns" and not deeds:
                come_back()
            if lie in ("lacks", "silent", "returns"):
                return
            if lie == "old" and isinstance(said, msg.StateOffer):
                deeds.append(world.clock.now)
                said = msgspec.structs.replace(said, t=max(0, said.t - 5))
                world.clock.after(0.1, partial(carry, sender, peer, msg.encode(said), None))
                return
            if lie == "old" and isinstance(said, msg.Piece):
                deeds.append(world.clock.now)
                return
        carry(sender, peer, message, payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    took = serving_s(world)
    assert deeds or lie in ("honest", "silent")
    assert took < 25.0 and wrong_states(world) == {} and removed(world) == {}
