"""Output of the commands: messages as text or JSON, the console, metrics for other programs, files."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.errors import UserError, os_errors_named
from anabranch.observe.console.step_line import wants_colour
from anabranch.observe.wording import ERROR_MAX, plain, plain_lines

if TYPE_CHECKING:
    from anabranch.checkpoint.directory import RunDirectory
    from anabranch.observe.console.event_console import Console
    from anabranch.observe.metrics.writers import MetricExporter

TEXT, JSON = "text", "json"


def print_error(message: str) -> None:
    """Print `message` as one line of at most ERROR_MAX characters on stderr, after "error:", which is red on
    a terminal. The process goes on."""
    label = "\033[1;31merror:\033[0m" if wants_colour(sys.stderr) else "error:"
    print(f"{label} {plain(message, ERROR_MAX)}", file=sys.stderr)


def add_out(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--out`, with its help text, and `--force`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def check_out(out: Path | None, force: bool) -> None:
    """Raise UserError if the file that `--out` names lies in no folder, is a folder, or exists without
    `force`; nothing if none is named. Called before work that takes a while; nothing is written."""
    if out is None:
        return
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UserError(f"--out {out}: Is a directory")
    if out.exists() and not force:
        raise UserError(f"--out {out} exists; give another name, or --force to overwrite it")


def write_out(path: Path, text: str) -> None:
    """Write `text` to the file that `--out` names, over an existing one. Raises UserError if that fails."""
    with os_errors_named(f"--out {path}"):
        path.write_text(text, "utf-8")


@contextmanager
def handled_signals(handler: Callable[..., object]) -> Iterator[None]:
    """Context in which `handler` handles SIGINT (Ctrl+C) and SIGTERM; at its end the former handlers do so
    again. For the main thread only (else ValueError)."""
    former = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in former.items():
            signal.signal(number, previous)


def add_log_format(parser: argparse.ArgumentParser) -> None:
    text = "format of printed messages; json: one object per line"
    parser.add_argument("--log-format", choices=(TEXT, JSON), default=TEXT, help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for output of commands that lead a run: web page, log format, metrics."""
    parser.add_argument("--no-page", action="store_true", help="do not serve the run's web page")
    add_log_format(parser)
    add_writers(parser)


def add_writers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write metrics for TensorBoard")
    parser.add_argument("--wandb", default="", metavar="PROJECT", help="log metrics to Weights & Biases")
    parser.add_argument("--mlflow", default="", metavar="EXPERIMENT", help="log metrics to MLflow")
    parser.add_argument("--trackio", default="", metavar="PROJECT", help="log metrics to Trackio")


@dataclass(frozen=True)
class Outputs:
    """Destinations of a command's messages and metrics, as its options say. log_format: of printed messages,
    TEXT or JSON. tensorboard: folder for TensorBoard's files; wandb, mlflow, trackio: project or experiment
    there; None or "": no metrics there."""

    log_format: str = TEXT
    tensorboard: Path | None = None
    wandb: str = ""
    mlflow: str = ""
    trackio: str = ""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Outputs:
        log_format = getattr(args, "log_format", TEXT)
        return cls(log_format, args.tensorboard, args.wandb, args.mlflow, args.trackio)

    @property
    def json(self) -> bool:
        return self.log_format == JSON

    def say(self, text: str) -> None:
        """Print a message, in the chosen format."""
        if self.json:
            from anabranch.observe.console.event_console import said

            said(text)
        else:
            print(plain_lines(text), flush=True)

    def console(self, steps: int = 0) -> Console:
        from anabranch.observe.console.event_console import Console, JsonConsole

        return JsonConsole(steps) if self.json else Console(steps)

    def exporter(self, directory: RunDirectory) -> MetricExporter | None:
        """Exporter of the run's metrics to other programs, None if not asked for. Raises UserError if one of
        them cannot be used here."""
        from anabranch.observe.metrics import writers as kinds

        writers: list[kinds.Writer] = []
        if self.tensorboard is not None:
            writers.append(kinds.TensorBoardWriter(self.tensorboard))
        if self.wandb:
            writers.append(kinds.WandbWriter(self.wandb, directory.path.name, directory.path))
        if self.mlflow:
            writers.append(kinds.MlflowWriter(self.mlflow, directory.path.name))
        if self.trackio:
            writers.append(kinds.TrackioWriter(self.trackio, directory.path.name))
        return kinds.MetricExporter(writers) if writers else None

    @contextmanager
    def beside(self, directory: RunDirectory) -> Iterator[None]:
        """Context in which a thread writes the run's metrics to other programs, from the present end of the
        run's event log on; nothing is written if no option asks for metrics. Raises UserError as `exporter`
        does."""
        exporter = self.exporter(directory)
        if exporter is None:
            yield
            return
        from anabranch.observe.metrics.writers import ExportThread

        events = directory.events
        thread = ExportThread(events, events.stat().st_size if events.exists() else 0, exporter, self.say)
        try:
            yield
        finally:
            thread.close()
