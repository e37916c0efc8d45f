"""Machines in rounds that wait for late slots: one that is heard and never computes, one that is slow."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.grids import first_of
from swarm.islands.test_review_rounds import island_run, world_of


def waiting_world(**carried: object) -> World:
    run = island_run(slots=3, late="wait", **carried)
    return world_of(replace(run, batch=replace(run.batch, microbatches=6)), relays=3, checked=False)


def removed(world: World) -> list[str]:
    records = (decode_entry(line).record for line in world.log)
    return [peer for each in records if isinstance(each, Members) for peer in each.removed]


@pytest.mark.parametrize("carried", first_of([{}, {"select": "largest", "unsent": "feedback"}]))
def test_a_silent_machine_does_not_stop_the_run(carried: dict[str, object]) -> None:
    world = waiting_world(**carried)
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        work = isinstance(msg.decode(message), msg.Slots | msg.Forward | msg.Backward | msg.Claim | msg.Lack)
        if not (work and sender.id == "r1.1" and sender.peer.committed >= 3):
            carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert world.history().t == 6 and removed(world) == ["r1.1"]


def test_a_machine_that_claims_its_slot_and_gives_nothing_back_does_not_stop_the_run() -> None:
    """Only the data node sees that: a claim is the machine's own word, and frees it from nothing."""
    world = waiting_world()
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        work = isinstance(msg.decode(message), msg.Forward | msg.Backward)
        iteration = sender.peer.iterations.current
        if not (sender.id == "r1.1" and sender.peer.committed >= 3):
            carry(sender, peer, message, payload)
        elif not work:
            carry(sender, peer, message, payload)
            own = {k for k, slot in enumerate(sender.peer.ctx.run.plan(4)) if slot.peer == "r1.1"}
            if iteration is not None and iteration.t == 4 and not own <= iteration.claims.held:
                iteration.claims.held |= own
                iteration.claims.send()

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=300.0)
    assert world.history().t == 6 and removed(world) == ["r1.1"]


@pytest.mark.parametrize("carried", first_of([{"select": "largest", "unsent": "feedback"}, {}]))
def test_a_slow_machine_keeps_its_seat(carried: dict[str, object]) -> None:
    """It computes at a third of its measured speed from the second round on."""
    world, slowed = waiting_world(**carried), list[str]()

    def slow(node: Node, event: ev.Event) -> None:
        if node.id == "r1.1" and node.peer.committed == 3 and not slowed:
            node.slowness *= 3.0
            slowed.append(node.id)

    world.bookkeepers.append(slow)
    world.run(until_s=300.0)
    assert slowed and world.history().t == 6 and removed(world) == []


def test_a_machine_that_comes_back_is_not_removed_for_the_same_round_again() -> None:
    """Another machine redoes its slot then, later than six times a slot's time."""
    world, slowed = waiting_world(), list[str]()

    def slow(node: Node, event: ev.Event) -> None:
        lost = world.nodes["r1.1"]
        if lost.peer.committed == 3 and not slowed:
            lost.slowness *= 1e4
            slowed.append(lost.id)
        if len(slowed) == 1 and removed(world):
            world.crash("r1.1")
            again = msgspec.structs.replace(lost.member, incarnation=lost.member.incarnation + 1)
            world.clock.after(0.5, lambda: world.add(again, "d0"))
            slowed.append("removed")

    world.bookkeepers.append(slow)
    world.run(until_s=400.0)
    assert len(slowed) == 2 and world.history().t == 6 and removed(world) == ["r1.1"]
    assert "r1.1" in world.history().membership.active_from


def test_a_silent_machine_that_comes_back_silent_does_not_stop_the_run() -> None:
    """It was asked for a credit for its slot for ever, as the leader leaves the slots of machines that came
    back to others."""
    world, again = waiting_world(), list[str]()
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        work = isinstance(msg.decode(message), msg.Slots | msg.Forward | msg.Backward | msg.Claim | msg.Lack)
        if not (work and sender.id == "r1.1" and sender.peer.committed >= 3):
            carry(sender, peer, message, payload)

    def come_back(node: Node, event: ev.Event) -> None:
        if removed(world) and not again:
            member = world.nodes["r1.1"].member
            again.append("r1.1")
            world.crash("r1.1")
            member = msgspec.structs.replace(member, incarnation=member.incarnation + 1)
            world.clock.after(0.5, lambda: world.add(member, "d0"))

    world.carry = lie  # type: ignore[method-assign]
    world.bookkeepers.append(come_back)
    world.run(until_s=300.0)
    assert again and world.history().t == 6 and removed(world) == ["r1.1", "r1.1"]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("lie", [msg.Forward, msg.Ask])
