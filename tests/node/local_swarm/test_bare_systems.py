"""Commands of volunteers and leaders on systems that lack what Linux has: each feature is switched off, and
all together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.node.lifecycle import gate_file
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import EventTail
from anabranch.observe.events import Event, PeerJoined, PeerRemoved, Step
from support.bare_python import FEATURES
from support.local_swarms import PATIENCE_S, Swarm, check_exact, created, history_of, small_run, swarm_of
from support.unhurried_peer import run_unhurried_peer

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
#: Fleet of bare processes, each of which imports torch anew.
ONE_RELAY = {"pipeline__stages": 1, "fleet__relays_per_stage": [1]}


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
#: The same for a local swarm. Python's own fork server needs signals, so none has fork without them.
SWARM_CASES = [
    pytest.param([each, "fork"] if each == "signals" else [each], id=each, marks=pytest.mark.soak)
    for each in FEATURES
]


@pytest.mark.costly
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
    with swarm_of(
        directory, run, supervisor, leader_only=True, target=run_unhurried_peer
    ) as swarm:
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
    # The run goes on while a process is started: one step of each process is verified.
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
    with contextlib.ExitStack() as stack:
        swarm = stack.enter_context(
            swarm_of(directory, run, supervisor, leader_only=True, target=run_unhurried_peer)
        )
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


@pytest.mark.soak  # the other tests hold each part of it, and the tests of resumption its rules
@pytest.mark.parametrize("features", [pytest.param([*FEATURES], id="all"), *CASES])
def test_a_leader_is_stopped_and_resumed_and_its_gate_is_changed_meanwhile(
    tmp_path: Path, texts: Path, features: list[str]
) -> None:
    """Leader, relay and the owner's commands are all bare. Ctrl+C at the leader ends the run in order, and
    the second leader's run begins where the first ended."""
    run = small_run(texts, run__steps=100_000, **ONE_RELAY, evaluation__every=0)
    directory = created(tmp_path / "run", run)
    log = tmp_path / "leader.txt"

    def steps() -> list[int]:
        return [event.t for event in events_of(directory.events) if isinstance(event, Step)]

    def goes_on(since: int) -> bool:
        return len(steps()) >= since + 3

    ended = 0
    for _ in range(2):
        (directory.path / "tickets.json").unlink(missing_ok=True)
        with bare(log, features, "resume", str(directory.path), "--no-page") as leader, ExitStack() as relays:
            wait(lambda: (directory.path / "tickets.json").exists(), leader, log)
            ticket = json.loads((directory.path / "tickets.json").read_text("utf-8"))["relay"]
            home = directory.peer("relay-1")
            words = ["join", ticket, "--home", str(home), "--stage", "1", "--once"]
            relays.enter_context(bare(home / "output.txt", features, *words))
            with bare(tmp_path / "owner.txt", features, "ticket", "new", str(directory.path)) as owner:
                assert owner.wait(PATIENCE_S) == 0, (tmp_path / "owner.txt").read_text()
            wait(partial(goes_on, ended), leader, log)
            leader.send_signal(signal.SIGINT)
            assert leader.wait(PATIENCE_S) == 0, log.read_text()
        ended = steps()[-1]
    assert steps() == list(range(1, ended + 1))
    issued = [ticket.name for ticket in gate_file.read(directory.path).tickets]
    assert len(issued) == len(set(issued)) >= 4, "the leader's and two of the owner's"
    report = verify(directory.path, rounds=(ended, ended))
    assert report.holds and report.steps, "\n".join(report.lines())


@pytest.mark.costly
@pytest.mark.parametrize("features", [pytest.param([*FEATURES], id="all"), *SWARM_CASES])
def test_a_local_swarm_trains_and_is_verified(tmp_path: Path, texts: Path, features: list[str]) -> None:
    """As `train` does: all processes of the swarm are started anew, and as bare as the first one."""
    run = small_run(texts, run__steps=4, **ONE_RELAY)
    directory = created(tmp_path / "run", run)
    log = tmp_path / "output.txt"
    with bare(log, features, "resume", str(directory.path), "--local", "--no-page") as process:
        assert process.wait(3 * PATIENCE_S) == 0, log.read_text()
    check_exact(directory, 4)


def wait(reached: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 3 * PATIENCE_S
    while not reached():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def events_of(path: Path) -> list[Event]:
    return list(EventTail(path).read()) if path.exists() else []


def works(swarm: Swarm, name: str) -> bool:
    return first_step_of(swarm, name) > 0


def first_step_of(swarm: Swarm, name: str) -> int:
    """First step of which the peer `name` owns units since it joined, among the events so far; 0: none."""
    joined = {event.name: at for at, event in enumerate(swarm.seen) if isinstance(event, PeerJoined)}
    later = [event for event in swarm.seen[joined.get(name, len(swarm.seen)) :] if isinstance(event, Step)]
    its = [step for step in later for units in step.owners.values() if swarm.peer_id(name) in units.values()]
    return min((step.t for step in its), default=0)
