"""Logs of rounds whose plans lie: reported, never raised, nothing allocated for them."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import msgspec
import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Forward
from anabranch.protocol.log.records import Commit, Slot
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.train.reference import reference
from support.audited_runs import change_step, copy_of, make_run, small_run


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Two synchronous steps, then two rounds of two inner steps."""
    run = small_run(
        pipeline__stages=0, fleet__relays_per_stage=(2,), batch__microbatches=4,
        round__slots=2, round__steps=2, round__start=0.34,
    )  # fmt: skip
    return make_run(tmp_path_factory.mktemp("rounds"), run, (2,))


def test_the_run_itself_holds(clean: RunDirectory) -> None:
    report = verify(clean.path)
    assert report.holds and report.steps == 4


@pytest.mark.parametrize(
    "plan",
    [
        msgspec.UNSET,
        (),
        (Slot(0, 2), Slot(0, 2), Slot(0, 2)),
        (Slot(0, 10**9), Slot(0, 2)),
        (Slot(0, 10**30), Slot(0, 2)),
        (Slot(10**30, 2), Slot(0, 2)),
        (Slot(-5, 2), Slot(0, 2)),
        (Slot(0, -2), Slot(0, 2)),
        (Slot(0, 0), Slot(0, 0)),
    ],
    ids=["none", "empty", "slots", "steps", "huge steps", "huge first", "first", "negative", "idle"],
)
@pytest.mark.parametrize("t", [2, 3])
def test_a_plan_that_no_leader_makes_is_told(
    clean: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: tuple[Slot, ...], t: int
) -> None:
    copy, take = copy_of(clean, tmp_path), reference.slot_tokens

    def guarded(batches: object, run: object, slot: int, first: int, steps: int) -> object:
        assert 0 <= first < 1000 and 0 <= steps < 1000, "memory for absurd inner steps"
        return take(batches, run, slot, first, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "slot_tokens", guarded)
    change_step(copy, t, lambda commit: msgspec.structs.replace(commit, slots=plan))
    with contextlib.suppress(UserError):
        assert not verify(copy.path).holds


def test_a_round_with_too_few_stages_is_told_not_raised(clean: RunDirectory, tmp_path: Path) -> None:
    copy = copy_of(clean, tmp_path)
    change_step(copy, 4, lambda commit: msgspec.structs.replace(commit, stages=commit.stages[:1]))
    assert any("step 4: does not have an entry per stage" in each for each in verify(copy.path).problems)


@pytest.mark.parametrize("t", [1, 4])
def test_a_plan_of_another_iteration_is_told(clean: RunDirectory, tmp_path: Path, t: int) -> None:
    """Before a synchronous step, and after the last round."""
    copy = copy_of(clean, tmp_path)

    def change(commit: Commit) -> Commit:
        return msgspec.structs.replace(commit, slots=(Slot(0, 2), Slot(0, 2)))

    change_step(copy, t, change)
    with contextlib.suppress(UserError):
        assert not verify(copy.path).holds


def test_another_class_compares_the_losses_of_a_round_without_a_slot(tmp_path: Path) -> None:
    run = small_run(
        pipeline__stages=0, fleet__relays_per_stage=(3,), batch__microbatches=6,
        round__slots=3, round__steps=2, round__start=0.34, steps=10,
    )  # fmt: skip

    def spoil(world: World) -> None:
        struck: list[str] = []

        def watch(node: Node, event: ev.Event) -> None:
            running = node.peer.ctx.tasks.running
            if not struck and running and isinstance(running.task, Forward) and running.task.t == 4:
                struck.append(node.id)
                world.crash(node.id)

        world.bookkeepers.append(watch)

    found = verify(make_run(tmp_path, run, (3,), spoil=spoil, logged_class="x" * 64).path).distances
    assert all(math.isfinite(each.distance) for each in found)
