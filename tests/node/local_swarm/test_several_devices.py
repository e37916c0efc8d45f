"""A relay whose stage lies on several devices, in a swarm of real processes. The devices are parts of the
host."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerActive, PeerRemoved, RunFinished
from support.local_swarms import check_exact, created, history_of, small_run, steps_of, swarm_of

SPLIT = ["--device", "cpu:0,cpu:1"]


@pytest.mark.soak  # train/stage/test_several_devices.py has its bits, test_kills.py real kills
def test_a_split_relay_is_killed_and_a_split_one_takes_its_place(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """A process of a stage has its blocks on two devices, its fellow all on one: they agree on every bit
    (I1, I3), and so does the replacement, which loads its state from the fellow (I4)."""
    run = small_run(
        texts,
        run__steps=100_000,
        fleet__minimum=2,
        batch__microbatches=16,
        checkpoint__every=100_000,
        evaluation__every=0,
    )
    directory = created(tmp_path / "run", run)
    plan = {"at": "mid_backward", "iteration": 3, "added": 1}
    with swarm_of(directory, run, supervisor, {"relay-1.0": plan}, leader_only=True) as swarm:
        for name, stage in (("relay-1.0", 1), ("relay-1.1", 1), ("relay-2.0", 2), ("relay-2.1", 2)):
            swarm.join(name, swarm.ticket(), ["--stage", str(stage), *(SPLIT if name == "relay-1.0" else [])])
        swarm.until(lambda seen: isinstance(seen[-1], PeerRemoved))
        killed = swarm.peer_id("relay-1.0")
        assert swarm.of(PeerRemoved)[-1].subject == killed
        assert swarm.processes["relay-1.0"].status == -signal.SIGKILL
        swarm.join("relay-1.2", swarm.ticket(), ["--stage", "1", *SPLIT])
        swarm.until(lambda seen: isinstance(seen[-1], PeerActive) and seen[-1].from_iteration > 1)
        active = swarm.of(PeerActive)[-1]
        replacement = swarm.peer_id("relay-1.2")
        assert active.subject == replacement
        swarm.until(lambda seen: steps_of(seen)[-1:] >= [active.from_iteration + 3])
        swarm.stop()
        events = swarm.to_the_end()
    history = history_of(directory)
    assert steps_of(events) == list(range(1, history.t + 1))
    assert isinstance(events[-1], RunFinished)
    took_part = [commit.t for commit in history.commits if replacement in commit.stages[1].members]
    assert took_part[0] == active.from_iteration
    check_exact(directory, history.t)
