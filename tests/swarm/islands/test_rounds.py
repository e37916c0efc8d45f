"""Rounds of islands in virtual time, with real tensors: whatever happens, the log tells one process how to
compute the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Forward, SumPart, Task
from anabranch.protocol.rounds.plan import active, counted, late_slots, slots_of
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.train.model.rounds import iterations
from anabranch.train.reference.reference import Reference
from support.swarms.small_swarm import MadeUpBatches, small_model, small_run
from support.swarms.training_world import training_world

#: 2 synchronous steps, then 4 rounds of 3 optimizer steps each.
STEPS = 14


def island_run(**changes: object) -> RunConfig:
    """Two blocks, which every machine holds: all that a round knows of them is their tensors."""
    rounds = RoundSection(slots=3, steps=3, start=0.15)
    run = replace(small_run(steps=STEPS), pipeline=PipelineSection(stages=0))
    return replace(run, round=replace(rounds, **changes))  # type: ignore[arg-type]


def world_of(run: RunConfig, relays: int = 3, seed: int = 1, voters: int = 1) -> World:
    times = Model(task_s={"Forward": 0.5, "Embed": 0.002})
    batches = MadeUpBatches(run)
    world = training_world(
        run, small_model(run), batches, [relays], 2, seed, capacity=2, times=times, voters=voters
    )
    Invariants(world)
    return world


def check_replayed(run: RunConfig, world: World) -> None:
    """Replay of the log by one process: the same bits at every commit and in every state."""
    history, reference = world.history(), Reference(run, small_model(run), MadeUpBatches(run))
    assert history.t == iterations(run)
    for commit in history.commits:
        plan = history.plans.get(commit.t, ())
        reference.slots = slots_of(plan, commit)
        reference.late = late_slots(plan, history.plans.get(commit.t + 1, ()))
        batch = reference.batch(commit.t, lambda t: range(run.batch.microbatches))
        share = reference.share(commit.t, batch)
        reference.remember_late(commit.t, sorted(reference.late))
        record = reference.step(share)
        assert tuple(stage.digest for stage in commit.stages) == record.digests, commit.t
        assert tuple(stage.fingerprint_before for stage in commit.stages) == record.fingerprints
        assert (commit.learning_rate, commit.clip_factor) == (record.learning_rate, record.clip_factor)
        assert [loss for loss in commit.loss_sums if loss] == [
            record.losses[index] for index in sorted(record.losses)
        ]
    for node in world.nodes.values():
        if node.running and node.peer.replica.t == history.t:
            assert node.peer.replica.fingerprint == reference.fingerprints()[node.peer.ctx.run.stage]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("moment", ["zero", "estimate"])
def test_short_rounds_first_and_synchronous_steps_at_the_end(moment: str) -> None:
    """Inner steps double up to round.steps; after the last round the same bits are taken together again, also
    if a machine dies in the round before."""
    run = island_run(first_steps=1, steps=4, end=0.2, first_moment=moment)
    world = world_of(run, seed=8)  # here rounding the machines' shares of the steps loses none
    struck = strike(world, 5)
    world.run(until_s=2000)
    assert struck
    plans = world.history().plans
    assert [sum(slot.steps for slot in plans[t]) for t in (3, 4, 5)] == [3, 6, 12]
    assert [t for t in range(1, iterations(run) + 1) if plans.get(t)] == [3, 4, 5, 6]
    assert iterations(run) == 7
    check_replayed(run, world)


def strike(world: World, t: int) -> list[str]:
    """Crash a relay while it takes inner steps of round t; returns the list that will name it."""
    struck: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if struck or not isinstance(message, msg.Forward) or not node.id.startswith("r"):
            return
        if message.fence.t == t and message.train:
            struck.append(node.id)
            world.clock.after(0.1, lambda: world.crash(struck[0]))

    world.watchers.append(watch)
    return struck


@pytest.mark.costly
def test_data_nodes_help_to_sum_contributions() -> None:
    """A helper holds no state of the stage whose parts it sums, and rounds the sums all the same."""
    run, helped = island_run(), list[int]()
    for seed in (3, 1, 2):  # the plan of each reduce is drawn at random
        world = world_of(replace(run, fleet=replace(run.fleet, spread="always")), relays=3, seed=seed)
        world.watchers.append(lambda node, event: helped.extend(_helped(node, event)))
        world.run(until_s=2000)
        check_replayed(run, world)
        if helped:
            return
    raise AssertionError("no data node has helped")


def _helped(node: Node, event: ev.Event) -> list[int]:
    """Round of which a data node added up a part that is not empty."""
    if not isinstance(event, ev.Finished) or not isinstance(event.task, SumPart) or node.id[0] != "d":
        return []
    return [event.task.t for part in event.result.outputs if event.task.t > 2 and len(part)]  # type: ignore[arg-type]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("relays", [1, 3, 5])
def test_rounds_are_replayed_by_one_process(relays: int) -> None:
    run = island_run()
    world = world_of(run, relays)
    world.run(until_s=2000)
    check_replayed(run, world)
    plans = world.history().plans
    assert sorted(plans) == [3, 4, 5, 6, 7]
    assert len(active(plans[4])) == min(3, relays)
    for t in (4, 5, 6):  # on average each slot takes as many steps as the run file says
        assert abs(sum(slot.steps for slot in plans[t]) - 3 * min(3, relays)) <= 2


def test_a_slot_whose_machine_dies_is_dropped_and_its_batches_come_again() -> None:
    run = island_run()
    world = world_of(run, relays=3)
    struck = strike(world, 4)
    world.run(until_s=2000)
    check_replayed(run, world)
    history = world.history()
    [lost] = [slot for slot, each in enumerate(history.plans[4]) if each.peer == struck[0]]
    assert counted(history.commits[3].stages[1].owners) == tuple(k for k in range(3) if k != lost)
    assert history.commits[3].loss_sums[lost] == 0.0
    # Its counter stands still; the next round has two machines, and a slot without one.
    assert history.plans[5][lost].first == history.plans[4][lost].first
    assert len(active(history.plans[5])) == 2


@pytest.mark.costly
def test_a_machine_that_is_late_gets_fewer_steps_until_it_is_in_time() -> None:
    """It is ten times as slow as it was measured (another program uses its GPU). Late slots are not
    measured."""
    run = island_run()
    run = replace(run, run=replace(run.run, steps=32))
    world, slowed = world_of(run), list[str]()
    plain = world.task_s

    def by_steps(node: Node, task: Task) -> float:
        steps = task.steps if isinstance(task, Forward) else 1
        return plain(node, task) * max(1, steps)

    def slow(node: Node, event: ev.Event) -> None:
        if node.id == "r1.1" and node.peer.committed == 4 and not slowed:
            node.slowness *= 10.0
            slowed.append(node.id)

    world.task_s = by_steps  # type: ignore[method-assign]
    world.watchers.append(slow)
    world.run(until_s=2000)
    check_replayed(run, world)
    history = world.history()
    late = [commit.t for commit in history.commits[4:] if len(counted(commit.stages[1].owners)) < 3]
    assert slowed and history.t == 14 and 5 in late and max(late) < 10, late


def test_an_idle_machine_takes_over_the_slot_of_one_that_died() -> None:
    run = island_run(late="wait")
    world = world_of(run, relays=4)
    struck = strike(world, 4)
    world.run(until_s=2000)
    check_replayed(run, world)
    history = world.history()
    assert struck and all(len(counted(c.stages[1].owners)) == 3 for c in history.commits[2:])
    assert struck[0] not in history.commits[3].stages[1].members


def test_a_new_leader_goes_on_with_the_plan_of_the_log() -> None:
    run = island_run()
    world = world_of(run, relays=3, voters=3)
    struck = strike(world, 4)
    down: list[float] = []

    def watch(node: Node, event: ev.Event) -> None:
        leader = world.nodes["d0"]
        if not down and leader.running and leader.peer.committed == 4:
            down.append(world.clock.now)
            world.crash("d0")

    world.bookkeepers.append(watch)
    world.run(until_s=4000)
    assert struck and down
    check_replayed(run, world)


def returning(world: World, t: int, after_s: float = 0.02) -> list[str]:
    """Crash a relay early in round t and start it again; returns the list that will name it."""
    struck = strike(world, t)

    def watch(node: Node, event: ev.Event) -> None:
        if struck and not world.nodes[struck[0]].running and not started:
            started.append(struck[0])
            former = world.nodes[struck[0]].member
            member = msgspec.structs.replace(former, incarnation=former.incarnation + 1)
            world.clock.after(after_s, lambda: world.add(member, "d0", world.clock.now))

    started: list[str] = []
    world.bookkeepers.append(watch)
    return struck


def test_a_machine_that_comes_back_has_a_slot_in_the_next_round() -> None:
    """Machines that take inner steps have no time to serve a state: some copied theirs before."""
    run = island_run()
    world = world_of(run, relays=3)
    struck = returning(world, 4)
    world.run(until_s=2000)
    check_replayed(run, world)
    history = world.history()
    assert struck and struck[0] in {slot.peer for slot in history.plans[5]}
    assert struck[0] in history.commits[3].stages[1].members  # it got the result with the others
    assert len(counted(history.commits[3].stages[1].owners)) == 2  # it did not take its slot again
    assert len(counted(history.commits[4].stages[1].owners)) == 3


def test_slots_of_machines_that_left_do_not_hold_up_the_round() -> None:
    """Three quarters are meant of those that can still be ready: a slow machine is late in time."""
    run = island_run(slots=6)
    world = world_of(run, relays=6)
    gone: list[str] = []
    for node in world.nodes.values():
        node.slowness = 1.0

    def watch(node: Node, event: ev.Event) -> None:
        message = event.message if isinstance(event, ev.Received) else None
        if node.id == "r1.2" and node.peer.iteration is not None and node.peer.iteration.t == 3:
            node.slowness = 100.0  # from its next task on: its slot has not come
        slot_came = isinstance(message, msg.Forward) and message.train and message.fence.t == 3
        if slot_came and node.id in ("r1.0", "r1.1") and node.id not in gone:
            gone.append(node.id)
            world.clock.after(0.1, partial(world.crash, node.id))

    world.watchers.append(watch)
    world.run(until_s=4000)
    check_replayed(run, world)
    plan, owners = world.history().plans[3], world.history().commits[2].stages[1].owners
    assert {plan[slot].peer for slot in counted(owners)} == {"r1.3", "r1.4", "r1.5"}


def test_a_machine_that_is_back_within_the_round_fetches_no_state() -> None:
    """A round changes the state only at its end: what a machine left on its disk is what it would fetch."""
    run = island_run(steps=6)
    world = world_of(run, relays=4)
    world.keeps_states = True
    left: list[int] = []
    got: list[int] = []

    def look(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iteration
        if not left and node.id == "r1.1" and iteration is not None and iteration.t == 4:
            left.append(world.history().t)
            world.clock.after(0.2, lambda: node.handle(ev.Stopping("Ctrl+C")))
            world.clock.after(1.5, lambda: world.add(node.next_life(), "d0", world.clock.now))
        if left and node.id == "r1.1" and isinstance(event, ev.Received):
            piece = event.message
            got.extend([piece.t] if isinstance(piece, msg.Piece) and piece.stage == 1 else [])

    world.watchers.append(look)
    world.run(until_s=4000)
    assert left == [3]
    texts = [str(fields.get("text")) for _, peer, _, fields in world.notes if peer == "r1.1"]
    assert any("iteration 3 is on this machine's disk: not fetched" in text for text in texts), texts
    assert not got
    check_replayed(run, world)
