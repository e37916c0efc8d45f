"""Checks of log fields beside the steps: compared with the replay; nonsense is reported, never raised."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.protocol.log.records import (
    STRANDED,
    AnyRecord,
    Closing,
    Commit,
    Evaluation,
    Genesis,
    Members,
    Rollback,
    StageCommit,
    Witness,
)
from support.audited_runs import change_step, copy_of, make_run, rewrite_log, small_run


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Six steps; checkpoints after 3 and 6, evaluations after 0, 3 and 6."""
    return make_run(tmp_path_factory.mktemp("exact"), small_run())


@pytest.fixture
def copy(clean: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(clean, tmp_path)


def evaluated(change: Callable[[Evaluation], Evaluation]) -> Callable[[Commit], Commit]:
    def changed(commit: Commit) -> Commit:
        assert commit.evaluation is not None
        return msgspec.structs.replace(commit, evaluation=change(commit.evaluation))

    return changed


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "change",
    [
        lambda e: Evaluation(e.t, (), 0),
        lambda e: Evaluation(99, (1.0, 2.0), 48),
        lambda e: Evaluation(-1, (1.0, 2.0), 48),
        lambda e: Evaluation(e.t - 1, e.loss_sums, e.tokens),
    ],
    ids=["of no window", "of a step to come", "of no step", "of another step"],
)
def test_an_evaluation_that_would_be_compared_with_nothing_is_found(
    copy: RunDirectory, change: Callable[[Evaluation], Evaluation]
) -> None:
    change_step(copy, 4, evaluated(change))
    report = verify(copy.path)
    assert any("step 4" in problem and "evaluation" in problem for problem in report.problems)
    assert not report.holds


def test_a_closing_evaluation_of_another_step_is_found(copy: RunDirectory) -> None:
    def close(record: AnyRecord) -> AnyRecord:
        return Closing(9, record.evaluation) if isinstance(record, Closing) else record

    rewrite_log(copy, lambda records: [close(record) for record in records])
    report = verify(copy.path)
    assert any("closing" in problem for problem in report.problems)
    assert not report.holds


@pytest.mark.parametrize("index", [-1, 5, 10**9])
def test_a_witness_that_is_no_microbatch_is_found(copy: RunDirectory, index: int) -> None:
    def skip(commit: Commit) -> Commit:
        return msgspec.structs.replace(
            commit, verdict="skip", loss_sums=(), stages=(), adam_step=3,
            witness=Witness("r1.0", 1, index, "activation"),
        )  # fmt: skip

    change_step(copy, 4, skip)
    report = verify(copy.path)
    assert any(f"microbatch {index}" in problem and "step 4" in problem for problem in report.problems)
    assert not report.holds


def test_a_step_that_was_skipped_for_want_of_machines_for_slots_is_found(copy: RunDirectory) -> None:
    """Only a round has slots; the word for it let any step of a synchronous run be skipped unseen."""

    def skip(commit: Commit) -> Commit:
        return msgspec.structs.replace(
            commit, verdict="skip", loss_sums=(), stages=(), adam_step=5, norm=0.0, clip_factor=0.0,
            witness=Witness("r1.0", 1, 0, STRANDED),
        )  # fmt: skip

    change_step(copy, 6, skip)
    rewrite_log(copy, lambda records: [each for each in records if not isinstance(each, Closing)])
    shutil.rmtree(copy.checkpoint_path(6))
    report = verify(copy.path)
    assert any("step 6" in problem and "is no round" in problem for problem in report.problems)
    assert not report.holds


def test_a_skipped_step_that_counts_something_is_found(copy: RunDirectory) -> None:
    def skip(commit: Commit) -> Commit:
        return msgspec.structs.replace(
            commit, verdict="skip", adam_step=3, witness=Witness("r1.0", 1, 0, "activation")
        )

    change_step(copy, 4, skip)
    assert any("is skipped but has stages" in problem for problem in verify(copy.path).problems)


@pytest.mark.parametrize("t", [1, 4])
def test_a_step_with_too_few_stages_is_told_not_raised(copy: RunDirectory, t: int) -> None:
    change_step(copy, t, lambda commit: msgspec.structs.replace(commit, stages=commit.stages[:1]))
    report = verify(copy.path)
    assert any(f"step {t}" in problem and "an entry per stage" in problem for problem in report.problems)


def test_a_genesis_with_too_few_fingerprints_is_told_not_raised(copy: RunDirectory) -> None:
    def short(record: AnyRecord) -> AnyRecord:
        if isinstance(record, Genesis):
            return msgspec.structs.replace(record, fingerprints=record.fingerprints[:1])
        return record

    rewrite_log(copy, lambda records: [short(record) for record in records])
    assert any("a fingerprint of each stage" in problem for problem in verify(copy.path).problems)


