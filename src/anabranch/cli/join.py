"""Lend this machine to a run: measure it, fetch the state of a stage, and compute until the run is over.

examples:
  anabranch join anabranch1:...                          nothing more is needed
  anabranch join anabranch1:... --name ada --region London
  anabranch join anabranch1:... --gpus all               one peer for each GPU of this machine
  anabranch join anabranch1:... --host 0.0.0.0 --port 7700 --advertise my.host:7700

A peer computes on one device: the first GPU unless --device names another. Join again in another terminal to
add another peer. Behind a router nothing has to be set up: this machine dials those that it can, and meets
the others through a carrier; with --advertise others dial it directly. Ctrl+C leaves the run cleanly: other
peers take over this machine's work.

It stays: after sleep, a lost connection or a removal, and while the owner has paused or stopped the run, it
waits and joins again by itself. It ends when all steps of the run are committed, when its ticket has expired
or is revoked, when the owner expels it, or when the run speaks another protocol version.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.support import outputs
from anabranch.cli.support.arguments import PORT, add_listen, carry_limits, check_range
from anabranch.cli.support.gpus import check_device
from anabranch.config import Range, address_problem
from anabranch.errors import UserError
from anabranch.hours import parse_hours
from anabranch.observe.wording import plain

if TYPE_CHECKING:
    from anabranch.net.ticket import Ticket


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ticket", nargs="+", metavar="TICKET", help="ticket that `anabranch start` printed, spaces or not")
    add("--name", default="", help="name of this peer that others see")
    region = "region of this machine, e.g. London; used to choose neighbours and to estimate links"
    add("--region", default="", help=region)
    device = '"cpu", "cuda" or "cuda:N" (default: as the run file says; there "auto" is the first GPU)'
    add("--device", default="", help=device)
    gpus = "one peer for each GPU: all, or numbers with commas between, e.g. 0,2"
    add("--gpus", default="", metavar="all|N,N", help=gpus)
    add("--stage", type=int, metavar="N", help="stage to serve (default: the run chooses)")
    add_listen(parser)
    advertise = "addresses at which other peers can dial this one, the best first, with commas between"
    add("--advertise", default="", metavar="HOST:PORT", help=advertise)
    add("--no-listen", action="store_true", help="accept no connection: others come through a carrier")
    carry = "most Mbit/s that this machine carries for others that cannot dial each other; 0: nothing"
    add("--carry", type=float, metavar="MBIT", help=f"{carry} (default: no limit)")
    hours = "local time at which this machine is lent (default: always)"
    add("--hours", default="", metavar="22:00-07:00", help=hours)
    nice = "priority below other programs of this machine, 0 to 19; 0: none below"
    add("--nice", type=int, default=0, metavar="N", help=nice)
    add("--corpus", type=Path, metavar="DIR", help="copy of the run's corpus folder (data nodes only)")
    patience = "how long to try to reach the run's data node for the first time"
    add("--patience", type=float, default=120.0, metavar="SECONDS", help=patience)
    add("--once", action="store_true", help="end, instead of joining again, when the part in the run ends")
    add("--home", type=Path, metavar="DIR", help="folder for key and log (default: ~/.anabranch/RUN)")
    outputs.add_log_format(parser)
    add("--quiet", action="store_true", help="print nothing but errors")


def run(args: argparse.Namespace) -> int:
    from anabranch.net.ticket import parse_ticket
    from anabranch.node.driver.event_loop import run_async
    from anabranch.node.lifecycle.join import JoinOptions, join
    from anabranch.node.lifecycle.peer_home import claimed

    to = outputs.Outputs(args.log_format)

    def say(text: str) -> None:
        if not args.quiet:
            to.say(plain(text))

    _check(args)
    args.ticket = "".join(args.ticket)  # a shell made several words of a ticket with spaces or line breaks
    ticket = parse_ticket(args.ticket, now_s=time.time())
    if ticket.grant.role == "watch":
        raise UserError("this ticket only permits watching: anabranch watch TICKET; ask for a relay ticket")
    if ticket.grant.role == "data" and args.corpus is None:
        raise UserError(
            "a data node needs the run's corpus: copy its `corpus` folder to this machine and name it with "
            "--corpus"
        )
    if args.nice and hasattr(os, "nice"):
        os.nice(args.nice)
    default_home = args.home or home_of(ticket)
    if args.gpus:
        return _join_on_gpus(args, default_home, to)
    with claimed(default_home, exclusive=args.home is not None) as home:
        if home != default_home:
            say(f"this machine has a peer in this run already; joining as another one, in {home}")
        options = JoinOptions(
            ticket=ticket,
            home=home,
            name=args.name,
            region=args.region,
            stage=-1 if args.stage is None else args.stage,
            host=args.host,
            port=args.port,
            advertise=args.advertise,
            corpus=args.corpus,
            device=args.device,
            patience_s=args.patience,
            once=args.once,
            hours=parse_hours(args.hours) if args.hours else None,
            listens=not args.no_listen,
            carry=carry_limits(args.carry),
        )
        outcome = run_async(join(options, say))
    if outcome.ok:
        say(outcome.reason)
        return 0
    outputs.print_error(outcome.reason + ("; the ticket is still valid: join again" if outcome.again else ""))
    return 1


def _join_on_gpus(args: argparse.Namespace, home: Path, to: outputs.Outputs) -> int:
    """Join with one process for each GPU that --gpus names; returns their largest exit status."""
    from anabranch.cli.support import gpus

    chosen = gpus.chosen_gpus(args.gpus)
    labels = ["" if to.json else f"gpu {number}: " for number in chosen]
    return gpus.run_all(gpus.join_commands(args, chosen, home), labels, lambda line: print(line, flush=True))


def _check(args: argparse.Namespace) -> None:
    """Raise UserError for options that cannot work, before any peer is dialled."""
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
    check_range("--carry", args.carry or 0.0, Range(0, 10**6))
    check_range("--patience", args.patience, Range(0, 10**7))
    check_range("--stage", args.stage or 0, Range(0))
    if args.corpus is not None and not (args.corpus / "manifest.json").is_file():
        raise UserError(
            f"--corpus {args.corpus}: there is no corpus; copy the `corpus` folder of the run directory"
        )


def home_of(ticket: Ticket) -> Path:
    """Default folder for the ticket's run. Raises UserError if the run's name, which a stranger chose, is no
    plain folder name."""
    run_id = ticket.grant.run
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run_id):
        raise UserError(
            f"the ticket's run {run_id[:40]!r} cannot be a folder name: choose a folder with --home"
        )
    return Path.home() / ".anabranch" / run_id
