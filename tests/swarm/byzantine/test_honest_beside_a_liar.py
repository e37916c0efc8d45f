"""Honest machines that crash, freeze or are slow while a liar holds the step up (I4): found by the grid of
`benchmarks.byzantine.honest_beside_liar`."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
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
