"""Relays that die, freeze, leave and come while real processes train: every step is taken, none is bent."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig
from anabranch.launch.fleet import AGAIN
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import (
    FaultDelivered,
    PeerActive,
    PeerJoined,
    PeerRemoved,
    Repair,
    RunFinished,
    Step,
    Suspected,
)
from support.local_swarms import Swarm, check_exact, created, history_of, small_run, steps_of, swarm_of
from support.unhurried_peer import run_unhurried_peer

STEPS = 6


@pytest.fixture
def run(texts: Path) -> RunConfig:
    """Stage 1 has most of the work, so gradients wait there while others are computed."""
    return small_run(
        texts,
        run__steps=STEPS,
        batch__microbatches=16,
        pipeline__blocks_per_stage=[3, 1],
        fleet__minimum=2,
        checkpoint__every=100,
    )


def check_survived(swarm: Swarm, directory: RunDirectory, dead: str) -> None:
    """The run lost a peer, told of it, and took every step all the same."""
    events = swarm.to_the_end()
    assert steps_of(events) == list(range(1, STEPS + 1)), swarm.story()
    assert isinstance(events[-1], RunFinished)
    lost = swarm.peer_id(dead)
    removed = [event for event in swarm.of(PeerRemoved) if event.subject == lost]
    assert len(removed) == 1, swarm.story()
    after = events[events.index(removed[0]) :]
    assert steps_of(after), "no progress after the fault"
    for commit in history_of(directory).commits[STEPS - len(steps_of(after)) + 1 :]:
        assert all(lost not in stage.members for stage in commit.stages)
    check_exact(directory, STEPS)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("moment", "added"),
    [
        ("mid_backward", 1),
        pytest.param("mid_backward", 2, marks=pytest.mark.soak),
        pytest.param("mid_backward", 4, marks=pytest.mark.soak),
        ("reducing", 1),
        pytest.param("prepared", 1, marks=pytest.mark.soak),  # test_resume.py kills the leader then
    ],
)
def test_a_relay_that_kills_itself(
    tmp_path: Path, run: RunConfig, supervisor: Supervisor, moment: str, added: int
) -> None:
    """SIGKILL at a named event of the protocol: in mid-backward it has added `added` weight gradients and
    holds another microbatch whose gradient has arrived."""
    directory = created(tmp_path / "run", run)
    plan = {"at": moment, "iteration": 3, "added": added}
    with swarm_of(directory, run, supervisor, {"relay-1.0": plan}) as swarm:
        check_survived(swarm, directory, "relay-1.0")
        assert swarm.processes["relay-1.0"].status == -signal.SIGKILL
    own = events_of(directory.peer("relay-1.0") / "events.jsonl", FaultDelivered)
    assert len(own) == 1
    assert own[0].fault == "kill"
    struck, _, t = own[0].phase.rpartition(" of iteration ")
    assert struck == moment and int(t) >= 3
    if moment == "mid_backward":
        repairs = [event for event in swarm.of(Repair) if event.dead == own[0].peer]
        assert repairs, swarm.story()
        assert all(event.t == int(t) and event.stage == 1 for event in repairs)
        dead = next(i for i, event in enumerate(swarm.seen) if isinstance(event, PeerRemoved))
        assert steps_of(swarm.seen[:dead]) == list(range(1, int(t)))


@pytest.mark.soak  # as in test_islands.py, where every step is exact too
def test_a_relay_killed_from_outside(tmp_path: Path, run: RunConfig, supervisor: Supervisor) -> None:
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: isinstance(seen[-1], Step))
        swarm.processes["relay-2.1"].signal(signal.SIGKILL)
        check_survived(swarm, directory, "relay-2.1")


@pytest.mark.costly
def test_a_relay_that_freezes_and_wakes(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Frozen, it is suspected and then removed; woken, it learns that and ends with a clear word."""
    run = small_run(texts, run__steps=100_000, fleet__minimum=2, evaluation__every=0)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, target=run_unhurried_peer) as swarm:
        swarm.until(lambda seen: isinstance(seen[-1], Step))
        frozen = swarm.processes["relay-2.0"]
        frozen.signal(signal.SIGSTOP)
        swarm.until(lambda seen: isinstance(seen[-1], PeerRemoved))
        removed = swarm.of(PeerRemoved)[-1]
        assert removed.subject == swarm.peer_id("relay-2.0")
        assert any(event.subject == removed.subject for event in swarm.of(Suspected))
        reached = max(steps_of(swarm.seen))
        frozen.signal(signal.SIGCONT)
        assert frozen.wait(60), "it does not learn that it was removed"
        assert frozen.status == AGAIN
        words = frozen.log.read_text()
        assert "removed from the run" in words.splitlines()[-1], words
        assert "Traceback" not in words
        swarm.until(lambda seen: steps_of(seen)[-1] > reached + 3)
        swarm.stop()
        swarm.to_the_end()
    steps = history_of(directory).t
    check_exact(directory, steps)


def test_one_leaves_and_one_comes(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Ctrl+C at a relay: it leaves cleanly. A volunteer without a stage of its own is put where it is needed,
    and what it computes counts."""
    run = small_run(texts, run__steps=100_000, fleet__minimum=2, evaluation__every=0)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        swarm.until(lambda seen: isinstance(seen[-1], Step))
        leaving = swarm.processes["relay-2.0"]
        leaving.signal(signal.SIGINT)
        assert leaving.wait(30)
        assert leaving.status == 0
        assert "Traceback" not in leaving.log.read_text()
        swarm.until(lambda seen: isinstance(seen[-1], PeerRemoved))
        assert "left" in swarm.of(PeerRemoved)[-1].reason

        volunteer = swarm.join("ada", swarm.ticket(), ["--region", "London"])
        swarm.until(lambda seen: isinstance(seen[-1], PeerActive) and seen[-1].from_iteration > 1)
        joined = swarm.of(PeerJoined)[-1]
        assert (joined.name, joined.region, joined.stage) == ("ada", "London", 2)
        active = swarm.of(PeerActive)[-1]
        enough = [active.from_iteration + 3]
        swarm.until(lambda seen: steps_of(seen)[-1:] >= enough and swarm.owns("ada"))
        swarm.stop()
        swarm.to_the_end()
        assert volunteer.status == 0
    ada = swarm.peer_id("ada")
    owned = {
        commit.t: commit.stages[2].owners.count(commit.stages[2].members.index(ada))
        for commit in history_of(directory).commits
        if ada in commit.stages[2].members
    }
    assert min(owned) == active.from_iteration
    assert sum(owned.values()) > 0
    check_exact(directory, history_of(directory).t)
    assert "serving" in volunteer.log.read_text()


def test_nothing_outlives_the_supervisor(tmp_path: Path, texts: Path) -> None:
    """When the nursery goes, be it killed, its peers go."""
    run = small_run(texts, run__steps=100_000, evaluation__every=0)
    directory = created(tmp_path / "run", run)
    own = Supervisor(threads=1)
    with swarm_of(directory, run, own) as swarm:
        swarm.until(lambda seen: isinstance(seen[-1], Step))
        pids = [process.pid for process in swarm.processes.values()]
        swarm.processes["relay-1.0"].signal(signal.SIGSTOP)
        own.close()
    until = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
