"""Pause this machine's peers: they hand over, leave their run in order, and join again after the pause.

examples:
  anabranch pause                        all peers of this machine, until `anabranch pause --end`
  anabranch pause --minutes 90           for an hour and a half
  anabranch pause tiny-1 --minutes 90    its peers in one run
  anabranch pause --home DIR             the peer of `join --home DIR`
  anabranch pause --end                  they join again

The pause is a file in a peer's folder, at which the peer looks every two seconds; hours (`join --hours`) hold
besides. A peer that starts during the pause waits, too. Without --once it stays as a process and joins again
by itself, with --once it ends when it has left, with exit status 75. It only pauses peers of `join` and
`audit`; the run's owner pauses the run itself on its page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from anabranch.cli.support.arguments import check_range
from anabranch.cli.support.outputs import print_error
from anabranch.config import Range
from anabranch.errors import UserError, words_of
from anabranch.observe.wording import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", nargs="?", default="", metavar="RUN", help="folder's name in ~/.anabranch (default: all runs)")
    add("--home", type=Path, metavar="DIR", help="the peer of this folder alone, and those of its --gpus")
    add("--minutes", type=float, metavar="M", help="length of the pause (default: until --end)")
    add("--end", action="store_true", help="end the pause now")


def run(args: argparse.Namespace) -> int:
    from anabranch.lending import Pause, begin_pause, end_pause, pause_of
    from anabranch.node.lifecycle.peer_home import in_use

    if args.run and args.home is not None:
        raise UserError("RUN and --home: give one of them")
    if args.minutes is not None:
        if args.end:
            raise UserError("--end ends the pause now, so --minutes has no use: give one of them")
        check_range("--minutes", args.minutes, Range(0.1, 10**6))
    homes, where = _homes(args.run, args.home)
    running = list[Path]()
    for home in list(homes):
        try:
            running += [home] if in_use(home) else []
        except OSError as error:  # another user's
            homes.remove(home)
            print_error(f"left alone: {home}: {words_of(error)}")
    if not args.end:
        if not running:
            raise UserError(f"no peer runs here: looked in {where}; name a folder of `join` with --home")
        pause = Pause(None if args.minutes is None else time.time() + 60 * args.minutes)
        for home in running:
            begin_pause(home, pause)
        peers = counted(len(running), "peer")
        print(f"{peers} {_verb('hand', running)} over and {_verb('pause', running)} {pause}:")
    else:
        paused = [home for home in homes if pause_of(home) is not None]
        for home in paused:
            end_pause(home)
        running = [home for home in paused if home in running]
        idle = f"; {len(paused) - len(running)} more that were paused do not run" if paused != running else ""
        if not paused:
            print(f"nothing is paused in {where}")
            return 0
        peers = counted(len(running), "peer")
        print(f"{peers} {_verb('join', running)} again{idle}{':' if running else ''}")
    for home in running:
        print(f"  {home}")
    return 0


def _homes(run: str, home: Path | None) -> tuple[list[Path], str]:
    """(folders of the peers of this machine that can be paused, text for messages on where they were looked
    for): `home` and its gpu-N folders, or those of one run or of all runs (run: "") in ~/.anabranch."""
    from anabranch.node.lifecycle.peer_home import LOCK, MAX_HOMES

    if home is not None:
        folders, where = [home], str(home)
    else:
        base = Path.home() / ".anabranch"
        names = {run, *(f"{run}-{number}" for number in range(2, MAX_HOMES + 1))}
        folders = [one for one in sorted(base.glob("*")) if not run or one.name in names]
        where = f"{base / run}" if run else str(base)
    each = [one for folder in folders for one in (folder, *sorted(folder.glob("gpu-*")))]
    return [one for one in each if (one / LOCK).is_file()], where


def _verb(word: str, homes: Sequence[Path]) -> str:
    return f"{word}s" if len(homes) == 1 else word
