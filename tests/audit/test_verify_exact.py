"""`verify` of exact runs: a clean one has zero bits that differ, and whatever is changed is found."""

from __future__ import annotations

import math
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from anabranch.audit.parallel_replay import ParallelStepper, _receive, _work
from anabranch.audit.replay import replay
from anabranch.audit.verification_report import Report
from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import AnyRecord, Commit, Members, Rollback, StageCommit, Witness
from anabranch.sim.kernel.swarm_world import World
from support.audited_runs import change_step, copy_of, flip_bits, make_run, rewrite_log, small_run
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment

NORM = "weights/model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Six steps; checkpoints after 3 and 6, evaluations after 0, 3 and 6."""
    return make_run(tmp_path_factory.mktemp("exact"), small_run())


@pytest.fixture
def copy(clean: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(clean, tmp_path)


def kinds_that_differ(report: Report) -> set[str]:
    return {kind for kind, tally in report.counts.items() if tally.differ}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_a_clean_run_has_zero_bits_that_differ(architecture: str, tmp_path: Path) -> None:
    report = verify(make_run(tmp_path, small_run(architecture), seed=3).path)
    assert report.holds and report.promise == "bits" and not report.problems and not report.notes
    counts = {kind: tally.compared for kind, tally in report.counts.items()}
    assert counts["batches"] == 6 and counts["losses"] == 30 and counts["evaluations"] == 6
    assert counts["digests"] == 18 and counts["fingerprints"] == 21
    assert counts["moments"] == 2 * counts["weights"] > 0
    assert report.verdict() == (
        "verify: 6 steps, 5 microbatches each, 0 peers removed, 0 rollbacks: zero bits differ"
    )


def test_flipped_bits_of_a_checkpoint_are_counted(copy: RunDirectory) -> None:
    flip_bits(copy, 6, 1, NORM, [(0, 0), (0, 22), (5, 31)], rehash=True)
    flip_bits(copy, 3, 2, "exp_avg/model.layers.1.mlp.up_proj.weight", [(7, 3)], rehash=True)
    report = verify(copy.path)
    weights, moments = report.counts["weights"], report.counts["moments"]
    assert (weights.differ, weights.bits) == (2, 3)
    assert weights.first == f"checkpoint of step 6, stage 1, {NORM}"
    assert (moments.differ, moments.bits) == (1, 1)
    assert kinds_that_differ(report) == {"weights", "moments"}
    apart = {(d.t, d.of) for d in report.distances if d.distance > 0}
    assert apart == {(6, NORM), (3, "exp_avg/model.layers.1.mlp.up_proj.weight")}
    assert not report.holds
    assert "3 values differ in 4 bits, first at checkpoint of step 3, stage 2" in report.verdict()


def test_a_checkpoint_whose_hash_is_wrong_is_still_compared(copy: RunDirectory) -> None:
    flip_bits(copy, 6, 1, NORM, [(2, 9)], rehash=False)
    report = verify(copy.path)
    assert (report.counts["weights"].differ, report.counts["weights"].bits) == (1, 1)
    assert any("does not have the hash in its manifest" in problem for problem in report.problems)


def test_one_loss_changed_in_the_log_is_found(copy: RunDirectory) -> None:
    def nudge(commit: Commit) -> Commit:
        losses = list(commit.loss_sums)
        losses[2] = math.nextafter(losses[2], math.inf)
        return msgspec.structs.replace(commit, loss_sums=tuple(losses))

    change_step(copy, 4, nudge)
    report = verify(copy.path)
    assert kinds_that_differ(report) == {"losses"} and not report.problems
    losses = report.counts["losses"]
    assert losses.differ == 1 and losses.bits >= 1 and losses.first == "step 4, microbatch 2"
    assert not report.holds


def of_stage(number: int, **changes: Any) -> Callable[[Commit], Commit]:
    def change(commit: Commit) -> Commit:
        stages = list(commit.stages)
        stages[number] = msgspec.structs.replace(stages[number], **changes)
        return msgspec.structs.replace(commit, stages=tuple(stages))

    return change


def with_square(commit: Commit) -> Commit:
    name, value = next(iter(commit.stages[1].squares.items()))
    return of_stage(1, squares={**commit.stages[1].squares, name: value * 2})(commit)


def with_evaluation(commit: Commit) -> Commit:
    evaluation = commit.evaluation
    assert evaluation is not None
    changed = msgspec.structs.replace(evaluation, loss_sums=(1.0, *evaluation.loss_sums[1:]))
    return msgspec.structs.replace(commit, evaluation=changed)


def replaced(**changes: Any) -> Callable[[Commit], Commit]:
    return lambda commit: msgspec.structs.replace(commit, **changes)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("change", "kinds", "problem"),
    [
        (replaced(manifest="0" * 64), {"batches"}, ""),
        (replaced(norm=1.0), {"schedule"}, ""),
        (replaced(clip_factor=0.5), {"schedule"}, ""),
        (replaced(learning_rate=1e-3), {"schedule"}, ""),
        (replaced(bias_correction2=0.5), {"schedule"}, ""),
        (replaced(tokens=7), {"schedule"}, ""),
        (replaced(adam_step=9), {"schedule"}, "Adam's counter is 9, not 4"),
        (replaced(epoch=2), set(), "epoch 2, not 1"),
        (replaced(run="other"), set(), "is of run other"),
        (replaced(term=5), set(), "says term 5"),
        (with_square, {"squares", "schedule"}, ""),
        (with_evaluation, {"evaluations"}, ""),
        (of_stage(2, digest="ff"), {"digests"}, ""),
        (of_stage(2, fingerprint_before="ff"), {"fingerprints"}, ""),
    ],
)
def test_whatever_the_log_says_otherwise_is_found(
    copy: RunDirectory, change: Callable[[Commit], Commit], kinds: set[str], problem: str
) -> None:
    change_step(copy, 4, change)
    report = verify(copy.path)
    assert kinds_that_differ(report) == kinds
    assert not report.holds
    assert any(problem in found and "step 4" in found for found in report.problems) or not problem


