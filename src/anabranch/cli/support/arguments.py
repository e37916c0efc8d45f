"""Options that several commands have, and checks of their values."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.config import Range
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.net.connection_limits import CarryLimits, LineCaps

#: Numbers of processes; 0 means one per core.
JOBS = Range(0)
#: Address to listen on where none is named.
LOOPBACK = "127.0.0.1"
#: Ports to listen on; 0 means a free one.
PORT = Range(0, 65535)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, e.g. runs/tiny")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run directory (RUN_DIR) and one of its checkpoints (--step; the newest if
    left out)."""
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
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on; 0: a free one")


def add_line(parser: argparse.ArgumentParser) -> None:
    """Add the caps of this machine's line, for a command that runs a peer (`Line`)."""
    add = parser.add_argument
    carry = "most Mbit/s that this machine carries for others that cannot dial each other; 0: nothing"
    add("--carry", type=float, metavar="MBIT", help=f"{carry} (default: no limit)")
    up, down = ("most Mbit/s that it sends; 0: no limit", "most Mbit/s that it receives; 0: no limit")
    add("--max-up", type=float, default=0.0, metavar="MBIT", help=up)
    add("--max-down", type=float, default=0.0, metavar="MBIT", help=down)


#: Least cap of a peer's line (Mbit/s). A choice: a dozen links at it still pass a kB a second each.
LEAST_MBIT = 0.1


@dataclass(frozen=True)
class Line:
    """Caps of a machine's line, in Mbit/s. carry: of what it carries for others; None: no limit, 0: it
    carries nothing. max_up, max_down: of the payloads that its own peers send and receive; 0: no limit."""

    carry: float | None = None
    max_up: float = 0.0
    max_down: float = 0.0

    @classmethod
    def of(cls, args: argparse.Namespace) -> Line:
        """Caps that the options of `add_line` name. Raises UserError if one is out of range."""
        line = cls(args.carry, args.max_up, args.max_down)
        check_range("--carry", line.carry or 0.0, Range(0, 10**6))
        for option, mbit in (("--max-up", line.max_up), ("--max-down", line.max_down)):
            check_range(option, mbit or 1.0, Range(LEAST_MBIT, 10**6))
        return line

    def shared_by(self, peers: int) -> Line:
        """Caps of each of so many peers of one machine, which share its line equally. Raises UserError if a
        share is below the least cap of a peer."""
        for option, mbit in (("--max-up", self.max_up), ("--max-down", self.max_down)):
            if mbit and mbit / peers < LEAST_MBIT:
                least = f"{LEAST_MBIT * peers:g} Mbit/s or more, or fewer peers"
                raise UserError(f"{option} {mbit:g}: {peers} peers of this machine share it; name {least}")
        carry = None if self.carry is None else self.carry / peers
        return Line(carry, self.max_up / peers, self.max_down / peers)

    def words(self) -> list[str]:
        """Command-line words that name these caps again; [] if there is none."""
        words = [] if self.carry is None else ["--carry", f"{self.carry:g}"]
        for option, mbit in (("--max-up", self.max_up), ("--max-down", self.max_down)):
            words += [option, f"{mbit:g}"] if mbit else []
        return words

    def limits(self) -> tuple[CarryLimits, LineCaps]:
        """Limits of a peer's transport, in bytes/s: of what it carries for others, and of its own payloads.
        """
        from anabranch.net.connection_limits import CarryLimits, LineCaps

        carry = CarryLimits() if self.carry is None else CarryLimits(bytes_per_s=self.carry * 1e6 / 8)
        if self.carry == 0:
            carry = CarryLimits(circuits=0)
        return carry, LineCaps(self.max_up * 1e6 / 8, self.max_down * 1e6 / 8)


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
