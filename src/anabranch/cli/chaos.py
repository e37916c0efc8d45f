"""Train with a local swarm whose processes are killed, frozen and replaced all the time, and verify the
result.

examples:
  anabranch chaos                                 12 relays over 4 stages, ten minutes, 20 faults per minute
  anabranch chaos --minutes 1 --calm-minutes 0    a short trial, without runs to compare it with
  anabranch chaos run.toml --population 8         the model, stages and data nodes of a run file
  anabranch chaos --preset diloco --minutes 5     islands, in rounds of few steps
  anabranch chaos --hostile                       a third of the faults are hostile guests
  anabranch chaos --wan wan10                     links as between ten regions (Linux, root, /dev/net/tun)
  anabranch chaos --json                          the result for a program (docs/reference/formats.md)

A fault is a SIGKILL or SIGSTOP of a relay, now and then of a data node or a voter, once of a whole stage.
Another process replaces each victim: half of the time the same machine, else a stranger. With --hostile, a
third of the faults are strangers with a relay ticket that lie, take work and give none back, or flood the
run. Before and after the faults, the same run is made without any, to compare. At the end every step is
verified. Exit status 0: steps were committed, also after the last fault, every bit is what a single process
computes, and no honest member lost its seat to a guest for good. Ctrl+C ends all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from anabranch.cli.support.arguments import add_json, add_new_run_dir, check_range
from anabranch.cli.support.outputs import handled_signals
from anabranch.config import Range
from anabranch.errors import UserError
from anabranch.train.recipes.presets import PRESETS

if TYPE_CHECKING:
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.config import RunConfig
    from anabranch.node.chaos.fault_schedule import PlannedFault
    from anabranch.node.chaos.metrics import Metrics
    from anabranch.node.chaos.report import Result, Verdict
    from anabranch.node.chaos.run_record import RunRecord

#: Run without a run file: small enough for two cores to carry fifteen processes. Frequent snapshots keep
#: rollbacks after the loss of a whole stage short.
DEFAULTS: dict[str, object] = {
    "run.name": "chaos",
    "model.dim": 64,
    "model.blocks": 4,
    "model.ffn": 176,
    "data.tokenizer": "bytes",
    "batch.microbatches": 12,
    "batch.rows": 2,
    "batch.sequence": 64,
    "pipeline.stages": 4,
    "fleet.data_nodes": 2,
    "fleet.voters": 3,
    "evaluation.every": 0,
    "checkpoint.every": 20,
    "snapshots.every": 2,
}
POPULATION = 12
#: Steps of the run: more than any experiment reaches, since its end is a matter of time.
STEPS = 1_000_000
#: Rounds of a preset: at most so many inner steps, from so many synchronous ones on, by so many islands.
#: Plain choices, so that two cores take a round in seconds, and faults hit rounds.
ROUND_STEPS, ROUNDS_FROM, MOST_ISLANDS = 8, 4, 4
#: Ports for the founder, below the kernel's ephemeral ones, so that its port is still free when it returns.
PORTS = range(20_000, 32_000)
PORT_TRIES = 100
#: Share of hostile guests among the faults with --hostile.
GUESTS = 1 / 3
#: Length of each run without faults: this share of the minutes with faults, at most CALM_MINUTES.
CALM_SHARE, CALM_MINUTES = 0.15, 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_file", nargs="?", type=Path, metavar="RUN.toml", help="run file (default: a small llama)")
    add("--population", type=int, metavar="N", help=f"relays (default: the run file's, or {POPULATION})")
    add("--faults-per-minute", type=float, default=20.0, metavar="F", help="mean rate of faults")
    add("--freeze", type=float, default=0.2, metavar="SHARE", help="share of SIGSTOP faults")
    preset = f"settings of a published system, its rounds shortened: {', '.join(PRESETS)}"
    add("--preset", choices=PRESETS, metavar="NAME", help=preset)
    guests = "make a third of the faults hostile guests, which join with a ticket of their own"
    add("--hostile", action="store_true", help=guests)
    add("--minutes", type=float, default=10.0, metavar="M", help="length of the run with faults")
    calm = f"length of each run without (default: {CALM_SHARE:.0%}% of --minutes, at most {CALM_MINUTES:g})"
    add("--calm-minutes", type=float, metavar="M", help=calm)
    add("--wan", metavar="PROFILE", help="emulate a wide-area network: wan10, or a profile's JSON file")
    add("--seed", type=int, default=1, metavar="N", help="seed of the faults")
    add_new_run_dir(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.population is not None:
        check_range("--population", args.population, Range(1, 10**6))
    check_range("--minutes", args.minutes, Range(0.05, 10**6))
    check_range("--calm-minutes", args.calm_minutes or 0.0, Range(0, 10**6))
    check_range("--faults-per-minute", args.faults_per_minute, Range(0, 10**6))
    check_range("--freeze", args.freeze, Range(0, 1))
    if args.hostile and args.wan:
        raise UserError("--hostile needs this machine's own addresses for the guests: leave out --wan")
    with handled_signals(signal.default_int_handler):  # the shell ignores SIGINT for background jobs
        try:
            result = _experiment(args)
        except KeyboardInterrupt:
            left = "the run directories stay; the same command begins a new experiment"
            raise KeyboardInterrupt(f"all processes are ended, and {left}") from None
    print(json.dumps(result.as_dict(), allow_nan=False) if args.json else "\n".join(result.lines()))
    return 1 if result.problems else 0


def configured(run_file: Path | None, population: int | None, preset: str = "") -> RunConfig:
    """Configuration of the experiment: that of `run_file` (None: the default one), with more steps than any
    experiment takes, a fixed port, and a first iteration that waits until every stage has as many replicas as
    the smallest stage is to have. population: number of relays (None: the run file's, the preset's, or
    POPULATION). preset: system whose settings the run has, with rounds of at most ROUND_STEPS steps from the
    ROUNDS_FROM-th step on and at most MOST_ISLANDS islands. Raises UserError if they cannot work together,
    the run's data are private, or no port is free."""
    from anabranch.config import RunConfig, load_run_file, relays_by_stage, with_changes

    config = load_run_file(run_file) if run_file else with_changes(RunConfig(), DEFAULTS)
    if config.data.private:
        raise UserError(f"{run_file}: chaos gives its relays no data of their own: set data.private to false")
    if preset:
        config = _with_preset(config, preset)
    changes: dict[str, object] = {"run.steps": STEPS}
    # A founder that returns listens on the same port, so that tickets stay valid.
    changes["network.port"] = config.network.port or free_port(config.network.host)
    changes["optimizer.decay_steps"] = config.optimizer.decay_steps or config.run.steps
    minimum = config.fleet.minimum
    if population is not None or run_file is None:
        minimum = 1
        usual = (config.round.slots + 1) * config.pipeline.relay_stages if config.round.slots else POPULATION
        changes |= {"fleet.relays": population or usual, "fleet.relays_per_stage": []}
    config = with_changes(config, changes | {"fleet.minimum": minimum})
    return with_changes(config, {"fleet.minimum": max(minimum, min(relays_by_stage(config)))})