def test_steps_out_of_order_are_refused(copy: RunDirectory) -> None:
    change_step(copy, 4, replaced(t=5))
    with pytest.raises(UserError, match="step 5: does not follow step 3"):
        verify(copy.path)


def with_owner(stage: int, change: Callable[[StageCommit], dict[str, Any]]) -> Callable[[Commit], Commit]:
    return lambda commit: of_stage(stage, **change(commit.stages[stage]))(commit)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_owner(1, lambda s: {"owners": s.owners[:-1]}), "4 owners for 5 units"),
        (with_owner(0, lambda s: {"owners": (*s.owners, 0)}), "11 owners for 10 units"),
        (with_owner(1, lambda s: {"owners": (9, *s.owners[1:])}), "unit 0 belongs to none of the 2 members"),
        (with_owner(1, lambda s: {"owners": (-1, *s.owners[1:])}), "unit 0 belongs to none"),
        (with_owner(2, lambda s: {"members": (s.members[0], "r9.9")}), "r9.9 was no active member"),
        (with_owner(2, lambda s: {"members": (s.members[0], "r1.0")}), "r1.0 was no active member"),
        (with_owner(2, lambda s: {"members": (s.members[0],) * 2}), "a member is named twice"),
        (with_owner(2, lambda s: {"classes": (s.classes[0], "x")}), "joined with another numerics class"),
        (with_owner(2, lambda s: {"classes": s.classes[:1]}), "a numerics class per member"),
    ],
)
def test_a_cover_that_does_not_count_each_unit_once_is_found(
    copy: RunDirectory, change: Callable[[Commit], Commit], problem: str
) -> None:
    change_step(copy, 4, change)
    report = verify(copy.path)
    assert any("step 4, stage" in found and problem in found for found in report.problems), report.problems
    assert not report.holds
    assert report.verdict().endswith(("1 problem", f"{len(report.problems)} problems"))


def test_a_removed_owner_in_the_log_is_found(copy: RunDirectory) -> None:
    """A member that the log removed before step 4 cannot own a unit of step 5."""

    def remove(records: list[AnyRecord]) -> list[AnyRecord]:
        at = next(i for i, r in enumerate(records) if isinstance(r, Commit) and r.t == 4)
        number = max(getattr(record, "number", 0) for record in records[:at])
        return [*records[:at], Members(number + 1, removed={"r1.0": "gone"}), *records[at:]]

    rewrite_log(copy, remove)
    report = verify(copy.path)
    # Step 4 may still have it: its reduce was ready before the removal.
    assert not [p for p in report.problems if "step 4" in p]
    assert [p for p in report.problems if "step 5, stage 1: r1.0 was no active member" in p]
    assert report.removals == 1


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "moment",
    [faults.added_in_mid_backward(3), faults.ended(tasks.Assemble, 3), faults.chosen(3)],
    ids=["in mid-backward", "prepared", "chosen"],
)
def test_a_peer_that_dies_changes_no_bit(moment: Moment, tmp_path: Path) -> None:
    planned: list[Fault] = []

    def crash(world: World) -> None:
        planned.append(Fault(world, ("r1.0", "r1.1", "r1.2"), moment, faults.kill()))

    run = make_run(tmp_path, small_run(), replicas=(3, 2), seed=5, spoil=crash)
    assert planned[0].delivered
    report = verify(run.path)
    assert report.holds, report.problems
    assert report.removals == 1 and "1 peer removed" in report.verdict()


