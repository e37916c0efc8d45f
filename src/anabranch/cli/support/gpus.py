"""Joining with several GPUs: one peer, in a process of its own, for each of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from anabranch.addresses import parse_addresses
from anabranch.cli.support.arguments import Line
from anabranch.cli.support.children import PROGRAM, Children
from anabranch.cli.support.outputs import handled_signals
from anabranch.config import DEVICE, DEVICE_WORDS, device_problem
from anabranch.errors import UserError

#: Attributes of the parsed command that are no options, or that differ from child to child.
_OWN = {
    *("command", "of_command", "ticket", "ticket_file"),
    *("gpus", "device", "name", "port", "advertise", "home"),
    *("carry", "max_up", "max_down"),
}


def check_device(device: str, said: str = "") -> None:
    """Raise UserError unless `device` names one device, or several GPUs on which a stage can lie together,
    all of which torch finds here; devices other than GPUs are not looked for. said: option with its value as
    the user wrote it, for the message ("": --device)."""
    if not re.fullmatch(DEVICE, device):
        raise UserError(f"--device {device}: write {DEVICE_WORDS}")
    if problem := device_problem(device):
        raise UserError(f"--device {problem}")
    if not device.startswith("cuda"):
        return
    found = gpu_count()
    for name in device.split(","):
        if int(name.partition(":")[2] or 0) >= found:
            where = said or f"--device {name}"
            raise UserError(f"{where}: torch finds {found} GPUs here; `anabranch doctor` lists them")


def gpu_count() -> int:
    """Number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count()


def chosen_gpus(text: str) -> list[int]:
    """Numbers, ascending, of the GPUs that `--gpus` names: "all", or numbers with commas between. Raises
    UserError if it is ill-formed, one is not here, or there is none for "all"."""
    found = gpu_count()
    if text == "all":
        if not found:
            raise UserError("--gpus all: torch finds no GPU here; `anabranch doctor` says more")
        return list(range(found))
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f'--gpus {text}: write "all", or numbers with commas between, e.g. 0,2')
    numbers = sorted({int(number) for number in text.split(",")})
    for number in numbers:
        check_device(f"cuda:{number}", f"--gpus {text}")
    return numbers


def join_commands(args: argparse.Namespace, gpus: Sequence[int], home: Path) -> list[list[str]]:
    """Arguments of `anabranch`, without the ticket, with which the peer of each of `gpus` (their numbers)
    joins. args: options that the user gave `anabranch join --gpus`.

    home: folder below which each has one of its own, so that a GPU keeps its peer's key. A fixed port, and
    the port of `--advertise`, count upwards from the first GPU to the last. The peers share the caps of this
    machine's line equally. Raises UserError if a share is too small.
    """
    shared: list[str] = []
    for key, value in vars(args).items():
        if key in _OWN or value is None or value is False or value == "":
            continue
        option = f"--{key.replace('_', '-')}"
        shared += [option] if value is True else [option, str(value)]
    shared += Line.of(args).shared_by(len(gpus)).words()
    commands = []
    for position, gpu in enumerate(gpus):
        command = ["join", "--device", f"cuda:{gpu}", *shared]
        command += ["--home", str(home / f"gpu-{gpu}")]
        command += ["--name", f"{args.name}-gpu{gpu}"] if args.name else []
        command += ["--port", str(args.port + position)] if args.port else []
        if args.advertise:
            addresses = parse_addresses(args.advertise)
            moved = [replace(address, port=address.port + position) for address in addresses]
            command += ["--advertise", ",".join(map(str, moved))]
        commands.append(command)
    return commands


def run_all(
    commands: Sequence[Sequence[str]],
    labels: Sequence[str],
    show: Callable[[str], None],
    program: Sequence[str] = PROGRAM,
    ticket: str = "",
) -> int:
    """Run all commands at the same time until each has ended; returns the largest exit status. Signals to
    stop are handed on. labels: text before each line, by command. show: prints a line that a process wrote,
    after its label. program: words before those of each command. ticket: handed to each process in its
    environment."""
    children = Children(commands, labels, show, program, ticket)
    with handled_signals(lambda number, *_: children.signal(number)):
        return children.wait()
