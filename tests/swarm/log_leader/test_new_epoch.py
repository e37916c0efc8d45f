"""The voters lose their majority for good; the owner begins a new epoch, and the old one is fenced."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Entry, Epoch, encode_entry
from anabranch.protocol.peer.bootstrap import SavedCheckpoint, lead
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

SETTINGS = Settings("epochs", 1, 1, 6, 10, checkpoint_every=2, min_replicas=2, voters=3)


def swarm(seed: int) -> World:
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r0", 1), Machine("r1", 1), Machine("r2", 1)]
    return counting_world(SETTINGS, machines, seed)


def lose_the_majority(world: World) -> None:
    """The leader and another voter die when three vote and some steps are committed."""

    def watch(node: Node, event: object) -> None:
        ctx = node.peer.ctx
        whole = len(ctx.log.voters) == 3 and not node.peer.voter.busy
        if node.id == "d0" and node.running and whole and node.peer.committed >= 4:
            for voter in ctx.log.voters[:2]:
                world.crash(voter.partition("/")[0])

    world.watchers.append(watch)
    with pytest.raises(TimeoutError):
        world.run(until_s=120.0)
    world.watchers.remove(watch)
    assert sum(not node.running for node in world.nodes.values()) == 2


def begin_a_new_epoch(world: World) -> None:
    """As `anabranch recover --new-epoch` and `resume` do."""
    node = world.nodes["d0"]
    log = RaftLog(node.disk.lines)
    record = Epoch(2, ("d0/0",), "given up")
    term = log.last_term + 1
    node.disk.lines.append(encode_entry(Entry(log.length, term, log.position.previous, record)))
    node.disk.term = term
    world.settings = replace(world.settings, epoch=2)
    member = msgspec.structs.replace(node.member, incarnation=2)
    t = max(world.checkpoints)
    saved = SavedCheckpoint(
        t, tuple(fingerprint for _, (_, fingerprint) in sorted(world.checkpoints[t].items()))
    )
    assert world.schedule is not None
    kept = node.disk.kept(1)
    peer = lead(member, world.settings, world.schedule, world.genesis, kept, saved)
    world.add_leader(peer, member, node.disk)


def test_a_new_epoch_goes_on_and_the_old_one_ends() -> None:
    world = swarm(1)
    lose_the_majority(world)
    survivors = [node.id for node in world.nodes.values() if node.running]
    begin_a_new_epoch(world)
    world.clock.step()
    # The survivors are of the old epoch: whoever meets the new one stops, and comes back as a joiner.
    for peer in [*survivors, "d1", "r0", "r1", "r2"]:
        world.clock.after(30.0, lambda peer=peer: rejoin(world, peer))
    for peer in survivors:
        world.dial(world.nodes[peer], "d0")
    world.run(until_s=900.0)
    assert [commit.t for commit in world.history().commits] == list(range(1, 11))
    assert {commit.epoch for commit in world.history().commits} == {1, 2}
    assert wrong_states(world) == {}
    assert world.nodes["d0"].stopped == ("all 10 steps are committed", True)


def rejoin(world: World, peer: str) -> None:
    node = world.nodes[peer]
    if node.member.incarnation > 1:
        return
    if node.running:
        world.crash(peer)
    member = msgspec.structs.replace(node.member, incarnation=2)
    world.add(member, "d0", at=world.clock.now)
