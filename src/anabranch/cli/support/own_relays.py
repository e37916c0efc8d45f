"""Relays of the machine that leads: `--serve` makes it compute for a stage as well.

A relay is a process of its own, with a key of its own and the ticket that every volunteer has: the run need
not know that two of its peers share a machine.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support import gpus
from anabranch.cli.support.arguments import Line
from anabranch.cli.support.children import LEAVE_S, Children
from anabranch.cli.support.outputs import Outputs
from anabranch.config import RunConfig, load_run_file
from anabranch.errors import UserError

#: Value of `--serve` without a word: one relay, on the device that the run file names.
ONE = "one"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--serve` to a command that leads a run."""
    text = (
        "lend this machine to the run as well: one relay on the run file's device, or one on each GPU that "
        "is named (all, or numbers with commas between)"
    )
    parser.add_argument("--serve", nargs="?", const=ONE, default="", metavar="GPUS", help=text)


def options(serve: str) -> list[str]:
    """Command-line words that give `--serve` the value `serve`; [] for ""."""
    return ["--serve", *([] if serve == ONE else [serve])] if serve else []


def check(run: RunConfig, serve: str) -> None:
    """Raise UserError if this machine's relays, by `--serve`, would need data of their own."""
    if serve and run.data.private:
        raise UserError(
            "--serve: a relay of this run needs data of its own: leave it out, and use `anabranch join` with "
            "--private-data"
        )


class OwnRelays:
    """Relays of the machine that leads, one for each device of `devices` ("": that of the run file); none
    runs before `join`. to: format of their messages, which are printed. line: caps of the machine's line,
    which the relays and the leader share equally; the attribute of this name has the caps of each. Raises
    UserError if a share is too small."""

    def __init__(self, directory: RunDirectory, devices: Sequence[str], to: Outputs, line: Line) -> None:
        self._directory, self._devices, self._to = directory, devices, to
        self.line = line.shared_by(1 + len(devices))
        """Caps of each relay, and of the leader."""
        self._children: Children | None = None

    def join(self, ticket: str) -> None:
        """Start the relays with the text of a ticket; later calls do nothing."""
        if self._children is not None or not self._devices:
            return
        commands, labels = [], []
        for number, device in enumerate(self._devices):
            name = f"own-{number}"
            command = ["join", "--name", name, "--home", str(self._directory.peer(name))]
            command += ["--nice", "0"]  # the leader's machine is no guest's
            command += self.line.words()
            command += ["--log-format", "json"] if self._to.json else []
            commands.append(command + (["--device", device] if device else []))
            labels.append("" if self._to.json else f"{name}: ")
        self._children = Children(commands, labels, lambda line: print(line, flush=True), ticket=ticket)

    def finish(self) -> None:
        """Wait up to LEAVE_S seconds for each of the relays to end by itself, as the run is over."""
        if self._children is not None:
            with suppress(subprocess.TimeoutExpired):
                self._children.wait(LEAVE_S)

    def end(self) -> None:
        """Make the relays that still run leave, and wait until they have ended; after LEAVE_S seconds they
        are killed."""
        if self._children is not None:
            self._children.end()


@contextmanager
def own_relays(directory: RunDirectory, serve: str, to: Outputs, line: Line) -> Iterator[OwnRelays]:
    """Yield this machine's relays, which are not started yet; they leave the run when the context ends.
    serve: value of `--serve`; "" for no relay. to: format of their messages. line: caps of this machine's
    line, which they and the leader share. Raises UserError for a GPU that is not here, for a share of the
    line that is too small, and for a run on private data."""
    check(load_run_file(directory.run_file), serve)
    devices = [""] if serve == ONE else []
    if serve and serve != ONE:
        devices = [f"cuda:{gpu}" for gpu in gpus.chosen_gpus(serve)]
    relays = OwnRelays(directory, devices, to, line)
    try:
        yield relays
    finally:
        relays.end()
