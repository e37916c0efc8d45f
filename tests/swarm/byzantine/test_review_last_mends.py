"""Mends of the evening of 2026-11-30 beside slow honest machines, and after changes of leader (I4)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Event
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_evening_rules import leader_dies
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

WORK = tasks.Forward | tasks.InputGradient | tasks.WeightGradient
STAGES = {"d0": 0, "d1": 0, "d2": 0, "a0": 1, "a1": 1, "b0": 2, "b1": 2, "b2": 2}


@pytest.mark.costly
def test_a_new_leader_removes_no_machine_of_a_round_that_waits_for_late_slots() -> None:
    """Seven of eight slots are claimed when the leader dies, after 40 s; the last one takes 160 s. The new
    leader took six times what machines say that they take, from when it came to lead."""
    rounds = Rounds(2, 4, 8, drops=False)
    settings = Settings("waits", 1, 1, 32, 8, min_replicas=1, rounds=rounds, voters=3)
    names = ["d0", "d1", "d2", *(f"r{k}" for k in range(8))]
    world = counting_world(settings, [Machine(name, int(name[0] == "r")) for name in names], 1)
    Invariants(world)
    task_s, died = world.task_s, leader_dies(world, 7)

    def slot_s(node: Node, task: tasks.Task) -> float:
        if not isinstance(task, tasks.Forward):
            return task_s(node, task)
        return max(1, task.steps) * (40.0 if node.id == "r7" and task.t == 6 else 10.0)

    world.task_s = slot_s  # type: ignore[method-assign]
    assert go_on(world, 1500.0) == 8 and died and removed(world).keys() == {"d0"}


@pytest.mark.costly
def test_who_leads_again_reckons_the_open_step_from_when_it_opened_it() -> None:
    """Steps of two minutes, reduces of 25 s. No line works for 12 s, and the same peer leads again: it took
    five seconds for what the reduce may take, and expelled those that sent no parts meanwhile."""
    settings = Settings("again", 1, 2, 6, 5, min_replicas=1, snapshot_every=2, voters=3)
    machines = [Machine(name, stage) for name, stage in STAGES.items()]
    world = counting_world(settings, machines, 2)
    Invariants(world)
    task_s, lost, terms = world.task_s, list[float](), set[int]()

    def slow_s(node: Node, task: tasks.Task) -> float:
        if isinstance(task, tasks.Freeze) and node.id in ("a0", "a1"):
            return 25.0
        return task_s(node, task) * (200.0 if isinstance(task, WORK) else 1.0)

    def watch(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.shared.coordination.coordinator
        if lead is None or lead.round is None or lead.round.t != 3:
            return
        terms.add(lead.log.raft.term)
        if not lost and len(lead.round.attempts) == 3 and len(node.peer.ctx.log.voters) == 3:
            lost.append(world.clock.now)
            for one in STAGES:
                for other in STAGES.keys() - {one}:
                    world.lose(one, other, 12.0)

    world.task_s = slow_s  # type: ignore[method-assign]
    world.watchers.append(watch)
    assert go_on(world, 5000.0) == 5 and lost and len(terms) == 2 and wrong_states(world) == {}
    assert removed(world) == {} and rollbacks(world) == []


def test_a_new_leader_takes_no_long_wait_of_the_one_before_for_a_usual_step() -> None:
    """The device of a stage's only replica hangs for five minutes, the leader dies meanwhile, and a data node
    begins nothing from the next step on: that took 1,200 s to the first stall, and hours to the third."""
    settings = Settings("waited", 1, 2, 6, 6, min_replicas=1, snapshot_every=2, voters=3)
    machines = [Machine(name, stage) for name, stage in {"d0": 0, "d1": 0, "d2": 0, "d3": 0}.items()]
    world = counting_world(settings, [*machines, Machine("a", 1), Machine("b", 2)], 1)
    Invariants(world)
    world.liars.add("d3")
    task_s, hung, died = world.task_s, list[float](), list[float]()

    def hangs_s(node: Node, task: tasks.Task) -> float:
        if node.id == "a" and isinstance(task, tasks.Forward) and task.t == 3 and not hung:
            hung.append(world.clock.now)
            return 300.0
        return task_s(node, task)

    def watch(node: Node, event: Event) -> None:
        if hung and not died and world.clock.now >= hung[0] + 280.0 and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.crash("d0")

    def begins_nothing(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        begins = isinstance(said, msg.Forward) and sender.id == "d3" and said.fence.t == 4
        return None if begins else said

    altered(world, begins_nothing)
    world.task_s = hangs_s  # type: ignore[method-assign]
    world.watchers.append(watch)
    assert go_on(world, 40_000.0) == 6 and died and wrong_states(world) == {}
    assert removed(world).keys() <= {"d0", "d3"} and world.clock.now < died[0] + 600.0, world.clock.now


@pytest.mark.costly
def test_a_new_leader_expels_nobody_whose_reduce_of_a_round_takes_long() -> None:
    """Slots take 40 s, reduces 25 s. The new leader took the machines' own words for what a round takes, and
    so five seconds for what the reduce may take."""
    rounds = Rounds(2, 4, 8)
    settings = Settings("long", 1, 1, 32, 8, min_replicas=1, rounds=rounds, voters=3)
    names = ["d0", "d1", "d2", *(f"r{k}" for k in range(8))]
    world = counting_world(settings, [Machine(name, int(name[0] == "r")) for name in names], 1)
    Invariants(world)
    task_s, died = world.task_s, leader_dies(world, 8)

    def slow_s(node: Node, task: tasks.Task) -> float:
        if isinstance(task, tasks.Freeze) and node.id in ("r1", "r2"):
            return 25.0
        return max(1, task.steps) * 10.0 if isinstance(task, tasks.Forward) else task_s(node, task)

    world.task_s = slow_s  # type: ignore[method-assign]
    assert go_on(world, 1500.0) == 8 and died and removed(world).keys() == {"d0"}


@pytest.mark.costly
def test_a_new_leader_expels_nobody_whose_reduce_takes_longer_than_the_work_before_it() -> None:
    """Reduces take 26 s, the work before them five. The leader dies at the beginning of a step, so the next
    one saw nothing of that, and took as long for the reduce as the work had taken."""
    settings = Settings("short", 1, 2, 8, 7, min_replicas=1, snapshot_every=2, voters=3)
    machines = [Machine(name, stage) for name, stage in {**STAGES, "d3": 0, "a2": 1}.items()]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    task_s, died = world.task_s, list[float]()

    def slow_s(node: Node, task: tasks.Task) -> float:
        if isinstance(task, tasks.Freeze) and node.id == "b0" and task.t > 1:
            return 26.0
        return task_s(node, task) * (20.0 if isinstance(task, WORK) else 1.0)

    def watch(node: Node, event: Event) -> None:
        if not died and world.log and world.history().t == 4 and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.clock.after(2.5, lambda: world.crash("d0"))

    world.task_s = slow_s  # type: ignore[method-assign]
    world.watchers.append(watch)
    assert go_on(world, 2000.0) == 7 and died and wrong_states(world) == {}
    assert removed(world).keys() == {"d0"} and rollbacks(world) == []
