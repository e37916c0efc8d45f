"""Honest machines that crash, freeze or are slow while a liar holds the step up (I4): found by the grid of
`benchmarks.byzantine.honest_beside_liar`."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_review_stalls import altered, go_on, removed

SINCE, STEPS = 4, 8


def removals(world: World) -> list[tuple[str, str]]:
    """Each removal in the log, with its reason."""
    found = (decode_entry(line).record for line in world.log)
    return [each for record in found if isinstance(record, Members) for each in record.removed.items()]


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


def alone(newcomer: bool, snapshot_every: int = 2) -> World:
    """World of a machine "x" that is alone at stage 1; as `newcomer` "h" comes there before iteration
    SINCE."""
    settings = Settings("alone", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=snapshot_every)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("x", 1), Machine("r2", 2), Machine("r3", 2)]
    world, came = counting_world(settings, machines, 1), list[float]()
    Invariants(world)

    def watch(node: Node, event: object) -> None:
        if newcomer and not came and world.log and world.history().t == SINCE - 1:
            came.append(world.clock.now)
            world.add(member_of(Machine("h", 1)), "d0", world.clock.now)

    world.watchers.append(watch)
    return world


@pytest.mark.parametrize("newcomer", [False, True])
def test_the_only_replica_that_is_never_prepared_holds_a_step_up_for_sixty_usual_ones(newcomer: bool) -> None:
    """It does its work. Its reduce was tried six times, for 250 usual steps, also while another replica was
    to serve from the next iteration (as where such a guest comes first when a run is resumed)."""
    world = alone(newcomer)
    world.liars.add("x")

    def never_prepared(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        withheld = isinstance(said, msg.Prepared) and sender.id == "x" and said.fence.t >= SINCE
        return None if withheld else said

    altered(world, never_prepared)
    assert go_on(world, 900.0) == STEPS and wrong_states(world).keys() <= {"x"}
    lost = {peer for peer, why in removals(world) if "moves to" not in why}
    assert lost == {"x"} and world.clock.now < 120.0, world.clock.now


def test_it_does_not_hold_the_step_up_for_longer_when_it_comes_back() -> None:
    """Its former tries counted, so that it was waited for sixteen times as long as at first: 247 s."""
    world, at = alone(newcomer=False, snapshot_every=SINCE - 1), list[float]()
    plain = world.task_s
    world.task_s = lambda node, task: 10.0 * plain(node, task)  # type: ignore[method-assign]
    world.liars.add("x")

    def never_prepared(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        withheld = isinstance(said, msg.Prepared) and sender.id == "x" and said.fence.t >= SINCE
        return None if withheld else said

    def watch(node: Node, event: object) -> None:
        if not at and any(peer == "x" for peer, _ in removals(world)):
            at.append(world.clock.now)
            world.add(world.nodes["x"].next_life(), "d0", world.clock.now + 5.2)

    altered(world, never_prepared)
    world.watchers.append(watch)
    assert go_on(world, 900.0) == STEPS and wrong_states(world).keys() <= {"x"}
    assert world.clock.now - at[0] < 100.0, world.clock.now - at[0]


@pytest.mark.parametrize("newcomer", [False, True])
def test_an_honest_one_whose_device_hangs_in_the_reduce_keeps_its_seat(newcomer: bool) -> None:
    """Each try takes it two dozen usual steps."""
    world, slow_s = alone(newcomer), 12.0
    plain = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        slow_s
        if node.id == "x" and isinstance(task, tasks.Freeze) and task.t == SINCE
        else plain(node, task)
    )
    assert go_on(world, 900.0) == STEPS and wrong_states(world) == {}
    assert removed(world) == {} and world.clock.now > slow_s


def waiting_rounds(restart_s: float, returns: str = "x") -> tuple[World, dict[int, float]]:
    """World of rounds of islands that wait for late slots, with "x" as one of four machines, and the time at
    which each round ended. Processes of `returns` are started again `restart_s` after their end."""
    rounds = Rounds(2, 4, 4, drops=False)
    settings = Settings("waiting", 1, 1, 8, 1000, min_replicas=1, rounds=rounds)
    machines = [*(Machine(f"d{k}", 0) for k in range(3)), *(Machine(f"r{k}", 1) for k in range(3))]
    machines.append(Machine("x", 1))
    world, at = counting_world(settings, machines, 1), dict[int, float]()
    plain = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        10.0 * plain(node, task) * max(1, task.steps if isinstance(task, tasks.Forward) else 1)
    )

    ended = list[Node]()

    def look() -> None:
        for node in [world.nodes[name] for name in returns.split()]:
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


@pytest.mark.costly(stay=1)
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


def test_a_machine_that_waited_for_a_late_data_node_is_not_banned() -> None:
    """A data node begins none of its slots. The machine that waits alone may be removed first, and was banned
    the second time, though the data node had lost its seat for the same slot meanwhile."""
    world, _ = waiting_rounds(5.0, "d1 d2 r0 r1 r2 x")
    limits, banned = world.nodes["d0"].peer.ctx.rate_limits, set[str]()
    world.liars.add("d2")

    def begins_nothing(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        begins = isinstance(said, msg.Forward | msg.Backward) and sender.id == "d2"
        return None if begins and said.fence.t >= SINCE else said  # type: ignore[attr-defined]

    def watch(node: Node, event: object) -> None:
        banned.update(name for name in ("r0", "r1", "r2", "x") if limits.banned(name, world.clock.now))

    altered(world, begins_nothing)
    world.watchers.append(watch)
    go_on(world, 220.0)
    times = Counter(peer for peer, _ in removals(world))
    assert times["x"] > 1 and times["d2"] > 1 and not banned, times
