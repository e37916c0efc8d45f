"""Recompute every step of a run in a single process, from corpus, seed and run file, and compare
weights, optimizer state, losses and commit log value by value.

examples:
  anabranch verify runs/tiny
  anabranch verify runs/tiny --jobs 2       two processes share each step; the result is the same
  anabranch verify runs/tiny --independent  compare with torch's own modules and optimizer too, in fp64
  anabranch verify runs/tiny --rounds 40:42 steps or rounds 40 to 42 only, from the checkpoint before them
  anabranch verify runs/tiny --private-data mine   a run on private data: inner steps on one's own, too
  anabranch verify runs/tiny --json         the result for a program (docs/reference/formats.md)
  anabranch verify runs/tiny --proof runs/tiny/proofs/step-000002-stage-1-0a1b2c3d4e5f6071.json

Exit status 0: the run keeps its promise. Exact sums on machines of this one's numerics class promise every
bit, fast sums a distance (docs/explanation/numerics.md). Exit status 1: it does not. Exit status 2: a file
cannot be read.

With --proof it computes the step of a proof again, which a leader wrote when an auditor found a relay's work
different, and compares it with the receipt that the relay signed. Exit status 0: proved, its work is false.
Exit status 1: not proved, or refuted (the receipt is right). Exit status 2: a file cannot be read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from anabranch.cli.support.arguments import add_json, add_run_dir, check_range
from anabranch.config import Range
from anabranch.errors import UserError
from anabranch.observe.wording import plain, plain_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    add = parser.add_argument
    add("--jobs", type=int, default=1, metavar="N", help="processes that share each step")
    independent = "also train one unsplit torch module with torch's AdamW in fp64, and compare"
    add("--independent", action="store_true", help=independent)
    part = "take only iterations A to B of the log again, from the last checkpoint before them"
    add("--rounds", type=_span, metavar="A:B", help=part)
    add("--proof", type=Path, metavar="FILE", help="check a proof that a relay's work is false")
    fetch = "download imported weights that this machine lacks from the Hugging Face Hub"
    add("--fetch", action="store_true", help=fetch)
    kept = "folder of contributions to a run on private data (default: those of the run's peers here)"
    add("--contributions", type=Path, action="append", default=[], metavar="DIR", help=kept)
    private = "private corpus of a machine of the run, whose inner steps are taken again"
    add("--private-data", type=Path, action="append", default=[], metavar="DIR", help=private)
    add_json(parser)


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two numbers of iterations") from None


def run(args: argparse.Namespace) -> int:
    from anabranch.api.run import verify

    check_range("--jobs", args.jobs, Range(1))
    if args.proof is not None:
        return _check_proof(args)
    for path in args.contributions:
        if not path.is_dir():
            raise UserError(f"--contributions {path}: there is no such folder")
    report = verify(
        *(args.run_dir, args.jobs, args.independent, args.rounds, args.fetch),
        *(args.contributions, args.private_data),
    )
    text = "\n".join(report.lines())
    print(json.dumps(report.as_dict(), allow_nan=False) if args.json else plain_lines(text))
    return 0 if report.holds else 1


def _check_proof(args: argparse.Namespace) -> int:
    from anabranch.api.run import prepared
    from anabranch.net.identity import Identity, IdentitySigner

    prepared(args.run_dir)
    from anabranch.audit.proof import PROVED, verify_proof

    result = verify_proof(args.run_dir, args.proof, IdentitySigner(Identity.generate()), args.fetch)
    lines = [plain(line, longest=len(line)) for line in result.lines()]  # names in the file may have ends
    print(json.dumps(result.as_dict(), allow_nan=False) if args.json else "\n".join(lines))
    return 0 if result.outcome == PROVED else 1
