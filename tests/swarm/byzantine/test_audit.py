"""Relays that compute wrong activations, gradients or contributions: audits, drawn from each commit's hash,
find them, and the log goes back to a state that a single machine would have computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from anabranch.protocol.audit import draw
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import NEIGHBOURS, Settings
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import (
    AnyRecord,
    Commit,
    Members,
    Revoke,
    Rollback,
    StageCommit,
    decode_entry,
)
from anabranch.protocol.messages import AnyMessage, Audited, Claim, Prepared, Work
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import IntegerWorker, hashed
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value, first_of

STEPS = 12


class LyingWorker(IntegerWorker):
    """Worker whose tasks of one kind give false outputs from iteration `first` on. signs: True if it signs
    what it gives; otherwise it signs what it should give. also_audits: True if it sums parts falsely in
    audits of others too."""

    lies, first = 0, 3

    def __init__(self, stage: int, kind: type[Task], signs: bool, also_audits: bool) -> None:
        super().__init__(stage)
        self._kind, self._signs, self._also_audits = kind, signs, also_audits

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        evaluates = isinstance(task, tasks.Forward) and not task.train
        audits = isinstance(task, tasks.SumPart) and task.t <= self.t and not self._also_audits
        if not isinstance(task, self._kind) or task.t < self.first or evaluates or audits:
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


def audited_world(
    share: float,
    replicas: int = 3,
    seed: int = 1,
    checkpoint_every: int = 2,
    run: str = "audited",
    neighbours: int = NEIGHBOURS,
    steps: int = STEPS,
) -> World:
    """World whose contributions are audited. seed, run: both are part of what draws who audits whom.
    neighbours: a stage of more than four times as many reduces in cells if nothing is audited."""
    settings = Settings(
        run,
        1,
        2,
        6,
        steps,
        min_replicas=replicas,
        audit_share=share,
        checkpoint_every=checkpoint_every,
        neighbours=neighbours,
    )
    machines = [Machine("d0", 0)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)]
    return counting_world(settings, machines, seed)


def give_lying_worker(
    world: World, liar: str, kind: type[Task], signs: bool = True, also_audits: bool = True
) -> LyingWorker:
    """Give machine `liar` a worker that lies in this kind of task, before it begins to work."""
    worker = LyingWorker(int(liar[1]), kind, signs, also_audits)

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


def others_are_right(world: World, liar: str) -> bool:
    """True if the run ended, with the state of a single machine at all peers but the liar, and no other peer
    lost its seat or its key."""
    records = records_of(world)
    removed = {peer for record in records if isinstance(record, Members) for peer in record.removed}
    revoked = {record.id for record in records if isinstance(record, Revoke)}
    ended = world.history().t == STEPS and wrong_states(world).keys() <= {liar}
    return ended and removed | revoked <= {liar}


DRAWS = [("audited", 1), ("audited", 2), ("audited-b", 3)]


KINDS = (tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("kind", "draws", "liar"), every_value(KINDS, DRAWS, ("r1.1", "r2.2")))
def test_a_relay_that_computes_falsely_is_convicted(
    kind: type[Task], liar: str, draws: tuple[str, int]
) -> None:
    """Its key is revoked, its steps are void, and all others end with the state of a single machine."""
    run, seed = draws
    world = audited_world(share=1.0, seed=seed, run=run)
    worker = give_lying_worker(world, liar, kind, also_audits=False)
    world.run(until_s=900.0)
    records = records_of(world)
    assert worker.lies > 0 and others_are_right(world, liar)
    assert [record.id for record in records if isinstance(record, Revoke)] == [liar]
    assert [record for record in records if isinstance(record, Rollback)]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("silent", [("r2.0",), ("r2.0", "r2.1")])
def test_a_liar_is_convicted_though_the_next_stage_is_silent_about_its_work(silent: tuple[str, ...]) -> None:
    """Each audit waited 30 s for what a silent relay had sent the liar, and expired after four short steps:
    the liar kept its seat for 22 steps, to the end. An auditor that waited in vain asks others first now."""
    world = audited_world(share=1.0, checkpoint_every=1, steps=24)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    for peer in silent:
        world.mouths[peer] = lambda message: (
            None if isinstance(message, Work) and message.subject == "r1.1" else message
        )
    world.run(until_s=900.0)
    records = records_of(world)
    assert 0 < worker.lies <= 12 and world.history().t == 24 and wrong_states(world).keys() == {"r1.1"}
    assert [record.id for record in records if isinstance(record, Revoke)] == ["r1.1"]


@pytest.mark.parametrize("kind", [tasks.Freeze, tasks.SumPart])
def test_a_relay_of_a_large_stage_that_sums_falsely_is_convicted(kind: type[Task]) -> None:
    """Five replicas would reduce in cells, whose sums have no receipts: a false one stayed (seed 5212438)."""
    world = audited_world(share=1.0, replicas=5, neighbours=1)
    worker = give_lying_worker(world, "r1.1", kind, also_audits=False)
    world.run(until_s=900.0)
    records = records_of(world)
    assert worker.lies > 0 and others_are_right(world, "r1.1")
    assert [record.id for record in records if isinstance(record, Revoke)] == ["r1.1"]


@pytest.mark.parametrize("seed", first_of([0, 9, 10, 22], 2))
def test_a_relay_that_lies_as_an_auditor_too_is_out(seed: int) -> None:
    """It sums parts falsely, those of its audits as well. Depending on the draw it is convicted for its own
    sums, or loses its seat before any of them counts, for a difference that the second auditor did not
    find."""
    world = audited_world(share=1.0, seed=seed, run="audited-b")
    worker = give_lying_worker(world, "r1.1", tasks.SumPart)
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r1.1")
    assert "r1.1" not in world.history().membership.members


def test_a_return_to_a_checkpoint_of_the_leader_fetches_that_state() -> None:
    """Peers that keep no snapshots asked each other for the latest state, which nobody has after a return;
    the run stood still."""
    world = audited_world(share=1.0, checkpoint_every=1, run="audited-b")
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    worker.first = 7
    world.run(until_s=900.0)
    returns = [record.t for record in records_of(world) if isinstance(record, Rollback)]
    assert worker.lies > 0 and others_are_right(world, "r1.1")
    assert returns and min(returns) > 0


def vanishes(world: World, liar: str, worker: LyingWorker, after_s: float, reports: bool) -> None:
    """Let a relay die `after_s` after it has reduced its first false gradient. reports: True if it reports
    PREPARED, with its receipt, before."""
    doomed = False

    def mouth(message: AnyMessage) -> AnyMessage | None:
        nonlocal doomed
        if not isinstance(message, Prepared) or not worker.lies:
            return message
        if not doomed:
            world.clock.after(after_s, lambda: world.crash(liar))
        doomed = True
        return message if reports else None

    world.mouths[liar] = mouth


@pytest.mark.parametrize("seed", first_of([1, 2, 3], 1))
def test_a_relay_that_vanishes_before_its_receipt_is_not_counted(seed: int) -> None:
    """It sends false parts, and dies before it reports the reduce. The others had the sum with its parts and
    went on with it; no receipt of it was in the commit, so that nothing of it was audited."""
    world = audited_world(share=1.0, seed=seed)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    vanishes(world, "r1.1", worker, 0.5, reports=False)
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r1.1")


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kind", [tasks.InputGradient, tasks.Freeze, tasks.SumPart])
def test_a_relay_that_vanishes_after_its_receipt_is_audited(kind: type[Task]) -> None:
    """An auditor waited 30 s for a piece from it although it had been removed. By then the weights of its
    step were dropped, and the false step stayed."""
    world = audited_world(share=1.0, seed=3)
    worker = give_lying_worker(world, "r2.2", kind, also_audits=False)
    vanishes(world, "r2.2", worker, 0.2, reports=True)
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r2.2")


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("liar", "kind"), [("r2.2", tasks.Forward), ("r1.1", tasks.InputGradient)])
@pytest.mark.parametrize("seed", first_of([1, 2]))
def test_what_a_vanished_relay_sent_to_a_data_node_is_not_used(
    liar: str, kind: type[Task], seed: int
) -> None:
    """Its units are computed again, but the data node has used its false activation or gradient: the data
    node's receipt says so."""
    world = audited_world(share=1.0, seed=seed)
    worker = give_lying_worker(world, liar, kind)
    vanishes(world, liar, worker, 0.5, reports=False)
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, liar)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("liar", "kind"), [("r2.2", tasks.Forward), ("r1.1", tasks.InputGradient)])
def test_what_a_relay_that_claims_nothing_sent_to_a_data_node_is_not_used(
    liar: str, kind: type[Task]
) -> None:
    """It owns no unit, so that nothing of it is audited."""
    world = audited_world(share=1.0, seed=1)
    worker = give_lying_worker(world, liar, kind)
    world.mouths[liar] = lambda message: None if worker.lies and isinstance(message, Claim) else message
    world.clock.after(40.0, lambda: world.crash(liar))
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, liar)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kind", [tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart])
def test_bytes_that_are_not_those_that_were_signed_are_refused(kind: type[Task]) -> None:
    world = audited_world(share=1.0)
    worker = give_lying_worker(world, "r1.1", kind, signs=False)
    world.run(until_s=1800.0)
    assert worker.lies > 0
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"r1.1"}


