"""Two iterations in flight, reviewed: what the operator asks for finds both of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.config import ConfigError, IterationSection, RunConfig, check_fleet_holds, with_changes
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Control, Member, Members
from anabranch.protocol.membership.view import Membership
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.world_builder import IntegerWorld
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.kernel.violation import Violation
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from anabranch.train.reference.reference import Reference, Share
from support.swarms.fault_points import Fault
from support.swarms.small_swarm import MadeUpBatches, Overflowing, small_model, small_run
from support.swarms.training_world import training_world
from support.swarms.voters import records

STEPS, START = 10, 2


def world_of(seed: int = 0, evaluate_every: int = 4) -> World:
    settings = Settings(
        run="r", epoch=1, stages=2, microbatches=6, steps=STEPS, windows=2, evaluate_every=evaluate_every,
        checkpoint_every=0, snapshot_every=2, delay=Delay(START),
    )  # fmt: skip
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{k}", stage) for stage in (1, 2) for k in range(2)]
    world = counting_world(settings, machines, seed)
    Invariants(world, IntegerWorld(settings))
    return world


def in_flight_after(t: int, node: Node, event: ev.Event) -> bool:
    return node.peer.committed == t and node.peer.iterations.ahead is not None


def wish(world: World, t: int, wished: ev.Wished) -> Fault:
    """Request of the founder once t is committed and two iterations are in flight there."""
    return Fault(
        world, ("d0",), lambda node, event: in_flight_after(t, node, event),
        lambda world, node: node.handle(wished),
    )  # fmt: skip


@pytest.mark.parametrize(("steps", "ends"), [(6, STEPS), (7, 7), (8, 8)])
def test_a_run_does_not_end_before_an_iteration_in_flight(steps: int, ends: int) -> None:
    """The held-out windows after the last step are an iteration of their own, and 7 is open with others."""
    world = world_of()
    assert wish(world, 5, ev.Wished("steps", steps)) and not world.history().t
    world.run(300.0)
    assert world.nodes["d0"].stopped == (f"all {ends} steps are committed", True)
    assert world.history().t == ends and ends in world.history().evaluations
    assert not wrong_states(world)
    said = [str(fields["text"]) for _, _, kind, fields in world.notes if kind == "note"]
    assert any("steps = 6 was not done: step 7 has begun" in text for text in said) == (steps == 6)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("t", [START - 1, START, 5, STEPS - 1])
def test_a_pause_leaves_no_iteration_half_begun(t: int) -> None:
    """A peer that hears of the pause before it has applied the step opens what the others have opened."""
    world = world_of()
    Fault(
        world, ("d0",), lambda node, event: node.peer.committed == t,
        lambda world, node: node.handle(ev.Wished("pause")),
    )  # fmt: skip
    while world.clock.now < 60.0 and world.clock.step():
        pass
    (pause,) = records(world, Control)
    assert world.history().t == pause.steps == min(STEPS, t + 1 + (t >= START - 1))
    assert not any(node.peer.iterations.in_flight for node in world.nodes.values())
    world.leading().handle(ev.Wished("continue"))
    world.run(300.0)
    assert world.history().t == STEPS and not wrong_states(world)


def fall_behind(world: World, t: int, busy: bool) -> list[list[tasks.Task]]:
    """Let d1 find nobody with the gradient of committed step t, with t + 1 in flight (busy: and work of that
    waiting). Returns its waiting work on those right before and right after that."""
    replica, work = world.nodes["d1"].peer.replica, world.nodes["d1"].peer.ctx.tasks
    found: list[list[tasks.Task]] = []
    advance = replica.advance

    def waiting() -> list[tasks.Task]:
        return [task for _, task in work.waits((tasks.Embed, tasks.Head, tasks.WeightGradient))]

    def strike(world: World, node: Node) -> None:
        found.append(waiting())
        replica._give_up(t)
        found.append(waiting())

    def moment(node: Node, event: ev.Event) -> bool:
        return node.peer.committed == t == replica.t + 1 and (bool(waiting()) or not busy)

    def seek() -> None:  # the gradient is asked for, in vain
        if found or replica.t != t - 1:
            advance()

    replica.advance = seek  # type: ignore[method-assign]
    Fault(world, ("d1",), moment, strike)
    return found


def test_a_replica_that_needs_a_state_leaves_no_work_of_the_second_iteration() -> None:
    """A head or an embedding needs nothing but its inputs: its gradient would be added to the new sum."""
    world = world_of(seed=1)
    found = fall_behind(world, 5, busy=True)
    while len(found) < 2:
        assert world.clock.step()
    before, after = found
    assert before and not after


@pytest.mark.xfail(strict=True, raises=Violation, reason="a replica that fetches the state opens the second "
    "iteration anew, with other credits than its partners count")  # fmt: skip
def test_a_replica_that_needs_a_state_begins_the_second_iteration_again() -> None:
    world = world_of()
    found = fall_behind(world, 5, busy=False)
    world.run(300.0)
    assert len(found) == 2 and world.history().t == STEPS and not wrong_states(world)


def test_the_second_iteration_keeps_its_split_when_the_first_loses_all_data_nodes() -> None:
    """b serves from 6 on, a is the only data node of 5 and dies, c comes for 5."""

    def member(name: str, stage: int) -> Member:
        return member_of(Machine(name, stage))

    membership = Membership()
    served = {"a": 1, "b": 6, "r": 1}
    membership.enter([member("a", 0), member("b", 0), member("r", 1)], served, 1)
    membership.open(5, 1)
    membership.open(6, 1, delayed=True)
    membership.apply(Members(number=2, removed={"a": "dead"}))
    assert set(membership.assignment(6, range(4)).holder.values()) == {"b"}
    membership.apply(Members(number=3, joined=(member("c", 0),), active_from={"c": 5}))
    membership.open(5, 1)
    membership.open(6, 1, delayed=True)
    assert membership.is_reopened(5) and set(membership.assignment(5, range(4)).holder.values()) == {"c"}
    assert set(membership.assignment(6, range(4)).holder.values()) == {"b"}  # which has begun all of them


def test_the_fleet_holds_the_boundaries_of_two_iterations() -> None:
    changes = {"batch.microbatches": 8, "fleet.relays": 8, "fleet.data_nodes": 2}
    run = with_changes(RunConfig(), {**changes, "fleet.boundary_budget_bytes": 4 * 4 * 1000})
    check_fleet_holds(run, activation_bytes=1000)
    run = with_changes(run, {"iteration.delay": 1})
    with pytest.raises(ConfigError, match="4 x 8 tensors"):
        check_fleet_holds(run, activation_bytes=1000)
    check_fleet_holds(with_changes(run, {"fleet.boundary_budget_bytes": 4 * 8 * 1000}), activation_bytes=1000)


def test_two_skipped_steps_in_flight_at_once_leave_no_trace() -> None:
    """An overflow in each of two iterations: the prediction repeats the last step that was taken (I3)."""
    run = small_run(minimum=2, steps=5, evaluate_every=0)
    run = replace(run, iteration=IterationSection(delay=1, delay_from=START / 5))
    model, batches = small_model(run), MadeUpBatches(run)
    world, reference = (
        training_world(run, model, batches, [2, 2], 2, 0, capacity=2),
        Reference(run, model, batches),
    )
    make, bad = world.make_computer, {(t, index) for t in (3, 4) for index in (3, 4)}
    world.make_computer = lambda stage: Overflowing(make(stage), bad) if stage == 1 else make(stage)
    world.run(until_s=300)
    assert [commit.verdict for commit in world.history().commits] == ["step"] * 2 + ["skip"] * 2 + ["step"]
    for commit in world.history().commits:
        if commit.verdict == "skip":
            reference.skip(Share(commit.t, []))
            continue
        record = reference.step(reference.share(commit.t, range(6)))
        assert tuple(stage.digest for stage in commit.stages) == record.digests, commit.t
    for node in world.nodes.values():
        assert node.peer.replica.fingerprint == reference.fingerprints()[node.peer.ctx.run.stage]
