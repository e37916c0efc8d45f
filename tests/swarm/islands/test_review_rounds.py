"""Attacks of a reviewer on rounds: machines that crawl, overflow or lie, leaders that joined late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.config import PipelineSection, RoundSection, RunConfig
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.tasks import Forward, Payload, Result, Task
from anabranch.protocol.log.records import Slot
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog, rollback
from anabranch.protocol.rounds.plan import Plan, counted, even_plan, freed, next_plan
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.torch_world import ONE_CLASS, node_member
from anabranch.train.reference.reference import Reference
from support.grids import first_of
from support.swarms.small_swarm import MadeUpBatches, small_model, small_run
from support.swarms.training_world import training_world


def island_run(**changes: object) -> RunConfig:
    """2 synchronous steps, then 4 rounds of 3 optimizer steps each."""
    rounds = RoundSection(slots=3, steps=3, start=0.15)
    run = replace(small_run(steps=14), pipeline=PipelineSection(stages=0))
    return replace(run, round=replace(rounds, **changes))  # type: ignore[arg-type]


def world_of(run: RunConfig, relays: int, checked: bool = True) -> World:
    times = Model(task_s={"Forward": 0.5, "Embed": 0.002})
    world = training_world(
        run, small_model(run), MadeUpBatches(run), [relays], 2, seed=1, capacity=2, times=times
    )
    if checked:
        Invariants(world)
    return world


def run_of(slots: int) -> RunConfig:
    run = island_run(slots=slots)
    return replace(run, batch=replace(run.batch, microbatches=2 * slots))


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("slots", "crawling"), first_of([(2, 1), (4, 2), (5, 4), (5, 1), (3, 1), (3, 2)], 2))
def test_the_round_ends_without_machines_that_crawl(slots: int, crawling: int) -> None:
    """A machine that is heard, but takes hours for its slot (throttled, swapping): `late = "drop"`."""
    world = world_of(run_of(slots), relays=slots)
    slow: list[str] = []

    def watch(node: Node, event: ev.Event) -> None:
        if node.id[0] == "r" and len(slow) < crawling and node.peer.committed == 3 and node.id not in slow:
            node.slowness *= 1e5
            slow.append(node.id)

    world.bookkeepers.append(watch)
    leader = world.nodes["d0"].peer
    world._over = lambda: leader.committed >= 5  # type: ignore[method-assign]
    world.run(until_s=1000.0)


class _Overflowing:
    """Worker whose inner steps overflow in one slot, on whatever machine."""

    def __init__(self, worker: TaskExecutor, slot: int) -> None:
        self._worker, self._slot = worker, slot

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if isinstance(task, Forward) and task.steps and task.index == self._slot:
            return Result(overflow="contribution")
        return self._worker.run(task, inputs)


def test_who_tells_the_truth_about_an_overflow_stays() -> None:
    """A slot that overflows is dropped with the late ones: nobody found that it does not overflow."""
    world = world_of(run_of(5), relays=5)
    make = world.make_computer
    world.make_computer = lambda stage: _Overflowing(make(stage), 1) if stage == 1 else make(stage)
    world.run(until_s=2000.0)
    history = world.history()
    assert [counted(commit.stages[1].owners) for commit in history.commits[2:]] == [(0, 2, 3, 4)] * 4
    told = [f for _, who, _, f in world.notes if who == "d0" and "slot 1 overflowed in 3 rounds" in str(f)]
    assert len(told) == 1
    assert history.removals == 0


def test_a_leader_survives_absurd_speeds() -> None:
    """Speeds follow from what machines report of themselves."""
    rounds = Rounds(2, 20, 4)
    for seconds in (5e-324, 1e-300, 1e300):
        plan = next_plan(even_plan(rounds), {}, rounds, {("honest",): 1.0, ("liar",): 1.0 / seconds})
        assert sum(slot.steps for slot in plan) <= 2 * 20 + 1
    world = world_of(run_of(2), relays=2)
    tasks = world.nodes["r1.1"].peer.ctx.tasks
    measured = tasks.take_seconds
    tasks.take_seconds = lambda: dict.fromkeys(measured(), 5e-324)  # type: ignore[method-assign]
    world.run(until_s=2000.0)
    assert world.history().t == 6


def test_nobody_makes_the_leader_wait_for_ever() -> None:
    world = world_of(run_of(2), relays=2)
    tasks = world.nodes["r1.1"].peer.ctx.tasks
    measured = tasks.take_seconds
    tasks.take_seconds = lambda: dict.fromkeys(measured(), 1e300)  # type: ignore[method-assign]
    patience: list[float] = []

    def watch(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and node.peer.lead is not None and node.peer.lead.round is not None:
            patience.append(node.peer.lead.reducing.patience_s(node.peer.lead.round))

    world.bookkeepers.append(watch)
    world.run(until_s=2000.0)
    assert max(patience) < 86400.0


def test_a_leader_that_joined_later_goes_back_only_to_a_plan_of_the_log() -> None:
    """It knows the plan of the next round when it joined, and none from before. Round 5 began at inner step 6
    of each slot: a plan from 0 would repeat batches, and verify would refuse the log."""
    run = island_run()
    ctx = world_of(run, relays=2).nodes["d0"].peer.ctx
    view = ctx.run
    slots = (Slot(12, 3, "a"), Slot(12, 3, "b"), Slot(12, 3, "c"))
    assert not view.plan_round(7, slots)  # from Welcome
    catalog = SnapshotCatalog(ctx)
    for t in (1, 4, 6):
        catalog.points[t] = RestorePoint(t, ("", ""), 2, initial=True)
    assert view.can_open(2) and not view.can_open(5)
    point = catalog.newest(8)
    assert point is not None and point.t == 6
    assert rollback(view, point, "lost").slots == freed(slots)
    point = catalog.newest(6)
    assert point is not None and point.t == 1  # 4 is passed over
    with pytest.raises(ValueError, match="not known"):
        rollback(view, catalog.points[4], "lost")


def test_peers_leave_a_leader_whose_plan_no_honest_one_makes() -> None:
    """Nothing is allocated for it, and nobody serves it."""
    world = world_of(island_run(), relays=3, checked=False)
    leader = world.nodes["d0"].peer

    def lies(plan: Callable[..., Plan]) -> Callable[..., Plan]:
        return lambda current, accepted: tuple(Slot(0, 10**9) for _ in plan(current, accepted))

    def watch(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and leader.lead is not None and leader.committed == 3 and not lied:
            lied.append(True)
            take = leader.ctx.run.plan_round
            leader.ctx.run.plan_round = lambda t, plan: take(t, plan) and ""  # type: ignore[method-assign]
            leader.lead.rounds.next = lies(leader.lead.rounds.next)  # type: ignore[method-assign]

    lied: list[bool] = []
    world.bookkeepers.append(watch)
    with pytest.raises(TimeoutError):
        world.run(until_s=100.0)
    stopped = {peer: node.stopped for peer, node in world.nodes.items() if peer != "d0"}
    assert lied and all(stop is not None and "no honest one" in stop[0] for stop in stopped.values())


@pytest.mark.parametrize("skipped", [(3,), (2, 3)])
def test_a_skipped_first_round_does_not_keep_the_first_moment(skipped: tuple[int, ...]) -> None:
    """Steps 1 and 2 are synchronous."""
    run = island_run(outer_momentum=0.9)
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    for t in (1, 2, 3):
        reference.slots = {0: Slot(0, 3)} if t == 3 else {}
        share = reference.share(t, [0] if t == 3 else range(run.batch.microbatches))
        reference.skip(share) if t in skipped else reference.step(share)
    assert float(reference.states[1].exp_avg.abs().max()) == 0.0


def test_an_island_of_a_usual_batch_does_not_overflow() -> None:
    """In a round a lookup table gets one contribution per slot, not one per token of the batch."""
    run = small_run(steps=100)
    rounds = replace(island_run().round, slots=2048, steps=20, start=0.02)
    run = replace(
        run,
        pipeline=island_run().pipeline,
        round=rounds,
        # 65,536 tokens a step, of which a slot takes few, to be quick
        batch=replace(run.batch, microbatches=8192, rows=1, sequence=8),
        optimizer=replace(run.optimizer, lr=5e-3),
    )
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    reference.slots = {0: Slot(0, 20)}
    assert not reference.share(3, [0]).overflows


def test_newcomers_catch_up_over_a_round() -> None:
    """All relays die in a round; those that come take the state before it, and the round's kept result from
    each other (R14)."""
    world = world_of(run_of(3), relays=2)
    struck: list[float] = []

    def watch(node: Node, event: ev.Event) -> None:
        lead = node.peer.lead if node.running else None
        if not struck and lead is not None and lead.round is not None and lead.round.t == 4:
            if not lead.round.claims.get(1):
                return
            struck.append(world.clock.now)
            for peer in ("r1.0", "r1.1"):
                world.crash(peer)
            for number in (7, 8):
                at = world.clock.now + number - 6
                world.add(node_member(f"r1.{number}", 1, 2, ONE_CLASS), "d0", at=at)

    world.bookkeepers.append(watch)
    world.run(until_s=2000.0)
    assert struck and world.history().t == 6


def test_an_operator_counts_optimizer_steps() -> None:
    """Two synchronous steps and rounds of three: 8 steps are 4 iterations, not 8."""
    world = world_of(island_run(), relays=3)
    world.clock.at(0.5, lambda: world.nodes["d0"].handle(ev.Wished("steps", 8)))
    world.run(until_s=2000.0)
    assert world.history().course.steps == 8 and world.history().t == 4
