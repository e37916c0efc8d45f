"""Continue a run whose other voters are lost for good, from its run directory alone.

examples:
  anabranch recover runs/tiny --new-epoch       then: anabranch resume runs/tiny

Several peers (the voters) keep the commit log of a run. As long as a majority of them can come back, wait for
them: `anabranch resume` finds them. If they are lost for good, this command begins a new epoch from the log
in the run directory, with this machine as the only voter. Peers of the former epoch have to join again."""

from __future__ import annotations

import argparse

from anabranch.cli.support.arguments import add_run_dir
from anabranch.errors import UserError
from anabranch.observe.wording import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--new-epoch", action="store_true", help="confirm that the other voters are given up")


def run(args: argparse.Namespace) -> int:
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.node.lifecycle.new_epoch import recover
    from anabranch.observe.console.progress import ticking

    if not args.new_epoch:
        raise UserError(
            "this gives up the run's other voters for good, and the steps that only they have recorded; "
            "add --new-epoch to confirm"
        )
    directory = RunDirectory.open(args.run_dir)
    with directory.led(), ticking("reading the log"):
        recovered = recover(directory)
    given_up = ", ".join(plain(voter, 8) for voter in recovered.given_up)
    print(f"epoch {recovered.epoch} begins after step {recovered.t}; voters given up: {given_up}")
    print(f"continue with: anabranch resume {args.run_dir}")
    return 0
