"""Attacks of guests, found by review: they fill the log, put stalls off, hand out false states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
from msgspec import structs

from anabranch import PROTOCOL_VERSION
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Result, Snapshot, Task
from anabranch.protocol.log.records import Carriers, Members, decode_entry
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_arithmetic import fingerprint, in_pieces
from anabranch.sim.workers.integer_worker import IntegerWorker
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import first_of

#: One-way delays (s) of lines between continents.
FAR = Model(latency_s=(0.04, 0.06))


def swarm(steps: int, replicas: int = 3, model: Model | None = None, microbatches: int = 6) -> World:
    settings = Settings("guests", 1, 2, microbatches, steps, min_replicas=2, voters=3)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(replicas))]
    return counting_world(settings, machines, 1, model)


def strangers(world: World, count: int, every_s: float, talk: Callable[[Node, Node], None]) -> None:
    """Let so many peers dial the leader, and again when it hangs up; they hear nothing, and say what
    `talk(stranger, leader)` says each `every_s` seconds."""

    def speak(name: str) -> None:
        guest, lead = world.nodes[name], world.leading()
        if lead.id not in guest.links or not guest.links[lead.id].open:
            guest.links.pop(lead.id, None)
            world.dial(guest, lead.id)
        else:
            talk(guest, lead)
        world.clock.after(every_s, lambda: speak(name))

    def hear(node: Node, event: ev.Event) -> None:
        if not isinstance(event, ev.Received):
            Node.handle(node, event)

    def come() -> None:
        for number in range(count):
            name = f"g{number}"
            world.mouths[name] = lambda message: None
            world.liars.add(name)
            node = world.add(member_of(Machine(name, 1), ""), "d0", world.clock.now)
            node.handle = partial(hear, node)  # type: ignore[method-assign]
            world.clock.after(0.1, partial(speak, name))

    world.clock.after(1.0, come)


def removed(world: World) -> dict[str, str]:
    records = [record for line in world.log if isinstance(record := decode_entry(line).record, Members)]
    return {peer: why for record in records for peer, why in record.removed.items()}


@pytest.mark.costly
def test_carriers_that_move_all_the_time_do_not_fill_the_log() -> None:
    """Sixteen carriers, which are no members, named another address in each offer, and the leader logged it:
    of 5,000 log entries 30 were steps, and two honest relays lost their seats for parts that came late."""
    world, said = swarm(30, model=FAR), list[int]()

    def talk(guest: Node, lead: Node) -> None:
        said.append(len(said))
        world.carry(guest, lead.id, msg.encode(msg.Carry(f"192.0.2.1:{len(said) % 60000 + 1}")), None)

    strangers(world, 16, 0.05, talk)
    world.run(until_s=60.0)
    logged = [line for line in world.log if isinstance(decode_entry(line).record, Carriers)]
    assert len(said) > 1000 and 0 < len(logged) <= 24
    assert world.history().t == 30 and removed(world) == {}


@pytest.mark.costly
def test_peers_that_come_and_go_all_the_time_do_not_fill_the_log() -> None:
    """Each joins and leaves several times a second: 850 of 900 log entries were their joins and removals."""
    world, joins = swarm(30), list[float]()

    def talk(guest: Node, lead: Node) -> None:
        if guest.id in lead.peer.ctx.run.membership.members:
            world.carry(guest, lead.id, msg.encode(msg.Leave("bye")), None)
            return
        joins.append(world.clock.now)
        request = msg.JoinRequest(structs.replace(guest.member, id=guest.id), 1, PROTOCOL_VERSION, "", "")
        world.carry(guest, lead.id, msg.encode(request), None)

    strangers(world, 4, 0.125, talk)
    world.run(until_s=60.0)
    records = [record for line in world.log if isinstance(record := decode_entry(line).record, Members)]
    assert len(joins) > 100 and sum(bool(record.joined) for record in records) < 60
    assert world.history().t == 30 and all(peer[0] == "g" for peer in removed(world))


def test_a_stranger_gets_no_gradients() -> None:
    """With any ticket it got the reduced gradients of all stages, packed for it by each replica."""
    world, asked, got = swarm(12), list[str](), list[int]()
    carry = world.carry

    def watched(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if peer == "g0" and isinstance(said := msg.decode(message), msg.Gradient):
            got.append(said.stage)
        carry(sender, peer, message, payload)

    def talk(guest: Node, lead: Node) -> None:
        for peer in world.nodes.keys() - guest.links.keys() - {guest.id}:
            world.dial(guest, peer)
        for peer in guest.links:
            asked.append(peer)
            for stage in range(3):
                carry(guest, peer, msg.encode(msg.FetchGradient(world.history().t, stage)), None)

    world.carry = watched  # type: ignore[method-assign]
    strangers(world, 1, 0.3, talk)
    world.run(until_s=60.0)
    assert len(asked) > 20 and got == [] and world.history().t == 12


def test_overflows_made_up_one_after_the_other_put_no_stall_off() -> None:
    """A relay claims nothing, and reports an overflow of another microbatch just before each stall: it made a
    step take 110 s instead of 15."""
    world, told = swarm(8, microbatches=24), set[tuple[int, int]]()
    world.mouths["r1.0"] = lambda message: None if isinstance(message, msg.Claim) else message

    def lie() -> None:
        guest, lead = world.nodes["r1.0"], world.leading()
        current = lead.peer.lead.round if lead.peer.lead is not None else None
        if current is not None and lead.peer.lead is not None and lead.id in guest.links:
            due = current.progress_at + 0.7 * lead.peer.lead.reducing.patience_s(current)
            index = sum(t == current.t for t, _ in told)
            if world.clock.now >= due and index < 24:
                told.add((current.t, index))
                fence = msg.Fence(1, guest.member.incarnation, current.t, current.base, 1)
                world.carry(guest, lead.id, msg.encode(msg.Overflow(fence, 1, index, "w", "r2.0")), None)
        world.clock.after(0.5, lie)

    world.clock.after(1.0, lie)
    world.run(until_s=100.0)
    assert len(told) > 2 and world.history().t == 8 and wrong_states(world) == {}


@pytest.mark.costly
@pytest.mark.parametrize("replicas", first_of([3, 5]))
def test_a_liar_that_gives_joiners_a_false_state_keeps_nobody_out(replicas: int) -> None:
    """The replica with the lowest id is asked first. It gave a state that was consistent and false; each
    joiner was removed for it, came again, asked the same one, and never served."""
    settings = Settings("poison", 1, 1, 6, 100, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(replicas))]
    world, lies = counting_world(settings, machines, 1), list[int]()

    def poison() -> None:
        worker = cast(IntegerWorker, world.nodes["r1.0"].computer)
        run = worker.run

        def false(task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
            result = run(task, inputs)
            if not isinstance(task, Snapshot) or not result.outputs:
                return result
            lies.append(task.t)
            pieces = (task.t, *in_pieces(worker.state ^ 1))
            said = fingerprint(task.t, worker.state ^ 1)
            return structs.replace(result, outputs=pieces, fingerprint=said, hashes=tuple(map(str, pieces)))

        worker.run = false  # type: ignore[method-assign]

    world.clock.at(1.5, poison)
    world.clock.at(2.0, lambda: world.add(member_of(Machine("x", 1)), "d0", world.clock.now) and None)
    world.run(until_s=300.0)
    served = [decode_entry(line).record for line in world.log]
    assert lies and removed(world) == {} and world.history().t == 100 and wrong_states(world) == {}
    assert any("x" in record.active_from for record in served if isinstance(record, Members))
