"""Relays of the machine that leads: `--serve` makes it compute for a stage as well.

A relay is a process of its own, with a key of its own and the ticket that every volunteer has: the run need
not know that two of its peers share a machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.support import gpus
from anabranch.cli.support.children import Children
from anabranch.cli.support.outputs import Outputs

#: Value of `--serve` without a word: one relay, on the device that the run file names.
ONE = "one"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--serve`."""
    text = (
        "lend this machine to the run as well: one relay on the run file's device, or one on each GPU that "
        "is named (all, or numbers with commas between)"
    )
    parser.add_argument("--serve", nargs="?", const=ONE, default="", metavar="GPUS", help=text)


def options(serve: str) -> list[str]:
    """Command-line words for the value of `--serve`."""
    return ["--serve", *([] if serve == ONE else [serve])] if serve else []


@contextmanager
def own_relays(directory: RunDirectory, serve: str, to: Outputs) -> Iterator[Callable[[str], None]]:
    """Yield a function that starts this machine's relays with the text of a ticket; later calls do nothing.
    The relays leave the run when the context ends.

    serve: value of `--serve`; "" for no relay. Raises UserError for a GPU that is not here.
    """
    devices = [""] if serve == ONE else []
    if serve and serve != ONE:
        devices = [f"cuda:{gpu}" for gpu in gpus.chosen_gpus(serve)]
    started: list[Children] = []

    def join(ticket: str) -> None:
        if started or not devices:
            return
        commands, labels = [], []
        for number, device in enumerate(devices):
            name = f"own-{number}"
            command = ["join", ticket, "--name", name, "--home", str(directory.peer(name))]
            command += ["--log-format", "json"] if to.json else []
            commands.append(command + (["--device", device] if device else []))
            labels.append("" if to.json else f"{name}: ")
        started.append(Children(commands, labels, lambda line: print(line, flush=True)))

    try:
        yield join
    finally:
        for children in started:
            children.end()