def test_a_machine_that_never_computes_the_slot_of_another_does_not_stop_the_run(lie: type) -> None:
    """Machine r1.1 is gone. Who is sent its slot first, or asked for a credit for it, has done its own; it
    keeps the slot, or grants nothing."""
    world, crashed, liars = waiting_world(), list[str](), list[str]()
    carry = world.carry

    def look(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Slots) and said.fence.t == 4 and lie is msg.Ask and sender.id in liars:
            return
        if isinstance(said, msg.Forward | msg.Ask) and said.index < 3 and said.fence.t == 4:
            redone = sender.peer.ctx.run.plan(4)[said.index].peer == "r1.1" != peer
            if redone and isinstance(said, lie):
                liars.extend([peer] * (not liars))
                if peer in liars:
                    return
        carry(sender, peer, message, payload)

    def crash(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and node.peer.committed == 3 and not crashed:
            crashed.append("r1.1")
            world.clock.after(0.3, lambda: world.crash("r1.1"))

    world.carry = look  # type: ignore[method-assign]
    world.bookkeepers.append(crash)
    world.run(until_s=400.0)
    assert liars and world.history().t == 6 and removed(world) == ["r1.1"]


@pytest.mark.parametrize("slots", first_of([3, 4]))
def test_a_data_node_that_begins_no_slots_is_removed_and_its_machines_are_not(slots: int) -> None:
    """It is heard. Of a data node with one slot the first machine is suspected, and may come back."""
    run = island_run(slots=slots, late="wait")
    run = replace(run, batch=replace(run.batch, microbatches=2 * slots))
    world = world_of(run, relays=slots, checked=False)
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        work = isinstance(msg.decode(message), msg.Forward | msg.Claim)
        if not (work and sender.id == "d1" and sender.peer.committed >= 3):
            carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=3000.0)
    assert world.history().t == 6
    assert removed(world)[-1] == "d1" and len(removed(world)) == 1 + (slots == 3)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kept", [msg.Prepared, msg.ReducePart])
def test_a_machine_is_not_overdue_when_its_data_node_loses_its_seat(kept: type[msg.Message]) -> None:
    """The data node holds the reduce up until it is out, and its slots are begun again. Their time was over:
    the machine that had delivered one lost its seat at once."""
    rounds = Rounds(start=2, inner=3, slots=3, drops=False)
    settings = Settings("held up", 1, 1, 6, 8, min_replicas=3, rounds=rounds)
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(3))]
    world = counting_world(settings, machines, 1, Model(task_s={"Forward": 2.0}))
    carry = world.carry

    def hold(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        holds = isinstance(said, kept) and isinstance(said, msg.FencedMessage) and said.fence.t >= 4
        if sender.id != "d1" or not holds:
            carry(sender, peer, message, payload)

    world.carry = hold  # type: ignore[method-assign]
    world.run(until_s=900.0)
    assert world.history().t == 8 and removed(world) == ["d1"]


def test_a_machine_that_comes_late_when_the_run_is_taken_up_again_keeps_its_seat() -> None:
    """The log binds a slot to it, and others had done theirs long before: it lost its seat as soon as it
    served."""
    rounds = Rounds(start=2, inner=3, slots=3, drops=False)
    settings = Settings("again", 1, 1, 6, 60, snapshot_every=4, checkpoint_every=5, rounds=rounds)
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r1.{n}", 1) for n in range(4))]
    world = counting_world(settings, machines, 1, Model(task_s={"Forward": 0.1}))
    while max(world.checkpoints, default=0) < 20 or world.history().t > max(world.checkpoints):
        world.clock.step()
    for machine in machines:
        world.crash(machine.id)
    bound = sorted({slot.peer for slot in world.history().plans[world.history().t + 1]})
    founder_comes_back(world)
    for name, at in ((bound[0], 0.3), (bound[1], 20.0)):
        world.add(world.nodes[name].next_life(), "d0", world.clock.now + at)
    lives = len(world.log)
    world.run(until_s=900.0)
    records = (decode_entry(line).record for line in world.log[lives:])
    out = {p: why for each in records if isinstance(each, Members) for p, why in each.removed.items()}
    assert world.history().t == 60 and set(out.values()) == {"the run was taken up again"}
