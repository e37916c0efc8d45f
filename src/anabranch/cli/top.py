"""Show a run in the terminal: steps, stages and their peers, figures, and the latest events.

examples:
  anabranch top runs/tiny           follow the run; Ctrl+C ends the view, not the run
  anabranch top                     the most recently active run under ./runs
  anabranch top runs/tiny --once    print one screen, and exit

It is made for 80 columns and 24 lines or more; a terminal below 60 by 16 crops it. Where the output is no
terminal, one screen is printed, as with --once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from anabranch.checkpoint.directory import RunDirectory

#: Seconds between two reads of the event log.
INTERVAL_S = 0.5
#: Smallest screen that is drawn, in columns and lines; a smaller terminal crops it.
MIN_WIDTH, MIN_HEIGHT = 60, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run_dir = "run directory (default: the latest under ./runs)"
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help=run_dir)
    parser.add_argument("--once", action="store_true", help="print one screen and exit")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from anabranch.cli.watch import latest_run
    from anabranch.observe.console.progress import ticking
    from anabranch.observe.console.top_screen import screen
    from anabranch.observe.event_log import EventTail
    from anabranch.observe.view.run_view import View

    directory = RunDirectory.open(args.run_dir or latest_run(Path("runs")))
    tail, view, console = EventTail(directory.events), View(), Console(highlight=False)

    def catch_up() -> None:
        while events := tail.read():
            for event in events:
                view.take(event)
            view.state.take_patch()  # discard the list of changes, which only the page needs

    def shown() -> object:
        width, height = console.size
        return screen(view, max(MIN_WIDTH, width), max(MIN_HEIGHT, height))

    with ticking("reading the events"):
        catch_up()
    if args.once or not sys.stdout.isatty():
        console.print(shown(), no_wrap=True, crop=True)
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                catch_up()
                live.update(shown(), refresh=True)  # type: ignore[arg-type]
                time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        return 0
