"""Voters that leave on purpose: another takes over the vote first, and a leader hands over (R9, R14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol.log.records import Members, Voters, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms.leaving_voters import (
    BEGINS_AT,
    SETTINGS,
    SLOW,
    ask_to_go,
    gone_after,
    keepers,
    leader_without_founder,
    swarm,
    until,
)


def voters_when_removed(world: World, peer: str) -> list[str]:
    """Voters, by the log, when a member was removed."""
    voters: list[str] = []
    for line in world.log:
        record = decode_entry(line).record
        if isinstance(record, Voters):
            voters = [voter.partition("/")[0] for voter in record.ids]
        elif isinstance(record, Members) and peer in record.removed:
            return voters
    raise AssertionError(f"{peer} was not removed")


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("count", [1, 2])
def test_a_voter_goes_when_another_has_its_vote(count: int) -> None:
    world = swarm(1)
    leavers = [peer for peer in keepers(world) if peer != "d0"][:count]
    assert gone_after(world, ask_to_go(world, *leavers), *leavers) < 15.0
    for peer in leavers:
        voters = voters_when_removed(world, peer)
        assert len(voters) >= 3 and peer not in voters
    then = until(world, world.clock.now + 1.0)
    world.crash(next(peer for peer in keepers(world) if peer != "d0"))
    assert until(world, world.clock.now + 8.0) > then + 2


def test_a_voter_without_an_heir_goes_all_the_same() -> None:
    """Nobody else could vote, and of those that do one is out of reach: no change of voters can be made."""
    world = swarm(2, replicas=2, data_nodes=3)
    leaver = next(peer for peer in keepers(world) if peer != "d0")
    for node in world.nodes.values():
        if node.id not in keepers(world):
            world.partition([node.id], 3.0)
    assert gone_after(world, ask_to_go(world, leaver), leaver) < 40.0


def test_who_leads_hands_over_to_one_that_can_lead() -> None:
    """The first of the others could not: it is passed over."""
    world, leader = leader_without_founder(3)
    others = sorted(peer for peer in keepers(world) if peer != leader.id)
    world.nodes[others[0]].peer.voter._may_lead = lambda: False
    until(world, world.clock.now + 1.0)
    assert gone_after(world, ask_to_go(world, leader.id), leader.id) < 15.0
    assert "left" in str(leader.stopped) and world.leading().id == others[1]
    then = world.history().t
    assert until(world, world.clock.now + 4.0) > then


def test_who_leads_knows_at_once_that_nobody_can_take_over() -> None:
    world, leader = leader_without_founder(4)
    for peer in keepers(world):
        if peer != leader.id:
            world.crash(peer)
    while any(peer in leader.links for peer in keepers(world)):
        world.clock.step()
    assert gone_after(world, ask_to_go(world, leader.id), leader.id) < 3.0
    assert "nobody" in str(leader.stopped)


@pytest.mark.costly
def test_a_vote_stays_while_another_voter_is_dead() -> None:
    """Nobody else could vote when one voter dies and another wants to go: its vote is not taken before
    the dead one's, or those who live would be no majority ever again."""
    world = swarm(5, replicas=2, data_nodes=3)
    dies, leaves = (peer for peer in keepers(world) if peer != "d0")
    for node in world.nodes.values():
        if node.id not in keepers(world):
            world.partition([node.id], 4.0)
    world.freeze(dies, 60.0)
    gone_after(world, ask_to_go(world, leaves), leaves)
    then = world.history().t
    assert until(world, world.clock.now + 8.0) > then


def test_who_leads_goes_though_the_founder_is_just_back() -> None:
    """The log does not know the founder's new process yet, and of the other voters nobody else is awake: it
    is let in first, and takes the lead then."""
    settings = replace(SETTINGS, neighbours=1)
    machines = [Machine(f"d{n}", 0) for n in range(3)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(5)]
    world = counting_world(settings, machines, 6, SLOW)
    Invariants(world)
    until(world, BEGINS_AT)
    world.crash("d0")
    world.clock.after(0.1, lambda: world.add(world.nodes["d0"].next_life(), "d1", world.clock.now))
    while world.clock.now < BEGINS_AT + 20.0 and not any(
        node.peer.lead is not None for node in world.nodes.values() if node.id != "d0" and not node.stopped
    ):
        world.clock.step()
    leader = world.leading()
    third = next(peer for peer in keepers(world) if peer not in ("d0", leader.id))
    world.freeze(third, 60.0)
    assert gone_after(world, ask_to_go(world, leader.id), leader.id) < 15.0
    assert "left" in str(leader.stopped)
    then = world.history().t
    assert until(world, world.clock.now + 8.0) > then


@pytest.mark.costly
def test_all_voters_go_at_once_and_others_keep_the_log() -> None:
    world, _ = leader_without_founder(7, data_nodes=5)
    leavers = keepers(world)
    assert gone_after(world, ask_to_go(world, *leavers), *leavers) < 40.0
    assert all("left" in str(world.nodes[peer].stopped) for peer in leavers)
    assert not set(leavers) & set(keepers(world)) and len(keepers(world)) == 3
    then = world.history().t
    assert until(world, world.clock.now + 8.0) > then


def test_all_go_at_once() -> None:
    """Nobody stays: nobody waits for an heir either."""
    world, _ = leader_without_founder(8)
    everybody = [node.id for node in world.nodes.values() if node.stopped is None and node.id != "d0"]
    assert gone_after(world, ask_to_go(world, *everybody), *everybody) < 12.0
