"""A volunteer's `join` stays: after sleep, removal, stop and restart it is back by itself, until an end that
is one."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from anabranch.cli.main import main
from anabranch.node.driver.peer_driver import LivePeer
from anabranch.node.lifecycle.tickets import expel, new_ticket, revoke_ticket
from anabranch.node.lifecycle.training_machine import TrainingMachine
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.events import Checkpoint, Step
from anabranch.protocol.interface.events import Described
from anabranch.protocol.log.records import Genesis, entry_hash
from support.local_swarms import (
    PATIENCE_S,
    Swarm,
    check_exact,
    created,
    history_of,
    small_run,
    swarm_of,
    voters_of,
)
from support.unhurried_peer import run_unhurried_peer

pytestmark = pytest.mark.slow

RELAYS = ("relay-1.0", "relay-1.1", "relay-2.0", "relay-2.1")


@pytest.fixture
def swarm(tmp_path: Path, texts: Path, supervisor: Supervisor) -> Iterator[Swarm]:
    """A run of many steps, two relays a stage, that are volunteers: they stay."""
    directory = created(tmp_path / "run", small_run(texts, run__steps=100_000))
    with swarm_of(
        directory, small_run(texts), supervisor, leader_only=True, target=run_unhurried_peer
    ) as started:
        volunteers(started, started.ticket())
        yield started


def volunteers(swarm: Swarm, ticket: str) -> None:
    for name in RELAYS:
        swarm.join(name, ticket, ["--stage", name[6]], once=False)
    swarm.until(lambda _: all(swarm.serves(name) for name in RELAYS))


def words(process: Process) -> str:
    return process.log.read_text()


def ended(process: Process) -> str:
    """Output of a process that must end by itself with an error."""
    assert process.wait(PATIENCE_S), words(process)
    assert process.status == 1, words(process)
    return words(process)


@pytest.mark.soak  # so is a data node that slept, below
def test_a_machine_that_slept_is_back(swarm: Swarm) -> None:
    """SIGSTOP until the others have removed it: it wakes up, hears so, and serves again."""
    sleeper = swarm.processes["relay-1.0"]
    if sys.platform == "linux":
        assert Path(f"/proc/{sleeper.pid}/comm").read_text() == "relay-1.0\n", "as `ps` shows it"
    sleeper.signal(signal.SIGSTOP)
    swarm.until(lambda _: not swarm.serves("relay-1.0"))
    sleeper.signal(signal.SIGCONT)
    swarm.until(lambda _: swarm.serves("relay-1.0"))
    assert "removed from the run" in words(sleeper) and "joining again now (the ticket" in words(sleeper)
    assert not re.search(r"\b[0-9a-f]{8} has not heard", words(sleeper)), "peers are told by name"


@pytest.mark.soak  # test_gate.py revokes; in virtual time: swarm/membership/test_gate.py
def test_only_expulsion_revocation_and_the_end_of_its_ticket_send_it_away(swarm: Swarm) -> None:
    run_dir = swarm.directory.path
    swarm.until(lambda _: bool(swarm.of(Step)))  # until then the local swarm ends with a relay
    expel(run_dir, "relay-1.0", "wrong results")
    assert "the run's owner expelled this peer: wrong results" in ended(swarm.processes["relay-1.0"])

    ticket = new_ticket(run_dir, "relay", 0, 3600.0, "lab")
    guest = swarm.join("guest", ticket.text, once=False)
    swarm.until(lambda _: swarm.serves("guest"))
    revoke_ticket(run_dir, "lab", "the course is over")
    assert "revoked this peer's ticket: the course is over" in ended(guest)

    # While the run is stopped, a volunteer waits for as long as its ticket is good.
    short = new_ticket(run_dir, "relay", 0, 25.0, "short")
    guest = swarm.join("late", short.text, once=False)
    swarm.until(lambda _: swarm.serves("late"))
    swarm.stop()
    assert swarm.leader.wait(PATIENCE_S)
    assert "the ticket has expired: ask the run's owner for a new one" in ended(guest)
    assert swarm.processes["relay-2.0"].running


def test_the_end_of_the_run_is_told_and_ends_it(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    directory = created(tmp_path / "run", small_run(texts))
    with swarm_of(directory, small_run(texts), supervisor, leader_only=True) as swarm:
        for name in RELAYS:
            swarm.join(name, swarm.ticket(), ["--stage", name[6]], once=False)
        swarm.to_the_end()
        for name in RELAYS:
            assert swarm.processes[name].status == 0
            assert "the run is over: all 4 steps are committed" in words(swarm.processes[name])
            assert "all 4 steps" in (directory.peer(name) / "ended").read_text(), "for its next start"
    assert swarm.of(Step)[-1].t == 4
    check_exact(directory, 4)


def run_with_a_bad_disk(name: str, arguments: list[str], log: str, *rest: object) -> NoReturn:
    """Run a peer that fails when it writes the checkpoint of step 4."""
    write = LivePeer._write_checkpoint

    def fail(live: LivePeer, t: int, *rest: Any) -> Any:
        if t == 4:
            raise RuntimeError("a defect of the disk")
        return write(live, t, *rest)

    LivePeer._write_checkpoint = fail  # type: ignore[method-assign]
    run_peer(name, arguments, log, *rest)  # type: ignore[arg-type]


@pytest.mark.costly
def test_a_leader_that_fails_after_the_last_step_sends_nobody_away(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The last checkpoint is missing, and the volunteers alone have the final state: they wait."""
    run = small_run(texts, checkpoint__every=1000)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True, target=run_with_a_bad_disk) as swarm:
        for name in RELAYS:
            swarm.join(name, swarm.ticket(), ["--stage", name[6]], once=False)
        assert swarm.leader.wait(PATIENCE_S) and swarm.leader.status != 0
        waiting = "no connection to the run's data node"
        swarm.until(lambda _: all(waiting in words(swarm.processes[name]) for name in RELAYS))
        for name in RELAYS:
            assert swarm.processes[name].running and not (directory.peer(name) / "ended").exists()
    assert history_of(directory).t == 4