def a_foreseer_is_found(seed: int) -> bool:
    """True if the audits of one third of all work find a relay that lies only where the draw, made from what
    it knows before the commit, spares it."""
    share = 0.34
    world = audited_world(share=share, seed=seed)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze, also_audits=False)
    run = worker.run

    def spared(task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        all_reduce = world.nodes["r1.1"].peer.replica.all_reduce
        drawn_early = False
        if isinstance(task, tasks.Freeze) and all_reduce.reduce is not None:
            base, position = all_reduce.reduce.message.fence.base, all_reduce.reduce.position
            drawn_early = draw._number(base, 1, position) < share * 2.0**64
        return super(LyingWorker, worker).run(task, inputs) if drawn_early else run(task, inputs)

    worker.run = spared  # type: ignore[method-assign]
    world.run(until_s=900.0)
    return [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.1"]


def test_nobody_can_tell_which_work_is_audited() -> None:
    """The hash of the commit draws; a mutant from the hash that the iteration began with: none is found.
    Of eight lies each is audited with one chance in three: 4 of 100 such liars are not found in so short a
    run."""
    assert sum(a_foreseer_is_found(seed) for seed in range(1, 6)) >= 3


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_a_rare_lie_is_drawn_as_soon_as_if_each_unit_were_drawn(units: int) -> None:
    share, lies, count = 0.05, 0.1, 30_000
    members, owners = ("a", "b"), (0,) * units + (1,)
    stage = StageCommit("", "", {}, members, ("",) * 2, owners, ("hash",) * 2)
    record = Commit("run", 1, 1, 1, "", "", "step", 1, (), (stage, stage), 0.0, 1.0, 1e-3, 1.0, 1.0, 0)
    drawings = [draw.drawn(record, f"base {number}", share) for number in range(count)]
    audited = sum(each.subject == "a" for found in drawings for each in found) / count
    within_200 = 1 - (1 - audited * (1 - (1 - lies) ** units)) ** (200 / units)
    formula = 1 - (1 - share * lies) ** 200
    assert formula - 0.01 < within_200 < formula + 0.04  # drawn with `share`, four units give 58 %, not 63 %


def test_all_contributions_are_drawn_with_share_1_and_none_with_0() -> None:
    assert {draw.chance(1.0, units) for units in range(40)} == {1.0}
    assert {draw.chance(0.0, units) for units in range(40)} == {0.0}
    assert draw.chance(0.05, 500) == draw.chance(0.05, draw.COUNTED) < 0.075


def test_without_audits_a_false_contribution_is_counted() -> None:
    world = audited_world(share=0.0)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    world.run(until_s=600.0)
    assert worker.lies > 0 and world.history().t == STEPS and wrong_states(world) != {}


def pair_of_jurors(replicas: int, subjects_lie: bool, seed: int = 1) -> tuple[World, set[str]]:
    """A world in which "r1.0" and "r1.1" of a stage of so many replicas lie together in their audits, where
    nobody else has found otherwise yet: each finds the other's work right, and that of others false.

    subjects_lie: True if "r1.0" computes falsely, too; otherwise all work is right."""
    world, pair = audited_world(share=1.0, replicas=replicas, seed=seed), {"r1.0", "r1.1"}
    if subjects_lie:
        give_lying_worker(world, "r1.0", tasks.Freeze)

    def said_by(me: str) -> Callable[[AnyMessage], AnyMessage]:
        def say(message: AnyMessage) -> AnyMessage:
            if not isinstance(message, Audited):
                return message
            if message.subject in pair:
                return msgspec.structs.replace(message, verdict="same", receipt=b"")
            commits = (r for r in records_of(world) if isinstance(r, Commit) and r.t == message.t)
            audits = [each for commit in commits for each in draw.drawn(commit, message.base, 1.0)]
            both = any(each.subject == message.subject and set(each.auditors[:2]) == pair for each in audits)
            verdict = "different" if both and not subjects_lie else message.verdict
            return msgspec.structs.replace(message, verdict=verdict, what="part 0 of the sum")

        return say

    for name in pair:
        world.mouths[name] = said_by(name)
    world.run(until_s=900.0)
    return world, pair


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("replicas", [5, 6])
def test_two_that_lie_together_in_their_audits_take_nobody_out(replicas: int) -> None:
    """Two auditors were enough to convict, and everybody knows who is drawn. A pair said nothing but when
    both were, and had all others of its stage revoked within a dozen steps, without a risk."""
    world, pair = pair_of_jurors(replicas, subjects_lie=False)
    records = records_of(world)
    removed = {peer for record in records if isinstance(record, Members) for peer in record.removed}
    assert [record for record in records if isinstance(record, Revoke)] == [] and removed <= pair
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert removed


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seed", [8, 9])  # the accomplice is the second of those asked
def test_a_fellow_on_the_jury_does_not_save_a_liar(seed: int) -> None:
    """The second auditor found the liar's work right, and an honest first one lost its seat for it."""
    world, pair = pair_of_jurors(5, subjects_lie=True, seed=seed)
    records = records_of(world)
    removed = {peer for record in records if isinstance(record, Members) for peer in record.removed}
    assert "r1.0" in [record.id for record in records if isinstance(record, Revoke)] and removed <= pair
    assert world.history().t == STEPS and wrong_states(world).keys() <= pair
