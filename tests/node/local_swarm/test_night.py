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
from anabranch.config import render_run_file
from anabranch.node.lifecycle import control_file
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.event_log import EventTail
from anabranch.observe.events import (
    Checkpoint,
    Controlled,
    Event,
    Note,
    PeerActive,
    PeerJoined,
    PeerRemoved,
    RunStarted,
    Step,
)  # fmt: skip
from anabranch.protocol.fleet.operator_control import CONTINUE, PAUSE
from support.local_swarms import PATIENCE_S, check_exact, history_of, small_run
from support.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")

VOLUNTEERS = tuple(f"volunteer-{number}" for number in range(6))
DISK_BYTES = 12 << 20
#: Seconds for which two machines are suspended.
SLEEP_S = 60.0
#: Longest silence (s) of the run, and longest wait in all: eight processes on a busy machine take their time.
SILENCE_S, LONGEST_S = 3 * PATIENCE_S, 15 * PATIENCE_S


@dataclass
class Night:
    """Leader (unattended, `--restart`) and volunteers, each a command that is typed once.

    typed: processes of the commands, by name. seen: events of the run so far.
    """

    run_file: Path
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
        (home / "output.txt").touch()
        process = self.supervisor.start(name, arguments, home / "output.txt")
        self.typed.setdefault(name, []).append(process)
        return process

    def lead(self, *command: str | Path) -> Process:
        """Type one of the owner's two commands, `start` or `resume`, as someone who then goes to bed."""
        return self.start("leader", [*map(str, command), "--no-page", "--restart"])

    def ticket(self) -> str:
        return self.words("leader").partition("anabranch join ")[2].split()[0]

    def volunteer(self, name: str) -> Process:
        home = str(self.homes / name / "home")
        return self.start(name, ["join", self.ticket(), "--home", home, "--name", name])

    def process(self, name: str) -> Process:
        return self.typed[name][-1]

    def words(self, name: str) -> str:
        return (self.homes / name / "output.txt").read_text(errors="replace")

    def read(self) -> bool:
        """Read the events that were written since; True if there were any."""
        before = len(self.seen)
        while events := self.tail.read():
            self.seen += [event for event in events if isinstance(event, Event)]
        return len(self.seen) > before

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Read events until `reached`; fails after too long a silence, or a wait."""
        begun = latest = time.monotonic()
        while not reached():
            now = time.monotonic()
            in_time = now < latest + SILENCE_S and now < begun + LONGEST_S
            assert in_time, f"waited in vain for: {what}\n{self.story()}"
            time.sleep(0.1)
            if self.read():
                latest = time.monotonic()

    def told(self, name: str, words: str, times: int = 1) -> None:
        """Wait until the process has printed `words` so many times more than now."""
        before = self.words(name).count(words)
        self.until(lambda: self.words(name).count(words) >= before + times, f"{name} says {words!r}")

    def story(self) -> str:
        events = "\n".join(repr(event)[:300] for event in self.seen[-15:])
        return events + "".join(
            f"\n{name}: {self.process(name).status}: {self.words(name)[-700:]}" for name in self.typed
        )

    def steps(self) -> int:
        return max((event.t for event in self.seen if isinstance(event, Step)), default=0)

    def goes_on(self, by: int = 3) -> None:
        """Wait until further steps were taken, or taken again."""
        self.read()
        since = len(self.seen)
        taken = f"steps after step {self.steps()}"
        self.until(lambda: sum(isinstance(event, Step) for event in self.seen[since:]) >= by, f"{by} {taken}")

    def serving(self) -> set[str]:
        """Names of the volunteers that serve a stage now, as the present leader knows them."""
        names: dict[str, str] = {}
        active: set[str] = set()
        for event in self.seen:
            match event:
                case RunStarted():
                    active = set()
                case PeerJoined(subject=peer, name=name):
                    names[peer] = name
                    active.discard(peer)
                case PeerRemoved(subject=peer):
                    active.discard(peer)
                case PeerActive(subject=peer):
                    active.add(peer)
        return {names[peer] for peer in active} & set(VOLUNTEERS)

    def working(self, since: int) -> set[str]:
        """Names of the volunteers whose work counted in a step among the events from number `since` on."""
        names = {event.subject: event.name for event in self.seen if isinstance(event, PeerJoined)}
        steps = (event for event in self.seen[since:] if isinstance(event, Step))
        owners = {owner for step in steps for units in step.owners.values() for owner in units.values()}
        return {names[owner] for owner in owners} & set(VOLUNTEERS)

    def all_there(self, but: tuple[str, ...] = ()) -> None:
        """Wait until the volunteers serve, and the work of each of them has counted in a step from now on."""
        self.read()
        wanted, since = set(VOLUNTEERS) - set(but), len(self.seen)
        self.until(lambda: self.serving() == wanted, f"all volunteers serve but {but}")
        self.until(lambda: self.working(since) >= wanted, f"all volunteers work but {but}")


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
    run_file = tmp_path / "run.toml"
    run_file.write_text(render_run_file(run))
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        directory = RunDirectory(disk.path / "run")
        tail = EventTail(directory.events)
        begun = Night(run_file, directory, disk, tmp_path / "homes", supervisor, {}, [], tail)
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
@pytest.mark.timeout(3600)
def test_a_night(night: Night) -> None:
    begin(night)
    machines_sleep_and_restart(night)
    leader_is_stopped_and_resumed(night)
    disk_fills_and_is_freed(night)
    owner_pauses(night)
    morning(night)


def begin(night: Night) -> None:
    night.lead("start", night.run_file, "--run-dir", night.directory.path)
    night.until(lambda: "anabranch join anabranch1:" in night.words("leader"), "a ticket")
    for name in VOLUNTEERS:
        night.volunteer(name)
    night.all_there()
    comm = Path(f"/proc/{night.process(VOLUNTEERS[3]).pid}/comm")
    assert comm.read_text().strip() == VOLUNTEERS[3], "`ps` and `top` show its name"


def machines_sleep_and_restart(night: Night) -> None:
    """Two machines are suspended for a minute; meanwhile a third one restarts: its service, not its owner,
    types the same command."""
    sleepers = VOLUNTEERS[:2]
    for name in sleepers:
        night.process(name).signal(signal.SIGSTOP)
    wake_at = time.monotonic() + SLEEP_S
    night.until(lambda: not night.serving() & set(sleepers), "the sleepers are removed")
    restarted = night.process(VOLUNTEERS[2])
    restarted.signal(signal.SIGKILL)
    assert restarted.wait(PATIENCE_S)
    night.volunteer(VOLUNTEERS[2])
    night.all_there(but=sleepers)
    night.until(lambda: time.monotonic() >= wake_at, "a minute has passed")
    for name in sleepers:
        night.process(name).signal(signal.SIGCONT)
    night.all_there()


def leader_is_stopped_and_resumed(night: Night) -> None:
    """Ctrl+C and, once all volunteers wait, `resume`: the only other command that the owner types."""
    leader = night.process("leader")
    stopped_at = {name: len(night.words(name)) for name in VOLUNTEERS}
    leader.signal(signal.SIGINT)
    assert leader.wait(SILENCE_S), night.story()
    assert leader.status == 0, night.story()
    until_told = "until its owner resumes the run"
    for name, length in stopped_at.items():
        night.until(lambda n=name, k=length: until_told in night.words(n)[k:], f"{name} is told")
    night.lead("resume", night.directory.path)
    night.goes_on()
    night.all_there()


def disk_fills_and_is_freed(night: Night) -> None:
    """First there is no room for a checkpoint, then none for the commit log, then there is room again.

    It is freed once a leader has begun on the full disk and has ended for it.
    """
    night.read()
    checkpoints = [event.t for event in night.seen if isinstance(event, Checkpoint)]
    night.disk.fill(leave_bytes=1 << 20)
    left_out = "cannot write the checkpoint"
    night.until(
        lambda: any(isinstance(event, Note) and left_out in event.text for event in night.seen),
        "a checkpoint that is left out",
    )
    assert night.directory.checkpoints()[-1] >= checkpoints[-1], "the last good checkpoint stays"
    night.goes_on(1)
    night.disk.fill()
    night.told("leader", "it is started again", times=2)
    assert "the commit log log.jsonl cannot be written" in night.words("leader"), night.story()
    assert night.process("leader").running, night.story()
    night.disk.free()
    night.goes_on()
    night.all_there()


def owner_pauses(night: Night) -> None:
    """Pause and its end are requested as the page does; between them in the log no step lies but those that
    the pause lets end."""
    control_file.request(night.directory.path, PAUSE)
    night.until(lambda: bool(controlled(night)), "the pause")
    last = controlled(night)[-1]
    night.until(lambda: night.steps() >= last.t, "the last step before the pause")
    for name in VOLUNTEERS:
        told = f"the run's owner pauses it after step {last.t}"
        night.until(lambda n=name, words=told: words in night.words(n), f"{name} is told of the pause")
    control_file.request(night.directory.path, CONTINUE)
    night.until(lambda: controlled(night)[-1].action == CONTINUE, "its end")
    night.goes_on()
    assert [event.action for event in controlled(night)] == [PAUSE, CONTINUE]
    begin, end = (night.seen.index(event) for event in controlled(night))
    late = [event.t for event in night.seen[begin:end] if isinstance(event, Step) and event.t > last.t]
    assert not late, f"steps {late} while the run is paused after step {last.t}"
    night.all_there()


def controlled(night: Night) -> list[Controlled]:
    return [event for event in night.seen if isinstance(event, Controlled)]


def morning(night: Night) -> None:
    """A machine is killed for good, the others go on; the owner stops the run and verifies it."""
    lost = VOLUNTEERS[5]
    night.process(lost).signal(signal.SIGKILL)
    night.until(lambda: lost not in night.serving(), "the lost one is removed")
    night.all_there(but=(lost,))
    typed = {name: len(processes) for name, processes in night.typed.items()}
    expected = dict.fromkeys(VOLUNTEERS, 1) | {"leader": 2, VOLUNTEERS[2]: 2}
    assert typed == expected, "somebody had to type a command again"
    assert all(night.process(name).running for name in VOLUNTEERS[:5]), night.story()
    leader = night.process("leader")
    leader.signal(signal.SIGINT)
    assert leader.wait(SILENCE_S) and leader.status == 0, night.story()
    check_exact(night.directory, history_of(night.directory).t)
