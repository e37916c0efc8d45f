"""Local swarm: the processes of a run on this machine, how they are started, followed and ended."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, relays_by_stage
from anabranch.errors import UserError
from anabranch.node.driver.compute_ledger import LEDGER_VARIABLE, ledger_of
from anabranch.node.lifecycle import control_file
from anabranch.node.local_swarm.supervisor import LISTEN_VARIABLE, Process, Supervisor
from anabranch.node.private_data.relay_corpora import check_private, give_private, private_options
from anabranch.observe.event_log import EventLog, EventTail
from anabranch.observe.events import Event, Note, Step, Unknown
from anabranch.operating_system import KILL, SIGNALS_ASK

if TYPE_CHECKING:
    from anabranch.net.wan.places import Place

#: Seconds that the leader may take to write its tickets, and the other processes to end after the leader.
START_S = 120.0
END_S = 20.0
#: Seconds between reads of the event log.
INTERVAL_S = 0.1

LEADER = "data-0"
#: Exit status of a command with bad input.
BAD_INPUT = 2


def processes_of(run: RunConfig) -> dict[str, int]:
    """Stage of every process of a local swarm by name, in the order in which they start."""
    relays = enumerate(relays_by_stage(run), start=1)
    return {f"data-{number}": 0 for number in range(run.fleet.data_nodes)} | {
        f"relay-{stage}.{number}": stage for stage, count in relays for number in range(count)
    }


def create_local(
    run: RunConfig,
    path: Path,
    private: Sequence[Path] = (),
    progress: Callable[[str, int, int], None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> RunDirectory:
    """Make the run directory of a local swarm; arguments and errors as of `create_run`. private: folders of
    text, or prepared corpora, of the relays, in a run on private data: one for each relay, or a single one,
    of which each relay gets a part. [] for other runs. Raises UserError if they do not fit the run, too."""
    from anabranch.node.lifecycle.create_run import create_run

    check_private(run, private)
    directory = create_run(run, path, progress, tell)
    try:
        if private:
            relays = [name for name, stage in processes_of(run).items() if stage]
            give_private(directory, relays, private, tell)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return directory


class LeaderFailed(Exception):
    """Raised when the leading process ended with an error. status: its exit status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Interrupted(Exception):
    """Raised when the user stopped the swarm before it had started."""


