"""Voters whose processes all began anew: none is a member, and a member that serves gets a vote, to lead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Voters
from anabranch.protocol.messages import Append, AskVote
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.fault_points import Fault
from support.swarms.voters import come_back, has_voters, leads_three, one_history, records

SETTINGS = Settings("anew", 1, 1, 4, 30, voters=3, snapshot_every=2)
VOTERS = ("d0", "d1", "d2")


def began_anew(
    seed: int, back: tuple[int, ...] = (1, 2), settings: Settings = SETTINGS, data_nodes: int = 4
) -> tuple[World, list[str]]:
    """Swarm whose three voters died at once, and these voters, the founder first. back: positions of those
    that came back a second later."""
    machines = [Machine(f"d{n}", 0) for n in range(data_nodes)] + [Machine(f"r1.{n}", 1) for n in range(3)]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    died: list[str] = []

    def strike(world: World, node: object) -> None:
        died.extend(voter.partition("/")[0] for voter in world.nodes["d0"].peer.ctx.log.voters)
        for position, peer in enumerate(died):
            world.crash(peer)
            if position in back and position:
                come_back(world, peer, 1.0, died[3 - position])
        if 0 in back:
            world.clock.after(1.0, lambda: founder_comes_back(world) and None)

    Fault(world, ("d0",), leads_three(5), strike)
    while not died:
        world.clock.step()
    return world, died


def voters_of(world: World, peer: str) -> set[str]:
    return {voter.partition("/")[0] for voter in world.nodes[peer].peer.voter.raft.log.voters}


def until(world: World, holds: Callable[[], bool], within_s: float) -> bool:
    end = world.clock.now + within_s
    while not holds() and world.clock.now < end:
        world.clock.step()
    return holds()


@pytest.mark.parametrize("seed", [1, 2])
def test_all_voters_began_anew_and_none_is_gone(seed: int) -> None:
    world, _ = began_anew(seed, (0, 1, 2))
    world.run(until_s=200)
    print(world.clock.now, world.history().t, [r.ids for r in records(world, Voters)])
    assert world.history().t == 30 and not wrong_states(world)
    one_history(world)

@pytest.mark.parametrize("seed", [1, 2])
def test_plain(seed: int) -> None:
    world, _ = began_anew(seed)
    world.run(until_s=200)
    print(world.clock.now, world.history().t, [r.ids for r in records(world, Voters)])
    assert world.history().t == 30 and not wrong_states(world)
    one_history(world)


def test_a_founder_that_comes_back_when_all_others_are_gone_leads() -> None:
    """Its vote was taken, as it was out of reach, and the member that got one instead dies before it leads;
    so do all other members. The founder has its directory: it gets its vote back, and resumes the run."""
    world, died = began_anew(1)
    stay = set(died)
    assert until(world, lambda: "d0" not in voters_of(world, died[1]) or "d0" not in voters_of(world, died[2]), 60)
    for peer, node in world.nodes.items():
        if peer not in stay and node.running:
            world.crash(peer)
    world.clock.after(5.0, lambda: founder_comes_back(world) and None)
    world.clock.after(20.0, lambda: come_back(world, "r1.1", 0.0, "d0"))
    then = world.history().t
    assert until(world, lambda: world.history().t > then + 3, 120), [voters_of(world, p) for p in died]


def test_a_false_disk_costs_no_voter_its_vote() -> None:
    """The only members that serve have other disks than they said: none ever has the log, and nobody out of
    reach is to lose its vote for them."""
    world, died = began_anew(1)
    for peer in set(world.nodes) - set(died):
        world.nodes[peer].peer.voter.raft.me = f"{peer}/other"
    until(world, lambda: False, 30)
    assert "d0" in voters_of(world, died[1]) and "d0" in voters_of(world, died[2])


def test_who_takes_the_lead_and_is_silent_is_asked_three_times() -> None:
    """The member that gets the vote takes the lead at each offer, says once that it leads, and no more."""
    world, died = began_anew(1)
    liar, said = "", set()

    def mouth(message: object) -> object:
        if isinstance(message, Append):
            if message.term in said and silent:
                return None
            said.add(message.term)
        return message
    silent = True
    d1 = world.nodes[died[1]].peer.voter.raft
    def given():
        for p in died[1:]:
            got = voters_of(world, p) - set(died)
            if got: return sorted(got)[0]
        return ""
    assert until(world, lambda: bool(given()), 60)
    liar = given()
    world.mouths[liar] = mouth
    then = world.history().t
    until(world, lambda: world.history().t > then + 3, 150)
    print(liar, len(said), world.clock.now, [r.ids for r in records(world, Voters)])
    assert world.history().t > then + 3


@pytest.mark.parametrize("seed", range(6))
def test_without_snapshots_the_founder_leads_that_is_there(seed: int) -> None:
    """Data nodes all gone."""
    world, died = began_anew(seed, (0, 1, 2), replace(SETTINGS, snapshot_every=0, checkpoint_every=2), data_nodes=2)
    then = world.history().t
    until(world, lambda: world.history().t >=30, 150)
    print(then, world.clock.now, world.history().t, [r.ids for r in records(world, Voters)], [ (n[1],n[3]) for n in world.notes if n[2] in("waiting",)][-1:])
    assert world.history().t >= 30