def test_steps_taken_again_after_a_rollback_verify(copy: RunDirectory) -> None:
    def roll_back(records: list[AnyRecord]) -> list[AnyRecord]:
        commits = [(i, r) for i, r in enumerate(records) if isinstance(r, Commit)]
        end, _ = commits[-1]
        again = [r for _, r in commits if r.t > 3]
        state = tuple(stage.fingerprint_before for stage in again[0].stages)
        return [*records[: end + 1], Rollback(3, 3, "taken up", state), *again, *records[end + 1 :]]

    rewrite_log(copy, roll_back)
    report = verify(copy.path)
    # The checkpoint of step 3 follows from C_3, which the rollback replaced as the base.
    assert (report.rollbacks, report.rolled_back, report.steps) == (1, 3, 6)
    assert report.holds, report.problems
    assert "1 rollback:" in report.verdict()


def test_a_rollback_to_another_state_is_found(copy: RunDirectory) -> None:
    def roll_back(records: list[AnyRecord]) -> list[AnyRecord]:
        at = next(i for i, r in enumerate(records) if isinstance(r, Commit) and r.t == 4)
        return [*records[: at + 1], Rollback(3, 2, "taken up", ("x", "y", "z")), *records[at:]]

    rewrite_log(copy, roll_back)
    problems = verify(copy.path).problems
    assert any("another number of Adam's steps" in problem for problem in problems)
    assert any("the state is not the one" in problem for problem in problems)


def test_a_skipped_step_is_replayed_with_its_witness(tmp_path: Path) -> None:
    # The first step sends the weights out of range, so every later one is skipped; three in a row end it.
    run = small_run(optimizer__lr=1e30, optimizer__warmup_steps=0, optimizer__min_lr_ratio=1.0)
    directory = make_run(tmp_path, run)
    report = verify(directory.path)
    assert report.holds, (report.problems, report.first)
    assert (report.steps, report.skipped) == (4, 3) and "3 skipped" in report.verdict()

    def accuse(commit: Commit) -> Commit:
        assert commit.witness is not None
        return msgspec.structs.replace(
            commit, witness=msgspec.structs.replace(commit.witness, stage=1, tensor="nothing")
        )

    change_step(directory, 3, accuse)
    assert any("step 3 was skipped for nothing" in problem for problem in verify(directory.path).problems)


def test_a_skip_without_cause_is_found(copy: RunDirectory) -> None:
    def skip(commit: Commit) -> Commit:
        return msgspec.structs.replace(
            commit,
            verdict="skip",
            loss_sums=(),
            stages=(),
            adam_step=3,
            witness=Witness("r1.0", 1, 0, "activation"),
        )

    change_step(copy, 4, skip)
    report = verify(copy.path)
    assert any("but here that is finite" in problem for problem in report.problems)
    assert not report.holds


@pytest.mark.costly
def test_sharing_the_microbatches_changes_nothing(copy: RunDirectory) -> None:
    flip_bits(copy, 3, 1, NORM, [(1, 4)], rehash=True)  # so that there is something to agree about
    alone = verify(copy.path).as_dict()
    assert verify(copy.path, jobs=2).as_dict() == alone
    assert alone["compared"]["weights"]["bits"] == 1


@pytest.mark.costly
def test_workers_follow_a_skipped_step(tmp_path: Path) -> None:
    run = small_run(optimizer__lr=1e30, optimizer__warmup_steps=0, optimizer__min_lr_ratio=1.0)
    directory = make_run(tmp_path, run)
    report = verify(directory.path, jobs=3)
    assert report.holds and report.skipped == 3


