"""Messages kept until their iteration is open, when the link that they came over has broken (R1)."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.context.early_buffer import EARLY_LARGEST, EARLY_PARTS_MAX, EARLY_PAYLOADS_MAX
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.reduce.partial_sums import PARTS, PARTS_LARGEST
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault


def five_peers() -> World:
    settings = Settings("found", 1, 2, 4, 4, snapshot_every=1, min_replicas=2)
    machines = [Machine("d0", 0)] + [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2)]
    return counting_world(settings, machines, 1)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seed", [0, 5, 6])
def test_an_ask_over_a_link_that_broke_gets_no_slot(seed: int) -> None:
    """r2.0 has one slot, and is behind when r1.0 asks it. Their link breaks for a minute, and only r1.0 can
    dial. r1.1, which asks after it, is linked all the while."""
    settings = Settings("found", 1, 2, 8, 4)
    machines = [Machine("d0", 0), Machine("r2.0", 2, 1)]
    machines += [Machine("r1.0", 1, reachable=False), Machine("r1.1", 1)]
    world = counting_world(settings, machines, seed)
    world.slow[frozenset(("d0", "r2.0"))] = 30.0
    cut: list[float] = []
    served: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        if node.id != "r2.0":
            return
        there, here = node.peer.iteration, world.nodes["r1.0"].peer.iteration
        if here is not None and here.t == 2 and (there is None or there.t < 2) and not cut:
            kept = node.peer.reception.early._kept
            asks = [p for p, m, *_ in kept if isinstance(m, msg.Ask) and m.fence.t == 2]
            if asks[:1] == ["r1.0"] and "r1.0" in node.links:
                cut.append(world.clock.now)
                world.cut("r1.0", "r2.0", 60.0)
        grant = there.credits.ledger.grants.get("r1.1") if there is not None and there.t == 2 else None
        if cut and not served and grant is not None and grant.received:
            served.append(world.clock.now - cut[0])

    world.watchers.append(look)
    world.run(until_s=900.0)
    assert cut and served
    assert served[0] < 10.0, f"the only slot was with one that is not linked for {served[0]:.0f} s"


def test_a_hang_up_in_the_midst_of_what_was_kept_early_takes_the_slots_with_it() -> None:
    """r2.0 floods r1.0 before r1.0 has opened the iteration, and grants slots after that. r1.0 hangs up on it
    while it takes up what it kept; what is left of that is of a link that is no more."""
    world = five_peers()
    world.slow[frozenset(("d0", "r1.0"))] = 30.0
    node = world.nodes["r1.0"]
    done: list[str] = []
    believed: list[int] = []

    def look(seen: Node, event: ev.Event) -> None:
        there, here = world.nodes["r2.0"].peer.iteration, node.peer.iteration
        if seen is not node:
            return
        behind = there is not None and there.t == 2 and node.peer.replica.t < 1
        if behind and not done and "r2.0" in node.peer.ctx.links.up:
            done.append("flooded")
            for _ in range(200):
                node.handle(ev.Received("r2.0", msg.Holders(0, 1, "", ()), None))
            assert there is not None
            fence = world.nodes["r2.0"].peer.ctx.fence(2, there.base)
            for index in range(200):
                node.handle(ev.Received("r2.0", msg.Ask(fence, index, False), None))
            node.handle(ev.Received("r2.0", msg.Slots(fence, 99, 0, 0, 0, 99), None))
        if done and here is not None and here.t == 2 and "r2.0" not in node.peer.ctx.links.up:
            credit = here.sender.credits.get("r2.0")
            believed.append(credit.free if credit is not None else 0)

    world.watchers.append(look)
    world.run(until_s=900)
    assert done and believed, (done, believed)
    assert max(believed) == 0, f"{max(believed)} slots of a link that is no more"


def test_a_thawed_process_closes_the_connection_that_it_knows() -> None:
    """While it is frozen r1.0's process is removed, and the next one dials it. Thawed, it hangs up on the
    connection that it knows; the newer one is none of its doing."""
    world = five_peers()
    node = world.nodes["r2.0"]
    odd: list[str] = []
    Fault(world, ("d0",), faults.received(msg.Claim, 2), lambda world, _: world.vanish("r1.0"))

    def removed(seen: Node, event: ev.Event) -> bool:
        return seen.peer.committed >= 1 and "r1.0" not in seen.peer.ctx.run.membership.members

    def freeze(world: World, struck: Node) -> None:
        world.freeze("r2.0", 2.5)
        again = msgspec.structs.replace(world.nodes["r1.0"].member, incarnation=2)
        world.add(again, "d0", at=world.clock.now)

    def look(seen: Node, event: ev.Event) -> None:
        if seen is node and not node.frozen and not node.catching_up and node.running:
            odd.extend(p for p in node.peer.ctx.links.up if p not in node.links)

    world.watchers.append(look)
    fault = Fault(world, ("d0",), removed, freeze)
    world.run(until_s=600)
    assert fault.delivered
    assert not odd, f"the protocol has links that are none: {sorted(set(odd))} ({len(odd)} events)"


def test_a_guest_has_room_for_few_parts_of_iterations_to_come() -> None:
    """It has a ticket and a link, and names bases and attempts that never come (I5, I7). A member may send
    all parts of a reduce."""
    world = five_peers()
    world.run(until_s=5.0)
    node = world.nodes["r1.0"]
    fence = node.peer.ctx.fence(node.peer.replica.t + 1, "made up")
    kept = {}
    for sender in ("guest", "r1.1"):
        before = len(node.peer.reception.early)
        for part in range(EARLY_PARTS_MAX // 2):
            message = msg.ReducePart(fence, 1, msg.AttemptId(1, 1), part)
            node.peer.reception.fenced(sender, message, b"x")
        kept[sender] = len(node.peer.reception.early) - before
    assert kept == {"guest": EARLY_PAYLOADS_MAX, "r1.1": EARLY_PARTS_MAX // 2}


def test_a_member_has_room_for_few_of_the_largest_payloads_of_iterations_to_come() -> None:
    """As the driver tells their size (I5)."""
    world = five_peers()
    node, member = world.nodes["r1.0"], world.nodes["r1.1"]
    while node.peer.iteration is None or member.peer.iteration is None:
        world.clock.step()
    fence = member.peer.ctx.fence(node.peer.iteration.t + 1, "made up")
    before = len(node.peer.reception.early)
    for part in range(EARLY_PARTS_MAX // 2):
        message = msg.ReducePart(fence, 1, msg.AttemptId(1, 1), part)
        node.handle(ev.Received("r1.1", message, b"x", share=1.0))
    assert len(node.peer.reception.early) - before == EARLY_LARGEST


def test_a_member_has_room_for_the_parts_of_one_reduce_before_it_is_announced() -> None:
    """It names an attempt that never comes, of the open iteration, to a replica of its stage and to a peer
    beside it, which may be asked to help (I5)."""
    world = five_peers()
    peers = [world.nodes[name].peer for name in ("r1.0", "r1.1", "r2.0")]
    while not all(peer.iteration is not None and peer.iteration.t == 1 for peer in peers):
        world.clock.step()
    current = peers[1].iteration
    assert current is not None
    fence, attempt = peers[1].ctx.fence(current.t, current.base), msg.AttemptId(99, 1)
    for node in (world.nodes["r1.0"], world.nodes["r2.0"]):
        for part in range(PARTS):
            node.handle(ev.Received("r1.1", msg.ReducePart(fence, 1, attempt, part), b"x", share=0.5))
    most = PARTS_LARGEST / 0.5
    assert (len(peers[0].replica.all_reduce._early), peers[2].helping.early) == (most, most)
