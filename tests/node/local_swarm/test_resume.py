"""A run that was stopped, or whose leader died, goes on exactly where it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.config import load_run_file, render_run_file, with_changes
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Checkpoint, Note, PeerJoined, Rollback, RunStarted, Step
from support.crash_points import PLAN_FILE
from support.local_swarms import PATIENCE_S, check_exact, created, history_of, small_run, steps_of, swarm_of


def children_of(pid: int) -> set[int]:
    """All living descendants of a process (Linux)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    front = {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front} - found
        found |= front
    return found


def alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())[0] != "Z"
    except OSError:
        return False


@pytest.mark.costly
def test_ctrl_c_and_resume_from_the_command_line(
    tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGINT to `anabranch train` ends the swarm after its step; `resume --local` takes the rest."""
    run = small_run(
        texts,
        run__steps=24,
        evaluation__every=12,
        checkpoint__every=1000,
        batch__microbatches=4,
        pipeline__stages=1,
        fleet__relays_per_stage=[2],
    )
    file, path = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(render_run_file(run))
    command = [sys.executable, "-m", "anabranch.cli.main"]
    train = subprocess.Popen(
        [*command, "train", str(file), "--run-dir", str(path), "--no-verify"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert train.stdout is not None
    for line in train.stdout:
        if line.startswith("step "):
            break
    swarm = children_of(train.pid)
    assert len(swarm) >= 4
    train.send_signal(signal.SIGINT)
    rest = train.stdout.read()
    assert train.wait(PATIENCE_S) == 0
    assert "stopping after the present step" in rest
    assert rest.splitlines()[-2:] == [
        f"continue with: anabranch resume {path} --local",
        f"run directory: {path}",
    ]
    until = time.monotonic() + 30
    while any(alive(pid) for pid in swarm):
        assert time.monotonic() < until, "a process outlived the swarm"
        time.sleep(0.02)
    directory = RunDirectory.open(path)
    stopped_at = history_of(directory).t
    assert 0 < stopped_at < 24
    # Stopped cleanly, the last step is on disk: nothing has to be taken again.
    assert directory.latest_checkpoint() == stopped_at

    again = ["resume", str(path), "--local", "--no-verify"]
    assert main(again) == 0
    assert f"from step {stopped_at}" in capfd.readouterr().out
    check_exact(directory, steps=24)
    assert not events_of(directory.events, Rollback)
    assert steps_of(list(events_of(directory.events, Step))) == list(range(1, 25))
    # A run that is complete is left alone.
    capfd.readouterr()
    assert main(again) == 2
    error = capfd.readouterr().err
    assert "nothing to resume" in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def once_broken_off(
    tmp_path_factory: pytest.TempPathFactory, texts: Path, supervisor: Supervisor
) -> RunDirectory:
    """A run of 8 steps whose leader was killed in the seventh, with checkpoints of steps 2 and 4 at least."""
    run = small_run(texts, run__steps=8, checkpoint__keep=3)
    directory = created(tmp_path_factory.mktemp("broken-off") / "run", run)
    plan = {"at": "prepared", "iteration": 7}
    with swarm_of(directory, run, supervisor, {"data-0": plan}) as swarm:
        swarm.read(lambda: False)
        assert swarm.leader.status == -signal.SIGKILL
    assert history_of(directory).t >= 6
    assert directory.checkpoints()[:2] == [2, 4]
    return directory


@pytest.fixture
def broken_off(tmp_path: Path, once_broken_off: RunDirectory) -> RunDirectory:
    """Copy of `once_broken_off` for one test, without the plan that killed the leader."""
    shutil.copytree(once_broken_off.path, tmp_path / "run")
    copy = RunDirectory.open(tmp_path / "run")
    (copy.peer("data-0") / PLAN_FILE).unlink()
    return copy


def resume(directory: RunDirectory, supervisor: Supervisor) -> list[object]:
    run = load_run_file(directory.run_file)
    with swarm_of(directory, run, supervisor) as swarm:
        events = swarm.to_the_end()
    check_exact(directory, run.run.steps)
    assert len(swarm.of(PeerJoined)) == 5
    return list(events)


@pytest.mark.costly
def test_a_killed_leader_is_replayed_from_its_checkpoint(
    broken_off: RunDirectory, supervisor: Supervisor
) -> None:
    before = history_of(broken_off)
    newest = broken_off.latest_checkpoint()
    events = resume(broken_off, supervisor)
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.from_iteration == newest
    if newest < before.t:
        assert [event.t for event in events if isinstance(event, Rollback)] == [newest]
    taken = [event.t for event in events if isinstance(event, Step)]
    assert taken == list(range(newest + 1, 9))
    after = history_of(broken_off)
    assert after.rolled_back == before.t - newest
    # Steps that were taken again are equal.
    again = {commit.t: commit for commit in after.commits}
    for commit in before.commits:
        assert again[commit.t].loss_sums == commit.loss_sums
        assert [s.digest for s in again[commit.t].stages] == [s.digest for s in commit.stages]


@pytest.mark.soak  # a leader that is killed once, above
def test_a_leader_killed_again_before_its_next_checkpoint(
    broken_off: RunDirectory, supervisor: Supervisor
) -> None:
    """The checkpoint that a run was once taken up from serves a second time."""
    for t in broken_off.checkpoints():
        if t > 4:
            shutil.rmtree(broken_off.checkpoint_path(t))
    run = load_run_file(broken_off.run_file)
    with swarm_of(broken_off, run, supervisor, {"data-0": {"at": "prepared", "iteration": 6}}) as swarm:
        swarm.read(lambda: False)
        assert swarm.leader.status == -signal.SIGKILL
    # All may have been PREPARED with the leader: then the record of step 6 may be on disk when it is killed.
    assert broken_off.latest_checkpoint() == 4 and history_of(broken_off).t in (5, 6)
    events = resume(broken_off, supervisor)
    assert [event.t for event in events if isinstance(event, Rollback)] == [4]
    assert next(event for event in events if isinstance(event, RunStarted)).from_iteration == 4
    assert [event.t for event in events if isinstance(event, Step)] == [5, 6, 7, 8]


@pytest.mark.costly
def test_a_torn_last_line(broken_off: RunDirectory, supervisor: Supervisor) -> None:
    """Power was lost while the last entry was written: it was never announced."""
    data = broken_off.log.read_bytes()
    broken_off.log.write_bytes(data[:-40])
    resume(broken_off, supervisor)


def test_a_damaged_checkpoint(broken_off: RunDirectory, supervisor: Supervisor) -> None:
    """The newest checkpoint cannot be read: the one before is used, and the user is told."""
    newest = broken_off.latest_checkpoint()
    file = broken_off.checkpoint_path(newest) / "stage-1.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    events = resume(broken_off, supervisor)
    earlier = [event.t for event in events if isinstance(event, Rollback)]
    assert earlier == [newest - 2]
    told = [event.text for event in events if isinstance(event, Note)]
    assert any("stage-1.safetensors" in text for text in told), told
    assert f"the run goes on from the checkpoint of step {newest - 2}" in told
    rewritten = {event.t for event in events if isinstance(event, Checkpoint)}
    assert newest in rewritten


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "removed", "cut"])
@pytest.mark.parametrize("local", [[], ["--local", "--no-verify"]])
def test_a_run_without_a_good_checkpoint_stops_and_says_why(
    broken_off: RunDirectory, damage: str, local: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Training does not begin again at step 1, and nothing is overwritten."""
    if damage == "flipped":
        for file in broken_off.checkpoints_path.glob("*/stage-1.safetensors"):
            flip(file)
    elif damage == "removed":
        shutil.rmtree(broken_off.checkpoints_path)
    else:
        lines = broken_off.log.read_bytes().splitlines(keepends=True)
        broken_off.log.write_bytes(b"".join(lines[:4]))
    log, left = broken_off.log.read_bytes(), broken_off.checkpoints()
    capfd.readouterr()
    assert main(["resume", str(broken_off.path), "--no-page", *local]) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error and "Nothing was changed" in error, error
    assert "no good checkpoint is left" in error
    assert damage != "cut" or ("entries of" in error and "are lost: it ends at step" in error)
    assert "from a copy" in error and "--run-dir NEW" in error
    assert broken_off.log.read_bytes() == log and broken_off.checkpoints() == left


def test_continuing_from_imported_weights(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """A trained model, exported for transformers, is where another run begins."""
    first = created(tmp_path / "first", small_run(texts))
    run = small_run(texts)
    with swarm_of(first, run, supervisor) as swarm:
        swarm.to_the_end()
    exported = tmp_path / "exported"
    assert main(["export", str(first.path), "--to", "hf", str(exported)]) == 0
    trained = swarm.of(Step)[-1].loss

    run = with_changes(
        small_run(texts, run__seed=4),
        {"model.initial_weights": str(exported), "data.tokenizer": str(exported / "tokenizer.json")},
    )
    second = created(tmp_path / "second", run)
    with swarm_of(second, run, supervisor) as swarm:
        swarm.to_the_end()
    check_exact(second, steps=4)
    begun = swarm.of(Step)[0].loss
    untrained = events_of(first.events, Step)[0].loss
    assert begun is not None and trained is not None and untrained is not None
    assert abs(begun - trained) < abs(begun - untrained)
