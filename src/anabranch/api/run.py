"""A run in a directory of this machine: created or opened, started, followed, stopped, verified."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig, load_run_file, relays_by_stage, with_changes
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.api.model import TrainedModel
    from anabranch.audit.verification_report import Report
    from anabranch.node.local_swarm.local_swarm import LocalSwarm
    from anabranch.node.local_swarm.supervisor import Supervisor
    from anabranch.observe.events import Event

#: Seconds between reads of the event log.
INTERVAL_S = 0.1
#: Seconds that the leader may take to end the run when it is stopped; it allows a minute for its step.
STOP_S = 70.0


@dataclass(frozen=True)
class Metrics:
    """Figures of the committed step t, or of an evaluation of the weights after it.

    time: Unix seconds. figures: by the names that TensorBoard and Weights & Biases get, too
    (docs/reference/metrics.md); what is unknown is left out.
    """

    t: int
    time: float
    figures: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        """Training loss in nats per token; None for an evaluation, or if it is unknown."""
        return self.figures.get("loss/training")

    @property
    def held_out_loss(self) -> float | None:
        """Loss on held-out text in nats per token; None for the figures of a training step."""
        return self.figures.get("loss/held_out")


class Run:
    """A run and its directory. `create` or `open` make one; `start` starts its processes on this machine.

    In a `with` statement the run is started, and stopped at the end after its current step. The processes are
    children of this one and end with it. Its methods are for one thread.

    >>> import anabranch
    >>> with anabranch.Run.create({"run.steps": 50}) as run:      # doctest: +SKIP
    ...     for step in run.metrics():
    ...         print(step.t, step.loss)
    >>> anabranch.verify(run.path).holds                          # doctest: +SKIP
    True
    """

    def __init__(self, directory: RunDirectory, local: bool = True) -> None:
        self._directory, self._local = directory, local
        self._supervisor: Supervisor | None = None
        self._swarm: LocalSwarm | None = None
        self._from_byte = 0
        self._ended_here = False

    @classmethod
    def create(
        cls,
        config: RunConfig | Mapping[str, Any] | str | Path | None = None,
        path: str | Path | None = None,
        *,
        local: bool = True,
        private_data: Sequence[str | Path] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> Run:
        """Make a run directory with its corpus. What takes over two seconds shows a bar on standard error.

        config: path of a run file, a `RunConfig`, or changes to the default run by dotted keys, e.g.
        {"run.steps": 50, "model.size": "gpt-tiny"}. path: directory to make; by default runs/NAME, numbered
        if taken. local: True for a local swarm of processes, whose first iteration waits until each stage has
        as many relays as the smallest stage is to have; False for a run that others join. private_data: text
        or corpora of the relays of a local swarm, in a run on private data: one for each of them, or one of
        which each gets a part. say: gets sentences about the corpus, and warnings. Raises UserError; for a
        run that cannot work nothing is written.
        """
        from anabranch.node.lifecycle.create_run import create_run
        from anabranch.node.local_swarm.local_swarm import create_local
        from anabranch.observe.console.progress import progress_bars, ticking

        run = configuration(config)
        if private_data and not local:
            raise UserError("private_data is for a local swarm; machines that join bring data of their own")
        if local:
            run = complete_at_once(run)
        place = Path(path) if path is not None else free_path(run)
        with ticking("making the run directory"), progress_bars("bytes") as update:
            if local:
                given = [Path(each) for each in private_data]
                return cls(create_local(run, place, given, update, say))
            return cls(create_run(run, place, update, say), local)

    @classmethod
    def open(cls, path: str | Path, *, local: bool = True) -> Run:
        """Open a run directory, to start the run again or to read it. local: True if its processes all run on
        this machine. Raises UserError if it is no run directory."""
        return cls(RunDirectory.open(path), local)

    @property
    def path(self) -> Path:
        """Run directory."""
        return self._directory.path

    @property
    def config(self) -> RunConfig:
        """Configuration, read from the run file at each access. Raises UserError if it cannot be read."""
        return load_run_file(self._directory.run_file)

    @property
    def step(self) -> int:
        """Last committed step, by the commit log. Raises UserError for a damaged log."""
        from anabranch.node.lifecycle.tickets import history_of

        return history_of(self._directory).t

    @property
    def running(self) -> bool:
        """True while the leading process that this object started runs."""
        return self._swarm is not None and not self._swarm.over()

    @property
    def peers(self) -> Mapping[str, int]:
        """Running processes that this object started: name -> process id."""
        processes = {} if self._swarm is None else self._swarm.processes
        return MappingProxyType({name: one.pid for name, one in processes.items() if one.running})

    @property
    def tickets(self) -> Mapping[str, str]:
        """Tickets by role: "relay", "data" and "watch". Raises UserError before the first start."""
        import json

        try:
            texts: dict[str, str] = json.loads((self.path / "tickets.json").read_text("utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.path}: the run was not started yet, and has no tickets") from None
        return MappingProxyType(texts)

    def start(self) -> Run:
        """Start the run, or continue it from its newest checkpoint; returns this object once the leading
        process has issued its tickets and all other processes are started.

        A local run starts all data nodes and relays of its run file; another one its leading data node alone,
        and others join with `tickets`. Raises LeaderFailed; and UserError, also if this object runs it
        already, another process leads it, or all steps are committed.
        """
        from anabranch.node.local_swarm.local_swarm import LocalSwarm
        from anabranch.node.local_swarm.supervisor import Supervisor
        from anabranch.observe.console.progress import ticking

        if self.running:
            raise UserError(f"{self.path}: this object has started the run already")
        self._close()
        run, events = self.config, self._directory.events
        self._from_byte = events.stat().st_size if events.exists() else 0
        self._ended_here = False
        with self._directory.led():  # the leading process takes this lock; nothing is touched before
            self._refuse_finished(run)
        self._supervisor = Supervisor(run.compute.threads)
        self._swarm = LocalSwarm(self._directory, run, self._supervisor)
        try:
            with ticking("starting the run"):
                if self._local:
                    self._swarm.start()
                else:
                    self._swarm.start_leader(alone=True)
        except BaseException:
            self._close()
            raise
        return self

    def events(self, past: bool = False) -> Iterator[Event]:
        """Events of the run as they are written, until its leading process ends.

        past: begin with those before the last `start` of this object. Of a run that this object did not
        start, all events that are in its log, whatever `past` says. They end at once then. Raises
        LeaderFailed if the leading process fails, UserError if it refuses its input (neither after this
        object's `stop` or `kill`), or if a local run has lost too many relays of a stage before its first
        step.
        """
        from anabranch.observe.event_log import EventTail
        from anabranch.observe.events import Event

        tail = EventTail(self._directory.events, 0 if past else self._from_byte)
        while True:
            over = not self.running
            if self._swarm is not None:
                self._swarm.report_ends()
            while found := tail.read():
                for event in found:
                    if isinstance(event, Event):
                        yield event
            if over:
                if self._swarm is not None and not self._ended_here:
                    self._swarm.check_leader()
                return
            time.sleep(INTERVAL_S)

    def metrics(self, past: bool = False) -> Iterator[Metrics]:
        """Figures of each committed step and evaluation, as `events` yields them. past: as in `events`. Until
        the first ones a line on standard error shows the time."""
        from anabranch.observe.console.progress import ticking
        from anabranch.observe.metrics.writers import MetricExporter

        collected = _Collector()
        exporter = MetricExporter([collected])
        with ExitStack() as waiting:
            waiting.enter_context(ticking("waiting for the run's first step"))
            for event in self.events(past):
                exporter.take(event)
                for figures in collected.taken():
                    waiting.close()
                    yield figures

    def wait(self) -> int:
        """Wait until the run has ended, if this object started it; returns its last committed step. Raises as
        `events` does."""
        for _ in self.events():
            pass
        return self.step

    def stop(self) -> int:
        """End the run after its current step, with a checkpoint; returns the last committed step. Blocks
        until all its processes have ended.

        A leader that does not end in STOP_S seconds is killed; a later start continues from the checkpoint
        before. A run that this object did not start is not touched; of one that has ended, only processes
        that are left are killed.
        """
        if self._swarm is not None and self.running:
            self._ended_here = True
            self._swarm.stop()
            self._swarm.leader.wait(STOP_S)
            self._swarm.end()
        self._close()
        return self.step

    def kill(self, name: str = "") -> None:
        """Kill a process of this object's swarm, or without a name all of them, as a crash would.

        name: one of `peers`; nothing if it has ended. Raises UserError if there is no such process.
        """
        from anabranch.operating_system import KILL

        if self._swarm is None or (name and name not in self._swarm.processes):
            raise UserError(f"{name or self.path}: no such process runs here: {', '.join(self.peers)}")
        if name:
            self._swarm.processes[name].signal(KILL)
            return
        self._ended_here = True
        self._swarm.kill()
        self._close()

    def verify(self, jobs: int = 1, independent: bool = False) -> Report:
        """Recompute every step here and compare; imported weights that are not in this machine's cache are
        downloaded. Parameters and result are those of `anabranch.verify`."""
        return verify(self.path, jobs, independent, fetch=True)

    def load(self, step: int | None = None) -> TrainedModel:
        """Model of a checkpoint; see `anabranch.load`."""
        from anabranch.api.model import load

        return load(self.path, step)

    def __enter__(self) -> Run:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {'running' if self.running else 'not running'})"

    def _refuse_finished(self, run: RunConfig) -> None:
        from anabranch.node.lifecycle.tickets import history_of
        from anabranch.train.model.rounds import rounds_of

        history = history_of(self._directory)
        steps = rounds_of(run).iterations(history.course.steps or run.run.steps)
        if history.genesis is not None and history.t >= steps:
            raise UserError(f"{self.path}: all {steps} steps are committed; there is nothing to resume")

    def _close(self) -> None:
        """Kill the processes that are left."""
        if self._supervisor is not None:
            self._supervisor.close()
        self._supervisor = None


class _Collector:
    """Writer of metrics (see `MetricExporter`) that keeps them in memory until `taken` is called."""

    def __init__(self) -> None:
        self._kept: list[Metrics] = []

    def write(self, t: int, time: float, metrics: Mapping[str, float]) -> None:
        self._kept.append(Metrics(t, time, MappingProxyType(dict(metrics))))

    def close(self) -> None:
        """Do nothing: no file is open."""

    def taken(self) -> list[Metrics]:
        """Metrics written since the last call; they are no longer kept."""
        kept, self._kept = self._kept, []
        return kept


def configuration(config: RunConfig | Mapping[str, Any] | str | Path | None) -> RunConfig:
    """Run file that `config` means: a path, a RunConfig, or changes to the default run by dotted or nested
    keys (None: no changes). Raises ConfigError for a file, key or value that cannot be used.

    >>> configuration({"run.steps": 50, "optimizer": {"lr": 1e-3}}).run.steps
    50
    """
    from anabranch.train.recipes.recipes import DEFAULT_SIZE, recipe_run

    if isinstance(config, RunConfig):
        return with_changes(config, {})
    if isinstance(config, str | Path):
        return load_run_file(Path(config))
    changes: dict[str, Any] = {}
    for key, value in (config or {}).items():
        if isinstance(value, Mapping):
            changes.update({f"{key}.{inner}": each for inner, each in value.items()})
        else:
            changes[key] = value
    size = changes.get("model.size", DEFAULT_SIZE)
    return with_changes(recipe_run(str(size)), changes, "Run.create")


def complete_at_once(run: RunConfig) -> RunConfig:
    """Run file of a local swarm with `fleet.minimum` raised to the relays planned for its smallest stage: the
    first iteration waits until each stage has that many replicas."""
    return with_changes(run, {"fleet.minimum": max(run.fleet.minimum, min(relays_by_stage(run)))})


def free_path(run: RunConfig) -> Path:
    """First of runs/NAME, runs/NAME-2, ... that does not exist; it is not made. NAME: that of the run."""
    path, number = Path("runs") / run.run.name, 1
    while path.exists():
        number += 1
        path = path.with_name(f"{run.run.name}-{number}")
    return path


def verify(
    path: str | Path,
    jobs: int = 1,
    independent: bool = False,
    rounds: tuple[int, int] | None = None,
    fetch: bool = False,
    contributions: Sequence[str | Path] = (),
    private_data: Sequence[str | Path] = (),
) -> Report:
    """Recompute every step of a run on this machine, and compare all values with its log and checkpoints.

    jobs: processes that share each step; the result does not depend on it. independent: also train one
    unsplit torch module with torch's AdamW in fp64, and compare. rounds: first and last iteration of the log
    to recompute, from the last checkpoint before them; None: all. fetch: True to download imported weights
    that the run file names from the hub; else they have to be in its cache. contributions: folders of
    contributions to a run on private data, beside those of the peers in its directory. private_data: private
    corpora, whose machines' inner steps are taken again. `holds` of the result says
    whether the run keeps its promise, `lines()` has the details. Configures torch as the run does. Raises
    UserError for what is missing or unreadable.
    """
    directory = prepared(path)
    from anabranch.audit.verify import verify as replay

    folders, corpora = map(Path, contributions), map(Path, private_data)
    return replay(directory.path, jobs, independent, rounds, fetch, [*folders], [*corpora])


def prepared(path: str | Path) -> RunDirectory:
    """Run directory at `path`, after preparing this process for a recomputation of the run: the environment
    that torch reads when it is imported is set, and torch is imported. Raises UserError if the directory
    cannot be read."""
    from anabranch.observe.console.progress import ticking
    from anabranch.train.numerics.numerics_class import set_environment

    directory = RunDirectory.open(path)
    set_environment(load_run_file(directory.run_file).compute.threads)
    with ticking("loading torch"):
        importlib.import_module("torch")
    return directory