@pytest.mark.costly
def test_the_end_of_the_run_is_told_to_who_is_still_joining(
    tmp_path: Path,
    texts: Path,
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A slow machine that measures itself until the run is over: it follows no log yet, and would look for
    the data node until its ticket expires."""
    directory = created(tmp_path / "run", small_run(texts))
    describe = TrainingMachine.describe
    with swarm_of(directory, small_run(texts), supervisor, leader_only=True) as swarm:

        def slow(machine: TrainingMachine, genesis: Genesis) -> Described:
            for name in RELAYS:
                swarm.join(name, swarm.ticket(), ["--stage", name[6]])
            assert swarm.leader.wait(PATIENCE_S)
            return describe(machine, genesis)

        monkeypatch.setattr(TrainingMachine, "describe", slow)
        assert main(["join", swarm.ticket(), "--home", str(tmp_path / "slow")]) == 0
    assert capfd.readouterr().out.endswith("\nthe run is over\n")
    assert (tmp_path / "slow" / "ended").read_text() == "the run is over", "for its next start"


@pytest.mark.costly
def test_a_leader_that_lost_the_end_of_its_log_is_joined_anew(swarm: Swarm) -> None:
    """Power lost with a disk that had promised to write, or a copy of the run directory: the volunteers have
    log entries that the leader has not. They are no part of the run any more, and begin anew."""
    swarm.until(lambda seen: sum(isinstance(event, Checkpoint) for event in seen) >= 2)
    swarm.leader.signal(signal.SIGKILL)
    assert swarm.leader.wait(PATIENCE_S)
    directory = swarm.directory
    lines = directory.log.read_bytes().splitlines(keepends=True)
    bases = [directory.manifest(t).base for t in directory.checkpoints()]
    kept = next(n for n, line in enumerate(lines, 1) if entry_hash(line.rstrip(b"\n")) == bases[-2])
    directory.log.write_bytes(b"".join(lines[:kept]))
    shutil.rmtree(directory.checkpoint_path(directory.checkpoints()[-1]))

    swarm.start_other("again", ["resume", str(directory.path), "--no-page"], run_peer)
    swarm.processes["data-0"] = swarm.processes.pop("again")
    swarm.seen.clear()
    swarm.until(lambda _: bool(swarm.of(Step)) and all(swarm.serves(name) for name in RELAYS))
    assert "goes on from an earlier state" in words(swarm.processes["relay-1.0"])


@pytest.mark.costly
@pytest.mark.parametrize("voters", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_a_data_node_that_slept_is_back(
    tmp_path: Path, texts: Path, supervisor: Supervisor, voters: int
) -> None:
    """It may vote, and its disk has a part of the log: it joins again all the same."""
    run = small_run(
        texts,
        run__steps=100_000,
        evaluation__every=0,
        fleet__data_nodes=3,
        fleet__relays_per_stage=[1, 1],
        fleet__voters=voters,
    )
    directory = created(tmp_path / "run", run)
    corpus = ["--corpus", str(directory.corpus)]
    with swarm_of(
        directory, run, supervisor, leader_only=True, target=run_unhurried_peer
    ) as swarm:
        for name in ("data-1", "data-2"):
            swarm.join(name, swarm.ticket("data"), corpus, once=False)
        for name in RELAYS[::2]:
            swarm.join(name, swarm.ticket(), ["--stage", name[6]], once=False)
        swarm.until(lambda _: all(swarm.serves(name) for name in ("data-1", "data-2", *RELAYS[::2])))
        # While there are two voters, one alone decides nothing.
        swarm.until(lambda _: len(voters_of(directory)) == voters)
        sleeper = swarm.processes["data-1"]
        sleeper.signal(signal.SIGSTOP)
        swarm.until(lambda _: not swarm.serves("data-1"))
        sleeper.signal(signal.SIGCONT)
        swarm.until(lambda _: swarm.serves("data-1"))
