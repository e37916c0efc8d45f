"""Continue a run from its directory.

examples:
  anabranch resume runs/tiny            lead the run again; prints its tickets and waits for peers
  anabranch resume runs/tiny --restart  the same, unattended: lead on after an internal failure
  anabranch resume runs/tiny --serve    lead it, and compute for a stage, too
  anabranch resume runs/tiny --local    start a local swarm too, as `anabranch train` does
  anabranch resume runs/tiny --alone    one process without a swarm, after `anabranch train --alone`

Port and tickets stay, so that volunteers come back by themselves: the port that was chosen for network.port =
0 is taken again. Tickets are issued anew if less than half of their time is left; with --new-tickets all of
them, on another port.

The run continues from its newest checkpoint. Steps that were committed after it are recomputed, with the same
results; the log records this.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from anabranch.addresses import on_loopback
from anabranch.cli.support import outputs, own_relays, restart
from anabranch.cli.support.arguments import Line, add_line, add_run_dir
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.checkpoint.directory import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--local", action="store_true", help="start the other peers on this machine, too")
    alone = "continue what `anabranch train --alone` began"
    parser.add_argument("--alone", action="store_true", help=alone)
    parser.add_argument("--no-verify", action="store_true", help="with --local: do not verify at the end")
    parser.add_argument("--new-tickets", action="store_true", help="issue new tickets, on another port")
    own_relays.add_argument(parser)
    add_line(parser)
    restart.add_argument(parser)
    outputs.add_arguments(parser)
    # The leading process of a local swarm is started with this one.
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.cli.support.lead_run import lead_directory
    from anabranch.config import load_run_file

    to, line = outputs.Outputs.of(args), Line.of(args)
    if not args.quiet and not args.restart:
        to.say(f"run directory: {args.run_dir}")
    if args.alone and (args.local or args.restart or args.serve):
        raise UserError("--alone is one process without peers: leave out --local, --restart and --serve")
    if args.restart and args.local:
        raise UserError("--restart is for a leader whose peers are elsewhere: leave out --local")
    if line != Line() and (args.local or args.alone):
        raise UserError("all bytes stay on this machine: leave out --carry, --max-up and --max-down")
    if args.serve and args.local:
        raise UserError("--local starts all relays on this machine: leave out --serve")
    if args.alone:
        from anabranch.cli.support.train_alone import train_alone

        return train_alone(args.run_dir, to)
    directory = RunDirectory.open(args.run_dir)
    if directory.checkpoints() and not directory.log.exists():
        raise UserError(f"{directory.path} was trained alone: add --alone to continue it")
    if args.restart:
        return restart.keep_leading(restart.resume_command(args.run_dir, args), to.say)
    if not args.local:
        own = not args.quiet and not args.serve
        if own and on_loopback(load_run_file(directory.run_file).network.host):
            local = f"anabranch resume {args.run_dir} --local"
            to.say(f"only the leading data node is started; relays on this machine, too: {local}")
        new_tickets, page = args.new_tickets, not args.no_page
        return lead_directory(args.run_dir, args.quiet, page, to, new_tickets, args.serve, line)

    from anabranch.cli.train import train_directory
    from anabranch.node.local_swarm.supervisor import Supervisor

    config = load_run_file(directory.run_file)
    with directory.led():  # the leading process takes this lock; nothing it needs may be touched before
        _refuse_finished(directory)
    with Supervisor(config.compute.threads) as supervisor:
        return train_directory(args.run_dir, supervisor, not args.no_verify, page=not args.no_page, to=to)


def _refuse_finished(directory: RunDirectory) -> None:
    """Raise UserError if all steps are committed, before a swarm starts. A log that cannot be read passes:
    the leader reports it."""
    from anabranch.cli.support.lead_run import refuse_finished
    from anabranch.node.lifecycle.tickets import history_of
    from anabranch.node.lifecycle.training_machine import run_of
    from anabranch.observe.console.progress import ticking

    try:
        with ticking("reading the log"):
            history = history_of(directory)
    except UserError:
        return
    if history.genesis is not None:
        refuse_finished(directory, history, run_of(history.genesis))
