"""`anabranch start`: lead a run as its first data node."""

from __future__ import annotations

import argparse
from pathlib import Path

from anabranch.cli import outputs

_EPILOG = """\
examples:
  anabranch init run.toml && anabranch start run.toml
  anabranch start run.toml --run-dir /data/runs/mine

Set network.host to an address that others can reach (0.0.0.0 with network.advertise = "host:port" behind
a forwarded port). The ticket for relays is printed; the one for data nodes is in tickets.json of the run
directory. Ctrl+C stops after the present step and writes a checkpoint; a second one stops at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a run as its data node, and print the ticket with which others join."
    parser.epilog = _EPILOG
    parser.add_argument(
        "run_file", type=Path, metavar="RUN.toml", help="run file (anabranch init writes one)"
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME")
    parser.add_argument("--no-page", action="store_true", help="do not serve the page of the run")
    outputs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.leading import create, lead_directory, user_errors
    from anabranch.config import load_run_file

    with user_errors():
        config = load_run_file(args.run_file)
        path = args.run_dir or Path("runs") / config.run.name
        to = outputs.Outputs.of(args)
        to.say(f"run directory: {path}")
        return lead_directory(create(config, path).path, page=not args.no_page, to=to)