def _with_preset(config: RunConfig, name: str) -> RunConfig:
    from anabranch.config import with_changes
    from anabranch.train.recipes.presets import with_preset

    config = with_preset(config, name)
    if not config.round.slots:
        return config
    steps = min(config.round.steps, ROUND_STEPS)
    short = {"round.steps": steps, "round.overlap": min(config.round.overlap, steps // 2)}
    if config.round.slots > MOST_ISLANDS:
        short |= {"round.slots": MOST_ISLANDS}
    return with_changes(config, short | {"round.start": ROUNDS_FROM / STEPS})


def free_port(host: str) -> int:
    """Port on `host`, drawn at random from PORTS, that no process uses now; it is not reserved. Raises
    UserError if PORT_TRIES draws found none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(PORT_TRIES):
        port = secrets.choice(PORTS)
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise UserError(f"{PORT_TRIES} ports on {host} are in use: set network.port in a run file")


def _experiment(args: argparse.Namespace) -> Result:
    """Run the swarm without faults, with faults, and without faults again; return what was measured, with the
    verification of the run with faults, and whether the runs took the same steps (None: not compared; so in
    rounds). Each run without faults has the minutes that the arguments or CALM_SHARE say; with 0 minutes
    there are none. Makes the run directories. Raises UserError if the run cannot be made."""
    from anabranch.api.run import free_path
    from anabranch.cli.support.create_directory import create
    from anabranch.cli.train import emulated_network
    from anabranch.config import relays_by_stage
    from anabranch.node.chaos.fault_schedule import draw_schedule, with_guests
    from anabranch.node.chaos.guest_host import DEEDS
    from anabranch.node.chaos.report import Result, Settings
    from anabranch.node.chaos.step_comparison import same_steps, tokens_of
    from anabranch.node.chaos.timed_run import timed_run
    from anabranch.node.local_swarm.supervisor import Supervisor
    from anabranch.observe.wording import duration

    config = configured(args.run_file, args.population, args.preset or "")
    path = args.run_dir or free_path(config)
    default = min(CALM_MINUTES, CALM_SHARE * args.minutes)
    calm_minutes = default if args.calm_minutes is None else args.calm_minutes
    settings = Settings(
        population=sum(relays_by_stage(config)),
        stages=config.pipeline.relay_stages,
        data_nodes=config.fleet.data_nodes,
        seed=args.seed,
        minutes=args.minutes,
        calm_minutes=calm_minutes,
        faults_per_minute=args.faults_per_minute,
        freeze=args.freeze,
        wan=args.wan or "",
        run_directory=str(path),
        hostile=GUESTS if args.hostile else 0.0,
        preset=args.preset or "",
    )
    schedule = draw_schedule(args.seed, 60 * args.minutes, args.faults_per_minute, args.freeze)
    schedule = with_guests(schedule, args.seed, settings.hostile, DEEDS)
    with (
        emulated_network(args.wan, config, "--wan") as places,
        Supervisor(config.compute.threads) as supervisor,
        _saying(sys.stderr if args.json else sys.stdout) as say,
    ):

        def timed(run_directory: RunDirectory, minutes: float, faults: list[PlannedFault]) -> RunRecord:
            say(f"{duration(60 * minutes)} " + (f"with {len(faults)} faults" if faults else "without faults"))
            record = timed_run(run_directory, config, supervisor, faults, 60 * minutes, say, places)
            record.tokens = tokens_of(run_directory, record.began_t, record.ended_t)
            return record

        say(f"run directory: {path}")
        directory = create(config, path, say)
        calm_directories = [_copy(directory, f"calm-{n}") for n in (1, 2)] if calm_minutes else []
        calm = [timed(each, calm_minutes, []) for each in calm_directories[:1]]
        record = timed(directory, args.minutes, schedule)
        calm += [timed(each, calm_minutes, []) for each in calm_directories[1:]]
    metrics = _metrics(record, directory, settings.population + settings.data_nodes)
    same: bool | None = None
    if calm_directories and not config.round.slots:  # which machine takes how many inner steps is its speed's
        same = all(same_steps(directory, other) for other in calm_directories)
    return Result(settings, record, metrics, _verdict(directory), calm, same)


@contextmanager
def _saying(stream: IO[str]) -> Iterator[Callable[[str], None]]:
    """Context that yields the function which prints a sentence on `stream`; after each sentence a terminal's
    last line tells how long ago it was."""
    from anabranch.observe.console.progress import Ticker

    with Ticker(plain=False) as ticker:

        def say(text: str) -> None:
            with ticker.aside():
                print(text, file=stream, flush=True)
            ticker.begin("since then")

        yield say


def _copy(directory: RunDirectory, name: str) -> RunDirectory:
    """Copy the directory of a run that has not begun to a new one beside it, DIRECTORY-`name`, and return
    that. Raises UserError if it exists."""
    from anabranch.checkpoint.directory import RunDirectory

    path = directory.path.with_name(f"{directory.path.name}-{name}")
    if path.exists():
        raise UserError(f"{path} exists already: remove it, or choose another --run-dir")
    shutil.copytree(directory.path, path)
    return RunDirectory.open(path)


def _metrics(record: RunRecord, directory: RunDirectory, population: int) -> Metrics:
    from anabranch.node.chaos.metrics import metrics_of
    from anabranch.node.chaos.wasted_compute import wasted_compute
    from anabranch.node.driver.compute_ledger import ledger_of, read_ledger
    from anabranch.node.lifecycle.tickets import history_of
    from anabranch.observe.event_log import read_events
    from anabranch.observe.events import Event, PeerJoined

    events = [event for event in read_events(directory.events) if isinstance(event, Event)]
    peers = {event.subject: event.name for event in events if isinstance(event, PeerJoined)}
    ledgers = {peer: read_ledger(ledger_of(directory, name)) for peer, name in peers.items()}
    wasted = wasted_compute(record, events, history_of(directory), ledgers)
    return metrics_of(record, events, population, wasted)


def _verdict(directory: RunDirectory) -> Verdict:
    from anabranch.audit.verify import verify
    from anabranch.node.chaos.report import Verdict

    try:
        report = verify(directory.path, jobs=min(2, os.cpu_count() or 1))
    except UserError as error:
        return Verdict(False, 0, f"verify: {error}")
    return Verdict(report.holds and report.promise == "bits", report.steps, report.verdict())
