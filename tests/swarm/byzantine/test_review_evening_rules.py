"""Rules of the evening of 2026-11-30 in worse company, and beside honest machines that are slow (I4)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Event
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_doubted_stages import SINCE, STEPS, holds_up, moved, others, swarm
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks
from swarm.byzantine.test_withheld_states import NEW, OLD, is_silent, with_newcomer

WORK = tasks.Forward | tasks.InputGradient | tasks.WeightGradient


def leader_dies(world: World, claimed: int) -> list[float]:
    """Have the leader "d0" of three voters crash once so many slots of round 6 are claimed; filled with the
    time (s) of that."""
    died = list[float]()

    def watch(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.shared.coordination.coordinator
        if died or lead is None or lead.round is None or lead.round.t != 6:
            return
        if len(lead.round.complete) == claimed and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.crash("d0")

    world.watchers.append(watch)
    return died


def test_an_accomplice_that_says_once_that_it_has_the_state_keeps_no_witness_out() -> None:
    said_so = list[int]()

    def mouth(world: World, sender: Node, said: msg.Message) -> msg.Message | None:
        if sender.id == "x" and isinstance(said, msg.Vouch):
            return None
        if sender.id == "y" and isinstance(said, msg.Ready):
            if said.t != SINCE - 1 or said_so:
                return None
            said_so.append(said.t)
        return None if sender.id == "y" and isinstance(said, msg.Applied) else holds_up(world, sender, said)

    world = swarm([Machine("x", 1), *others(2, 3)], mouth, snapshot_every=2)
    world.liars.add("y")
    world.add(member_of(Machine("y", 1)), "d0", 20.0)
    assert go_on(world, 900.0) == STEPS and said_so and wrong_states(world).keys() <= {"x", "y"}
    assert moved(world) == ["r2"] and {*removed(world)} <= {"r2", "x", "y"}


@pytest.mark.costly
def test_a_data_node_that_claims_what_it_never_sent_is_removed_beside_an_accomplice_too() -> None:
    """The only replica of the first stage claims it as well: so the data node was not late, and the run stood
    for ever. (Its made-up gradients are not looked for: nobody audits data nodes.)"""
    settings = Settings("claims", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("x", 1)]
    world, gone = counting_world(settings, [*machines, *others(2, 3)], 1), list[str]()

    def silent(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        begins = sender.id == "d1" and isinstance(said, msg.Forward) and said.fence.t >= SINCE
        return None if begins else said

    def lie(node: Node, event: Event) -> None:
        if not gone and "d1" in removed(world):
            gone.append("x")
            world.crash("x")  # it cannot go on here: it has nothing of what it claims
        iteration, source = node.peer.iterations.current, world.nodes["d1"].peer.iterations.current
        if node.id not in ("d1", "x") or iteration is None or source is None or iteration.t < SINCE:
            return
        own = source.source.assignments[0].of("d1") if source.t == iteration.t else ()
        units = {*own} if node.id == "x" else {unit for index in own for unit in (2 * index, 2 * index + 1)}
        if not units <= iteration.claims.held:
            iteration.claims.held |= units
            iteration.claims.losses.update(dict.fromkeys(own, 1.0) if node.id == "d1" else {})
            iteration.claims.send()

    altered(world, silent)
    world.bookkeepers.append(lie)
    assert go_on(world, 900.0) == STEPS and gone
    assert {*removed(world)} - {*moved(world)} == {"d1", "x"} and world.clock.now < 600.0


def changed_leader(after_s: float, steps: int = 5, **stages: int) -> tuple[World, list[float]]:
    """World in which the leader d0 dies `after_s` after iteration 2 is committed."""
    settings = Settings("long", 1, 2, 6, steps, min_replicas=1, snapshot_every=2, voters=3)
    world = counting_world(settings, [Machine(name, stage) for name, stage in stages.items()], 1)
    Invariants(world)
    died = list[float]()

    def watch(node: Node, event: Event) -> None:
        if not died and world.log and world.history().t == 2 and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.clock.after(after_s, lambda: world.crash("d0"))

    world.watchers.append(watch)
    return world, died


@pytest.mark.costly
def test_after_a_change_of_leader_a_data_node_that_is_minutes_behind_keeps_its_seat() -> None:
    """Its embeddings take 200 s, those of others 70 s. The new leader reckoned from when it came to lead."""
    world, died = changed_leader(160.0, 4, d0=0, d1=0, d2=0, d3=0, a0=1, a1=1, b0=2, b1=2)
    task_s = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        (200.0 if node.id == "d3" else 70.0) if isinstance(task, tasks.Embed) else task_s(node, task)
    )
    assert go_on(world, 5000.0) == 4 and died and wrong_states(world) == {}
    assert removed(world).keys() <= {"d0"} and rollbacks(world) == []


@pytest.mark.costly
@pytest.mark.parametrize("slow", ["a0", "a0 a1"])
def test_after_a_change_of_leader_replicas_that_reduce_long_keep_their_seats(slow: str) -> None:
    """Steps of two minutes, reduces of 25 s. The new leader had all claims at once, took five seconds for
    what the reduce may take, and expelled those that sent no parts meanwhile."""
    settings = Settings("long", 1, 2, 6, 5, min_replicas=1, snapshot_every=2, voters=3)
    stages = {"d0": 0, "d1": 0, "d2": 0, "a0": 1, "a1": 1, "b0": 2, "b1": 2, "b2": 2}
    world = counting_world(settings, [Machine(name, stage) for name, stage in stages.items()], 1)
    Invariants(world)
    task_s, died = world.task_s, list[float]()

    def slow_s(node: Node, task: tasks.Task) -> float:
        if isinstance(task, tasks.Freeze) and node.id in slow.split():
            return 25.0
        return task_s(node, task) * (200.0 if isinstance(task, WORK) else 1.0)

    def watch(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.shared.coordination.coordinator
        if died or lead is None or lead.round is None or lead.round.t != 3:
            return
        if len(lead.round.attempts) == 3 and len(node.peer.ctx.log.voters) == 3:
            died.append(world.clock.now)
            world.crash("d0")

    world.task_s = slow_s  # type: ignore[method-assign]
    world.watchers.append(watch)
    assert go_on(world, 5000.0) == 5 and died and wrong_states(world) == {}
    assert removed(world).keys() == {"d0"} and rollbacks(world) == []


@pytest.mark.costly
@pytest.mark.parametrize("freeze_s", [30.0])
def test_after_a_change_of_leader_a_lone_replica_that_reduces_long_keeps_its_seat(freeze_s: float) -> None:
    """Reduces that have taken so long in each step."""
    world, died = changed_leader(0.5, 5, d0=0, d1=0, d2=0, a0=1, b0=2, b1=2, b2=2)
    task_s = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        freeze_s if node.id == "a0" and isinstance(task, tasks.Freeze) else task_s(node, task)
    )
    assert go_on(world, 5000.0) == 5 and died and wrong_states(world) == {}
    assert removed(world).keys() <= {"d0"} and rollbacks(world) == []


@pytest.mark.parametrize("freeze_s", [12.0, 60.0])
@pytest.mark.parametrize("snapshot_every", [0, 2])
def test_the_only_replica_that_nobody_can_replace_is_waited_for(snapshot_every: int, freeze_s: float) -> None:
    settings = Settings("alone", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=snapshot_every)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("a", 1), Machine("b", 2)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    task_s = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        freeze_s
        if node.id == "a" and isinstance(task, tasks.Freeze) and task.t == SINCE
        else task_s(node, task)
    )
    assert go_on(world, 900.0) == STEPS and wrong_states(world) == {}
    assert removed(world) == {} and rollbacks(world) == []


@pytest.mark.costly
@pytest.mark.parametrize("stage", [1, 2])
def test_a_data_node_is_not_late_with_heads_that_a_relay_sends_to_nobody_again(stage: int) -> None:
    """Steps of ten seconds. Data node d1 dies with heads of microbatches that d2 began, and the relay that
    sent them to it does not send them again: d2 lost its seat with the third stall, when others had their
    turn."""
    settings = Settings("heads", 1, stage, 12 * stage, STEPS, min_replicas=1, snapshot_every=2)
    machines = [*(Machine(f"d{k}", 0) for k in range(3)), Machine("x", stage)]
    machines += [Machine(f"r{s}.{k}", s) for s in range(1, stage + 1) for k in range(2)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add("x")
    plain, sent, kept, died = world.task_s, dict[tuple[int, str, int], str](), list[int](), list[str]()
    world.task_s = lambda node, task: 20.0 * plain(node, task)  # type: ignore[method-assign]

    def once(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        if sender.id == "x" and isinstance(said, msg.Forward) and said.path[0] == "d2":
            what = said.fence.t, said.fence.base, said.index
            if what in sent:
                kept.append(said.index)
                return None
            sent[what] = peer
        return said

    def watch(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.shared.coordination.coordinator
        if died or lead is None or lead.round is None or lead.round.t < SINCE:
            return
        held = lead.round.claims.get(0, {}).get("d1", ())
        now = {index for (t, _, index), peer in sent.items() if t == lead.round.t and peer == "d1"}
        if any(2 * index in held for index in now):
            died.append("d1")
            world.crash("d1")

    altered(world, once)
    world.bookkeepers.append(watch)
    assert go_on(world, 2000.0) == STEPS and kept and died
    assert [*removed(world)] == died and rollbacks(world) == [] and wrong_states(world) == {}


def test_an_honest_replica_whose_device_hangs_is_not_banned_beside_a_newcomer() -> None:
    """It was its stage's only replica, and its device hangs for a minute in its reduce. After three tries the
    newcomer took part, so that it seemed to withhold parts of its sum from that one: it was expelled."""
    settings = Settings("hangs", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("a", 1), Machine("b0", 2), Machine("b1", 2)]
    world, came, hung = counting_world(settings, machines, 1), list[float](), list[float]()
    Invariants(world)
    task_s = world.task_s

    def hangs_s(node: Node, task: tasks.Task) -> float:
        if node.id == "a" and isinstance(task, tasks.Freeze) and task.t == SINCE and not hung:
            hung.append(world.clock.now)
            return 65.0
        return task_s(node, task)

    def watch(node: Node, event: Event) -> None:
        if not came and world.log and world.history().t == SINCE - 1:
            came.append(world.clock.now)
            world.add(member_of(Machine("h", 1)), "d0", world.clock.now)

    world.task_s = hangs_s  # type: ignore[method-assign]
    world.watchers.append(watch)
    assert go_on(world, 900.0) == STEPS and hung and wrong_states(world) == {} and rollbacks(world) == []
    limits = world.nodes["d0"].peer.ctx.rate_limits
    assert {*removed(world)} <= {"a"} and not limits.banned("a", world.clock.now)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("snapshot_every", [0, 2])
def test_a_newcomer_ends_the_wait_for_a_replica_that_nobody_could_replace(snapshot_every: int) -> None:
    """The liar is alone at its stage, and never PREPARED. Without snapshots the run was lost with it."""
    settings = Settings("alone", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=snapshot_every)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("x", 1), Machine("b", 2)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add("x")

    def never_prepared(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        withheld = isinstance(said, msg.Prepared) and sender.id == "x" and said.fence.t >= SINCE
        return None if withheld else said

    altered(world, never_prepared)
    world.add(member_of(Machine("h", 1)), "d0", 400.0)
    assert go_on(world, 900.0) == STEPS and world.clock.now < 500.0
    assert {*removed(world)} == {"x"} and rollbacks(world) == [] and wrong_states(world).keys() <= {"x"}


def test_an_accomplice_that_says_that_it_got_the_state_costs_no_honest_replica_its_seat() -> None:
    """The state of a step is given to nobody by one of two, and the other one cannot apply it. The accomplice
    waits at their stage, and says that it got the state: no witness came, and the honest one lost its
    seat."""
    world, told = with_newcomer(OLD, is_silent), list[str]()
    world.liars.add("y")
    world.add(member_of(Machine("y", 1)), "d0", 0.6)
    carry = world.carry

    def watch(node: Node, event: Event) -> None:
        lead, liar = world.nodes["d0"].peer.shared.coordination.coordinator, world.nodes.get("y")
        if lead is None or lead.released.last or liar is None or "y" not in lead.ctx.run.membership.members:
            return
        state = lead.released.applied.get(1, {}).get(OLD, "")
        if state and NEW in lead.ctx.run.membership.active_from and state not in told:
            told.append(state)
            carry(liar, "d0", msg.encode(msg.Ready(lead.t, 1, state)), None)

    def is_never_ready(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        return None if sender.id == "y" and isinstance(said, msg.Ready) else said

    altered(world, is_never_ready)
    world.bookkeepers.append(watch)
    assert go_on(world, 600.0) == 12 and told and wrong_states(world).keys() <= {OLD, "y"}
    assert NEW not in removed(world) and OLD in removed(world)


@pytest.mark.costly
def test_a_new_leader_does_not_drop_the_slots_of_a_round_that_it_did_not_see_from_its_beginning() -> None:
    """Seven of eight slots are claimed when the leader dies, after 40 s; the last one takes 54 s, within the
    grace. The new leader took no time at all for what the seven had taken."""
    rounds = Rounds(2, 4, 8)
    settings = Settings("drops", 1, 1, 32, 8, min_replicas=1, rounds=rounds, voters=3)
    names = ["d0", "d1", "d2", *(f"r{k}" for k in range(8))]
    world = counting_world(settings, [Machine(name, int(name[0] == "r")) for name in names], 1)
    Invariants(world)
    task_s, died = world.task_s, leader_dies(world, 7)

    def slot_s(node: Node, task: tasks.Task) -> float:
        if not isinstance(task, tasks.Forward):
            return task_s(node, task)
        return max(1, task.steps) * (13.5 if node.id == "r7" and task.t == 6 else 10.0)

    world.task_s = slot_s  # type: ignore[method-assign]
    assert go_on(world, 900.0) == 8 and died and removed(world).keys() == {"d0"}
    assert all(min(commit.stages[1].owners) >= 0 for commit in world.history().commits if commit.stages)
