"""Relays that compute wrong activations, gradients or contributions: audits, drawn from each commit's hash,
find them, and the log goes back to a state that a single machine would have computed."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import AnyRecord, Commit, Revoke, Rollback, decode_entry
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import (
    IntegerWorker,
    Machine,
    counting_world,
    hashed,
    wrong_states,
)

STEPS = 12


class LyingWorker(IntegerWorker):
    """Worker whose tasks of one kind give false outputs from iteration 3 on. signs: True if it signs what it
    gives; otherwise it signs what it should give."""

    lies = 0

    def __init__(self, stage: int, kind: type[Task], signs: bool) -> None:
        super().__init__(stage)
        self._kind, self._signs = kind, signs

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        evaluates = isinstance(task, tasks.Forward) and not task.train
        if not isinstance(task, self._kind) or task.t < 3 or evaluates:
            return super().run(task, inputs)
        self.lies += 1
        result = self._run(task, inputs)
        outputs = tuple(
            tuple(word + 1 for word in output) if isinstance(output, tuple) else cast(int, output) ^ 1
            for output in result.outputs
        )
        false = hashed(task, inputs, msgspec.structs.replace(result, outputs=outputs))
        hashes = (false if self._signs else hashed(task, inputs, result)).hashes
        return msgspec.structs.replace(false, hashes=hashes)


def audited_world(share: float, replicas: int = 3, seed: int = 1, checkpoint_every: int = 2) -> World:
    settings = Settings(
        "audited-b",
        1,
        2,
        6,
        STEPS,
        min_replicas=replicas,
        audit_share=share,
        checkpoint_every=checkpoint_every,
    )
    machines = [Machine("d0", 0)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)]
    return counting_world(settings, machines, seed)


def give_lying_worker(world: World, liar: str, kind: type[Task], signs: bool = True) -> LyingWorker:
    """Give machine `liar` a worker that lies in this kind of task, before it begins to work."""
    worker = LyingWorker(int(liar[1]), kind, signs)

    def begin() -> None:
        node = world.nodes[liar]
        if isinstance(node.computer, IntegerWorker):
            worker.__dict__.update(node.computer.__dict__)
            node.computer = worker
        else:
            world.clock.after(0.1, begin)

    world.clock.after(0.6, begin)
    return worker


def records_of(world: World) -> list[AnyRecord]:
    return [decode_entry(line).record for line in world.log]


def audits_of(world: World) -> list[dict[str, object]]:
    return [dict(fields) for _, _, kind, fields in world.notes if kind == "audit"]


def test_honest_relays_pass_all_audits() -> None:
    world = audited_world(share=1.0)
    world.run(until_s=600.0)
    commits = [record for record in records_of(world) if isinstance(record, Commit)]
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert all(any(stage.receipts) for commit in commits for stage in commit.stages[1:])
    assert len(audits_of(world)) > 4 * STEPS
    assert {audit["verdict"] for audit in audits_of(world)} == {"same"}
    assert not [record for record in records_of(world) if isinstance(record, Revoke | Rollback)]


@pytest.mark.parametrize("kind", [tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart])
@pytest.mark.parametrize("liar", ["r1.1", "r2.2"])
def test_a_relay_that_computes_falsely_is_convicted(kind: type[Task], liar: str) -> None:
    """Its key is revoked, its steps are void, and all others end with the state of a single machine."""
    world = audited_world(share=1.0, seed=3)
    worker = give_lying_worker(world, liar, kind)
    world.run(until_s=900.0)
    revoked = [record.id for record in records_of(world) if isinstance(record, Revoke)]
    assert worker.lies > 0 and revoked == [liar]
    assert [record for record in records_of(world) if isinstance(record, Rollback)]
    assert world.history().t == STEPS and wrong_states(world).keys() <= {liar}


@pytest.mark.parametrize("kind", [tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart])
def test_bytes_that_are_not_those_that_were_signed_are_refused(kind: type[Task]) -> None:
    world = audited_world(share=1.0)
    worker = give_lying_worker(world, "r1.1", kind, signs=False)
    world.run(until_s=1800.0)
    assert worker.lies > 0
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"r1.1"}


def test_without_audits_a_false_contribution_is_counted() -> None:
    world = audited_world(share=0.0)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    world.run(until_s=600.0)
    assert worker.lies > 0 and world.history().t == STEPS and wrong_states(world) != {}
