"""Folder of a volunteer's peer (key, incarnation, log), locked for one process at a time.

Of two processes with one key, the run would refuse the older one each time the other starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anabranch.errors import UserError
from anabranch.operating_system import lock

#: File in a folder that its process keeps locked.
LOCK = "lock"
#: Seconds after which a lock that is held is tried once more. A choice: `in_use` holds it for far shorter.
LOOK_S = 0.05
#: Most peers of one run on one machine whose folders are chosen automatically; a plain choice.
MAX_HOMES = 64


@contextmanager
def claimed(home: Path, exclusive: bool) -> Iterator[Path]:
    """Lock a folder that no other process uses, while the context is entered, and yield its path.

    The folder is `home`; if that is in use and `exclusive` is false, the first free one of `home`-2,
    `home`-3, ... (up to MAX_HOMES). It is made if it does not exist, readable by its owner alone, and stays.
    The kernel releases the lock of a dead process. Raises UserError if every folder is in use.
    """
    for number in range(1, 2 if exclusive else MAX_HOMES + 1):
        folder = home if number == 1 else home.with_name(f"{home.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(file)
        except OSError:
            os.close(file)
            continue
        try:
            yield folder
        finally:
            os.close(file)
        return
    what = f"{home} is" if exclusive else f"{home} and {MAX_HOMES - 1} folders beside it are"
    raise UserError(f"{what} in use by another process: end that one, or choose another folder with --home")


def _lock(file: int) -> None:
    """Lock a folder's open file, at a second try if need be: another process may have looked at it
    (`in_use`). Raises OSError if it is in use."""
    try:
        lock(file)
    except OSError:
        time.sleep(LOOK_S)
        lock(file)


def in_use(home: Path) -> bool:
    """True if a process has claimed (`claimed`) the folder `home` now; False without a lock file. Raises
    OSError if its lock cannot be looked at."""
    try:
        file = os.open(home / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        lock(file)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
