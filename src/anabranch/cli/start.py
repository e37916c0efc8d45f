"""Start a run as its leading data node, and print the ticket with which others join.

examples:
  anabranch init run.toml && anabranch start run.toml
  anabranch start run.toml --run-dir /data/runs/mine
  anabranch start run.toml --restart    unattended: lead on after an internal failure
  anabranch start run.toml --serve      this machine computes for a stage, too

For peers on other machines, set network.host in the run file to an address that they can reach, or to 0.0.0.0
with network.advertise = "host:port" behind a forwarded port. The tickets for relays and for watching are
printed; tickets.json in the run directory also has the one for data nodes. Ctrl+C stops after the current
step and writes a checkpoint; a second Ctrl+C stops at once. Volunteers wait meanwhile, and come back when the
run is resumed."""

from __future__ import annotations

import argparse
from pathlib import Path

from anabranch.cli.support import outputs, own_relays, restart
from anabranch.cli.support.arguments import Line, add_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_file", type=Path, metavar="RUN.toml", help="run file (`anabranch init` writes one)")
    add("--run-dir", type=Path, metavar="DIR", help="run directory to make (default: runs/NAME)")
    own_relays.add_argument(parser)
    add_line(parser)
    restart.add_argument(parser)
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.support.create_directory import create, open_to_others
    from anabranch.cli.support.lead_run import lead_directory
    from anabranch.config import load_run_file

    line = Line.of(args)
    config = load_run_file(args.run_file)
    own_relays.check(config, args.serve)
    path = args.run_dir or Path("runs") / config.run.name
    to = outputs.Outputs.of(args)
    to.say(f"run directory: {path}")
    config = open_to_others(config, to.say)
    if args.restart:
        return restart.keep_leading(restart.resume_command(create(config, path, to.say).path, args), to.say)
    made = create(config, path, to.say).path
    return lead_directory(made, page=not args.no_page, to=to, serve=args.serve, line=line)
