"""Volunteers' commands on systems that lack what Linux has: each feature is switched off, one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerJoined, PeerRemoved, Step
from support.bare_python import FEATURES
from support.local_swarms import PATIENCE_S, Swarm, created, history_of, small_run, swarm_of

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]


@contextlib.contextmanager
def bare(log: Path, features: Sequence[str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command on a system without these features, which appends its output to `log`."""
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "support.bare_python", ",".join(features), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    with open(log, "ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


CASES = [pytest.param([each], id=each, marks=pytest.mark.soak) for each in FEATURES]


@pytest.mark.parametrize("features", [pytest.param([*FEATURES], id="all"), *CASES])
def test_a_volunteer_trains_leaves_in_order_and_comes_back_with_its_key(
    tmp_path: Path, texts: Path, supervisor: Supervisor, features: list[str]
) -> None:
    """Ctrl+C hands its work over: the peer leaves the run, and ends with status 0. Its second process has the
    same key, and a higher incarnation."""
    run = small_run(
        texts,
        run__steps=1000,
        run__numerics="strict",
        fleet__relays_per_stage=[1, 1],
        evaluation__every=0,
        checkpoint__every=10,
        checkpoint__keep=100,
    )
    directory = created(tmp_path / "run", run)
    log = directory.peer("bare") / "output.txt"
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        for stage in (1, 2):
            swarm.join(f"relay-{stage}", swarm.ticket(), ["--stage", str(stage)])
        words = ["join", swarm.ticket(), "--home", str(log.parent), "--stage", "1", "--once", "--nice", "1"]

        def takes_part(name: str) -> str:
            """Let a process of this name work and leave; returns its peer's id."""
            with bare(log, features, *words, "--name", name) as process:

                def served() -> bool:
                    assert process.poll() is None, log.read_text()
                    return works(swarm, name)

                swarm.until(lambda _: served())
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE_S) == 0, log.read_text()
            peer, before = swarm.peer_id(name), len(swarm.of(PeerRemoved))
            swarm.until(lambda _: peer in {event.subject for event in swarm.of(PeerRemoved)[before:]})
            return peer

        assert takes_part("bare-1") == takes_part("bare-2")
        swarm.stop()
        swarm.to_the_end()
    assert log.read_text().count("leaving the run") == 2
    # The run goes on while a process is started, for hundreds of steps: one of each process is verified.
    for name in ("bare-1", "bare-2"):
        t = first_step_of(swarm, name)
        report = verify(directory.path, rounds=(t, t))
        assert report.holds and report.steps, "\n".join(report.lines())


@pytest.mark.parametrize("features", [pytest.param([*FEATURES], id="all")])
def test_a_carrier_and_an_onlooker(
    tmp_path: Path, texts: Path, supervisor: Supervisor, features: list[str]
) -> None:
    """The log lists the carrier. The onlooker copies the event log, and no second one may write its file."""
    run = small_run(texts, run__steps=1000, fleet__relays_per_stage=[1, 1], evaluation__every=0)
    directory = created(tmp_path / "run", run)
    home = directory.peer("watch")
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm, contextlib.ExitStack() as stack:
        watch = ["watch", swarm.ticket("watch"), "--port", "0", "--home", str(home)]
        watching = stack.enter_context(bare(home / "output.txt", features, *watch))
        words = ["relay", swarm.ticket(), "--home", str(directory.peer("carrier"))]
        log = directory.peer("carrier") / "output.txt"
        carrying = stack.enter_context(bare(log, features, *words))
        for stage in (1, 2):
            swarm.join(f"relay-{stage}", swarm.ticket(), ["--stage", str(stage)])
        copy = home / "events.jsonl"

        def listed() -> bool:
            return directory.log.exists() and bool(history_of(directory).carriers)

        swarm.until(lambda _: listed() and copy.exists() and copy.stat().st_size > 0)
        copied = copy.read_bytes()
        assert directory.events.read_bytes().startswith(copied)
        with bare(home / "second.txt", features, *watch) as second:
            assert second.wait(PATIENCE_S) == 2
        assert "another process watches" in (home / "second.txt").read_text()
        for process in (watching, carrying):
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, (home / "output.txt").read_text() + log.read_text()


def works(swarm: Swarm, name: str) -> bool:
    return first_step_of(swarm, name) > 0


def first_step_of(swarm: Swarm, name: str) -> int:
    """First step of which the peer `name` owns units since it joined, among the events so far; 0: none."""
    joined = {event.name: at for at, event in enumerate(swarm.seen) if isinstance(event, PeerJoined)}
    later = [event for event in swarm.seen[joined.get(name, len(swarm.seen)) :] if isinstance(event, Step)]
    its = [step for step in later for units in step.owners.values() if swarm.peer_id(name) in units.values()]
    return min((step.t for step in its), default=0)
