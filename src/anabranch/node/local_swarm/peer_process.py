"""Process of a peer in a local swarm: a command of `anabranch` in a session of its own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from anabranch.operating_system import KILL

#: Number of prctl's option that names the signal sent to a process when its parent dies, from linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def run_peer(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Run `anabranch ARGUMENTS` in this process, with its output appended to `log`.

    See `enter` for the other parameters.
    """
    enter(name, log, namespace, environment)
    sys.argv = ["anabranch", *arguments]
    sys.exit(importlib.import_module("anabranch.cli.main").main())


def enter(name: str, log: str, namespace: str, environment: Mapping[str, str]) -> None:
    """Give this process, which a supervisor started, a session of its own; append its output to `log`, and
    let it end with its supervisor. name: shown by `top`. namespace: network namespace to enter; "" for none.
    environment: variables to set."""
    own_session()
    die_with_parent()
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    if namespace:
        from anabranch.net.wan import namespaces

        namespaces.enter(namespace)  # before any thread or socket exists
    os.environ.update(environment)


def own_session() -> None:
    """Keep Ctrl+C in the terminal, which is for the supervisor, away from this process: by a session of its
    own, on Windows by a switch of the console."""
    if sys.platform == "win32":
        ctypes.windll.kernel32.SetConsoleCtrlHandler(None, True)
    elif hasattr(os, "setsid"):
        os.setsid()
    else:  # a system that lacks it is not known; a test takes it away
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def signal_at_end_of_parent(number: int) -> None:
    """Have the kernel send this process the signal `number` when the thread that started it ends; on Linux
    only, elsewhere nothing. No signal comes if that thread has ended before the call. Processes that this one
    forks do not inherit it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with_parent() -> None:
    """Make this process die when the process that started it dies, on Linux even while frozen (SIGSTOP), as
    by `signal_at_end_of_parent`."""
    if sys.platform == "linux":
        signal_at_end_of_parent(KILL)
        return

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="anabranch parent watch", daemon=True).start()
