"""Swarms whose voters die and come back."""

from __future__ import annotations

import msgspec

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms.fault_points import Moment


def leads_three(steps: int) -> Moment:
    """The peer leads three voters, and so many steps are committed."""

    def moment(node: Node, event: ev.Event) -> bool:
        raft = node.peer.voter.raft
        own = node.peer.lead is not None and raft.commit_index > raft.log.voters_since
        return own and len(node.peer.ctx.log.voters) == 3 and node.peer.committed >= steps

    return moment


def leads(node: Node) -> bool:
    return node.peer.lead is not None


def has_voters(world: World, count: int = 3) -> bool:
    return any(len(node.peer.ctx.log.voters) == count for node in world.nodes.values())


def records(world: World, kind: type) -> list:  # type: ignore[type-arg]
    found = [decode_entry(line).record for line in world.log]
    return [record for record in found if isinstance(record, kind)]


def one_history(world: World) -> None:
    """Every disk has a prefix of what was chosen, and perhaps lines that nobody else ever had."""
    for node in world.nodes.values():
        raft = node.peer.voter.raft
        for index in range(raft.log.start.index, raft.commit_index):
            assert raft.log.line(index) == world.log[index], node.id


LONG = Settings("long", 1, 2, 6, 14, checkpoint_every=3, min_replicas=2, voters=3)


def long_swarm(seed: int) -> World:
    stages = {"d0": 0, "d1": 0, "r1.0": 1, "r1.1": 1, "r2.0": 2, "r2.1": 2}
    world = counting_world(LONG, [Machine(name, stage) for name, stage in stages.items()], seed)
    Invariants(world)
    return world


def come_back(world: World, peer: str, after_s: float, door: str, **changes: str) -> None:
    member = world.nodes[peer].member
    member = msgspec.structs.replace(member, incarnation=member.incarnation + 1, **changes)
    world.clock.after(after_s, lambda: world.add(member, door, at=world.clock.now) and None)


def restart_later(world: World, peer: str, door: str, after_s: float) -> None:
    """The member as it is when it comes: a peer may move meanwhile."""

    def start() -> None:
        member = world.nodes[peer].member
        member = msgspec.structs.replace(member, incarnation=member.incarnation + 1)
        world.add(member, door, at=world.clock.now)

    world.clock.after(after_s, start)
