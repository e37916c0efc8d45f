"""A night of a run that nobody watches: machines sleep and restart, the disk fills, the leader is stopped and
resumed, its owner pauses. In the morning everybody is there, and not one bit differs."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.node.lifecycle import control_file
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.event_log import EventTail
from anabranch.observe.events import Checkpoint, Event, Note, PeerActive, PeerJoined, PeerRemoved, Step
from anabranch.protocol.coordinator.operator_control import CONTINUE, PAUSE
from support.local_swarms import PATIENCE_S, check_exact, created, history_of, small_run
from support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")

VOLUNTEERS = tuple(f"volunteer-{number}" for number in range(6))
DISK_BYTES = 12 << 20


@dataclass
class Night:
    """Leader (unattended, `--restart`) and volunteers, each a command that is typed once."""

    directory: RunDirectory
    disk: SmallDisk
    homes: Path
    supervisor: Supervisor
    typed: dict[str, list[Process]]
    seen: list[Event]
    tail: EventTail

    def start(self, name: str, arguments: list[str]) -> Process:
        home = self.homes / name
        home.mkdir(parents=True, exist_ok=True)
        process = self.supervisor.start(name, arguments, home / "output.txt")
        self.typed.setdefault(name, []).append(process)
        return process

    def lead(self) -> Process:
        return self.start("leader", ["resume", str(self.directory.path), "--no-page", "--restart"])

    def volunteer(self, name: str, ticket: str) -> Process:
        home = str(self.homes / name / "home")
        return self.start(name, ["join", ticket, "--home", home, "--name", name])

    def process(self, name: str) -> Process:
        return self.typed[name][-1]

    def words(self, name: str) -> str:
        return (self.homes / name / "output.txt").read_text(errors="replace")

    def read(self) -> None:
        while events := self.tail.read():
            self.seen += [event for event in events if isinstance(event, Event)]

    def until(self, reached: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        end = time.monotonic() + patience_s
        while not reached():
            assert time.monotonic() < end, f"waited in vain for: {what}\n{self.story()}"
            time.sleep(0.1)
            self.read()

    def story(self) -> str:
        events = "\n".join(repr(event)[:300] for event in self.seen[-15:])
        return events + "".join(
            f"\n{name}: {self.process(name).status}: {self.words(name)[-700:]}" for name in self.typed
        )

    def steps(self) -> int:
        return max((event.t for event in self.seen if isinstance(event, Step)), default=0)

    def goes_on(self, by: int = 3) -> None:
        """Wait for further steps."""
        before = self.steps()
        self.until(lambda: self.steps() >= before + by, f"{by} steps after step {before}")

    def serving(self) -> set[str]:
        """Names of the volunteers that serve a stage now."""
        names = {event.subject: event.name for event in self.seen if isinstance(event, PeerJoined)}
        active: dict[str, bool] = {}
        for event in self.seen:
            if isinstance(event, PeerJoined | PeerRemoved):
                active[event.subject] = False
            elif isinstance(event, PeerActive):
                active[event.subject] = True
        return {names[peer] for peer, is_active in active.items() if is_active} & set(VOLUNTEERS)

    def all_there(self, but: tuple[str, ...] = ()) -> None:
        wanted = set(VOLUNTEERS) - set(but)
        self.until(lambda: self.serving() == wanted, f"all volunteers but {but}", 3 * PATIENCE_S)


@pytest.fixture
def night(tmp_path: Path, texts: Path, supervisor: Supervisor) -> Iterator[Night]:
    run = small_run(
        texts,
        run__steps=100_000,
        batch__microbatches=6,
        fleet__minimum=2,
        evaluation__every=0,
        checkpoint__every=5,
        checkpoint__keep=2,
    )
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        directory = created(disk.path / "run", run)
        begun = Night(directory, disk, tmp_path / "homes", supervisor, {}, [], EventTail(directory.events))
        try:
            yield begun
        finally:
            disk.free()
            for number in (signal.SIGCONT, signal.SIGINT, signal.SIGINT):
                for processes in begun.typed.values():
                    processes[-1].signal(number)
                time.sleep(0.5)
            for processes in begun.typed.values():
                for process in processes:
                    if not process.wait(PATIENCE_S):
                        process.signal(signal.SIGKILL)
                        process.wait(PATIENCE_S)


@pytest.mark.soak
@pytest.mark.parametrize("sleep_s", [1.0, 60.0])
def test_a_night(night: Night, sleep_s: float) -> None:
    begin(night)
    machines_sleep_and_restart(night, sleep_s)
    leader_is_stopped_and_resumed(night)
    disk_fills_and_is_freed(night)
    owner_pauses(night)
    morning(night)


def begin(night: Night) -> None:
    night.lead()
    tickets = night.directory.path / "tickets.json"
    night.until(lambda: tickets.exists() and "anabranch join" in night.words("leader"), "a ticket")
    ticket = night.words("leader").partition("anabranch join ")[2].split()[0]
    for name in VOLUNTEERS:
        night.volunteer(name, ticket)
    night.all_there()
    comm = Path(f"/proc/{night.process(VOLUNTEERS[3]).pid}/comm")
    assert comm.read_text().strip() == VOLUNTEERS[3], "`ps` and `top` show its name"
    night.goes_on()


def machines_sleep_and_restart(night: Night, sleep_s: float) -> None:
    """Two machines are suspended, a third one restarts: its service types the same command."""
    sleepers = VOLUNTEERS[:2]
    for name in sleepers:
        night.process(name).signal(signal.SIGSTOP)
    night.until(lambda: not night.serving() & set(sleepers), "the sleepers are removed")
    night.goes_on()
    restarted = night.process(VOLUNTEERS[2])
    restarted.signal(signal.SIGKILL)
    assert restarted.wait(PATIENCE_S)
    ticket = night.words("leader").partition("anabranch join ")[2].split()[0]
    night.volunteer(VOLUNTEERS[2], ticket)
    time.sleep(sleep_s)
    for name in sleepers:
        night.process(name).signal(signal.SIGCONT)
    night.all_there()
    night.goes_on()


def leader_is_stopped_and_resumed(night: Night) -> None:
    """Ctrl+C and, later, `resume`: the only command that its owner types again."""
    leader = night.process("leader")
    leader.signal(signal.SIGINT)
    assert leader.wait(PATIENCE_S), night.story()
    assert leader.status == 0, night.story()
    time.sleep(2.0)
    night.lead()
    night.goes_on()
    night.all_there()


def disk_fills_and_is_freed(night: Night) -> None:
    """First there is no room for a checkpoint, then none for the commit log, then there is room again."""
    checkpoints = [event.t for event in night.seen if isinstance(event, Checkpoint)]
    night.disk.fill(leave_bytes=1 << 20)
    told = "cannot write the checkpoint"
    night.until(
        lambda: any(isinstance(event, Note) and told in event.text for event in night.seen),
        "a checkpoint that is left out",
    )
    assert night.directory.checkpoints()[-1] >= checkpoints[-1], "the last good checkpoint stays"
    night.goes_on(1)
    night.disk.fill()
    night.until(lambda: "it is started again" in night.words("leader"), "the leader ends for lack of room")
    assert "the commit log log.jsonl cannot be written" in night.words("leader"), night.story()
    time.sleep(3.0)
    assert night.process("leader").running, night.story()
    night.disk.free()
    night.goes_on()
    night.all_there()


def owner_pauses(night: Night) -> None:
    night.read()
    control_file.request(night.directory.path, PAUSE)
    time.sleep(2.0)
    night.read()
    paused_at = night.steps()
    time.sleep(3.0)
    night.read()
    assert night.steps() == paused_at, "the run goes on although it is paused"
    control_file.request(night.directory.path, CONTINUE)
    night.goes_on()
    night.all_there()


def morning(night: Night) -> None:
    """A machine is killed for good, the others go on; the owner stops the run and verifies it."""
    lost = VOLUNTEERS[5]
    night.process(lost).signal(signal.SIGKILL)
    night.all_there(but=(lost,))
    night.goes_on()
    typed = {name: len(processes) for name, processes in night.typed.items()}
    expected = dict.fromkeys(VOLUNTEERS, 1) | {"leader": 2, VOLUNTEERS[2]: 2}
    assert typed == expected, "somebody had to type a command again"
    assert all(night.process(name).running for name in VOLUNTEERS[:5]), night.story()
    leader = night.process("leader")
    leader.signal(signal.SIGINT)
    assert leader.wait(PATIENCE_S) and leader.status == 0, night.story()
    check_exact(night.directory, history_of(night.directory).t)
