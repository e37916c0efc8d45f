"""A peer leads before it serves, or before it has admitted itself: it may lose the lead there, or what it
builds may come late, and the run goes on all the same."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.peer.shared_state import Step
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.fault_points import Fault
from support.swarms.voters import leads_three, restart_later

LONG = Settings("long", 1, 2, 6, 12, checkpoint_every=3, min_replicas=2, voters=3)


def swarm(seed: int, data_nodes: int = 3) -> World:
    stages = {f"d{i}": 0 for i in range(data_nodes)} | {f"r{s}.{i}": s for s in (1, 2) for i in range(2)}
    world = counting_world(LONG, [Machine(name, stage) for name, stage in stages.items()], seed)
    Invariants(world)
    return world


def check_counted(world: World) -> None:
    assert [commit.t for commit in world.history().commits] == list(range(1, LONG.steps + 1))
    assert wrong_states(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("left", [2, 1])
def test_the_founder_loses_the_lead_while_it_takes_the_run_up(left: int) -> None:
    """All had died. The founder is elected, and is cut off when so many of the records with which it takes
    the run up are still to be logged: when it is back it begins anew."""
    world = swarm(1)
    others = tuple(peer for peer in world.nodes if peer != "d0")

    def all_die(world: World, node: Node) -> None:
        for peer in world.nodes:
            world.crash(peer)
        for peer in others:
            restart_later(world, peer, "d0", 1.0)
        world.clock.after(2.0, lambda: founder_comes_back(world))

    first = Fault(world, ("d0",), leads_three(4), all_die)

    def takes_up(node: Node, event: ev.Event) -> bool:
        lead = node.peer.lead
        return node.member.incarnation == 2 and lead is not None and len(lead.opening) == left

    second = Fault(world, ("d0",), takes_up, lambda w, node: w.partition(["d0"], 25.0))
    world.run(until_s=900)
    check_counted(world)
    assert first.delivered and second.delivered
    founder = world.nodes["d0"].peer
    assert founder.replica.t == LONG.steps and founder.ctx.log.voters


def build_slowly(world: World, node: Node, late_s: float) -> None:
    """Its stage is built so many seconds after it leads."""
    handle, held = node.handle, []

    def late(event: ev.Event) -> None:
        held.append(event) if isinstance(event, ev.StageBuilt) else handle(event)
        if held and node.peer.lead is not None:
            built = held.pop()
            world.clock.after(late_s, lambda: handle(built))

    node.handle = late  # type: ignore[method-assign]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("least", "how", "late_s"),
    [(3, "crash", 0.0), (0, "hand over", 0.0)],
    ids=["later", "from the first state"],
)
def test_a_voter_that_is_back_leads_while_it_builds_its_stage(least: int, how: str, late_s: float) -> None:
    """It is a member and has the log: it leads before it has a state, builds, fetches it and serves."""
    world = swarm(2)

    def strike(world: World, node: Node) -> None:
        world.crash("d1")
        restart_later(world, "d1", "d0", 0.1)
        world.watchers.append(slow)

    def slow(node: Node, event: ev.Event) -> None:
        if node.id == "d1" and node.running and isinstance(event, ev.Started):
            build_slowly(world, node, late_s)

    def builds(node: Node, event: ev.Event) -> bool:
        peer = node.peer
        caught_up = world.nodes["d0"].peer.voter.raft.caught_up("d1/0") and peer.voter.raft.campaigns
        return node.member.incarnation == 2 and peer.joining.step is Step.BUILDING and caught_up

    def takes_over(world: World, node: Node) -> None:
        world.nodes["d0"].peer.voter.transfer_leadership("d1/0")

    first = Fault(world, ("d0",), leads_three(least), strike)
    second = Fault(world, ("d1",), builds, takes_over)
    third = Fault(
        world,
        ("d1",),
        lambda node, event: node.peer.lead is not None and node.member.incarnation == 2,
        lambda world, node: world.crash("d0") if how == "crash" else None,
    )
    world.run(until_s=900)
    check_counted(world)
    assert first.delivered and second.delivered and third.delivered
