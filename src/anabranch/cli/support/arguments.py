"""Options that several commands have, and checks of their values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.config import Range
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.net.connection_limits import CarryLimits, LineCaps

#: Numbers of processes; 0 means one per core.
JOBS = Range(0)
#: Ports to listen on; 0 means a free one.
PORT = Range(0, 65535)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, e.g. runs/tiny")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run directory and one of its checkpoints."""
    add_run_dir(parser)
    parser.add_argument("--step", type=int, metavar="T", help="checkpoint after step T (default: the newest)")


def add_new_run_dir(parser: argparse.ArgumentParser) -> None:
    text = "run directory (default: runs/NAME, numbered if taken)"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (docs/reference/formats.md)"
    )


def add_listen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on; 0: a free one")


def carry_limits(mbit: float | None) -> CarryLimits:
    """Limits of a carrier that may pass on `mbit` Mbit/s (None: without limit; 0: it carries nothing)."""
    from anabranch.net.connection_limits import CarryLimits

    if mbit is None:
        return CarryLimits()
    return CarryLimits(bytes_per_s=mbit * 1e6 / 8) if mbit else CarryLimits(circuits=0)


def line_caps(up_mbit: float, down_mbit: float) -> LineCaps:
    """Caps of this machine's line: most Mbit/s that it sends and receives; 0: none."""
    from anabranch.net.connection_limits import LineCaps

    return LineCaps(up_mbit * 1e6 / 8, down_mbit * 1e6 / 8)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes; 0: one per core")


def add_executor(parser: argparse.ArgumentParser) -> None:
    from anabranch.executors import NAMES

    text = "processes of this machine, or a Ray cluster (RAY_ADDRESS; needs the extra ray)"
    parser.add_argument("--executor", choices=NAMES, default=NAMES[0], help=text)


def check_range(option: str, value: float, allowed: Range) -> None:
    """Raise UserError, naming the option, if its value is not within `allowed`."""
    if not allowed.holds(value):
        raise UserError(f"{option} {value:g}: it must be {allowed}")
