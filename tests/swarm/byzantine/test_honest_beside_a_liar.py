"""Honest machines that crash, freeze or are slow while a liar holds the step up (I4): found by the grid of
`benchmarks.byzantine.honest_beside_liar`."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed

SINCE, STEPS = 4, 8


def test_who_comes_back_while_a_step_is_held_up_was_not_sent_its_reduce() -> None:
    """A data node claims nothing, so the step waits while the reduce of stage 1 has ended. A replica crashes,
    comes back and serves in the open step: the reduce had its former process as a member, which the new one
    never heard of. The second time it was expelled, as it "was sent the whole gradient"."""
    settings = Settings("back", 1, 1, 6, STEPS, min_replicas=2)
    machines = [Machine(name, int(name[0] == "r")) for name in ("d0", "d1", "r0", "r1")]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add("d1")

    def claims_nothing(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        withheld = isinstance(said, msg.Claim) and sender.id == "d1" and said.fence.t >= SINCE
        return None if withheld else said

    def crash() -> None:
        node = world.nodes["r0"]
        world.crash("r0")
        world.clock.after(5.0, lambda: world.add(node.next_life(), "d0", world.clock.now))

    altered(world, claims_nothing)
    for at_s in (8.0, 35.0):
        world.clock.at(at_s, crash)
    assert go_on(world, 400.0) == STEPS
    assert "refused" in removed(world)["r0"] and wrong_states(world).keys() <= {"d1"}
    assert not any("stuck" in str(fields.get("text")) for _, _, _, fields in world.notes)


def alone_and_a_newcomer(steps: int = STEPS) -> World:
    """World of a machine "x" that is alone at stage 1, to which "h" comes before iteration SINCE."""
    settings = Settings("alone", 1, 2, 6, steps, min_replicas=1, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("x", 1), Machine("r2", 2), Machine("r3", 2)]
    world, came = counting_world(settings, machines, 1), list[float]()
    Invariants(world)

    def watch(node: Node, event: object) -> None:
        if not came and world.log and world.history().t == SINCE - 1:
            came.append(world.clock.now)
            world.add(member_of(Machine("h", 1)), "d0", world.clock.now)

    world.watchers.append(watch)
    return world


def test_who_is_to_serve_takes_part_in_a_reduce_that_the_only_replica_holds_up() -> None:
    """It does its work and is never PREPARED: its reduce was tried six times, 250 s, while another replica
    was to serve from the next iteration. (Seen where such a guest comes first when a run is resumed.)"""
    world = alone_and_a_newcomer()
    world.liars.add("x")

    def never_prepared(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        withheld = isinstance(said, msg.Prepared) and sender.id == "x" and said.fence.t >= SINCE
        return None if withheld else said

    altered(world, never_prepared)
    assert go_on(world, 900.0) == STEPS and wrong_states(world).keys() <= {"x"}
    assert set(removed(world)) <= {"x"} and world.clock.now < 100.0, world.clock.now


@pytest.mark.parametrize("slow_s", [8.0, 12.0])
def test_an_honest_one_whose_device_hangs_in_the_reduce_keeps_its_seat(slow_s: float) -> None:
    """Each try takes it two dozen usual steps, while another replica is to serve."""
    world = alone_and_a_newcomer()
    plain = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        slow_s
        if node.id == "x" and isinstance(task, tasks.Freeze) and task.t == SINCE
        else plain(node, task)
    )
    assert go_on(world, 900.0) == STEPS and wrong_states(world) == {}
    assert removed(world) == {} and world.clock.now > slow_s


def waiting_rounds(restart_s: float) -> tuple[World, dict[int, float]]:
    """World of rounds of islands that wait for late slots, with "x" as one of four machines, whose process is
    started again `restart_s` after its end; and the time at which each round ended."""
    rounds = Rounds(2, 4, 4, drops=False)
    settings = Settings("waiting", 1, 1, 8, 1000, min_replicas=1, rounds=rounds)
    machines = [Machine("d0", 0), Machine("d1", 0), *(Machine(f"r{k}", 1) for k in range(3)), Machine("x", 1)]
    world, at = counting_world(settings, machines, 1), dict[int, float]()
    plain = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        10.0 * plain(node, task) * max(1, task.steps if isinstance(task, tasks.Forward) else 1)
    )

    ended = list[Node]()

    def look() -> None:
        node = world.nodes["x"]
        if not node.running and node not in ended:
            ended.append(node)
            world.add(node.next_life(), "d0", world.clock.now + restart_s)
        world.clock.after(0.5, look)

    world.clock.after(1.0, look)
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    return world, at


def test_a_machine_that_crashes_again_and_again_in_its_slot_does_not_stop_rounds_that_wait() -> None:
    """An honest one, say, whose memory is too small. Each time that it came back within 30 s it got its slot
    again, and others that have a slot of their own had to wait for as long anew: the round never ended, and
    the data node that had begun the slot lost its seat."""
    world, at = waiting_rounds(3.0)

    def crash(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if node.id == "x" and node.alive and isinstance(message, msg.Forward) and message.fence.t >= SINCE:
            world.clock.after(0.5, lambda: world.crash("x") if world.nodes["x"] is node else None)

    world.watchers.append(crash)
    go_on(world, 200.0)
    assert at[SINCE] - at[SINCE - 1] < 40.0 and len(at) > SINCE + 3
    assert removed(world).keys() == {"x"} and wrong_states(world) == {}


@pytest.mark.parametrize("works", [False, True])
def test_one_that_reports_false_states_again_and_again_does_not_hold_up_rounds_that_wait(works: bool) -> None:
    """It lost its seat after each round, came back, and reported the false state again, in the middle of its
    slot. Or it `works` until the round's end, so that each round waited for it, three times as long as usual:
    the second time it is expelled."""
    world, at = waiting_rounds(5.0)
    world.liars.add("x")
    worked = set[tuple[int, int]]()

    def false_state(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        if sender.id != "x" or not isinstance(said, msg.Claim | msg.Applied):
            return said
        key = sender.member.incarnation, said.fence.t
        if isinstance(said, msg.Claim):
            worked.update({key} if said.units else ())
            return said
        lies = said.fence.t >= SINCE and (key in worked or not works)
        return msgspec.structs.replace(said, fingerprint="f" * 16) if lies else said

    altered(world, false_state)
    go_on(world, 200.0)
    took_s = [at[t + 1] - at[t] for t in range(SINCE, len(at) - 1)]
    assert removed(world).keys() == {"x"} and wrong_states(world).keys() <= {"x"}
    assert sum(seconds > 5.0 for seconds in took_s) < 6, took_s
