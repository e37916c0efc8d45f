"""Small runs on a small corpus, and swarms of real processes, for tests of live peers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, relays_by_stage, with_changes
from anabranch.net.wan.places import Place
from anabranch.node.lifecycle.create_run import create_run
from anabranch.node.local_swarm.local_swarm import LocalSwarm
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Event, PeerActive, PeerJoined, PeerRemoved, Step
from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.raft.raft_log import RaftLog
from support.crash_points import PLAN_FILE, run_crashing_peer

_E = TypeVar("_E", bound=Event)

#: No test waits longer than this (s) for the next thing that has to happen, and three times as long in all.
PATIENCE_S = 60.0


def write_texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(40):
        lines = (f"line {line} of text {number}: the quick brown fox\n" for line in range(20))
        (folder / f"{number:02}.txt").write_text("".join(lines))
    return folder


def small_run(texts: Path, **changes: Any) -> RunConfig:
    """Four narrow blocks, six microbatches of 1×16 bytes; `changes` with two underscores for the dot. Unless
    these have `fleet__minimum`, no step is taken before all relays are there (of uneven stages, as many as
    the smallest has): a busy machine starts the last one when a short run could be over."""
    plain = {
        "run.steps": 4,
        "run.seed": 3,
        "model.dim": 16,
        "model.blocks": 4,
        "model.heads": 2,
        "model.ffn": 24,
        "data.source": "text",
        "data.path": str(texts),
        "data.tokenizer": "bytes",
        "batch.microbatches": 6,
        "batch.rows": 1,
        "batch.sequence": 16,
        "optimizer.warmup_steps": 2,
        "optimizer.clip": 0.2,
        "pipeline.stages": 2,
        "fleet.data_nodes": 1,
        "fleet.relays_per_stage": [2, 2],
        "evaluation.every": 3,
        "evaluation.windows": 2,
        "checkpoint.every": 2,
        "compute.device": "cpu",
    }
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    run = with_changes(RunConfig(), plain | dotted)
    minimum = dotted.get("fleet.minimum", min(relays_by_stage(run)))
    return with_changes(run, {"fleet.minimum": minimum})


class Swarm(LocalSwarm):
    """A local swarm with its events so far, and waiting for some that must come."""

    seen: list[Event]

    def until(self, reached: Callable[[list[Event]], bool]) -> None:
        """Go on reading events until `reached`; fails when the swarm ends or nothing comes for too long."""
        self.read(lambda: reached(self.seen))
        assert reached(self.seen), f"the swarm ended before: {self.story()}"

    def to_the_end(self, *staying: Process) -> list[Event]:
        """All events, once every process has ended; the leader must have ended well. staying: processes that
        do not end with the run, and are told to."""
        self.read(lambda: False)
        for process in staying:
            process.signal(signal.SIGTERM)
        self.end()
        self.check_leader()
        return self.seen

    def read(self, enough: Callable[[], bool]) -> None:
        begun = self._latest = time.monotonic()
        for event in self.events(lambda: self._in_time(begun)):
            self._latest = time.monotonic()
            self.seen.append(event)
            if enough():
                return

    def _in_time(self, begun: float) -> None:
        now = time.monotonic()
        assert now < self._latest + PATIENCE_S, f"nothing happens any more: {self.story()}"
        assert now < begun + 3 * PATIENCE_S, f"it does not end: {self.story()}"

    def story(self) -> str:
        """The last events and each process's last line, for a failed assertion."""
        events = "\n".join(repr(event)[:300] for event in self.seen[-12:])
        ends = "\n".join(
            f"{name}: status {process.status}, {process.log.read_text(errors='replace')[-300:]!r}"
            for name, process in self.processes.items()
        )
        return f"\n{events}\n{ends}"

    def of(self, kind: type[_E]) -> list[_E]:
        return [event for event in self.seen if isinstance(event, kind)]

    def serves(self, name: str) -> bool:
        """True if the peer with this name joined, serves, and was not removed since."""
        state = False
        ids = {event.subject for event in self.of(PeerJoined) if event.name == name}
        for event in self.seen:
            if isinstance(event, PeerJoined | PeerRemoved) and event.subject in ids:
                state = False
            elif isinstance(event, PeerActive) and event.subject in ids:
                state = True
        return state

    def owns(self, name: str) -> bool:
        """True if a committed step has a unit of the peer with this name."""
        peer = self.peer_id(name)
        return any(peer in units.values() for step in self.of(Step) for units in step.owners.values())

    def peer_id(self, name: str) -> str:
        """Id of the peer with this name, from the peers' own introductions."""
        return next(event.subject for event in reversed(self.of(PeerJoined)) if event.name == name)


@contextmanager
def swarm_of(
    directory: RunDirectory,
    run: RunConfig,
    supervisor: Supervisor,
    plans: dict[str, dict[str, Any]] | None = None,
    leader_only: bool = False,
    target: Callable[..., NoReturn] = run_peer,
    places: dict[str, Place] | None = None,
) -> Iterator[Swarm]:
    """A started swarm; whatever of it still runs at the end is killed. plans: name of a peer -> fault.
    target: function that runs a peer without one. places: as for `LocalSwarm`."""
    for name, plan in (plans or {}).items():
        (directory.peer(name) / PLAN_FILE).write_text(json.dumps(plan))
    supervisor.target = run_crashing_peer if plans else target
    swarm = Swarm(directory, run, supervisor, places)
    swarm.seen = []
    try:
        if leader_only:
            swarm.start_leader()
        else:
            swarm.start()
        yield swarm
    finally:
        for process in swarm.processes.values():
            process.signal(9)
        for process in swarm.processes.values():
            assert process.wait(PATIENCE_S)


def created(path: Path, run: RunConfig) -> RunDirectory:
    return create_run(run, path)


def steps_of(events: list[Event]) -> list[int]:
    return [event.t for event in events if isinstance(event, Step)]


def history_of(directory: RunDirectory) -> LogReplay:
    return fold(directory.log.read_bytes().splitlines())


def voters_of(directory: RunDirectory) -> tuple[str, ...]:
    """Voters by the founder's copy of the log: PEER/DISK each."""
    return RaftLog(directory.log.read_bytes().rpartition(b"\n")[0].splitlines()).voters


def check_exact(directory: RunDirectory, steps: int) -> None:
    """All steps are committed, and not one bit differs from a single process that takes them again."""
    report = verify(directory.path)
    assert report.holds, "\n".join(report.lines())
    assert report.promise == "bits"
    assert report.steps == steps
    logged = [event.t for event in events_of(directory.events, Step)]
    assert set(logged) == set(range(1, steps + 1))
