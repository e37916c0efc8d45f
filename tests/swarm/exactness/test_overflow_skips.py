"""An overflow makes a skipped step, everywhere alike; three in a row stop the run with a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from anabranch.train.reference.reference import Reference
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault
from support.swarms.small_swarm import MadeUpBatches, Overflowing, small_model, small_run
from support.swarms.training_world import training_world
from support.swarms.voters import long_swarm
from swarm.byzantine.test_review_stalls import go_on, overflowing


def world_of(bad: set[tuple[int, int]], steps: int, seed: int = 1) -> tuple[World, Reference]:
    run = small_run(minimum=2, steps=steps, evaluate_every=1)
    world = training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 2, seed, capacity=2)
    make = world.make_computer
    world.make_computer = lambda stage: Overflowing(make(stage), bad) if stage == 1 else make(stage)
    return world, Reference(run, small_model(run), MadeUpBatches(run))


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_skipped_step_is_skipped_everywhere_and_nothing_else_changes(seed: int) -> None:
    world, reference = world_of({(2, 3), (2, 4)}, steps=4, seed=seed)
    world.run(until_s=300)
    history = world.history()
    assert [commit.verdict for commit in history.commits] == ["step", "skip", "step", "step"]
    evaluations = []
    for commit in history.commits:
        evaluations.append(reference.evaluate(3))
        share = reference.share(commit.t, range(6))
        if commit.verdict == "skip":
            assert commit.witness is not None
            assert (commit.witness.stage, commit.witness.tensor) == (1, "blocks.0.attention.wq")
            assert commit.witness.index in (3, 4)
            assert commit.adam_step == 1
            record = reference.skip(share)
        else:
            record = reference.step(share)
            assert tuple(stage.digest for stage in commit.stages) == record.digests
            assert tuple(stage.fingerprint_before for stage in commit.stages) == record.fingerprints
            assert commit.bias_correction1 == record.bias_corrections[0]
        assert commit.learning_rate == record.learning_rate or record.skipped
    for t, evaluation in enumerate(evaluations):
        if t in history.evaluations:
            assert history.evaluations[t].loss_sums == tuple(loss for loss, _ in evaluation)
    for node in world.nodes.values():
        assert node.peer.replica.fingerprint == reference.fingerprints()[node.peer.ctx.run.stage]
        assert node.stopped is not None and node.stopped[1]


def test_three_in_a_row_stop_the_run_with_a_message() -> None:
    world, reference = world_of({(t, 0) for t in (2, 3, 4)}, steps=9)
    world.run(until_s=300)
    history = world.history()
    assert [commit.verdict for commit in history.commits] == ["step", "skip", "skip", "skip"]
    reason, _ = world.nodes["d0"].stopped or ("", False)
    assert "3 skipped steps in a row" in reason
    assert "blocks.0.attention.wq" in reason
    reference.step(reference.share(1, range(6)))
    assert world.checkpoints[4][1][1] != ""  # stopped with a checkpoint, of the state after the last step


def test_an_overflow_told_over_a_breaking_link_is_told_again() -> None:
    world, _ = world_of({(1, 2)}, steps=2)

    def cut(node: object, event: object) -> None:
        if any(kind == "overflow" for _, _, kind, _ in world.notes) and not done:
            done.extend(world.cut(f"r1.{n}", "d0") for n in (0, 1))

    done: list[bool] = []
    world.watchers.append(cut)
    world.run(until_s=300)
    assert any(done)
    assert [commit.verdict for commit in world.history().commits] == ["skip", "step"]


def test_numbers_that_really_overflow() -> None:
    """A learning rate of 1e30 makes weights whose activations are not finite."""
    run = small_run(minimum=1, steps=8, evaluate_every=0)
    run = replace(run, optimizer=replace(run.optimizer, lr=1e30, warmup_steps=1, clip=0.0))
    batches = MadeUpBatches(run)
    world = training_world(run, small_model(run), batches, [1, 2], 1, seed=2, capacity=2)
    world.run(until_s=300)
    history = world.history()
    reference = Reference(run, small_model(run), batches)
    for commit in history.commits:
        share = reference.share(commit.t, range(6))
        assert bool(share.overflows) == (commit.verdict == "skip")
        if commit.witness is not None:
            found = share.overflows[commit.witness.index]
            assert (commit.witness.stage, commit.witness.tensor) in found
        reference.step(share)
    assert [commit.verdict for commit in history.commits][-3:] == ["skip"] * 3
    assert len(history.commits) < 8


def test_an_overflow_of_a_microbatch_that_is_not_there_is_refused() -> None:
    """Nobody could compute it again: `verify` would have no witness for the skipped step."""
    settings = Settings("overflow", 1, 1, 4, 3, min_replicas=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)], 1)
    told: list[str] = []

    def lie(world: World, leader: Node) -> None:
        iteration = leader.peer.iteration
        assert iteration is not None
        fence = msg.Fence(1, 1, iteration.t, iteration.base, 1)
        message = msg.Overflow(fence, 1, 1000, "blocks.0.attention.wq")
        before = len(world.notes)
        leader.handle(ev.Received("r1.0", message))
        told.extend(str(fields["reason"]) for _, _, kind, fields in world.notes[before:] if kind == "refused")

    fault = Fault(world, ("d0",), faults.received(msg.Claim, 2), lie)
    world.run(until_s=300)
    assert fault.delivered and len(told) == 1 and "no microbatch 1000" in told[0]
    assert [commit.verdict for commit in world.history().commits] == ["step"] * 3


def test_three_in_a_row_stop_the_run_though_the_leader_dies_with_the_third() -> None:
    world = long_swarm(seed=1)
    bad = {(t, 0) for t in (5, 6, 7)}
    overflowing(world, 1, lambda task, _: isinstance(task, tasks.Forward) and (task.t, task.index) in bad)

    def all_know(node: Node, event: ev.Event) -> bool:
        return all(each.peer.committed == 7 for each in world.nodes.values())

    knows = Fault(world, tuple(world.nodes), all_know, lambda world, _: world.crash("d0"))
    go_on(world, 300.0)
    assert knows.delivered and [commit.verdict for commit in world.history().commits[4:]] == ["skip"] * 3
    lead = world.leading().peer.lead
    assert lead is not None and "3 skipped steps in a row" in str(lead.tip.stop_reason)
