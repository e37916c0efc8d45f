"""Claims of members about holdings, their own and others': bounded by what exists (I7)."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Held, Holds, Spoilt
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault


def five_peers() -> World:
    settings = Settings("found", 1, 2, 4, 4, snapshot_every=1, min_replicas=2)
    machines = [Machine("d0", 0)] + [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2)]
    return counting_world(settings, machines, 1)


def test_holdings_of_who_was_never_let_in_go_with_its_link() -> None:
    world = five_peers()

    def strike(world: World, node: Node) -> None:
        node.handle(ev.LinkUp("stranger", 1))
        held = tuple(Held(0, t, "x") for t in range(10_000))
        node.handle(ev.Received("stranger", Holds(held, 1), None))
        node.handle(ev.LinkDown("stranger", "gone"))

    Fault(world, ("d0",), faults.received(msg.Claim, 2), strike)
    left: list[int] = []

    def look(node: Node, event: ev.Event) -> None:
        if node.peer.lead is not None:
            left.append(len(node.peer.lead.catalog._states._of.get("stranger", {})))

    world.watchers.append(look)
    world.run(until_s=300)
    assert world.history().t == 4
    assert left[-1] == 0, f"{left[-1]} entries of a stranger stay for ever"


def test_holds_of_a_liar_are_bounded_by_what_there_is_to_hold() -> None:
    world = five_peers()

    def strike(world: World, node: Node) -> None:
        held = tuple(Held(4000, t, f"{t}") for t in range(20_000))
        node.handle(ev.Received("r1.0", Holds(held, 1 << 39), None))

    Fault(world, ("d0",), faults.received(msg.Claim, 2), strike)
    left: list[int] = []

    def look(node: Node, event: ev.Event) -> None:
        if node.peer.lead is not None:
            left.append(len(node.peer.lead.catalog._states._who))

    world.watchers.append(look)
    world.run(until_s=300)
    assert max(left) < 1000, f"{max(left)} entries about a stage that there is not"


def test_what_a_liar_calls_spoilt_is_bounded() -> None:
    world = five_peers()

    def strike(world: World, node: Node) -> None:
        assert node.peer.lead is not None
        t = max(node.peer.lead.catalog.points)
        for number in range(5_000):
            node.handle(ev.Received("r1.0", Spoilt(1, t, f"nobody{number}"), None))
        refused.append(sum(node.peer.ctx.rate_limits.counts.get("r1.0", {}).values()))
        left.append(len(node.peer.lead.catalog._spoilt))

    refused: list[int] = []
    left: list[int] = []
    Fault(world, ("d0",), faults.received(msg.Claim, 2), strike)
    world.run(until_s=300)
    assert left[0] <= 100 or refused[0], f"{left[0]} spoilt holders that are nobody, none refused"
