"""Train with a local swarm: data nodes and relays as processes on this machine.

examples:
  anabranch train                           llama-tiny on the Python standard library's source text
  anabranch train --steps 50                a shorter run
  anabranch train run.toml                  the run of a run file (`anabranch init` writes one)
  anabranch train --network wan10           the processes as far apart as regions of the earth
  anabranch train --alone                   one process, without a swarm
  anabranch train run.toml --private-data texts      each island on a part of these texts (data.private)

Data nodes and relays are separate processes that talk over encrypted connections, as they would across the
internet. Ctrl+C stops after the current step and says how to continue.

With --network each process runs in a network of its own, with the latency and bandwidth between the regions
of a profile. A process is in the region of its own name (data-0, relay-1.0, ...) if the profile has one; the
other processes take the remaining regions in turn. The profile is a JSON file (docs/reference/formats.md) or
the shipped wan10. This needs Linux, root and /dev/net/tun."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.support import outputs
from anabranch.cli.support.arguments import add_new_run_dir
from anabranch.cli.support.outputs import Outputs
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.config import RunConfig
    from anabranch.net.wan.places import Place
    from anabranch.node.local_swarm.local_swarm import LocalSwarm
    from anabranch.node.local_swarm.supervisor import Supervisor
    from anabranch.observe.console.event_console import Console

#: Prompt and length (tokens) of the sample that is shown at the end.
PROMPT = "def "
SAMPLE_TOKENS = 120
#: Advice to whoever has lost the weights.
_AGAIN = "make room on the disk and train again (the log is kept, and `anabranch verify` still holds)"
#: Seconds that the leader may take to end the run after Ctrl+C; it allows a minute for its current step.
STOP_S = 70.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_file", nargs="?", type=Path, metavar="RUN.toml", help="run file (default: a tiny llama)")
    add("--steps", type=int, metavar="N", help="steps to train for, instead of run.steps")
    add_new_run_dir(parser)
    add("--network", metavar="PROFILE", help="emulate a wide-area network: wan10, or a profile's JSON file")
    add("--alone", action="store_true", help="one process without a swarm, at torch's own speed; no log")
    private = "data of the relays' own (data.private): text or a corpus for each relay, or one to be cut"
    add("--private-data", type=Path, nargs="+", default=[], metavar="DIR", help=private)
    add("--no-verify", action="store_true", help="do not verify at the end")
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.api.run import complete_at_once, configuration, free_path
    from anabranch.cli.support.create_directory import create, partition_line
    from anabranch.config import with_changes
    from anabranch.node.local_swarm.supervisor import Supervisor

    config = configuration(args.run_file)
    if args.steps is not None:
        config = with_changes(config, {"run.steps": args.steps})
    path = args.run_dir or free_path(config)
    if args.alone:
        return _alone(args, config, path)
    config = complete_at_once(config)
    with emulated_network(args.network, config) as places, Supervisor(config.compute.threads) as supervisor:
        to = Outputs.of(args)
        to.say(f"run directory: {path}")
        if places is not None:
            where = (f"{name} in {place.region}" for name, place in places.items())
            to.say(f"emulated network: {', '.join(where)}")
        to.say(partition_line(create(config, path, to.say, args.private_data)))
        return train_directory(path, supervisor, not args.no_verify, places, not args.no_page, to)


def _alone(args: argparse.Namespace, config: RunConfig, path: Path) -> int:
    """Create the run directory `path` of `config` and train in this process, without a swarm; returns the
    exit status. args: options of `anabranch train`. Raises UserError if the run cannot be trained so, before
    the directory is made."""
    from anabranch.cli.support.create_directory import create
    from anabranch.cli.support.train_alone import check, train_alone

    check(config, args.run_file)
    if args.private_data:
        raise UserError("--alone: one process trains on the run's own corpus; leave out --private-data")
    if args.network is not None:
        raise UserError("--alone: one process has no network to emulate; leave out --network")
    to = Outputs.of(args)
    to.say(f"run directory: {path}")
    create(config, path, to.say)
    return train_alone(path, to)


@contextmanager
def emulated_network(
    profile: str | None, config: RunConfig, option: str = "--network"
) -> Iterator[dict[str, Place] | None]:
    """Emulate a wide-area network while the context is entered; yields process name -> namespace, address and
    region for each process of the local swarm of `config`, or None without a profile.

    profile: name of a shipped profile, or path of one. option: name of the command-line option, for messages.
    Raises UserError if it cannot be emulated here.
    """
    if profile is None:
        yield None
        return
    from anabranch.net.wan.emulated_network import available
    from anabranch.net.wan.places import emulated
    from anabranch.net.wan.profile import find_profile
    from anabranch.node.local_swarm.local_swarm import processes_of

    found = find_profile(profile)
    if (reason := available()) is not None:
        raise UserError(f"{option} {profile}: {reason}; leave out {option} to run without it")
    with emulated(list(processes_of(config)), found) as places:
        yield places


def train_directory(
    path: Path,
    supervisor: Supervisor,
    verify: bool = True,
    places: dict[str, Place] | None = None,
    page: bool = False,
    to: Outputs = Outputs(),  # noqa: B008 (it is frozen)
) -> int:
    """Run the local swarm of a run directory until it ends, then show and verify the result; returns the exit
    status. It closes the supervisor. places: namespace, address and region of each process in an emulated
    network, None without one. page: True to serve the web page. to: where messages and metrics go."""
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.cli.main import main
    from anabranch.config import load_run_file
    from anabranch.node.local_swarm.local_swarm import LeaderFailed, LocalSwarm
    from anabranch.train.model.rounds import iterations

    directory = RunDirectory.open(path)
    config = load_run_file(directory.run_file)
    swarm = LocalSwarm(directory, config, supervisor, places=places)
    console = to.console(iterations(config))
    began = time.monotonic()
    try:
        finished = _follow(swarm, supervisor, console, page, to)
    except LeaderFailed as failure:
        outputs.print_error(str(failure))
        to.say(f"{_what_next(path, False, places is not None)}\nrun directory: {path}")
        return 1
    if swarm.stopping:
        to.say(f"{_what_next(path, finished, places is not None)}\nrun directory: {path}")
        return 0
    console.say(f"trained in {time.monotonic() - began:.0f} s")
    if not directory.checkpoints():
        outputs.print_error(f"{path}: no checkpoint could be written: the trained weights are lost; {_AGAIN}")
        return 1
    jobs = ["--jobs", str(min(2, os.cpu_count() or 1))]
    if to.json:
        return main(["verify", str(path), "--json", *jobs]) if verify else 0
    return _show_result(path, console, jobs if verify else None)


def _follow(swarm: LocalSwarm, supervisor: Supervisor, console: Console, page: bool, to: Outputs) -> bool:
    """Start the swarm, print its events on `console` until it ends, and close the supervisor. SIGINT and
    SIGTERM ask it to stop meanwhile (main thread only). page: True to serve the web page meanwhile, if it can
    be served. to: where metrics go. Returns True if the last step was committed. Raises LeaderFailed and
    UserError as `LocalSwarm` does, and UserError as `Outputs.beside`. After a request to stop, how the leader
    ended is not checked, and a stop before the first step returns False."""
    from anabranch.cli.support.lead_run import page_beside
    from anabranch.node.local_swarm.local_swarm import Interrupted
    from anabranch.node.operator.owner_actions import SwarmOwner
    from anabranch.observe.events import RunFinished

    finished, stopping = False, _Stopping(swarm, console)
    with outputs.handled_signals(stopping.ask), ExitStack() as beside:
        owner = SwarmOwner(swarm, stopping.ask)

        def poll() -> None:
            owner.poll()
            stopping.poll()

        try:
            beside.enter_context(to.beside(swarm.directory))
            beside.enter_context(page_beside(swarm.directory, console.say, owner, wanted=page))
            beside.enter_context(console)
            swarm.start()
            for event in swarm.events(poll):
                console.on_event(event)
                finished |= isinstance(event, RunFinished) and event.t >= console.steps
            if not stopping.at_once:  # otherwise the supervisor kills the processes
                swarm.end()
            if not swarm.stopping:
                swarm.check_leader()
        except Interrupted:
            console.say("stopped before the first step")
        finally:
            supervisor.close()
    return finished


def _what_next(path: Path, finished: bool, emulated: bool) -> str:
    """Next command for a run that was stopped, or whose leading process died. finished: True if all steps are
    committed. emulated: True if it ran in an emulated network."""
    if finished:
        return f"all its steps are committed; verify them with: anabranch verify {path}"
    note = ", without the emulated network" if emulated else ""
    return f"continue with: anabranch resume {path} --local{note}"


class _Stopping:
    """State of the user's request to stop a swarm. After the first request the swarm stops after the current
    step; after the second one, or STOP_S after the first, at once. `poll`, which stops it, must be called
    regularly. console: tells the user."""

    def __init__(self, swarm: LocalSwarm, console: Console) -> None:
        self._swarm, self._console = swarm, console
        self._requests: list[float] = []
        self._handled = 0

    @property
    def at_once(self) -> bool:
        return len(self._requests) > 1

    def ask(self, *_: object) -> None:
        """Record a request of the user to stop the swarm, which the next `poll` carries out; a start that is
        under way is broken off without it. The arguments are those of a signal handler, and ignored."""
        self._requests.append(time.monotonic())
        self._swarm.stopping = True

    def poll(self) -> None:
        if self._requests and time.monotonic() - self._requests[-1] > STOP_S:
            self._requests.append(time.monotonic())
        if len(self._requests) <= self._handled:
            return
        self._handled = len(self._requests)
        if self._handled == 1:
            self._console.say("stopping after the present step (Ctrl+C again stops at once)")
        elif self._handled == 2:
            self._console.say("stopping at once")
        self._swarm.stop()


def _show_result(path: Path, console: Console, verify: list[str] | None) -> int:
    """Print the first and last held-out loss that `console` saw, a sample and plots, then verify the run;
    returns the verification's exit status. verify: options of `anabranch verify`; None skips it (status
    0)."""
    from anabranch.cli.main import main

    first, last = console.first_evaluation, console.last_evaluation
    if first is not None and last is not None and first is not last:
        print(
            f"held-out loss {first.loss:.3f} -> {last.loss:.3f} nats per token, "
            f"{first.bits_per_byte:.3f} -> {last.bits_per_byte:.3f} bits per byte"
        )
    print(f"\na sample (the model continues {PROMPT!r}):", flush=True)
    main(["generate", str(path), "--prompt", PROMPT, "--tokens", str(SAMPLE_TOKENS)])
    print()
    main(["plot", str(path)])
    status = main(["verify", str(path), *verify]) if verify is not None else 0
    print(f"run directory: {path}", flush=True)
    return status
