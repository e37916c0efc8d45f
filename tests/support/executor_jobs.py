"""Work for the tests of executors: functions that other processes import by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from anabranch.errors import UserError


def squared(number: int) -> tuple[int, int]:
    """(square, process id)."""
    return number * number, os.getpid()


def refused(number: int) -> int:
    if number == 3:
        raise ValueError(f"job {number} cannot be computed")
    return number


def refused_by_user_error(number: int) -> int:
    if number == 3:
        raise UserError(f"job {number}: take another machine")
    return number


def killed(number: int) -> int:
    """Kill this process at job 3."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def slept(folder: str) -> int:
    """Leave this process's id in a folder, then sleep far longer than a test."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)
    return 0


def first_quick(job: tuple[str, int]) -> int:
    """The job's number, or, with a folder, `slept`."""
    folder, number = job
    return slept(folder) if folder else number


def died_once(folder: str) -> int:
    """Kill this process at the first call with a folder."""
    mark = Path(folder) / "died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1
