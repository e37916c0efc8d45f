"""Contributions that are far off the others' are audited, however rare the draws are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import msgspec
import pytest
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.config.schema import AuditSection
from anabranch.protocol import messages as msg
from anabranch.protocol.audit.draw import drawn
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import (
    AnyRecord,
    Commit,
    Entry,
    Members,
    Revoke,
    Rollback,
    StageCommit,
    decode_entry,
    encode_entry,
)
from anabranch.sim.kernel.simulated_peer import Node, TaskExecutor
from anabranch.sim.kernel.swarm_world import World
from anabranch.train.stage.audit import payload_hash
from support.swarms.small_swarm import check_equal, small_run, small_world

#: Iteration from which the liars lie.
SINCE = 4
Change = Callable[[Task, tuple[Payload, ...], Result], Result]


class Changed:
    """Worker whose results are changed from iteration SINCE on."""

    def __init__(self, worker: TaskExecutor, change: Change) -> None:
        self._worker, self._change = worker, change
        self.changed: set[int] = set()
        """Iterations in which a result was changed."""

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        result = self._worker.run(task, inputs)
        if task.t < SINCE or result.error:
            return result
        found = self._change(task, inputs, result)
        if found is not result:
            self.changed.add(task.t)
        return found


def times(factor: int) -> Change:
    """Multiply the gradient sum, and sign that."""

    def change(task: Task, inputs: tuple[Payload, ...], result: Result) -> Result:
        if not isinstance(task, tasks.Freeze):
            return result
        outputs = tuple(factor * cast(Tensor, output) for output in result.outputs)
        return msgspec.structs.replace(result, outputs=outputs, hashes=tuple(map(payload_hash, outputs)))

    return change


def false_moments(*about: int) -> Change:
    """Report that the contributions of the members at these ranks are enormous, and against all others."""

    def change(task: Task, inputs: tuple[Payload, ...], result: Result) -> Result:
        if not isinstance(task, tasks.SumPart) or not result.moments:
            return result
        moments = [(1e9, -1e9) if rank in about else each for rank, each in enumerate(result.moments)]
        return msgspec.structs.replace(result, moments=tuple(moments))

    return change


def run_of(steps: int, policy: str = "static") -> RunConfig:
    """Run in which next to nothing is drawn."""
    run = small_run(stages=1, steps=steps, policy=policy, minimum=3, evaluate_every=0)
    return replace(run, audit=AuditSection(share=1e-9))


def world_of(run: RunConfig, changes: dict[str, Change]) -> tuple[World, list[Changed]]:
    """World with three replicas of the stage. changes: of the results of which machines."""
    world, liars = small_world(run, [3], seed=2), list[Changed]()

    def give(name: str, change: Change) -> None:
        node = world.nodes[name]
        if node.computer is None:
            world.clock.after(0.1, lambda: give(name, change))
            return
        liars.append(Changed(node.computer, change))
        node.computer = liars[-1]

    for name, change in changes.items():
        world.clock.after(0.6, lambda name=name, change=change: give(name, change))
    return world, liars


def records_of(world: World) -> list[AnyRecord]:
    return [decode_entry(line).record for line in world.log]


def far_off(world: World) -> list[tuple[int, str]]:
    """Steps and peers of the contributions that were far off, void steps included."""
    commits = [record for record in records_of(world) if isinstance(record, Commit)]
    stages = [(commit.t, stage) for commit in commits for stage in commit.stages if stage.far_off >= 0]
    return [(t, stage.members[stage.far_off]) for t, stage in stages]


def losses(world: World) -> set[str]:
    """Peers that lost their seat or their key."""
    records = records_of(world)
    removed = {peer for record in records if isinstance(record, Members) for peer in record.removed}
    return removed | {record.id for record in records if isinstance(record, Revoke)}


def ends_right(world: World, run: RunConfig, out: set[str]) -> bool:
    """True if nobody but `out` lost its seat or key; and the run ended with the bits of a single machine."""
    for liar in out & world.nodes.keys():
        world.crash(liar)  # it keeps its false state, which is nobody's any more
    check_equal(world, run)
    return losses(world) == out


def test_a_relay_that_sends_50_times_its_gradient_reversed_is_out_at_once() -> None:
    """It is audited for the first such step, whatever the draw says: the log goes back, and the run ends with
    the bits of a single machine."""
    run = run_of(8)
    world, liars = world_of(run, {"r1.1": times(-50)})
    world.run(until_s=900)
    [(first, found), *_] = far_off(world)
    assert found == "r1.1" and first == min(liars[0].changed) and max(liars[0].changed) <= first + 3
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.1"]
    assert [record.t for record in records_of(world) if isinstance(record, Rollback)] == [first - 2]
    assert ends_right(world, run, {"r1.1"})


@pytest.mark.costly
def test_honest_relays_are_left_alone() -> None:
    """Nobody is accused. No more than one contribution in thirty would be audited for nothing; it is none."""
    run = run_of(30, policy="greedy")
    world, _ = world_of(run, {})
    world.run(until_s=900)
    assert len(far_off(world)) <= 30 * 3 / 30
    assert ends_right(world, run, set())
    assert not [record for record in records_of(world) if isinstance(record, Rollback)]


def test_false_moments_of_one_peer_accuse_nobody() -> None:
    run = run_of(8)
    world, liars = world_of(run, {"r1.1": false_moments(0, 2)})
    world.run(until_s=900)
    assert liars[0].changed and far_off(world) == []
    assert ends_right(world, run, set())


def test_false_moments_of_two_of_three_cost_an_honest_relay_one_audit() -> None:
    """They are most of those who report: its work is audited once in ten steps, and found right."""
    run = run_of(12)
    world, liars = world_of(run, {"r1.1": false_moments(0), "r1.2": false_moments(0)})
    world.run(until_s=900)
    assert all(each.changed for each in liars) and far_off(world) == [(4, "r1.0")]
    audits = [(fields["subject"], fields["verdict"]) for _, _, kind, fields in world.notes if kind == "audit"]
    assert audits == [("r1.0", "same")]
    assert ends_right(world, run, set())


def test_a_liar_is_not_hidden_by_its_own_reports() -> None:
    """It reports moments as of an honest contribution about itself, and enormous ones about another."""
    run = run_of(8)
    reverses = times(-50)

    def change(task: Task, inputs: tuple[Payload, ...], result: Result) -> Result:
        if isinstance(task, tasks.SumPart) and result.moments:
            moments = [(1e9, -1e9) if rank == 0 else result.moments[2] for rank in range(len(result.moments))]
            return msgspec.structs.replace(result, moments=tuple(moments))
        return reverses(task, inputs, result)

    world, _ = world_of(run, {"r1.1": change})
    world.run(until_s=900)
    assert {peer for _, peer in far_off(world)} == {"r1.1"} and ends_right(world, run, {"r1.1"})


@pytest.mark.costly
def test_a_liar_is_found_in_a_stage_whose_parts_the_leader_sums() -> None:
    """It claims not to reach another replica, and holds its parts of one reduce back, so that the reduces of
    the next 50 steps are witnessed. Then no member sums a part and reports moments."""
    run = run_of(8)
    world, _ = world_of(run, {"r1.1": times(-50)})
    carry, witnessed = world.carry, set[int]()

    def deliver(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said, wait_s = msg.decode(message), 0.0
        if sender.id == "r1.1" and isinstance(said, msg.Claim) and said.fence.t >= SINCE - 1:
            message = msg.encode(msgspec.structs.replace(said, apart=("r1.0",)))
        if sender.id == "r1.1" and isinstance(said, msg.ReducePart) and said.fence.t == SINCE - 1:
            wait_s = 4.0 * (peer != "d0")
        if isinstance(said, msg.Attempt) and said.helpers:
            witnessed.add(said.fence.t)
        world.clock.after(wait_s, partial(carry, sender, peer, message, payload))

    world.carry = deliver  # type: ignore[method-assign]
    world.run(until_s=900)
    assert {SINCE - 1, SINCE} <= witnessed and {peer for _, peer in far_off(world)} == {"r1.1"}
    assert ends_right(world, run, {"r1.1"})


def test_a_commit_names_the_contribution_and_an_older_log_names_none() -> None:
    """Every peer draws it, though nothing is drawn. The encoded form is that of logs before the field if
    there is none. A position that nobody has, or nobody who owns a unit, draws nobody."""
    stage = StageCommit("", "", {}, ("a", "b", "c"), ("",) * 3, (0, 1), ("hash", "hash", ""))
    found = {}
    for position in (-1, 1, 2, 7):
        stages = stage, msgspec.structs.replace(stage, far_off=position)
        record = Commit("run", 1, 1, 1, "", "", "step", 1, (), stages, 0.0, 1.0, 1e-3, 1.0, 1.0, 0)
        line = encode_entry(Entry(1, 1, "", record))
        assert (b"far_off" in line) == (position >= 0) and decode_entry(line).record == record
        found[position] = [each.subject for each in drawn(record, "base", 0.0)]
    assert found == {-1: [], 1: ["b"], 2: [], 7: []}