@pytest.mark.costly
def test_of_another_class_parity_is_promised(tmp_path: Path) -> None:
    directory = make_run(tmp_path, small_run(run__numerics="mixed"), logged_class="another")
    report = verify(directory.path)
    assert report.promise == "parity" and report.holds and report.classes == ("another",)
    assert all(distance.distance == 0 and distance.bound is None for distance in report.distances)
    assert "replicas in parity" in report.verdict()
    # Bits of a single process are not promised: here, that a loss is this machine's. A cover is.
    change_step(directory, 2, replaced(loss_sums=(30.0, 31.0, 32.0, 33.0, 34.0)))
    report = verify(directory.path)
    assert report.holds and {d.of for d in report.distances if d.distance} == {"losses"}
    change_step(directory, 2, with_owner(1, lambda s: {"owners": (9, *s.owners[1:])}))
    assert not verify(directory.path).holds


def in_class(peer: str, name: str) -> Callable[[AnyRecord], AnyRecord]:
    """Say of a peer that it is of another class, where it joins and in every commit."""

    def change(record: AnyRecord) -> AnyRecord:
        if isinstance(record, Members):
            joined = tuple(
                msgspec.structs.replace(m, numerics_class=name) if m.id == peer else m for m in record.joined
            )
            return msgspec.structs.replace(record, joined=joined)
        if isinstance(record, Commit):
            stages = tuple(
                msgspec.structs.replace(
                    s,
                    classes=tuple(
                        name if m == peer else c for m, c in zip(s.members, s.classes, strict=True)
                    ),
                )
                for s in record.stages
            )
            return msgspec.structs.replace(record, stages=stages)
        return record

    return change


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("numerics", ["mixed", "strict"])
def test_owners_of_several_classes_are_named(numerics: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path, small_run(run__numerics=numerics))
    change = in_class("r1.0", "another")
    rewrite_log(directory, lambda records: [change(record) for record in records])
    report = verify(directory.path)
    assert report.promise == "parity" and set(report.classes) == {"another", report.own_class}
    assert report.holds == (numerics == "mixed")
    strict = [problem for problem in report.problems if "run.numerics is strict" in problem]
    assert len(strict) == len(report.problems) == (numerics == "strict")


def test_a_worker_that_ends_is_told() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(UserError, match="a worker process of verify ended unexpectedly"):
        _receive(here)
    reference = SimpleNamespace(slots={}, late={}, is_round=lambda t: True)
    stepper = ParallelStepper(cast(Any, reference), 2, [here])
    with pytest.raises(UserError, match="a worker process of verify ended unexpectedly"):
        stepper.witnesses(1, 1)  # the command had ended here without a word


def test_a_worker_whose_first_process_has_ended_ends_without_a_traceback(
    copy: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.audit.parallel_replay.signal.signal", lambda *_: None)
    here, there = multiprocessing.Pipe()
    here.close()
    _work(str(copy.path), 1, 2, there)


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_left_out(
    copy: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_a_while(*args: Any) -> None:
        shutil.rmtree(copy.checkpoint_path(3))
        replay(*args)

    monkeypatch.setattr("anabranch.audit.verify.replay", after_a_while)
    report = verify(copy.path)
    assert report.holds and report.steps == 6
    assert any("the checkpoint of step 3 was deleted meanwhile" in note for note in report.notes)


def test_steps_after_the_newest_checkpoint_are_held_against_the_log(copy: RunDirectory) -> None:
    lines = copy.log.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"t":5' in line)
    copy.log.write_bytes(b"".join(lines[: at + 1]) + lines[at + 1][:40])
    for path in copy.checkpoint_path(6).iterdir():
        path.unlink()
    copy.checkpoint_path(6).rmdir()
    report = verify(copy.path)
    assert report.holds and report.steps == 5
    assert any("newest checkpoint is of step 3" in note for note in report.notes)
    assert any("cut off by a crash (40 bytes)" in note for note in report.notes)


def test_a_checkpoint_beyond_the_log_is_found(copy: RunDirectory) -> None:
    lines = copy.log.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"t":5' in line)
    copy.log.write_bytes(b"".join(lines[: at + 1]))
    report = verify(copy.path)
    assert report.problems == ["the checkpoint of step 6 is beyond the log, which ends at step 5"]


def test_another_run_file_than_the_logs_is_found(copy: RunDirectory) -> None:
    text = copy.run_file.read_text()
    copy.run_file.write_text(text.replace("lr = 0.01", "lr = 0.02"))
    report = verify(copy.path)
    assert "the run file has another optimizer.lr than the log's genesis record" in report.problems
    assert report.counts["schedule"].first == "step 1, learning rate"
