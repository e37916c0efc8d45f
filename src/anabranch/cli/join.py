"""Lend this machine to a run: measure it, fetch the state of a stage, and compute until the run is over.

examples:
  anabranch join anabranch1:...                          nothing more is needed
  anabranch join anabranch1:... --name ada --region London
  anabranch join anabranch1:... --gpus all               one peer for each GPU of this machine
  anabranch join anabranch1:... --device cuda:0,cuda:1   one peer, whose stage lies on two GPUs
  anabranch join anabranch1:... --hours "when idle"      only while nobody uses this machine
  anabranch join anabranch1:... --private-data mine      train on text of one's own, which stays here
  anabranch join anabranch1:... --host 0.0.0.0 --port 7700 --advertise my.host:7700

A peer computes on one device: the first GPU unless --device names another. Join again in another terminal to
add another peer. Where a stage does not fit into one GPU, --device names several: each holds some of its
blocks. They compute in turn, so that peer is as fast as one of them; with --gpus each GPU is a peer.

Behind a router nothing has to be set up: this machine dials those that it can, and meets the others through a
carrier; with --advertise others dial it directly. Ctrl+C leaves the run cleanly: other peers take over this
machine's work. `anabranch pause` does so for a time, after which it joins again.

What it computes has low priority (--nice 10), so that the other programs of this machine go first; --nice 0
is for a machine that does nothing else.

The ticket may be left out where the environment variable ANABRANCH_TICKET holds it or --ticket-file names a
file with it: other users of this machine can read a command line.

It stays: after sleep, a lost connection or a removal, and while the owner has paused or stopped the run, it
waits and joins again by itself. It ends when all steps of the run are committed, when its ticket has expired
or is revoked, when the owner expels it, or when the run speaks another protocol version.

SIGTERM, as schedulers and spot machines send it, is an announced leave within --grace seconds, as Ctrl+C is.
Exit status 0: the run is over, or Ctrl+C ended it. Exit status 75: start the same command again (SIGTERM
ended it, or with --once a pause or its hours; the run could not be reached, or this machine failed). Exit
status 1 or 2: the same command fails again; the message says why.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.api.volunteer import CACHE_GB, KEEP_GB, NICE
from anabranch.cli.support import outputs
from anabranch.cli.support.arguments import PORT, Line, add_line, add_listen, check_range
from anabranch.cli.support.gpus import check_device
from anabranch.config import Range, address_problem
from anabranch.errors import UserError, used_up, words_of
from anabranch.hours import parse_hours
from anabranch.launch.fleet import AGAIN, TICKET_VARIABLE
from anabranch.node.lifecycle.shutdown import STOP_S
from anabranch.observe.console.progress import Ticker
from anabranch.observe.wording import plain

if TYPE_CHECKING:
    from anabranch.node.driver.peer_driver import Outcome

#: Seconds between looks for the ticket's file.
FILE_S = 0.5
#: Help of --ticket-file and --stage.
TICKET_FILE = "read the ticket from this file, once it is there; of a run's tickets.json the relays' one"
STAGE = "stage to serve (default: the run chooses)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_machine(parser)
    gpus = "one peer for each GPU: all, or numbers with commas between, e.g. 0,2"
    add("--gpus", default="", metavar="all|N,N", help=gpus)
    threads = 'threads of torch; only where run.numerics is "mixed" (default: as the run file says)'
    add("--threads", type=int, default=0, metavar="N", help=threads)
    memory = "GiB to plan with as if no more were free, also of each GPU (default: what is free)"
    add("--memory", type=float, default=0.0, metavar="GIB", help=memory)
    hours = 'local time at which this machine is lent, or "when idle" (default: always)'
    add("--hours", default="", metavar="22:00-07:00", help=hours)
    add("--corpus", type=Path, metavar="DIR", help="copy of the run's corpus folder (data nodes only)")
    private = "prepared corpus of this machine alone, in a run on private data; it never leaves the machine"
    add("--private-data", type=Path, metavar="DIR", help=private)
    keep = f"most GB of disk for its contributions to such a run, for verify (default: {KEEP_GB:g})"
    add("--keep", type=float, default=KEEP_GB, metavar="GB", help=keep)
    add_stay(parser)
    parser.set_defaults(audits=False)


def add_machine(
    parser: argparse.ArgumentParser, ticket_file: str = TICKET_FILE, stage: str = STAGE
) -> None:
    """Add the arguments of a machine that takes part in a run: ticket, name, device, stage, addresses.
    ticket_file, stage: help of these options."""
    add = parser.add_argument
    add("ticket", nargs="*", metavar="TICKET", help="ticket that the run's owner gave away, spaces or not")
    add("--ticket-file", type=Path, metavar="FILE", help=ticket_file)
    add("--name", default="", help="name of this peer that others see")
    region = "region of this machine, e.g. London; used to choose neighbours and to estimate links"
    add("--region", default="", help=region)
    device = (
        '"cpu", "cuda", "cuda:N", or GPUs that hold a stage together, e.g. cuda:0,cuda:1 (default: as the '
        'run file says; there "auto" is the first GPU)'
    )
    add("--device", default="", help=device)
    add("--stage", type=int, metavar="N", help=stage)
    add_listen(parser)
    advertise = "addresses at which other peers can dial this one, the best first, with commas between"
    add("--advertise", default="", metavar="HOST:PORT", help=advertise)
    add("--no-listen", action="store_true", help="accept no connection: others come through a carrier")
    transport = "how to connect (default: TCP, and iroh if the ticket names its relay and it is installed)"
    add("--transport", choices=("tcp", "iroh", "auto"), default="auto", help=transport)
    add_line(parser)


def add_stay(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about how long a machine takes part, and about its folder and its output."""
    add = parser.add_argument
    nice = f"priority of computing below other programs, 1 to 19; 0: as they have (default: {NICE})"
    add("--nice", type=int, default=NICE, metavar="N", help=nice)
    patience = "how long to try to reach the run's data node for the first time"
    add("--patience", type=float, default=120.0, metavar="SECONDS", help=patience)
    grace = "time to leave in, after Ctrl+C or SIGTERM"
    add("--grace", type=float, default=STOP_S, metavar="SECONDS", help=grace)
    cache = f"most GB of disk for states of stages, kept for the next time; 0: none (default: {CACHE_GB:g})"
    add("--cache", type=float, default=CACHE_GB, metavar="GB", help=cache)
    add("--once", action="store_true", help="end, instead of joining again, when the part in the run ends")
    add("--home", type=Path, metavar="DIR", help="folder for key and log (default: ~/.anabranch/RUN)")
    outputs.add_log_format(parser)
    add("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> int:
    from anabranch.api.volunteer import checked_ticket, home_of

    to = outputs.Outputs(args.log_format)

    ticker = Ticker(plain=False)

    def say(text: str) -> None:
        if not args.quiet:
            with ticker.aside():
                to.say(plain(text))
            ticker.begin("since then")

    _check(args)
    args.ticket = ticket_text(args.ticket, args.ticket_file, args.patience)
    ticket = checked_ticket(args.ticket, has_corpus=args.corpus is not None, audits=args.audits)
    if args.gpus:
        return _join_on_gpus(args, args.home or home_of(ticket), to)
    try:
        with nullcontext() if args.quiet or to.json else ticker:
            outcome = _join(args, say)
    except OSError as error:
        if not used_up(error):
            raise
        outputs.print_error(f"this machine cannot join now: {words_of(error)}; make room, then join again")
        return AGAIN
    if outcome.ok:
        say(outcome.reason)
        return AGAIN if outcome.terminated else 0
    outputs.print_error(outcome.reason + ("; the ticket is still valid: join again" if outcome.again else ""))
    again = outcome.again or outcome.internal or outcome.unreached or outcome.terminated
    return AGAIN if again else 1


def _join(args: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    from anabranch.api.volunteer import join

    carry, caps = Line.of(args).limits()
    return join(
        args.ticket,
        name=args.name,
        region=args.region,
        device=args.device,
        stage=args.stage,
        host=args.host,
        port=args.port,
        advertise=args.advertise,
        corpus=args.corpus,
        home=args.home,
        patience_s=args.patience,
        grace_s=args.grace,
        once=args.once,
        listens=not args.no_listen,
        hours=args.hours,
        carry=carry,
        transport=args.transport,
        caps=caps,
        audits=args.audits,
        cache_gb=args.cache,
        threads=args.threads,
        memory_gib=args.memory,
        nice=args.nice,
        private_data=args.private_data,
        keep_gb=args.keep,
        say=say,
    )


def ticket_text(words: Sequence[str], file: Path | None, patience_s: float) -> str:
    """Text of the ticket: the words of the command line (a shell made several of one with spaces or line
    breaks), else a file's (of a tickets.json the relays' one), else the environment's. Raises UserError if
    there is none, if the file is no text, or if both words and a file are given. patience_s: seconds to wait
    for the file, which a starting leader writes late."""
    if words and file is not None:
        raise UserError("a ticket and --ticket-file: give one of them")
    if words:
        return "".join(words)
    if file is None:
        if text := os.environ.get(TICKET_VARIABLE):
            return text
        raise UserError(f"no ticket: give one, or --ticket-file, or set {TICKET_VARIABLE}")
    until = time.monotonic() + patience_s
    while True:
        try:
            text = file.read_text("utf-8").strip()
        except FileNotFoundError:
            text = ""
        except UnicodeDecodeError:
            raise UserError(f"--ticket-file {file}: this is not a text") from None
        if text.startswith("{"):
            text = _of_relays(text)
        if text:
            return text
        if time.monotonic() >= until:
            raise UserError(f"--ticket-file {file}: there is no ticket")
        time.sleep(FILE_S)


def _of_relays(text: str) -> str:
    """Ticket for relays in the text of a tickets.json; "" if there is none, as in a file that is still being
    written."""
    try:
        return str(json.loads(text)["relay"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""


def _join_on_gpus(args: argparse.Namespace, home: Path, to: outputs.Outputs) -> int:
    """Join with one process for each GPU that --gpus names, until all have ended; returns their largest exit
    status. args: options of `anabranch join`. home: folder below which each has its own. to: unless messages
    are JSON, each line that a process writes is shown after the number of its GPU. Raises UserError if --gpus
    is ill-formed or names a GPU that is not here."""
    from anabranch.cli.support import gpus

    chosen = gpus.chosen_gpus(args.gpus)
    labels = ["" if to.json else f"gpu {number}: " for number in chosen]
    commands = gpus.join_commands(args, chosen, home)
    return gpus.run_all(commands, labels, lambda line: print(line, flush=True), ticket=args.ticket)


def _check(args: argparse.Namespace) -> None:
    """Raise UserError for options that cannot work or contradict each other, before any peer is dialled."""
    if args.device and args.gpus:
        raise UserError("--device names one device and --gpus several: give one of them")
    if args.device:
        check_device(args.device)
    check_range("--port", args.port, PORT)
    if problem := address_problem(args.host, args.advertise, "--host", "--advertise"):
        raise UserError(problem)
    try:
        socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UserError(
            f"--host {args.host}: not an address of this machine, e.g. 127.0.0.1 or 0.0.0.0"
        ) from None
    if args.no_listen and args.advertise:
        raise UserError("--no-listen accepts no connection, so --advertise has no use: give one of them")
    check_range("--nice", args.nice, Range(0, 19))
    if args.hours:
        parse_hours(args.hours)
    Line.of(args)
    check_range("--cache", args.cache, Range(0, 10**6))
    check_range("--threads", args.threads, Range(0, 1024))
    check_range("--memory", args.memory or 1.0, Range(0.05, 10**6))
    check_range("--patience", args.patience, Range(0, 10**7))
    check_range("--grace", args.grace, Range(0, 10**7))
    check_range("--stage", args.stage or 0, Range(0))
    check_range("--keep", args.keep, Range(0, 10**6))
    if args.private_data is not None and args.corpus is not None:
        raise UserError("--private-data is for relays, and --corpus for data nodes: give one of them")
    if args.private_data is not None and not (args.private_data / "manifest.json").is_file():
        raise UserError(
            f"--private-data {args.private_data}: there is no corpus; prepare one of your text with "
            "`anabranch data FILE.toml --out DIR`, where data.tokenizer is the run's tokenizer.json"
        )
    if args.corpus is not None and not (args.corpus / "manifest.json").is_file():
        raise UserError(
            f"--corpus {args.corpus}: there is no corpus; copy the `corpus` folder of the run directory"
        )
