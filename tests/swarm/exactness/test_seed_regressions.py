"""Faults of the protocol that `simtest` found, each told again by itself."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, kill


def world_of(replicas: int, microbatches: int = 4, steps: int = 4, seed: int = 0) -> World:
    """Two stages of so many replicas, one data node."""
    settings = Settings("found", 1, 2, microbatches, steps)
    machines = [Machine("d0", 0)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)]
    return counting_world(settings, machines, seed)


def test_slots_of_a_newcomer_reach_whom_the_log_has_yet_to_reach() -> None:
    """The only replica of a stage dies, and one that was to serve later serves at once. It grants slots when
    the stage before has not heard of it; nobody would grant them again."""
    world = world_of(1)
    Invariants(world)
    newcomer = member_of(Machine("late", 2, 2))

    def joined(world: World, node: Node) -> None:
        world.add(newcomer, "d0", world.clock.now)

    def to_serve_later(node: Node, event: ev.Event) -> bool:
        lead = world.nodes["d0"].peer
        return lead.ctx.run.membership.active_from.get("late", 0) > lead.replica.t + 1

    def last_one_dies(world: World, node: Node) -> None:
        world.crash("r2.0")
        world.slow[frozenset(("d0", "r1.0"))] = 30.0  # the log comes late to the stage before

    Fault(world, ("r2.0",), faults.received(msg.Forward, 1), joined)
    dies = Fault(world, ("d0", "r1.0", "r2.0"), to_serve_later, last_one_dies)
    world.run(until_s=300.0)
    assert dies.delivered
    assert world.history().t == 4
    assert not wrong_states(world)


def test_replicas_that_all_missed_a_step_do_not_feed_each_other_the_state_before_it() -> None:
    """Two come that are to serve from the second iteration on, and when the first is committed the only
    replica that took part dies. What they can fetch from each other is what both have already."""
    settings = Settings("found", 1, 2, 4, 4, snapshot_every=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r2.0", 2)], 0)
    Invariants(world)
    for name in ("late.0", "late.1"):
        world.add(member_of(Machine(name, 2)), "d0", 0.51)

    def committed(node: Node, event: ev.Event) -> bool:
        return world.history().t == 1 and node.id == "d0"

    def dies(world: World, node: Node) -> None:
        membership = node.peer.ctx.run.membership
        assert membership.live(2, 1) == ["r2.0"]
        assert len(membership.live(2, 2)) == 3
        world.crash("r2.0")

    fault = Fault(world, ("d0",), committed, dies)
    world.run(until_s=300.0)
    assert fault.delivered
    assert world.history().t == 4
    assert not wrong_states(world)


def test_a_gradient_for_what_was_refused_meanwhile() -> None:
    """A repair is asked after further on and found there; then its activation turns out to be none."""
    world = world_of(2)
    world.strict = False
    Invariants(world)
    spoilt: list[int] = []

    def spoil(node: Node, event: ev.Event) -> None:
        """A replacement is told that the next stage has the microbatch, and cannot compute its own part."""
        if not isinstance(event, ev.Received) or not isinstance(event.message, msg.Have) or spoilt:
            return
        queue, index = node.peer.ctx.tasks, event.message.index
        for job in [*queue._heap, queue.running]:
            if job is not None and job.index == index and isinstance(job.task, tasks.Forward):
                job.then(tasks.Result(error="spoilt"))
                job.then = lambda result: None
                spoilt.append(index)

    world.watchers.append(spoil)
    Fault(world, ("r1.1",), faults.received(msg.Backward, 1), kill())
    world.run(until_s=300.0)
    assert spoilt
    assert world.history().t == 4
    assert not wrong_states(world)


def test_slots_granted_over_a_link_that_broke_are_granted_no_more() -> None:
    """A relay that has yet to hear of the iteration keeps what the next one granted it in advance. The link
    breaks, which gives the slots to others; with the next link there is another account."""
    world = world_of(1)
    Invariants(world)
    world.slow[frozenset(("d0", "r1.0"))] = 30.0  # the log comes late
    broken: list[int] = []

    def granted() -> int:
        kept = world.nodes["r1.0"].peer.reception.early._kept
        return sum(isinstance(message, msg.Slots) for peer, message, *_ in kept if peer == "r2.0")

    def look(node: Node, event: ev.Event) -> None:
        if node.id == "r1.0" and granted() and not broken:
            broken.append(granted())
            assert world.cut("r1.0", "r2.0")
        elif node.id == "r1.0" and isinstance(event, ev.LinkDown) and event.peer == "r2.0":
            broken.append(granted())

    world.watchers.append(look)
    world.run(until_s=900.0)
    assert broken[0] > 0 and broken[1] == 0
    assert world.history().t == 4
    assert not wrong_states(world)


def test_a_process_that_was_frozen_reads_nothing_of_a_connection_that_it_closed() -> None:
    """Bytes that arrived over it meanwhile are gone with the connection."""
    world = world_of(1)
    node, read = world.nodes["d0"], list[str]()

    def look(seen: Node, event: ev.Event) -> None:
        if seen is node and isinstance(event, ev.Received) and event.peer == "r1.0" and not node.frozen:
            read.append(type(event.message).__name__)

    def hang_up(world: World, node: Node) -> None:
        world.freeze("d0", 1.0)
        garbage = msg.Holders(0, 1, "", ())
        for _ in range(300):
            node.handle(ev.Received("r1.0", garbage, None))

    world.watchers.append(look)
    fault = Fault(world, ("d0",), faults.received(msg.Backward, 2), hang_up)
    world.run(until_s=900.0)
    assert fault.delivered
    assert 0 < read.count("Holders") < 300, "the rest was never read"
    assert world.history().t == 4
    assert not wrong_states(world)
