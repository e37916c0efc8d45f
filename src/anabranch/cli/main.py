"""Entry point of `anabranch`: parses the command line, imports the chosen command and runs it.

A command is a module with `add_arguments(parser)` and `run(args) -> exit status`; its docstring is the text
of `anabranch COMMAND --help`: a description, then examples. Only the chosen command's module is imported, so
`anabranch --help` is quick and loads no torch."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import signal
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

from anabranch import __version__
from anabranch.cli.support.outputs import print_error
from anabranch.errors import UserError, words_of
from anabranch.net.errors import NetError

#: Short help of each command, in the order of use. A command's module has its name, with "_" for "-".
COMMANDS = {
    "init": "write a commented run file (TOML)",
    "data": "prepare the corpus of a run file, and say its documents, tokens and epochs",
    "train": "train on this machine alone, with a local swarm of processes",
    "start": "start a run as its leading data node, and print tickets",
    "ticket": "issue, list and revoke the tickets of a run",
    "expel": "expel a peer, or all peers of a ticket, from a run",
    "join": "lend this machine to a run, with its ticket",
    "audit": "compute others' work in a run again, as an auditor that its owner trusts",
    "relay": "carry the bytes of machines that cannot dial each other",
    "pause": "pause the peers that this machine lends, for a time or until told",
    "service": "print a service definition that lends this machine",
    "resume": "continue a run from its directory",
    "recover": "continue a run whose other voters are lost for good",
    "doctor": "check whether this machine can lend to a run or lead one",
    "watch": "show a run on a web page, live and as a replay",
    "top": "show a run in the terminal",
    "report": "write a run and its replay as one HTML file",
    "verify": "recompute every step of a run and compare it bit by bit",
    "ledger": "show who contributed what to a run",
    "export": "write a checkpoint as a Hugging Face folder",
    "push": "copy checkpoints to an object store or a model hub",
    "generate": "generate text with a checkpoint",
    "evaluate": "score a checkpoint on a task: multiple choice, cloze, perplexity",
    "check-model": "check a model for what would break exactness",
    "route": "solve a routing instance with any policy",
    "simtest": "test the protocol on simulated swarms with random faults",
    "chaos": "kill, freeze and replace real processes while they train",
    "profile": "measure this machine as a device for simulate",
    "simulate": "predict the time of an iteration on a fleet, under churn",
    "trace": "generate a churn trace (spot preemptions) for simulate",
    "fleet": "write the file with which a scheduler starts peers",
    "plan": "find the best stages, placement and batch for a fleet",
    "plot": "draw loss and throughput of a run as PNG and SVG",
}

_DESCRIPTION = """\
Train a language model on machines that volunteers lend. The model is split into stages, and
each stage has several replicas, so any machine may disappear at any time: every step is still
the step that one machine would have taken on the same batch.
"""

_EPILOG = """\
examples:
  anabranch train                  train a tiny llama with eight processes on this machine, and verify it
  anabranch init run.toml          write a run file, with a comment on each key
  anabranch start run.toml         open that run to others; prints their ticket
  anabranch join TICKET            lend this machine to a run
  anabranch verify runs/tiny       compare every bit with what one machine computes
  anabranch COMMAND --help         options and examples of a command
"""

#: Exit status of a program that Ctrl+C ended (128 + SIGINT), and of bad input.
INTERRUPTED = 130
BAD_INPUT = 2


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help texts that end with the option's default, unless they mention it or it is empty; line breaks stay.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help
        if text is None or not action.option_strings or "default:" in text:
            return text
        if isinstance(default, bool) or default in (None, "", [], argparse.SUPPRESS):
            return text
        return (
            f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} (default: {default})"
        )


def entry() -> NoReturn:
    """Installed command `anabranch`: exit with `main`'s status. Ctrl+C during the shutdown is ignored."""
    try:
        sys.exit(main())
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. argv: arguments after the program's name (None: this
    process's). Bad input, an OSError, or torch that is not installed, is a line on stderr and status 2,
    Ctrl+C status 130, a closed output status 1. Usage errors and --help end the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        getattr(parsed, "of_command", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        status: int = _module(parsed.command).run(parsed)
        sys.stdout.flush()
        return status
    except (UserError, NetError) as error:
        print_error(str(error))
        return BAD_INPUT
    except KeyboardInterrupt as stop:
        print("\n" + ": ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print_error(f"torch is not installed for {sys.executable}; {sys.executable} -m pip install torch")
        return BAD_INPUT
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print_error(words_of(error))
        return BAD_INPUT


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Parser of all commands; only the command that `arguments` name, whose module is imported for it, has
    its own arguments and help. The process ends with a usage error if they name another one."""
    parser = argparse.ArgumentParser("anabranch", None, _DESCRIPTION, _EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"anabranch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        meant = difflib.get_close_matches(chosen, COMMANDS, 1)
        hint = f"did you mean {meant[0]!r}? " if meant else ""
        parser.error(f"there is no command {chosen!r}; {hint}`anabranch --help` lists all")
    for name, text in COMMANDS.items():
        child = commands.add_parser(name, help=text, formatter_class=HelpFormatter)
        if name == chosen:
            module = _module(name)
            child.description, _, child.epilog = (module.__doc__ or "").strip().partition("\n\n")
            module.add_arguments(child)
            child.set_defaults(of_command=child)
    return parser


def _module(command: str) -> types.ModuleType:
    return importlib.import_module(f"anabranch.cli.{command.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
