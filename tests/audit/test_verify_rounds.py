"""`verify` of a part of a run, and of rounds whose slots carry state by several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.errors import UserError
from anabranch.protocol.log.records import Commit
from support.audited_runs import change_stage, change_step, copy_of, make_run, small_run

ISLANDS: dict[str, Any] = {
    "pipeline__stages": 0, "fleet__relays_per_stage": (2,), "batch__microbatches": 4, "steps": 10,
    "round__slots": 2, "round__steps": 2, "round__start": 0.2, "checkpoint__every": 2,
}  # fmt: skip
CREWS = {**ISLANDS, "pipeline__stages": 2, "fleet__relays_per_stage": (2, 2), "wire__gradients": "int8"}
SPARSE = {"round__select": "largest", "round__unsent": "feedback", "round__late": "carry"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Two synchronous steps, then four rounds of two inner steps."""
    return make_run(tmp_path_factory.mktemp("rounds"), small_run(**ISLANDS), (2,))


def test_a_range_begins_at_the_checkpoint_before_it(
    plain: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = max(t for t in plain.checkpoints() if t < 5)
    report = verify(plain.path, rounds=(5, 6))
    assert report.holds and report.steps == 6 - begun and begun > 0
    assert main(["verify", str(plain.path), "--rounds", "5:6"]) == 0
    text = capsys.readouterr().out
    assert f"only iterations {begun + 1} to 6 were taken again" in text
    assert "replayed: synchronous steps, then rounds of 2 islands with 2 steps each; start = 0.2\n" in text


def test_a_range_names_the_first_record_that_differs(plain: RunDirectory, tmp_path: Path) -> None:
    copy = copy_of(plain, tmp_path)

    def spoil(commit: Commit) -> Commit:
        return msgspec.structs.replace(commit, loss_sums=(commit.loss_sums[0] + 1.0, *commit.loss_sums[1:]))

    change_step(copy, 5, spoil)
    report = verify(copy.path, rounds=(5, 6))
    assert not report.holds and "step 5" in report.first
    assert verify(copy.path, rounds=(3, 4)).holds


def test_a_loss_of_a_slot_that_does_not_count_is_found(tmp_path: Path) -> None:
    """Nobody computes it again, and it counts in the loss that the page and the event log show."""
    run = make_run(tmp_path, small_run(**{**ISLANDS, "round__slots": 4}), (2,))
    assert verify(run.path).holds
    idle = list[int]()

    def spoil(commit: Commit) -> Commit:
        owners = commit.stages[1].owners
        idle.extend(slot for slot, owner in enumerate(owners) if owner < 0)
        losses = (loss - 50.0 * (owner < 0) for loss, owner in zip(commit.loss_sums, owners, strict=True))
        return msgspec.structs.replace(commit, loss_sums=tuple(losses))

    change_step(run, 5, spoil)
    report = verify(run.path)
    assert len(idle) == 2 and any("step 5: has the loss of a slot" in each for each in report.problems)


def test_a_range_that_is_not_there_is_refused(plain: RunDirectory) -> None:
    with pytest.raises(UserError, match="has iterations 1 to 6"):
        verify(plain.path, rounds=(5, 9))


@pytest.mark.slow
def test_what_slots_carry_is_replayed_by_two_processes_and_from_where_it_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path, small_run(**ISLANDS, **SPARSE), (2,))
    assert verify(run.path, jobs=2).holds
    report = verify(run.path, rounds=(6, 6))
    assert report.holds and report.steps == 4  # from the checkpoint before the first round


def test_a_range_does_not_begin_at_a_checkpoint_of_another_step(plain: RunDirectory, tmp_path: Path) -> None:
    """A checkpoint whose files say that they are of a later step would leave nothing to take again."""
    copy = copy_of(plain, tmp_path)
    begun = max(t for t in copy.checkpoints() if t < 5)
    change_stage(copy, begun, 0, lambda tensors, metadata: metadata.update(t="99"))
    with pytest.raises(UserError, match="stage 0 has the state after step 99 and"):
        verify(copy.path, rounds=(5, 6))


@pytest.mark.costly
@pytest.mark.slow
def test_rounds_of_crews_are_replayed_by_two_processes(tmp_path: Path) -> None:
    """Each stage carries its own part of a slot."""
    run = make_run(tmp_path, small_run(**CREWS, round__first_moment="keep"), (2, 2))
    report = verify(run.path, jobs=2)
    assert report.holds and report.steps == 6
    copy = copy_of(run, tmp_path / "copies")

    def spoil(commit: Commit) -> Commit:
        return msgspec.structs.replace(commit, loss_sums=(commit.loss_sums[0], commit.loss_sums[1] + 1e-9))

    change_step(copy, 5, spoil)
    assert "step 5" in verify(copy.path).first
