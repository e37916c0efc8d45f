"""Compute others' work in a run again, as an auditor that the run's owner trusts.

examples:
  anabranch ticket new runs/tiny --role auditor --quota 1   the owner issues the ticket, and prints this:
  anabranch audit anabranch1:...
  anabranch audit anabranch1:... --name audit-1 --stage 2

The machine follows the state of one stage, that with the fewest auditors unless --stage names another, and
computes the contributions again that the run's audits draw there (audit.share in the run file). It trains
nothing: it takes no microbatch, has no vote, and a run goes on without it. Of all machines of its stage it is
asked first, and its word alone convicts: a peer whose work it finds different loses its key, and the run goes
back to before the false step. So the owner gives an auditor's ticket to machines that are trusted like the
owner's own. It needs the numerics of the run: the same torch build, device model, threads and dtype.

It stays, ends and joins again as `anabranch join` does, with the same exit status.
"""

from __future__ import annotations

import argparse

from anabranch.cli import join


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stage = "stage to audit, 1 or more (default: one with the fewest auditors)"
    join.add_machine(parser, "read the auditor's ticket from this file, once it is there", stage)
    join.add_stay(parser)
    none = {"corpus": None, "private_data": None, "threads": 0, "memory": 0.0, "keep": 0.0}
    parser.set_defaults(audits=True, gpus="", hours="", **none)


def run(args: argparse.Namespace) -> int:
    return join.run(args)
