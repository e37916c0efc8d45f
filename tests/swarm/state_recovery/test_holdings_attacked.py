"""Claims of members about holdings, their own and others': bounded by what exists (I7)."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Held, Holds, Spoilt
from anabranch.protocol.state.snapshots import KEPT_PER_STAGE
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.grids import first_of
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


def kept_by(replicas: int) -> tuple[World, dict[str, int], list[int]]:
    """A swarm of 40 steps with a snapshot after every other one, and "r1.0" among its relays; while it runs:
    peer -> most states of one stage that it held at a time, and the last complete point."""
    settings = Settings("kept", 1, 2, 6, 40, snapshot_every=2, min_replicas=2)
    machines = [Machine("d0", 0)] + [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(replicas)]
    world = counting_world(settings, machines, 1)
    most, complete = dict[str, int](), [0]

    def look(node: Node, event: ev.Event) -> None:
        stages = Counter(stage for stage, _ in node.peer.states.pinned)
        most[node.id] = max(most.get(node.id, 0), *stages.values(), 0)
        if node.peer.lead is not None:
            complete[0] = node.peer.lead.catalog.complete_t

    world.watchers.append(look)
    return world, most, complete


@pytest.mark.parametrize("replicas", first_of([2, 3]))
def test_a_keeper_that_never_reports_its_copies_is_passed_over(replicas: int) -> None:
    """No point ever became complete, and all others held all copies of all points."""
    world, most, complete = kept_by(replicas)
    world.mouths["r1.0"] = lambda message: None if isinstance(message, Holds) else message
    world.run(until_s=300)
    assert world.history().t == 40 and complete[0] >= 36
    assert max(most.values()) <= KEPT_PER_STAGE + 1, most


def test_a_keeper_that_fails_now_and_then_is_asked_again() -> None:
    """It reports nothing during the first half of the run."""
    world, _, complete = kept_by(2)
    late, kept = lambda: world.history().t < 20, set[int]()

    def mouth(message: msg.AnyMessage) -> msg.AnyMessage | None:
        if isinstance(message, Holds) and not late():
            kept.update(held.t for held in message.states if held.stage != 1)
        return None if isinstance(message, Holds) and late() else message

    world.mouths["r1.0"] = mouth
    world.run(until_s=300)
    assert world.history().t == 40 and complete[0] >= 36 and max(kept) >= 30


def test_one_liar_calls_all_holders_spoilt() -> None:
    """All members were told to copy all stages' states, again and again, and no point became complete."""
    world, most, complete = kept_by(3)
    named: set[tuple[int, int, str]] = set()

    def lie(node: Node, event: ev.Event) -> None:
        guest, lead = world.nodes["r1.0"], node.peer.lead
        for t in list(lead.catalog.points) if lead is not None and "d0" in guest.links else ():
            for stage in range(3):
                for holder in node.peer.lead.catalog.holders(t, stage) if node.peer.lead else ():
                    if (stage, t, holder) not in named:
                        named.add((stage, t, holder))
                        world.carry(guest, "d0", msg.encode(Spoilt(stage, t, holder)), None)

    world.watchers.append(lie)
    world.run(until_s=300)
    assert len(named) > 100 and world.history().t == 40 and complete[0] >= 36
    assert max(most.values()) <= KEPT_PER_STAGE + 1, most
