"""No peer waits for ever for what never comes: a former process, a lost word, a machine that is gone (I4)."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Link, Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault


def swarm(*replicas: int, data_nodes: int = 1, steps: int = 8, **settings: object) -> World:
    """Stages of so many replicas."""
    options = Settings("run", 1, len(replicas), 4, steps, snapshot_every=2, **settings)  # type: ignore[arg-type]
    machines = [Machine(f"d{n}", 0) for n in range(data_nodes)]
    machines += [Machine(f"r{s}.{n}", s) for s, count in enumerate(replicas, 1) for n in range(count)]
    return counting_world(options, machines)


def at_step(t: int) -> faults.Moment:
    return lambda node, event: node.peer.committed == t


def test_who_is_linked_to_a_former_process_looks_for_the_present_one() -> None:
    """A key was copied. A joiner hears of the first process before it hears of the second, and it is on the
    joiner to dial."""
    world = swarm(2)
    ghost: list[Node] = []

    def copied(world: World, node: Node) -> None:
        ghost.append(world.nodes["r1.0"])
        world.add(node.next_life(without_disk=True), "d0", world.clock.now)

    def joined(world: World, node: Node) -> None:
        late = world.add(member_of(Machine("late", 1)), "d0", world.clock.now)
        world.clock.after(0.001, lambda: late.link_up(Link(ghost[0], late), "r1.0", 1))

    Fault(world, ("r1.0",), at_step(2), copied)
    Fault(world, ("d0",), at_step(4), joined)
    world.run(300.0)
    assert ghost
    assert world.nodes["late"].peer.ctx.links.incarnations["r1.0"] == 2
    assert world.nodes["late"].peer.replica.t == 8
    assert not wrong_states(world)


def test_the_former_process_is_not_let_in_again() -> None:
    world = swarm(2)
    first = world.nodes["r1.0"]

    def copied(world: World, node: Node) -> None:
        world.add(first.next_life(without_disk=True), "d0", world.clock.now)

    Fault(world, ("d0",), at_step(2), copied)
    world.run(300.0)
    assert first.stopped is not None and "another machine" in first.stopped[0]
    assert world.history().t == 8


def test_what_a_newcomer_says_waits_for_the_log() -> None:
    """The only replica of a stage dies, and one that was to serve later serves at once. The stage before has
    not heard of it at all, but what it grants there is not lost."""
    world = swarm(1, 1)
    Invariants(world)

    def joined(world: World, node: Node) -> None:
        world.add(member_of(Machine("late", 2, 2)), "d0", world.clock.now)
        world.clock.after(0.001, lambda: world.lose("d0", "r1.0", 3.0))

    def to_serve_later(node: Node, event: ev.Event) -> bool:
        lead = world.nodes["d0"].peer
        return lead.ctx.run.membership.active_from.get("late", 0) > lead.replica.t + 1

    Fault(world, ("r2.0",), faults.received(msg.Forward, 1), joined)
    dies = Fault(world, ("d0", "r1.0", "r2.0"), to_serve_later, lambda world, node: world.crash("r2.0"))
    world.run(300.0)
    assert dies.delivered
    assert not [f for _, _, kind, f in world.notes if kind == "refused" and "Slots: not a member" in str(f)]
    assert world.history().t == 8 and world.clock.now < 30.0
    assert not wrong_states(world)


def vanishes(world: World, node: Node) -> None:
    world.vanish("r1.0")


def test_the_last_replica_of_a_stage_is_waited_for_while_nobody_could_take_its_place() -> None:
    world = swarm(1, 1)
    gone = Fault(world, ("d0",), at_step(2), vanishes)
    world.add(member_of(Machine("late", 1)), "d0", 200.0)
    world.run(600.0)
    assert gone.delivered
    removed = [at for at, _, kind, f in world.notes if kind == "peer_removed" and f["subject"] == "r1.0"]
    assert min(removed) > 200.0
    assert world.history().t == 8
    assert not wrong_states(world)


def test_the_last_replica_of_a_stage_is_waited_for_no_longer_than_going_back_costs() -> None:
    """Another stage has a peer to spare, and there is a snapshot to go back to."""
    world = swarm(1, 2)
    Invariants(world)
    gone = Fault(world, ("d0",), at_step(2), vanishes)
    world.run(300.0)
    assert gone.delivered
    assert world.history().t == 8
    assert not wrong_states(world)


def test_a_new_leader_knows_that_the_first_state_comes_from_the_seed() -> None:
    """The leader and every replica of a stage die after the first step, before any snapshot is complete."""
    world = swarm(2, 2, data_nodes=2, voters=3)
    Invariants(world)

    def both(world: World, node: Node) -> None:
        for victim in ("d0", "r1.0", "r1.1"):
            world.crash(victim)
        world.add(member_of(Machine("late", 1)), "r2.0", world.clock.now + 1.0)

    def may_lose_one(node: Node, event: ev.Event) -> bool:
        return len(node.peer.ctx.log.voters) == 3 and node.peer.committed == 1

    lost = Fault(world, ("r2.0",), may_lose_one, both)
    world.run(300.0)
    assert lost.delivered
    assert world.history().t == 8
    assert not wrong_states(world)


def test_who_was_removed_while_it_was_cut_off_hears_of_it() -> None:
    """The first member of all is dialled by everyone, until it is a member no more."""
    world = swarm(2, 2, data_nodes=2, voters=3)
    founder = world.nodes["d0"]

    def cut_off(world: World, node: Node) -> None:
        for other in sorted(world.nodes):
            if other != "d0":
                world.cut("d0", other, 20.0)

    Fault(world, ("d0",), lambda node, event: len(node.peer.ctx.log.voters) == 3, cut_off)
    world.run(300.0)
    assert founder.stopped is not None and "removed from the run" in founder.stopped[0]


def test_a_dead_door_does_not_keep_a_joiner_from_the_next() -> None:
    world = swarm(1, steps=40)
    doors = [Machine(f"a{n}", 1) for n in range(3)]

    def joins(world: World, node: Node) -> None:
        for door in doors:
            world.add(member_of(door), "d0", world.clock.now)
            world.vanish(door.id)
        world.add(member_of(Machine("late", 1)), "a0", world.clock.now)

    Fault(world, ("d0",), at_step(1), joins)
    world.run(300.0)
    began = min(at for at, _, kind, f in world.notes if kind == "step")
    came = min(at for at, _, kind, f in world.notes if kind == "peer_joined" and f["member"].id == "late")  # type: ignore[attr-defined]
    assert came < began + 9.0  # a dial that nobody answers is given up after ten seconds
