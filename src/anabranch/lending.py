"""Times at which this machine is lent: its hours, unless its user paused it (`anabranch pause`).

A pause is a file in the home of a peer, so it holds for the peer's next process, too."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from anabranch.hours import Hours, WhenIdle
from anabranch.operating_system import write_atomically

#: File of a pause, in the home of a peer.
PAUSE = "pause"
#: Seconds between looks at the file and the hours. A choice: who pauses sees the peer leave at once.
LOOK_S = 2.0


class Pause(NamedTuple):
    """Pause of a peer by its machine's user. until_s: Unix time at which it is over; None: until ended."""

    until_s: float | None

    def __str__(self) -> str:
        if self.until_s is None:
            return "until `anabranch pause --end`"
        until = datetime.fromtimestamp(self.until_s)
        today = until.date() == datetime.now().date()
        return f"until {until:%H:%M}" if today else f"until {until:%Y-%m-%d %H:%M}"


def begin_pause(home: Path, pause: Pause) -> None:
    """Pause the peer whose folder is `home`, in place of a former pause, by a file there. Raises OSError if
    the file cannot be written."""
    write_atomically(home / PAUSE, json.dumps({"until_s": pause.until_s}).encode())


def end_pause(home: Path) -> None:
    """End the pause of the peer whose folder is `home`; nothing if there is none. Raises OSError if the file
    cannot be removed."""
    (home / PAUSE).unlink(missing_ok=True)


def pause_of(home: Path) -> Pause | None:
    """Pause of the peer whose folder is `home`, if it is not over yet; None if there is none. A file that
    cannot be read, such as another user's, is a pause until it is ended: the machine's user wanted one."""
    try:
        until_s = json.loads((home / PAUSE).read_bytes())["until_s"]
        pause = Pause(None if until_s is None else float(until_s))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return Pause(None)
    return None if pause.until_s is not None and pause.until_s <= time.time() else pause


class NotLent(NamedTuple):
    """Reason why a machine is not lent now, as two sentences. waiting: for its user. leaving: for the run
    that it leaves because of that."""

    waiting: str
    leaving: str


class Lending:
    """Hours and pauses of one peer's machine. home: the peer's folder, in which a pause is a file. hours: at
    which it is lent, None for always."""

    def __init__(self, home: Path, hours: Hours | WhenIdle | None) -> None:
        self._home, self._hours = home, hours

    def refusal(self) -> NotLent | None:
        """Reason why the machine is not lent now, None if it is; to be asked every LOOK_S."""
        hours = self._hours
        # Asked during a pause, too: whether the machine is idle is seen over a while.
        is_open = hours is None or hours.open(datetime.now())
        if (pause := pause_of(self._home)) is not None:
            return NotLent(f"this machine is paused {pause}", "this machine is paused by its user")
        if is_open:
            return None
        if isinstance(hours, WhenIdle):
            return NotLent(f"this machine is lent {hours}", "this machine is in use again")
        return NotLent(f"this machine is lent at {hours}", "the hours of this machine are over")