class LocalSwarm:
    """Local swarm of the run in `directory`: its data nodes and relays as processes, children of the
    `supervisor`. None runs before `start`. Its leader is the founder's process, whoever leads the log.

    places: address, region and network namespace of every process, by name, in an emulated network that
    outlives the swarm; None: all on this machine's loopback. ledgers: True if each peer keeps a compute
    ledger. processes: those started, by name, also ended ones. stopping: True once `stop` was called.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run: RunConfig,
        supervisor: Supervisor,
        places: Mapping[str, Place] | None = None,
        ledgers: bool = False,
    ) -> None:
        self.directory = directory
        self.run = run
        self.processes: dict[str, Process] = {}
        self.stopping = False
        self._asked = False
        self._supervisor = supervisor
        self._places = None if places is None else dict(places)
        self._ledgers = ledgers
        self._reported_ends: set[str] = set()
        self._stepped = False
        # Events of earlier parts of the run are skipped.
        position = directory.events.stat().st_size if directory.events.exists() else 0
        self._tail = EventTail(directory.events, position)
        self._unread: deque[Event | Unknown] = deque()

    def start(self) -> None:
        """Start the leader, wait for its tickets, then start the other processes. Raises LeaderFailed if the
        leader fails, UserError if it refuses its input or issues no tickets within START_S or a process
        cannot be started, and Interrupted if `stop` was called meanwhile. Processes that were started then
        still run."""
        corpus = str(self.directory.corpus)
        try:
            texts = self.start_leader()
            for name, stage in processes_of(self.run).items():
                if stage:
                    own = private_options(self.directory, name)
                    self.join(name, texts["relay"], ["--stage", str(stage), *own])
                elif name != LEADER:
                    self.join(name, texts["data"], ["--corpus", corpus])
        except UserError:
            if self.stopping:  # the signal to stop may have ended the fork server, too
                raise Interrupted from None
            raise

    def start_leader(self, alone: bool = False) -> dict[str, str]:
        """Start the leading process; wait for its tickets and return their texts by role. Raises as `start`
        does. alone: True if all others join from outside with these tickets, so that tickets and port of a
        former part of the run are kept; else tickets.json is deleted before, and all tickets are new."""
        tickets = self.directory.path / "tickets.json"
        if alone:
            former = tickets.stat().st_mtime_ns if tickets.exists() else 0
            self._spawn(LEADER, ["resume", str(self.directory.path), "--no-page"])
            return self._await_tickets(tickets, former)
        tickets.unlink(missing_ok=True)
        self.restart_leader()
        return self._await_tickets(tickets)

    def restart_leader(self) -> None:
        """Start the leader's process, for the first time or again, without waiting for it. Older tickets stay
        valid if the run file gives it a port."""
        self._spawn(LEADER, ["resume", str(self.directory.path), "--quiet"])

    def join(
        self, name: str, ticket: str, extra: Sequence[str] = (), once: bool = True, command: str = "join"
    ) -> Process:
        """Start `anabranch join` as process `name`, with its key and logs in the run directory. ticket: its
        text. extra: further options. once: True if it ends with its first part in the run. command: "audit"
        for an auditor."""
        home = str(self.directory.peer(name))
        place = self._places[name] if self._places else None
        where = ["--host", place.address, "--region", place.region] if place else []
        # All peers have this machine's disk and processors: a state on it is no download saved, and none of
        # them is a guest.
        here = ["--cache", "0", "--nice", "0"]
        arguments = [command, ticket, "--home", home, "--name", name, *here, *where, *extra]
        arguments += ["--once"] if once else []
        return self._spawn(name, arguments)

    def start_other(self, name: str, arguments: Sequence[str], target: Callable[..., NoReturn]) -> Process:
        """Start a process `name` that is no peer of the swarm, and keep it among its processes, so that
        `kill` ends it too. target: function that runs in the process, with the parameters of `run_peer`,
        among them `arguments`."""
        log = self.directory.peer(name) / "output.txt"
        self.processes[name] = process = self._supervisor.start(name, arguments, log, target=target)
        return process

    def ticket(self, role: str = "relay") -> str:
        """Text of the ticket for `role` in the run directory, which the leader issued or renewed last: a
        process joins the swarm with that ticket. Raises OSError or KeyError if there is none."""
        tickets: dict[str, str] = json.loads((self.directory.path / "tickets.json").read_text("utf-8"))
        return tickets[role]

    def hand_over(self, former: str, name: str) -> None:
        """Let process `name` have the address and network namespace of process `former`, if the network is
        emulated."""
        if self._places is not None:
            self._places[name] = self._places[former]

    def _spawn(self, name: str, arguments: list[str]) -> Process:
        log, namespace = self.directory.peer(name) / "output.txt", ""
        self._reported_ends.discard(name)
        environment = {LEDGER_VARIABLE: str(ledger_of(self.directory, name))} if self._ledgers else {}
        if self._places is not None:
            environment[LISTEN_VARIABLE], namespace = self._places[name].address, self._places[name].namespace
        self.processes[name] = process = self._supervisor.start(name, arguments, log, namespace, environment)
        return process

    def _await_tickets(self, path: Path, former_ns: int = 0) -> dict[str, str]:
        """Tickets by role in the file at `path`, once the leader has written it after the time `former_ns`.
        Raises UserError after START_S seconds, Interrupted if the swarm is to stop, and as `check_leader`."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if path.exists() and path.stat().st_mtime_ns > former_ns:
                try:
                    texts: dict[str, str] = json.loads(path.read_text("utf-8"))
                    return texts
                except ValueError:
                    pass  # the leader is writing it
            self.check_leader()
            if self.stopping:
                raise Interrupted
            time.sleep(INTERVAL_S / 5)
        raise UserError(f"the leading data node did not start within {START_S:.0f} s: see {self.leader.log}")

    @property
    def leader(self) -> Process:
        return self.processes[LEADER]

    def check_leader(self) -> None:
        """Raise an error if the leading process ended with one: UserError for bad input, else
        LeaderFailed."""
        status = self.leader.status
        if status == BAD_INPUT:
            raise UserError(last_words(self.leader.log))
        if status not in (None, 0):
            raise LeaderFailed(status, f"the leading data node {_ended(self.leader)}")

    def events(self, poll: Callable[[], None] = lambda: None) -> Iterator[Event]:
        """Yield the run's events as they are written, until the leader's process ends. Raises as
        `report_ends` does. `poll` is called about ten times a second. A caller that leaves the loop and calls
        again gets the events from there on."""
        while True:
            running = not self.over()
            self.report_ends()
            while (event := self._next_event()) is not None:
                if isinstance(event, Event):
                    self._stepped = self._stepped or isinstance(event, Step)
                    yield event
            poll()
            if not running:
                return
            time.sleep(INTERVAL_S)

    def _next_event(self) -> Event | Unknown | None:
        """The next line of the event log; None if there is none for now."""
        if not self._unread:
            self._unread.extend(self._tail.read())
        return self._unread.popleft() if self._unread else None

    def over(self) -> bool:
        """True if the leader's process has ended, so that no more events come."""
        return not self.leader.running

    def report_ends(self) -> None:
        """Write an event for each process but the leader that ended with an error while the leader runs, once
        each. Raises UserError if, before the first step, too few relays of a stage are left."""
        for process in self.processes.values():
            if process.running or process.name in self._reported_ends or process.name == LEADER:
                continue
            self._reported_ends.add(process.name)
            if process.status and self.leader.running:
                # A full disk costs the event, not the process that ends the others.
                with contextlib.suppress(OSError), EventLog(self.directory.events) as log:
                    log.write(Note(text=f"{process.name} {_ended(process)}"))
                if not self._has_stepped():
                    self._check_complete()

    def _has_stepped(self) -> bool:
        """True once a step was committed since this object was made, also one whose event `events` has not
        yielded yet: from then on the other relays make a lost one good."""
        if not self._stepped:
            self._unread.extend(self._tail.read())
            self._stepped = any(isinstance(event, Step) for event in self._unread)
        return self._stepped

    def _check_complete(self) -> None:
        """Raise UserError if so many relays of a stage failed that fewer than `fleet.minimum` are left, which
        the first step needs."""
        gone = [process for process in self.processes.values() if process.status]
        stages = processes_of(self.run)
        for stage, count in enumerate(relays_by_stage(self.run), start=1):
            lost = [process for process in gone if stages.get(process.name) == stage]
            if count - len(lost) < self.run.fleet.minimum:
                raise UserError(
                    f"stage {stage} has fewer than fleet.minimum relays: {lost[-1].name} {_ended(lost[-1])}"
                )

    def stop(self) -> None:
        """Ask the leader to end the run after the current step; a second call stops it at once."""
        again, self._asked = self._asked, True
        self.stopping = True
        if LEADER in self.processes and (SIGNALS_ASK or again):
            self.leader.signal(signal.SIGINT if SIGNALS_ASK else KILL)
        elif LEADER in self.processes:
            control_file.request_stop(self.directory.path)

    def end(self) -> None:
        """Wait until all processes have ended, but no longer than END_S in all; then `report_ends`, which may
        raise. Processes that still run are left to the supervisor, which kills them when it is closed."""
        until = time.monotonic() + END_S
        for process in self.processes.values():
            process.wait(max(0.0, until - time.monotonic()))
        self.report_ends()

    def kill(self) -> None:
        """Kill all processes, and wait until they have ended (END_S each at most)."""
        for process in self.processes.values():
            process.signal(KILL)
        for process in self.processes.values():
            process.wait(END_S)


def _ended(process: Process) -> str:
    status = process.status or 0
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    words = last_words(process.log)
    return f"ended with status {status}" + (f": {words}" if words else "")


def last_words(log: Path) -> str:
    """Last line in a process's output file `log`, without "error: " before it and blanks after it; "" if it
    printed nothing, or the file is missing or cannot be read."""
    try:
        lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1].removeprefix("error: ") if lines else ""