def test_the_state_that_a_last_rollback_names_is_compared(copy: RunDirectory) -> None:
    """Nothing follows the rollback that would say otherwise."""
    for t in (3, 6):
        for path in copy.checkpoint_path(t).iterdir():
            path.unlink()
        copy.checkpoint_path(t).rmdir()
    true_state: list[tuple[str, ...]] = []

    def end(records: list[AnyRecord]) -> list[AnyRecord]:
        at = next(i for i, r in enumerate(records) if isinstance(r, Commit) and r.t == 5)
        following = next(r for r in records if isinstance(r, Commit) and r.t == 6)
        true_state.append(tuple(stage.fingerprint_before for stage in following.stages))
        return [*records[: at + 1], Rollback(5, 5, "taken up", ("x", *true_state[0][1:]))]

    rewrite_log(copy, end)
    report = verify(copy.path)
    assert report.counts["fingerprints"].differ == 1 and not report.holds
    assert report.counts["fingerprints"].first == "the state after step 5, stage 0"


def test_a_run_that_only_skipped_is_of_its_founders_class(tmp_path: Path) -> None:
    directory = make_run(tmp_path, small_run(run__numerics="mixed", steps=1), logged_class="another")

    def skip(commit: Commit) -> Commit:
        return msgspec.structs.replace(
            commit, verdict="skip", loss_sums=(), stages=(), adam_step=0,
            witness=Witness("r1.0", 1, 0, "activation"),
        )  # fmt: skip

    change_step(directory, 1, skip)
    assert verify(directory.path).promise == "parity"


def test_a_sum_of_squares_that_is_named_twice_is_found(copy: RunDirectory) -> None:
    """The norm in the log is that of all the numbers in it: one too many is not hidden by its equal."""

    def twice(commit: Commit) -> Commit:
        one, two = commit.stages[1], commit.stages[2]
        name, value = next(iter(two.squares.items()))
        changed: StageCommit = msgspec.structs.replace(one, squares={**one.squares, name: value})
        return msgspec.structs.replace(commit, stages=(commit.stages[0], changed, two))

    change_step(copy, 4, twice)
    report = verify(copy.path)
    assert any(
        "step 4, stage 2 has sums of squares of another stage" in problem for problem in report.problems
    )


@pytest.mark.parametrize("value", [-1.0, 1e308])
def test_a_sum_of_squares_that_no_gradient_has_is_told_not_raised(copy: RunDirectory, value: float) -> None:
    def spoil(commit: Commit) -> Commit:
        one = commit.stages[1]
        changed = msgspec.structs.replace(one, squares=dict.fromkeys(one.squares, value))
        return msgspec.structs.replace(commit, stages=(commit.stages[0], changed, commit.stages[2]))

    change_step(copy, 4, spoil)
    problems = verify(copy.path).problems
    assert any("step 4, stage 1: has sums of squares that no gradient has" in each for each in problems)


def test_a_genesis_of_a_billion_microbatches_costs_no_memory(copy: RunDirectory) -> None:
    def huge(record: AnyRecord) -> AnyRecord:
        return msgspec.structs.replace(record, microbatches=10**12) if isinstance(record, Genesis) else record

    rewrite_log(copy, lambda records: [huge(record) for record in records])
    with pytest.raises(UserError, match="the log is of a run with 2 and 1000000000000"):
        verify(copy.path)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("decay_steps", [0, 6])
def test_another_number_of_steps_is_named_where_the_learning_rate_follows_it(
    decay_steps: int, tmp_path: Path
) -> None:
    directory = make_run(tmp_path, small_run(optimizer__decay_steps=decay_steps))
    text = directory.run_file.read_text()
    assert "\nsteps = 6\n" in text
    directory.run_file.write_text(text.replace("\nsteps = 6\n", "\nsteps = 9\n"))
    report = verify(directory.path)
    named = "the run file has another run.steps than the log's genesis record"
    assert (named in report.problems) == (decay_steps == 0)
    assert (report.counts["schedule"].differ > 0) == (decay_steps == 0)
    assert report.holds == (decay_steps != 0)


def test_a_peer_that_left_came_back_and_left_again_within_an_iteration_took_part_in_it(
    copy: RunDirectory,
) -> None:
    def left_twice(records: list[AnyRecord]) -> list[AnyRecord]:
        last = max(k for k, record in enumerate(records) if isinstance(record, Commit))
        commit = records[last]
        assert isinstance(commit, Commit)
        peer = commit.stages[1].members[0]
        changes_of = [record for record in records if isinstance(record, Members)]
        joined = {member.id: member for record in changes_of for member in record.joined}
        number = changes_of[-1].number
        again = msgspec.structs.replace(joined[peer], incarnation=joined[peer].incarnation + 1)
        changes = [
            Members(number + 1, removed={peer: "killed"}),
            Members(number + 2, joined=(again,)),
            Members(number + 3, active_from={peer: commit.t + 1}),
            Members(number + 4, removed={peer: "killed once more"}),
        ]
        return [*records[:last], *changes, *records[last:]]

    rewrite_log(copy, left_twice)
    assert not verify(copy.path).problems
