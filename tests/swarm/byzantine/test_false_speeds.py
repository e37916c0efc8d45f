"""Machines of islands that call themselves far quicker than they are, and get most of a round's steps; and
machines that never deliver a slot."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Forward, Payload, Task
from anabranch.protocol.rounds.late_machines import LATE_ROUNDS
from anabranch.protocol.rounds.plan import filled
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of

#: Islands, inner steps of a round, first round, last round.
ISLANDS, INNER, FIRST, LAST = 5, 8, 3, 42


def island_world(
    islands: int = ISLANDS, stages: int = 1, drops: bool = True, last: int = LAST
) -> World:
    """Whole models on machines of stage 1; with more stages, crews."""
    rounds = Rounds(start=FIRST - 1, inner=INNER, slots=islands, drops=drops, pipeline=stages > 1)
    settings = Settings("speeds", 1, stages, 2 * islands, last, min_replicas=1, rounds=rounds)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in range(1, stages + 1) for n in range(islands)]
    world = counting_world(settings, machines, 1)
    plain = world.task_s

    def by_steps(node: Node, task: Task) -> float:
        return plain(node, task) * max(1, task.steps if isinstance(task, Forward) else 1)

    world.task_s = by_steps  # type: ignore[method-assign]
    Invariants(world)
    return world


def as_the_quickest(said: msg.Applied) -> bytes:
    """Report of a step, encoded, by which its work took a millionth of the seconds."""
    quick = {kind: seconds * 1e-6 for kind, seconds in said.timing.items()}
    return msg.encode(msgspec.structs.replace(said, timing=quick))


def counted_steps(world: World) -> dict[int, int]:
    """Round -> inner steps that counted in it."""
    history = world.history()
    plans = {commit.t: history.plans.get(commit.t, ()) for commit in history.commits}
    found = {commit.t: filled(plans[commit.t], commit.stages) for commit in history.commits}
    return {t: sum(plans[t][slot].steps for slot in slots) for t, slots in found.items() if plans[t]}


def test_one_that_says_it_is_a_million_times_as_quick_and_is_late_gets_few_steps_soon() -> None:
    """It was in time once, and had 32 of 40 steps in each round from then on: half of so high a speed is
    still beyond what is believed, for twenty rounds."""
    world = island_world()
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == "r1.1" and isinstance(said, msg.Applied):
            message = as_the_quickest(said)
        work = isinstance(said, msg.Forward | msg.Backward | msg.Claim)
        if not (work and sender.id == "r1.1" and said.fence.t > FIRST):  # type: ignore[attr-defined]
            carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=600.0)
    steps = counted_steps(world)
    assert set(steps) == set(range(FIRST, LAST + 1)) and wrong_states(world) == {}
    assert steps[FIRST + 1] == INNER  # four of five machines share what is left
    assert min(steps[t] for t in range(FIRST + 10, LAST + 1)) >= INNER * (ISLANDS - 1)


def test_one_that_makes_up_an_overflow_of_its_slot_in_each_round_does_not_keep_most_of_the_steps() -> None:
    """A slot that overflows was not late: half of the steps of each round were lost, with three machines two
    thirds, for ever."""
    world, told = island_world(), set[int]()
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id != "r1.1":
            carry(sender, peer, message, payload)
            return
        if isinstance(said, msg.Applied):
            message = as_the_quickest(said)
        if isinstance(said, msg.Slots) and said.fence.t > FIRST and said.fence.t not in told:
            plan = world.history().plans.get(said.fence.t, ())
            own = [slot for slot, each in enumerate(plan) if each.peer == sender.id]
            for slot in own:
                told.add(said.fence.t)
                carry(sender, "d0", msg.encode(msg.Overflow(said.fence, 1, slot, "made up", "d0")), None)
        work = isinstance(said, msg.Backward | msg.Claim)
        if not (work and said.fence.t > FIRST):  # type: ignore[attr-defined]
            carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]
    world.run(until_s=600.0)
    steps = counted_steps(world)
    assert len(told) > LATE_ROUNDS and set(steps) == set(range(FIRST, LAST + 1)) and wrong_states(world) == {}
    assert min(steps[t] for t in range(FIRST + 10, LAST + 1)) >= INNER * (ISLANDS - 1)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("islands", [3, 4])
def test_one_that_leaves_in_each_round_and_comes_back_as_the_quickest_has_no_more_than_its_share(
    islands: int,
) -> None:
    """A machine that left was not late: it had 27 of 32 steps in each second round."""
    last = FIRST + 20
    world, left = island_world(islands, last=last), set[int]()
    carry = world.carry

    def lie(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == "r1.1" and isinstance(said, msg.Applied):
            message = as_the_quickest(said)
        carry(sender, peer, message, payload)

    world.carry = lie  # type: ignore[method-assign]

    def back() -> None:
        member = world.nodes["r1.1"].member
        quick = {"forward_s": 1e-7, "backward_s": 1e-7, "incarnation": member.incarnation + 1}
        world.add(msgspec.structs.replace(member, **quick), world.leading().id, world.clock.now)

    def leave() -> None:
        world.crash("r1.1")
        world.clock.after(0.05, back)

    def look(node: Node, event: ev.Event) -> None:
        t, liar = world.history().t + 1, world.nodes["r1.1"]
        has_slot = any(slot.peer == "r1.1" and slot.steps for slot in world.history().plans.get(t, ()))
        if t > FIRST and t not in left and liar.alive and liar.running and has_slot:
            left.add(t)
            world.clock.after(0.05, leave)

    world.bookkeepers.append(look)
    world.run(until_s=600.0)
    steps = counted_steps(world)
    assert len(left) > 5 and set(steps) == set(range(FIRST, last + 1)) and wrong_states(world) == {}
    assert min(steps[t] for t in range(FIRST + 4, last + 1)) >= INNER * (islands - 1)


def test_a_machine_that_was_late_once_soon_has_its_share_again() -> None:
    """A hiccup makes it half as quick, and the next round in which it is in time shows that it is not."""
    world, slow = island_world(), list[int]()
    carry = world.carry

    def hiccup(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        late = sender.id == "r1.1" and isinstance(said, msg.Backward | msg.Claim) and said.fence.t in (9, 10)
        slow.extend([1] * late)
        if not late:
            carry(sender, peer, message, payload)

    world.carry = hiccup  # type: ignore[method-assign]
    world.run(until_s=600.0)
    plans = world.history().plans
    shares = {t: slot.steps for t in plans for slot in plans[t] if slot.peer == "r1.1"}
    assert slow and shares[12] < INNER / 2 and shares[16] >= INNER - 1 and wrong_states(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("stages", "islands"), first_of([(1, 5), (2, 3), (1, 3)], 2))
def test_a_machine_that_never_delivers_holds_up_few_rounds(stages: int, islands: int) -> None:
    """It was half as quick each time, so the slot of three machines, or crews, that it had was expected to
    take ever longer: each round waited for 24 times as long as the others needed."""
    world, at = island_world(islands, stages), dict[int, float]()
    carry = world.carry

    def swallow(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        work = isinstance(said, msg.Backward | msg.Claim | msg.InnerActivation | msg.InnerGradient)
        if not (work and sender.id == "r1.1" and said.fence.t > FIRST + 2):  # type: ignore[attr-defined]
            carry(sender, peer, message, payload)

    world.carry = swallow  # type: ignore[method-assign]
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    world.run(until_s=600.0)
    took_s = {t: at[t] - at[t - 1] for t in range(FIRST, LAST + 1)}
    late = [t for t, seconds in took_s.items() if seconds > 1.3 * took_s[FIRST + 2]]
    assert LATE_ROUNDS <= len(late) <= LATE_ROUNDS + 3, took_s
    assert max(took_s.values()) < 4.0 * took_s[FIRST + 2], took_s
    assert world.history().t == LAST and wrong_states(world) == {} and world.history().removals == 0


def test_machines_that_deliver_one_after_the_other_hold_up_no_round_for_hours() -> None:
    """In a round that waits for late slots each of three had six times as long as the one before it: the
    round took 150 times as long as the others needed."""
    liars, last = ("r1.1", "r1.2", "r1.3"), FIRST + 3
    world, took_s = island_world(8, drops=False, last=last), dict[int, float]()
    carry = world.carry

    def late(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        work = isinstance(said, msg.Forward | msg.Backward | msg.Claim)

        def deliver() -> None:
            lead = world.leading().peer.lead
            current = lead.round if lead is not None else None
            if lead is None or current is None or current.t != said.fence.t:  # type: ignore[attr-defined]
                carry(sender, peer, message, payload)
                return
            after = liars[liars.index(sender.id) :]
            before = {k for k, slot in enumerate(current.slots) if slot.peer not in after}
            wait_s, spent_s = lead.rounds.deadline(current), world.clock.now - current.opened_at
            due = before <= current.complete and spent_s >= 0.9 * (wait_s - current.opened_at)
            if due or len(current.complete) == len(current.slots):
                took_s[current.t] = spent_s
                carry(sender, peer, message, payload)
            else:
                world.clock.after(max(0.02, 0.02 * spent_s), deliver)

        if work and sender.id in liars and said.fence.t > FIRST:  # type: ignore[attr-defined]
            deliver()
        else:
            carry(sender, peer, message, payload)

    world.carry = late  # type: ignore[method-assign]
    world.run(until_s=2000.0)
    assert set(took_s) == set(range(FIRST + 1, last + 1))
    assert max(took_s.values()) < 20.0, took_s
    assert wrong_states(world) == {} and world.history().removals == 0
