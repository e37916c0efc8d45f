"""A command of anabranch on a system that lacks what Linux has.

    python -m support.bare_python FEATURE[,FEATURE...] COMMAND [ARGUMENTS...]

The features (`FEATURES`) are taken away before anabranch is imported, in this process and in those that it
starts (`bare_site`). A lock of Windows (msvcrt) takes the place of fcntl's.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Modules that ask for the system when they are imported, so that they do so before.
_BEFORE = (subprocess, multiprocessing, shutil)


def without(module: types.ModuleType | type, *names: str) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def no_fork() -> None:
    without(os, "fork", "forkpty", "posix_spawn", "posix_spawnp", "setsid", "killpg")


def no_uvloop() -> None:
    sys.modules["uvloop"] = None  # type: ignore[assignment]


def no_proc() -> None:
    """No /proc; `platform` tells the processor's maker, as it does elsewhere."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    maker = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
    platform.processor = lambda: maker

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])

    sys.addaudithook(refuse)


def other_locks() -> None:
    """No fcntl; msvcrt locks bytes of a file, which nobody else may read or write then."""
    import fcntl

    flock, waits, waits_not = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    module: Any = types.ModuleType("msvcrt")
    module.LK_LOCK, module.LK_NBLCK = 1, 2

    def locking(handle: int, mode: int, count: int) -> None:
        assert os.lseek(handle, 0, os.SEEK_CUR) >= os.fstat(handle).st_size, "it locks what others read"
        flock(handle, waits if mode == module.LK_LOCK else waits_not)

    module.locking = locking
    sys.modules["msvcrt"] = module


def no_signals() -> None:
    """Signals are handled by `signal.signal` alone, and there are only those of Windows."""
    loops: list[Any] = [asyncio.SelectorEventLoop]
    try:
        import uvloop

        loops.append(uvloop.Loop)
    except ImportError:
        pass
    for loop in loops:
        for name in ("add_signal_handler", "remove_signal_handler"):
            setattr(loop, name, getattr(asyncio.AbstractEventLoop, name))
    windows = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
    without(signal, *(name for name in dir(signal) if name.startswith("SIG") and name not in windows))
    without(signal, "pthread_sigmask", "pthread_kill", "alarm", "setitimer", "siginterrupt")
    end = os.kill
    os.kill = lambda pid, number: end(pid, 9)  # Windows ends a process, whatever the number


def no_posix_files() -> None:
    """Folders cannot be opened, nothing is written at an offset, and modes say nothing about other users."""
    without(os, "pread", "pwrite", "getuid", "geteuid", "fchmod")
    without(os, "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK")
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it would open folders
    stat = os.stat

    def shown(*arguments: Any, **options: Any) -> os.stat_result:
        found = stat(*arguments, **options)
        _, (values, more) = found.__reduce__()  # type: ignore[misc]
        return os.stat_result((values[0] | 0o666, *values[1:]), more)  # type: ignore[has-type]

    os.stat = shown

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike) and os.path.isdir(arguments[0]):
            raise PermissionError(13, "Permission denied", arguments[0])

    sys.addaudithook(refuse)


def no_limits() -> None:
    """The system states neither limits, priorities nor its load."""
    sys.modules["resource"] = None  # type: ignore[assignment]
    without(os, "nice", "getpriority", "setpriority", "getloadavg", "sched_getaffinity")


FEATURES: dict[str, Callable[[], None]] = {
    "fork": no_fork,
    "uvloop": no_uvloop,
    "/proc": no_proc,
    "file locks": other_locks,
    "signals": no_signals,
    "files": no_posix_files,
    "limits": no_limits,
}

if __name__ == "__main__":
    for feature in sys.argv[1].split(","):
        FEATURES[feature]()
    here = Path(__file__).resolve().parent
    paths = (str(here / "bare_site"), str(here.parent), os.environ.get("PYTHONPATH", ""))
    os.environ |= {"ANABRANCH_BARE": sys.argv[1], "PYTHONPATH": os.pathsep.join(paths)}
    sys.argv = ["anabranch", *sys.argv[2:]]
    from anabranch.cli.main import main

    sys.exit(main())
