"""The conditions under which I4 promises progress, looked up in the simulated world."""

from __future__ import annotations

from anabranch.sim.node import Node
from anabranch.sim.world import World


def unmet(world: World, t: int) -> list[str]:
    """Which conditions of I4 do not hold, in words; t is the last committed iteration."""
    missing = []
    leader = world.nodes[world.genesis.leader]
    if not leader.running:
        missing.append(f"a majority of the voters: {leader.id}, the only one, is down")
    lead = leader.peer.lead
    restorable = lead is not None and lead.keeping.newest(t + 1) is not None
    for stage in range(world.settings.stages + 1):
        if not (restorable and stage) and not any(_holds(world, n, stage, t) for n in world.nodes.values()):
            what = f"a live replica, or a complete snapshot, of stage {stage}"
            missing.append(what if stage else "a live data node")
    return missing


def can_be_lost(world: World, node: Node, t: int) -> bool:
    """Whether another peer of the stage has what would be lost with this one, and takes part in the open
    iteration, so that it will have the next step, too."""
    stage = node.peer.core.stage
    if not _serves(world, node):
        return True
    live = world.nodes[world.genesis.leader].peer.core.membership.live(stage, t + 1)
    return any(
        other is not node and other.id in live and not other.frozen and _holds(world, other, stage, t)
        for other in world.nodes.values()
    )


def _serves(world: World, node: Node) -> bool:
    return node.id in world.nodes[world.genesis.leader].peer.core.membership.active_from


def _holds(world: World, node: Node, stage: int, t: int) -> bool:
    """Whether this peer serves the stage and has the state after iteration t, or the reduced gradient that
    leads to it. The initial state is whoever's that comes for the stage."""
    peer = node.peer
    if t == 0 and node.running and node.member.stage == stage:
        return True
    if not node.running or peer.core.stage != stage or not _serves(world, node):
        return False
    prepared = peer.replica.prepared
    return peer.replica.t >= t or (
        peer.replica.t == t - 1 and prepared is not None and prepared.fence.t == t
    )
