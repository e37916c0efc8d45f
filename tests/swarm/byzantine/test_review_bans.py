"""Honest peers keep their seats although the leader bans members that flood it (I5, I7)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 12
#: Time (s) for which a process is stopped: a machine that sleeps, or a debugger.
STOPPED_S = 600.0


def world_of(replicas: int, voters: int = 1) -> World:
    settings = Settings("bans", 1, 2, 6, STEPS, min_replicas=1, voters=voters)
    relays = (Machine(f"r{s}.{n}", s, capacity=3) for s in (1, 2) for n in range(replicas))
    world = counting_world(settings, [Machine("d0", 0), *relays], 1)
    Invariants(world)
    return world


def removed(world: World) -> dict[str, str]:
    """Members that the log removes -> the reason."""
    records = [decode_entry(line).record for line in world.log]
    return {p: why for one in records if isinstance(one, Members) for p, why in one.removed.items()}


@pytest.mark.parametrize(("stopped", "replicas"), [("d0", 2), ("r1.0", 1)])
def test_a_process_that_was_stopped_bans_nobody_and_is_not_banned(stopped: str, replicas: int) -> None:
    """The run needs it, so that it stays a member. It was pinged all the time, and answers hundreds of pings
    at once: the leader banned all members, or all banned it, and the run had stopped for good."""
    world, since = world_of(replicas), list[float]()

    def stop(node: Node, event: ev.Event) -> None:
        if world.history().t >= 5 and not since:
            since.append(world.clock.now)
            world.clock.after(0.0, world.nodes[stopped].freeze)
            world.clock.after(STOPPED_S, world.nodes[stopped].thaw)

    world.watchers.append(stop)
    world.run(until_s=STOPPED_S + 100.0)
    assert since and world.clock.now > STOPPED_S and world.history().t == STEPS and wrong_states(world) == {}
    assert not any(node.peer.ctx.rate_limits.over_budget for node in world.nodes.values())
    assert removed(world) == {}


def test_the_last_replica_of_a_stage_keeps_its_seat_when_the_leader_bans_it() -> None:
    """Without it the run would have stopped for good; now it waits until the ban is over."""
    world, flooded = world_of(1), list[float]()

    def flood(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and world.history().t >= 5 and not flooded:
            flooded.append(world.clock.now)
            while "r1.0" in node.peer.ctx.links.up:
                node.handle(ev.Received("r1.0", msg.Ping(1, 0), None))

    world.watchers.append(flood)
    world.run(until_s=200.0)
    assert flooded and world.history().t == STEPS and wrong_states(world) == {}
    assert world.nodes["d0"].peer.ctx.rate_limits.over_budget["Ping"] and removed(world) == {}
