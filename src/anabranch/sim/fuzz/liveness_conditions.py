"""Conditions under which invariant I4 promises progress, evaluated in the simulated world."""

from __future__ import annotations

from collections import Counter

from anabranch.protocol.raft.types import peer_of
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World


def unmet(world: World, t: int) -> list[str]:
    """Conditions of I4 (progress) that do not hold now, in words; empty if all hold. If no peer can be
    elected, only that is named; if one can and none leads yet, nothing is. t: last committed iteration."""
    missing = []
    leader = world.leading()
    if not any(_electable(world, node) for node in world.nodes.values()):
        voters = ", ".join(leader.peer.voter.raft.log.voters)
        return [f"a majority of the voters: nobody can be elected by {voters}"]
    lead = leader.peer.lead
    if lead is None:
        return []  # a leader can be elected
    restorable = lead.catalog.newest(t + 1, lambda peer: world.nodes[peer].running) is not None
    relays = Counter(node.peer.ctx.run.stage for node in world.nodes.values() if node.running)
    movable = any(count > 1 for stage, count in relays.items() if stage)
    for stage in range(world.settings.stages + 1):
        # A peer of the stage runs, or another stage has two relays, of which one could move.
        served = restorable and (relays[stage] > 0 or (stage > 0 and movable))
        if not served and not any(_holds(world, n, stage, t) for n in world.nodes.values()):
            what = f"a live replica, or a complete snapshot, of stage {stage}"
            missing.append(what if stage else "a live data node")
    return missing


def _electable(world: World, node: Node) -> bool:
    """True if this peer could win an election: it runs and is a voter by its own log, and a majority of its
    log's voters run, know it as a voter, and have logs no more complete than its own."""
    raft = node.peer.voter.raft
    if not node.running or raft.me not in raft.log.electors(raft.commit_index):
        return False
    running = [world.nodes[peer_of(voter)] for voter in raft.log.voters if _up(world, voter)]
    votes = [voter for voter in running if _complete(voter) <= _complete(node) and _knows(voter, raft.me)]
    return 2 * len(votes) > len(raft.log.voters)


def _up(world: World, voter: str) -> bool:
    node = world.nodes.get(peer_of(voter))
    return node is not None and node.running and node.peer.voter.raft.me == voter


def _knows(node: Node, voter: str) -> bool:
    raft = node.peer.voter.raft
    return voter in raft.log.electors(raft.commit_index) or voter in node.peer.ctx.log.voters


def _complete(node: Node) -> tuple[int, int]:
    log = node.peer.voter.raft.log
    return log.last_term, log.length


def _voters_remain(world: World, node: Node) -> bool:
    """True if more than half of the voters run, this peer not counted, or if the leader is itself no voter.
    Voters are those that the leader's log names."""
    raft = world.leading().peer.voter.raft
    remain = [voter for voter in raft.log.voters if _up(world, voter) and peer_of(voter) != node.id]
    return peer_of(raft.me) not in map(peer_of, raft.log.voters) or 2 * len(remain) > len(raft.log.voters)


def can_be_lost(world: World, node: Node, t: int) -> bool:
    """True if the run can go on when this peer's process and state are lost. A majority of the voters must
    remain. Of a peer that serves, another replica must take part in the open iteration, run unfrozen, and
    have the state after t or its gradient; of one that does not serve yet, any other peer of its stage must
    run. t: last committed iteration."""
    stage = node.peer.ctx.run.stage
    if not _voters_remain(world, node):
        return False
    if not _serves(world, node):
        return any(
            o is not node and o.running and o.peer.ctx.run.stage == stage for o in world.nodes.values()
        )
    live = world.leading().peer.ctx.run.membership.live(stage, t + 1)
    return any(
        other is not node and other.id in live and not other.frozen and _holds(world, other, stage, t)
        for other in world.nodes.values()
    )


def _serves(world: World, node: Node) -> bool:
    return node.id in world.leading().peer.ctx.run.membership.active_from


def _holds(world: World, node: Node, stage: int, t: int) -> bool:
    """True if this peer runs, serves the stage, and has the state after iteration t or the reduced gradient
    that leads to it. At t = 0, which is the initial state, any running peer that came for the stage has
    it."""
    peer = node.peer
    if t == 0 and node.running and node.member.stage == stage:
        return True
    if not node.running or peer.ctx.run.stage != stage or not _serves(world, node):
        return False
    prepared = peer.replica.all_reduce.prepared
    return peer.replica.t >= t or (peer.replica.t == t - 1 and prepared is not None and prepared.fence.t == t)
