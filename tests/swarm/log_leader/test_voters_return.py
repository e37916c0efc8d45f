"""Voters that died come back with their disks, elsewhere: the log goes on from what any of them had."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members, Rollback, decode_entry
from anabranch.protocol.raft.types import Role
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of
from support.swarms.fault_points import Fault, Moment
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world
from support.swarms.voters import leads_three

RUN = small_run(minimum=2, steps=8, checkpoint_every=2)


def swarm(seed: int) -> World:
    world = training_world(RUN, small_model(RUN), MadeUpBatches(RUN), [2, 2], 3, seed, voters=3)
    Invariants(world)
    return world


def elsewhere(world: World, peer: str) -> Member:
    """The machine with its disk, behind another address, as a process that only knows the founder's."""
    former = world.nodes[peer].member
    return msgspec.structs.replace(former, incarnation=former.incarnation + 1, address=f"{peer}:2")


def come_back(world: World, peer: str) -> None:
    node = world.add(elsewhere(world, peer), "d0", at=world.clock.now)
    node.peer.joining.doors = {"d0": "d0:1"}


def still_votes(world: World, name: str) -> Moment:
    """Another leads, more of the log is chosen than `name` has on its disk, and `name` is still a voter."""

    def moment(node: Node, event: ev.Event) -> bool:
        raft, has = node.peer.voter.raft, len(world.nodes[name].disk.lines)
        return node.peer.lead is not None and raft.commit_index > has and f"{name}/0" in raft.log.voters

    return moment


def others(world: World) -> tuple[str, ...]:
    return tuple(peer for peer in world.nodes if peer != "d0")


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_voter_finds_the_others_from_its_disk(seed: int) -> None:
    """The founder is gone for ever. Before it is replaced as a voter, the next leader dies too and is soon
    back, elsewhere: with its vote, which the third voter needs, the run goes on."""
    world = swarm(seed)
    Fault(world, ("d0",), leads_three(3), lambda world, node: world.crash(node.id))

    def strike(world: World, node: Node) -> None:
        world.crash(node.id)
        world.clock.after(1.0, lambda: come_back(world, node.id))

    second = Fault(world, others(world), still_votes(world, "d0"), strike)
    world.run(until_s=900)
    check_equal(world, RUN)
    assert second.delivered


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(3)))
def test_the_founder_takes_up_what_it_has_missed(seed: int) -> None:
    """The founder dies, another leads, and then all die. Those who come back with the longest log serve
    nothing and cannot lead; the founder can, and has less of the log. Between them nothing is lost."""
    world = swarm(seed)
    Fault(world, ("d0",), leads_three(3), lambda world, node: world.crash(node.id))

    def strike(world: World, node: Node) -> None:
        for peer in others(world):
            world.crash(peer)
            world.clock.after(1.0, lambda peer=peer: come_back(world, peer))  # type: ignore[misc]
        world.clock.after(2.0, lambda: founder_comes_back(world))

    second = Fault(world, others(world), still_votes(world, "d0"), strike)
    world.run(until_s=900)
    check_equal(world, RUN)
    assert second.delivered
    assert world.nodes["d0"].peer.lead is not None and world.history().term >= 3


def test_a_founder_that_leads_again_knows_its_checkpoint() -> None:
    """It dies, comes back while others go on, and is given the lead. When a stage is then lost, the run goes
    back to the checkpoint of the founder's directory, not to the beginning."""
    world = swarm(1)

    def strike(world: World, node: Node) -> None:
        world.crash("d0")
        world.clock.after(1.0, lambda: founder_comes_back(world))

    def again(node: Node, event: ev.Event) -> bool:
        return node.id == "d0" and node.peer.lead is not None and node.member.incarnation == 2

    def stage_lost(world: World, node: Node) -> None:
        for peer in ("r1.0", "r1.1"):
            world.crash(peer)
            world.clock.after(2.0, lambda peer=peer: come_back(world, peer))  # type: ignore[misc]

    Fault(world, ("d0",), leads_three(3), strike)
    lost = Fault(world, ("d0",), again, stage_lost)
    world.run(until_s=900)
    check_equal(world, RUN)
    assert lost.delivered
    points = [r.t for line in world.log if isinstance(r := decode_entry(line).record, Rollback)]
    assert points == [2]


@pytest.mark.costly
def test_two_voters_who_lost_their_link_find_each_other() -> None:
    """The founder is frozen, and removed without hearing of it; it still has its vote. Before another has it,
    the process that leads is replaced by one with another disk: all are linked with that one, and it has no
    vote. The two who have one are not linked, and nobody dials who was removed."""
    world = swarm(0)

    def freeze(world: World, node: Node) -> None:
        world.freeze("d0", 12.0)
        world.slow.update({frozenset(("d0", peer)): 1000.0 for peer in others(world)})

    def removed(node: Node, event: ev.Event) -> bool:
        raft, knows = node.peer.voter.raft, "d0" not in node.peer.ctx.run.membership.members
        return knows and {raft.me, "d0/0"} <= set(raft.log.voters) and node.peer.lead is None

    def strike(world: World, node: Node) -> None:
        world.slow.clear()
        leads = world.nodes[node.peer.ctx.log.leader]
        world.add(leads.next_life(without_disk=True), "d0", world.clock.now)

    Fault(world, ("d0",), leads_three(3), freeze)
    replaced = Fault(world, others(world), removed, strike)
    world.run(until_s=300)
    check_equal(world, RUN)
    assert replaced.delivered


