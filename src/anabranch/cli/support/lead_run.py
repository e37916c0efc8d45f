"""Leading a run from its directory, with console, tickets and web page, for `start` and `resume`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.addresses import on_loopback
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support.arguments import Line
from anabranch.cli.support.create_directory import partition_line
from anabranch.cli.support.outputs import Outputs, print_error
from anabranch.cli.support.own_relays import OwnRelays, own_relays
from anabranch.cli.support.restart import INTERNAL_FAILURE
from anabranch.config import NetworkSection, RunConfig, load_run_file
from anabranch.errors import UserError, used_up, words_of
from anabranch.train.model.rounds import iterations, rounds_of

if TYPE_CHECKING:
    from anabranch.node.lifecycle.create_run import CreatedRun
    from anabranch.observe.page.server import Owner
    from anabranch.protocol.consensus.log_replay import LogReplay

#: Sentence below tickets that name this machine's loopback address.
LOOPBACK_WARNING = (
    "warning: these tickets work on this machine only, as they name a loopback address; for other machines "
    "set network.host to an address that they can reach, or to 0.0.0.0 with network.advertise"
)


@contextmanager
def page_beside(
    directory: RunDirectory, say: Callable[[str], None], owner: Owner, wanted: bool = True
) -> Iterator[None]:
    """Context in which the run's web page is served; `say` gets its addresses, or why it cannot be served.
    wanted: False serves none. owner: executes the actions that the page offers to whoever has the owner's
    address."""
    if not wanted:
        yield
        return
    from anabranch.observe.page.page_thread import PageThread

    page = PageThread(directory.events, owner=owner)
    try:
        say(f"watch it: {page.start()}")
        say(f"watch and control it (keep this address secret): {page.owner_address}")
    except UserError as error:
        say(f"the run has no web page: {error}")
    try:
        yield
    finally:
        page.close()


def refuse_finished(directory: RunDirectory, history: LogReplay, run: RunConfig) -> None:
    """Raise UserError if the log ends with a stop and all steps are committed: nothing is left to resume.
    history: state of the run by its log. The number of steps is the last one in the log, else that of `run`,
    the genesis's configuration."""
    steps = rounds_of(run).iterations(history.course.steps) or iterations(run)
    if history.stopped and history.t >= steps:
        raise UserError(f"{directory}: all {steps} steps are committed; there is nothing to resume")


def lead_directory(
    path: Path,
    quiet: bool = False,
    page: bool = True,
    to: Outputs = Outputs(),  # noqa: B008 (it is frozen)
    new_tickets: bool = False,
    serve: str = "",
    line: Line = Line(),  # noqa: B008 (it is frozen)
) -> int:
    """Lead the run in a directory until it ends; returns the exit status: 0, 1, or INTERNAL_FAILURE. Raises
    UserError if the run cannot be led. quiet: True to print errors only, serve no page, and take any free
    port unless the run file names one. new_tickets: True to issue tickets even where former ones still work,
    and to take another port unless the run file names one. serve: relays of this machine that take part, too
    (`own_relays`). line: caps of this machine's line. A machine without room to begin is an internal failure,
    which `--restart` tries again, and no mistake of the user."""
    try:
        directory = RunDirectory.open(path)
        with directory.led(), own_relays(directory, serve, to, line) as relays:
            return _lead(directory, quiet, page and not quiet, to, new_tickets, relays)
    except (UserError, OSError) as error:
        if not used_up(error):
            raise
        advice = "; make room, then start again" if isinstance(error, OSError) else ""
        print_error(f"the run in {path} cannot be led now: {words_of(error)}{advice}")
        return INTERNAL_FAILURE


def _lead(
    directory: RunDirectory,
    quiet: bool,
    page: bool,
    to: Outputs,
    new_tickets: bool,
    relays: OwnRelays,
) -> int:
    from anabranch.net.ticket import Ticket
    from anabranch.node.driver.event_loop import run_async
    from anabranch.node.lifecycle.addresses import advertised, bind_port, remembered_port
    from anabranch.node.lifecycle.create_run import LEADER_NAME
    from anabranch.node.lifecycle.lead import lead
    from anabranch.node.operator.owner_actions import LeaderOwner
    from anabranch.observe.events import Event

    console = to.console()

    def on_event(event: Event) -> None:
        if not quiet:
            console.on_event(event)

    def say(text: str) -> None:
        if not quiet:
            console.say(text)

    def on_ready(tickets: dict[str, Ticket]) -> None:
        if not quiet:
            to.say(f"others join with:\n\n  anabranch join {tickets['relay'].text}\n")
            to.say(
                f"others can watch, without taking part, with:\n\n  anabranch watch {tickets['watch'].text}\n"
            )
            if on_loopback(tickets["relay"].first_peer.host):
                to.say(LOOPBACK_WARNING)
            to.say(partition_line(directory))
        relays.join(tickets["relay"].text)

    network = _network(load_run_file(directory.run_file))
    # The supervisor of a local swarm hands out the tickets: there any port will do.
    former = 0 if new_tickets or quiet else remembered_port(directory.peer(LEADER_NAME))
    port = bind_port(network.host, network.port or former)
    founded = _founded(directory, advertised(network, port), quiet)
    owner, moving = LeaderOwner(directory.path), nullcontext() if quiet else console
    carry, caps = relays.line.limits()
    with to.beside(directory), page_beside(directory, say, owner, wanted=page), moving:
        leading = lead(founded, network, port, on_event, on_ready, say, new_tickets, carry, caps)
        outcome = run_async(leading)
    over = founded.peer.committed >= founded.peer.ctx.run.steps
    if over:
        relays.finish()
    if not quiet:
        if not over:
            to.say(f"continue with: anabranch resume {directory.path}")
        to.say(f"run directory: {directory.path}")
    if not outcome.ok:
        print_error(outcome.reason)
    if outcome.internal:
        return INTERNAL_FAILURE
    return 0 if outcome.ok else 1


def _founded(directory: RunDirectory, address: str, quiet: bool) -> CreatedRun:
    """Leading peer of the run in a directory, not started yet, which others dial at `address`; measures this
    machine, and counts a start of the peer (`lead_run`). quiet: True to show no progress. Raises UserError,
    also if all steps are committed."""
    from anabranch.node.lifecycle.create_run import lead_run
    from anabranch.observe.console.progress import ticking

    with nullcontext() if quiet else ticking("reading the run and measuring this machine"):
        founded = lead_run(directory, address)
    refuse_finished(directory, founded.history, founded.run)
    return founded


def _network(config: RunConfig) -> NetworkSection:
    """Network section of a run file. In a process of a local swarm in an emulated network, which finds its
    address in the environment, `host` is that address, and nothing is advertised."""
    from anabranch.node.local_swarm.supervisor import LISTEN_VARIABLE

    address = os.environ.get(LISTEN_VARIABLE)
    return replace(config.network, host=address, advertise="") if address else config.network
