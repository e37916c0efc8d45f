"""Quotas and revocations in simulated swarms: by the log, under another leader, and after a resumption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol.consensus.log_replay import fold
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.records import Member, Members, Revoke, decode_entry
from anabranch.protocol.peer.bootstrap import lead
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import first_of
from support.swarms.voters import LONG, come_back, has_voters, leads, records

STAGES = {"d0": 0, "d1": 0, "r1.0": 1, "r1.1": 1, "r2.0": 2, "r2.1": 2}
#: Enough for all that happens in a test, with some steps after it.
STEPS = 24
LAB = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, "lab", 1)
REVOKE_LAB = ev.Wished("revoke", 0, "lab", "the course is over")


def swarm(seed: int, voters: int, *more: Machine) -> World:
    settings = replace(LONG, voters=voters, steps=STEPS)
    machines = [*(Machine(name, stage) for name, stage in STAGES.items()), *more]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    return world


def joins(world: World, name: str, at: float, credential: ev.VerifiedCredential = LAB) -> None:
    world.tickets[name] = credential
    world.add(member_of(Machine(name, 1)), "d0", at=at)


def until(world: World, reached: Callable[[], bool]) -> None:
    while not reached():
        assert world.clock.now < 300.0 and world.clock.step()


def seated(world: World, name: str) -> bool:
    return any(name in node.peer.ctx.run.membership.active_from for node in world.nodes.values())


def said(node: Node) -> str:
    """Reason with which a process ended."""
    assert node.stopped is not None
    return node.stopped[0]


def check_end(world: World) -> None:
    world.run(900.0)
    assert [commit.t for commit in world.history().commits] == list(range(1, STEPS + 1))
    assert wrong_states(world) == {}


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_quota_holds_when_two_ask_at_once_and_a_seat_is_free_again(seed: int) -> None:
    world = swarm(seed, voters=1)
    for name in ("one", "two"):
        joins(world, name, at=2.0)
    until(world, lambda: seated(world, "one") or seated(world, "two"))
    [there] = [name for name in ("one", "two") if seated(world, name)]
    out = world.nodes["two" if there == "one" else "one"]
    until(world, lambda: not out.running)
    assert "your ticket has a quota of 1" in said(out)
    world.crash(there)
    until(world, lambda: there not in world.nodes["d0"].peer.ctx.run.membership.members)
    joins(world, "three", at=world.clock.now)
    until(world, lambda: seated(world, "three"))
    check_end(world)
    admitted = [m.id for record in records(world, Members) for m in record.joined if m.ticket == "lab"]
    assert admitted == [there, "three"]


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_revoked_ticket_is_out_and_no_key_brings_it_back(seed: int) -> None:
    """The member is removed, the run goes on, and neither its key nor another gets in with the ticket."""
    world = swarm(seed, voters=1)
    joins(world, "guest", at=1.0)
    until(world, lambda: seated(world, "guest"))
    world.nodes["d0"].handle(REVOKE_LAB)
    until(world, lambda: "guest" not in world.nodes["r1.0"].peer.ctx.run.membership.members)
    guest = world.nodes["guest"]
    until(world, lambda: not guest.running)
    assert "the course is over" in said(guest)
    t = world.history().t
    world.add(next_process(member_of(Machine("guest", 1))), "d0", at=world.clock.now + 1.0)
    joins(world, "other key", at=world.clock.now + 1.0)
    check_end(world)
    assert world.history().t > t
    assert records(world, Revoke) == [Revoke("lab", "the course is over")]
    admitted = [m.id for record in records(world, Members) for m in record.joined if m.ticket == "lab"]
    assert admitted == ["guest"]
    assert all("lab" in node.peer.ctx.run.revoked for name, node in world.nodes.items() if name in STAGES)


def next_process(member: Member) -> Member:
    return msgspec.structs.replace(member, incarnation=member.incarnation + 1)


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_another_leader_knows_quotas_and_revocations(seed: int) -> None:
    """The next leader has the members' tickets and the revocations from the log."""
    world = swarm(seed, voters=3)
    school = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, "school", 1)
    joins(world, "guest", at=1.0)
    joins(world, "pupil", at=1.0, credential=school)
    until(world, lambda: seated(world, "guest") and seated(world, "pupil") and has_voters(world))
    world.nodes["d0"].handle(REVOKE_LAB)
    until(world, lambda: "lab" in world.nodes["d1"].peer.ctx.run.revoked)
    world.crash("d0")
    until(world, lambda: any(leads(node) for node in world.nodes.values() if node.running))
    [leader] = [node for node in world.nodes.values() if node.running and leads(node)]
    for name, credential in (("other key", LAB), ("second pupil", school)):
        world.tickets[name] = credential
        world.add(member_of(Machine(name, 1)), leader.id, at=world.clock.now + 5.0)
    until(world, lambda: not world.nodes["second pupil"].running and world.clock.now > 30.0)
    assert "a quota of 1" in said(world.nodes["second pupil"])
    members = leader.peer.ctx.run.membership.members
    assert "guest" not in members and "other key" not in members and "pupil" in members