@pytest.mark.parametrize("seed", [1, 4, 5])
def test_a_founder_that_is_back_before_another_leads_is_let_in(seed: int) -> None:
    """By the log its former process still serves when the next leader is elected, and in a swarm of many a
    change waits for others. The lead is not for the new process until it is a member: offered again and
    again, it would keep the leader from letting it in."""
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(5))]
    world = counting_world(Settings("back", 1, 1, 4, 6, voters=3, neighbours=1), machines, seed)
    Invariants(world)

    def strike(world: World, node: Node) -> None:
        world.crash("d0")
        world.clock.after(0.1, lambda: world.add(node.next_life(), others(world)[0], world.clock.now))

    struck = Fault(world, ("d0",), leads_three(3), strike)
    world.run(until_s=300)
    assert struck.delivered
    assert world.history().t == 6
    assert not wrong_states(world)


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(2)))
def test_a_founder_asks_further_than_strangers_who_ask_it(seed: int) -> None:
    """It was frozen for long and is no voter any more. Relays that died meanwhile are back elsewhere, know
    its address alone and linked with it; they know no leader either. It goes through the addresses of its log
    until one does, and they come in after it."""
    relays = [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(4)]
    machines = [Machine("d0", 0), Machine("x1", 0), *relays]
    world = counting_world(Settings("back", 1, 2, 4, 200, voters=3, snapshot_every=1), machines, seed)
    Invariants(world)

    def strike(world: World, node: Node) -> None:
        world.freeze("d0", 60.0)
        for peer in ("r1.0", "r1.1", "r1.2"):
            world.clock.after(50.0, lambda peer=peer: world.crash(peer))  # type: ignore[misc]
        for peer in ("r1.1", "r1.2"):
            world.clock.after(52.0, lambda peer=peer: come_back(world, peer))  # type: ignore[misc]
        world.clock.after(60.5, removed)

    def removed() -> None:
        if world.nodes["d0"].stopped is None:
            world.clock.after(0.5, removed)
            return
        assert "d0/0" not in world.leading().peer.voter.raft.log.voters
        founder_comes_back(world)
        world.clock.after(8.0, all_are_in)

    seen = []

    def all_are_in() -> None:
        members = world.leading().peer.ctx.run.membership.members
        seen.append({"d0", "r1.1", "r1.2"} - members.keys())

    struck = Fault(world, ("d0",), leads_three(3), strike)
    while not seen:
        world.clock.step()
    then = world.history().t
    while world.history().t < then + 3:
        world.clock.step()
    assert struck.delivered and seen == [set()]


@pytest.mark.costly
def test_a_founder_that_nobody_can_dial_leads_again() -> None:
    """It comes back behind another router, and dials out only."""
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(3))]
    world = counting_world(Settings("back", 1, 1, 4, 40, voters=3), machines, 1)
    Invariants(world)

    def strike(world: World, node: Node) -> None:
        world.crash("d0")
        back = msgspec.structs.replace(node.next_life(), address="")
        world.clock.after(6.0, lambda: world.add(back, "d1", world.clock.now))

    struck = Fault(world, ("d0",), leads_three(3), strike)
    world.run(until_s=300)
    assert struck.delivered and world.nodes["d0"].member.address == ""
    assert world.history().t == 40 and world.nodes["d0"].peer.lead is not None
    assert not wrong_states(world)


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of(range(2)))
def test_a_founder_that_is_elected_lets_others_go_on(seed: int) -> None:
    """It comes back while nobody leads, and is elected before those who never went. To take the run up it
    would remove them all, and if it then died nobody would be left who can lead: they go on instead."""
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(3))]
    world = counting_world(Settings("back", 1, 1, 4, 40, voters=3, snapshot_every=4), machines, seed)
    Invariants(world)

    def strike(world: World, node: Node) -> None:
        world.crash("d0")
        for peer in others(world):
            world.nodes[peer].peer.voter.raft.election._failures = 4  # as if they had stood in vain
        world.clock.after(1.0, lambda: founder_comes_back(world))

    def elected(node: Node, event: ev.Event) -> bool:
        again = node.id == "d0" and node.member.incarnation == 2
        return again and node.peer.voter.raft.role is Role.LEADER

    Fault(world, ("d0",), leads_three(3), strike)

    def dies(world: World, node: Node) -> None:
        world.clock.after(0.1, lambda: world.crash("d0"))

    died = Fault(world, ("d0",), elected, dies)
    world.clock.after(200.0, lambda: founder_comes_back(world))
    world.run(until_s=900)
    assert died.delivered
    assert world.history().t == 40 and not wrong_states(world)
    records = [decode_entry(line).record for line in world.log]
    reasons = [r for record in records if isinstance(record, Members) for r in record.removed.values()]
    assert not any("taken up" in reason for reason in reasons), reasons


def test_who_hears_the_last_of_a_stage_leads() -> None:
    """A relay leads, and the only data node that is left cannot reach it for long; others hear both. The run
    does not wait for that one link."""
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(3))]
    world = counting_world(Settings("apart", 1, 1, 4, 400, voters=3), machines, 2)
    Invariants(world)

    def a_relay_leads(node: Node, event: ev.Event) -> bool:
        raft = node.peer.voter.raft
        changed = raft.commit_index > raft.log.voters_since and len(node.peer.ctx.log.voters) == 3
        return node.peer.lead is not None and changed and node.peer.ctx.run.stage == 1

    Fault(world, ("d0",), leads_three(3), lambda world, node: world.crash("d0"))
    cut = Fault(world, others(world), a_relay_leads, lambda world, node: world.cut(node.id, "d1", 2000.0))
    while not cut.delivered and world.clock.now < 60.0:
        world.clock.step()
    assert cut.delivered
    began, then = world.clock.now, world.history().t
    while world.clock.now < began + 60.0 and world.history().t <= then + 15:
        world.clock.step()
    assert world.history().t > then + 15
