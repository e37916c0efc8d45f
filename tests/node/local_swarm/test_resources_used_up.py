"""Descriptors or disk used up: an internal failure ends the process with a sentence and a report, or costs
only what is said; no process lives on as a zombie."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from anabranch.cli.support.restart import INTERNAL_FAILURE
from anabranch.node.driver.crash_report import REPORT, RESERVE
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Checkpoint, Note, RunStarted, Step
from support.local_swarms import PATIENCE_S, Swarm, check_exact, created, history_of, small_run, swarm_of
from support.small_disk import small_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are set by prlimit"),
]


def steps(swarm: Swarm) -> int:
    return max((event.t for event in swarm.of(Step)), default=0)


def failures(swarm: Swarm) -> list[str]:
    return [event.text for event in swarm.of(Note) if "cannot write the checkpoint" in event.text]


def limit_leader(swarm: Swarm, kind: int, soft: int) -> None:
    _, hard = resource.prlimit(swarm.leader.pid, kind)
    resource.prlimit(swarm.leader.pid, kind, (soft, hard))


def test_a_leader_without_descriptors_ends_with_a_report(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=200)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda _: steps(swarm) >= 1)
        assert (directory.path / RESERVE).stat().st_blocks > 0
        limit_leader(swarm, resource.RLIMIT_NOFILE, 3)
        assert swarm.leader.wait(PATIENCE_S), "the leader lives on"
        assert swarm.leader.status == INTERNAL_FAILURE, "`--restart` starts it again"
        words = swarm.leader.log.read_text()
    assert "this peer failed" in words and "Too many open files" in words, words
    assert "Too many open files" in (directory.path / REPORT).read_text()


@pytest.mark.soak  # the rules: checkpoint/test_full_disk.py, and test_failed_checkpoints.py in virtual time
def test_a_full_disk_when_a_checkpoint_is_due_costs_the_checkpoint(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=6, model__dim=64, model__ffn=256)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda _: bool(swarm.of(Checkpoint)))
        size = min(file.stat().st_size for file in directory.checkpoints_path.glob("*/stage-*"))
        assert size > 4 * max(directory.log.stat().st_size, directory.events.stat().st_size)
        limit_leader(swarm, resource.RLIMIT_FSIZE, size - 1)
        swarm.until(lambda _: bool(failures(swarm)) and steps(swarm) == 6)
        assert directory.checkpoints() == [swarm.of(Checkpoint)[0].t], "the last good checkpoint stays"
        limit_leader(swarm, resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        swarm.to_the_end()
    assert str(tmp_path) not in failures(swarm)[0]
    assert history_of(directory).t == 6 and directory.checkpoints()[-1] == 6, "with room it is written"
    assert not list(directory.checkpoints_path.glob(".unfinished-*"))
    check_exact(directory, 6)


def test_a_run_on_a_full_disk_is_stopped_by_its_user(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=200, model__dim=64, model__ffn=256)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda _: bool(swarm.of(Checkpoint)))
        size = min(file.stat().st_size for file in directory.checkpoints_path.glob("*/stage-*"))
        limit_leader(swarm, resource.RLIMIT_FSIZE, size - 1)
        swarm.stop()
        swarm.until(lambda _: bool(failures(swarm)))
        swarm.stop()
        assert swarm.leader.wait(PATIENCE_S), "Ctrl+C does not end it"
    assert directory.checkpoints() and not (directory.path / REPORT).exists()


@pytest.mark.costly
def test_a_disk_without_any_room(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """A leader that has nothing to write yet is stopped by Ctrl+C; one that cannot write its log ends, says
    what to do, and goes on from the same step once there is room."""
    run = small_run(texts, run__steps=16, checkpoint__every=4)
    with small_disk(tmp_path / "disk", 12 << 20) as disk:
        directory = created(disk.path / "run", run)
        with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
            disk.fill()
            swarm.stop()
            assert swarm.leader.wait(PATIENCE_S), "Ctrl+C does not end it"
        disk.free()
        with swarm_of(directory, run, supervisor) as swarm:
            swarm.until(lambda _: bool(swarm.of(Checkpoint)))
            disk.fill()
            assert swarm.leader.wait(PATIENCE_S), "the leader lives on"
            assert swarm.leader.status == INTERNAL_FAILURE, "`--restart` starts it again"
            lost = "log.jsonl cannot be written: No space left"
            assert lost in (directory.path / REPORT).read_text(), "the room for it was reserved"
        good = directory.checkpoints()
        disk.free()
        assert good, "the last good checkpoint stays"
        with swarm_of(directory, run, supervisor) as swarm:
            started = next(event for event in swarm.to_the_end() if isinstance(event, RunStarted))
            assert started.from_iteration == good[-1]
        check_exact(directory, 16)