def test_a_resumed_run_remembers_revocations() -> None:
    world = swarm(1, voters=1)
    joins(world, "guest", at=1.0)
    until(world, lambda: seated(world, "guest"))
    world.nodes["d0"].handle(REVOKE_LAB)
    until(world, lambda: bool(records(world, Revoke)))
    lines = tuple(world.log)
    assert "lab" in fold(lines).revoked
    member = next_process(world.nodes["d0"].member)
    nonce = world.nodes["d0"].disk.nonce
    genesis = decode_entry(lines[0]).record
    again = lead(member, world.settings, world.schedule, genesis, SavedVoterState(nonce, lines=lines))  # type: ignore[arg-type]
    again.handle(ev.Started(), 0.0)
    effects = again.handle(ev.LinkUp("other key", 1, LAB), 0.1)
    assert [effect.peer for effect in effects if isinstance(effect, ev.HangUp)] == ["other key"]


def test_the_founder_is_not_expelled_and_a_peer_is_by_its_id() -> None:
    world = swarm(2, voters=1)
    joins(world, "guest", at=1.0)
    until(world, lambda: seated(world, "guest"))
    world.nodes["d0"].handle(ev.Wished("revoke", 0, "d0", "by mistake"))
    world.nodes["d0"].handle(ev.Wished("revoke", 0, "guest", ""))
    world.nodes["r1.0"].handle(ev.Wished("revoke", 0, "r1.1", "a coup"))
    check_end(world)
    assert records(world, Revoke) == [Revoke("guest", "no reason given")]
    assert "expelled this peer" in said(world.nodes["guest"])


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_a_revoked_voter_is_out_and_so_is_a_revoked_leader(seed: int) -> None:
    """While the founder is away another voter leads; the founder comes back and revokes the leader's ticket,
    which the leader logs itself. The others go on."""
    world = swarm(seed, 3, Machine("d2", 0))
    for name, node in world.nodes.items():
        if name != "d0":
            role = "relay" if node.member.stage else "data"
            world.tickets[name] = ev.VerifiedCredential(role, ev.NEVER_EXPIRES_S, f"ticket of {name}")
    until(world, lambda: has_voters(world) and world.history().t >= 2)
    world.crash("d0")
    until(world, lambda: any(leads(node) for node in world.nodes.values() if node.running))
    [leader] = [node for node in world.nodes.values() if node.running and leads(node)]
    come_back(world, "d0", 2.0, leader.id)
    until(world, lambda: world.nodes["d0"].running and world.nodes["d0"].peer.ctx.admitted())
    assert leads(leader)
    world.nodes["d0"].handle(ev.Wished("revoke", 0, f"ticket of {leader.id}", "a coup"))
    until(world, lambda: not leader.running)
    assert "a coup" in said(leader)
    check_end(world)
    assert leader.id not in world.nodes["d0"].peer.ctx.run.membership.members


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(2), 1))
def test_a_guest_that_does_not_go_is_removed_all_the_same(seed: int) -> None:
    """It ignores its revocation and every refusal, dials again, and gets no link."""
    world = swarm(seed, voters=1)
    joins(world, "guest", at=1.0)
    until(world, lambda: seated(world, "guest"))
    guest = world.nodes["guest"]
    guest.peer.exit.stop = lambda reason, ok, again=False, over=False: None  # type: ignore[method-assign]
    guest.end = lambda reason, ok, again=False: None  # type: ignore[method-assign]
    world.nodes["d0"].handle(REVOKE_LAB)
    until(world, lambda: "guest" not in world.nodes["d0"].peer.ctx.run.membership.members)
    since = world.clock.now
    until(world, lambda: world.clock.now > since + 1.0)
    for name in STAGES:
        world.dial(guest, name)
    until(world, lambda: world.clock.now > since + 3.0 or world.history().t == STEPS)
    assert not any("guest" in world.nodes[name].links for name in STAGES)
    check_end(world)
    owners = [set().union(*(stage.members for stage in commit.stages)) for commit in world.history().commits]
    assert "guest" not in owners[-1]
