"""A volunteer's disk keeps its stage's state: a machine that comes back to a run which stood still fetches
none of it, and the run's stop and resumption is such a time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anabranch.node.lifecycle import control_file
from anabranch.node.lifecycle.join import STATES
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Controlled, PeerJoined, Step
from support.local_swarms import PATIENCE_S, check_exact, created, small_run, swarm_of

pytestmark = pytest.mark.slow

STEPS = 40
USED = "is on this machine's disk: not fetched"


@pytest.mark.soak  # the test below, and swarm/state_recovery/test_kept_states.py
def test_a_machine_that_is_back_before_the_next_step_loads_its_state_from_its_disk(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=STEPS, fleet__relays_per_stage=[2, 1])
    directory = created(tmp_path / "run", run)
    home = directory.peer("relay-1.0")
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        words = ["--stage", "1", "--cache", "1"]
        for name in ("relay-1.0", "relay-1.1"):
            swarm.join(name, swarm.ticket(), words)
        swarm.join("relay-2.0", swarm.ticket(), ["--stage", "2", "--cache", "0"])
        swarm.until(lambda _: len(swarm.of(Step)) >= 2 and swarm.serves("relay-1.0"))
        control_file.request(directory.path, "pause")
        swarm.until(lambda _: bool(swarm.of(Controlled)))
        last = swarm.of(Controlled)[-1].t
        swarm.until(lambda _: swarm.of(Step)[-1].t >= last)
        former = swarm.processes["relay-1.0"]
        former.signal(signal.SIGINT)
        assert former.wait(PATIENCE_S)
        [file] = (home / STATES).iterdir()
        assert file.name.endswith("-1.state") and 0 < file.stat().st_size < 1e9
        assert "is kept on this machine's disk" in (home / "events.jsonl").read_text("utf-8")
        assert not (directory.peer("relay-2.0") / STATES).exists()
        before = len(swarm.seen)
        swarm.join("relay-1.0", swarm.ticket(), words)
        swarm.until(lambda _: any(isinstance(event, PeerJoined) for event in swarm.seen[before:]))
        swarm.until(lambda _: USED in (home / "events.jsonl").read_text("utf-8"))
        control_file.request(directory.path, "continue")
        swarm.until(lambda _: swarm.serves("relay-1.0"))
        swarm.to_the_end()
    check_exact(directory, STEPS)
    assert not list((home / STATES).iterdir()), "the run is over: the disk is free again"


def test_after_a_stop_and_a_resumption_nobody_fetches_what_all_have(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, run__steps=100_000, fleet__relays_per_stage=[1, 1], evaluation__every=0)
    directory = created(tmp_path / "run", run)
    names = ("relay-1.0", "relay-2.0")
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        for part in (1, 2):
            before = len(swarm.of(Step))
            for name in names:
                swarm.join(name, swarm.ticket(), ["--stage", name[6], "--cache", "1"])
            swarm.until(lambda _: len(swarm.of(Step)) >= before + 2)  # noqa: B023
            swarm.stop()
            for process in swarm.processes.values():
                assert process.wait(PATIENCE_S)
            if part == 1:
                swarm.read(lambda: False)
                swarm.stopping = False
                swarm.start_leader()
    for name in names:
        assert USED in (directory.peer(name) / "events.jsonl").read_text("utf-8")
