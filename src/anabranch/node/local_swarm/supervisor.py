"""Processes of a local swarm, forked from a server process that has imported all modules (on Linux).

On other systems a process with so many libraries cannot be forked safely, and every peer's process is started
anew. Each peer's process has a session of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

from anabranch.errors import UserError
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.operating_system import KILL, interrupts_blocked
from anabranch.train.model.registry import VARIABLE

#: Environment variable with the address at which the leading process listens, instead of its run file's.
LISTEN_VARIABLE = "ANABRANCH_LISTEN"
#: Seconds that the kernel may take to end a killed process.
KILL_S = 10.0

_FORKS = sys.platform == "linux" and hasattr(os, "fork")
_context = multiprocessing.get_context("forkserver") if _FORKS else multiprocessing.get_context("spawn")


class Process:
    """Process of one peer, as its supervisor sees it. name: of the peer. log: file of its output. The methods
    may be called from any thread."""

    def __init__(self, name: str, log: Path, child: multiprocessing.process.BaseProcess) -> None:
        assert child.pid is not None
        self.name = name
        self.log = log
        self.pid = child.pid
        self._child = child
        self._lock = threading.Lock()

    @property
    def status(self) -> int | None:
        """Exit status; None while the process is running, negative if a signal killed it."""
        with self._lock:
            return self._child.exitcode

    @property
    def running(self) -> bool:
        return self.status is None

    def signal(self, number: int) -> None:
        """Send the signal `number` to the process; nothing if it has ended."""
        with self._lock:  # no other thread finds its end, which frees its number, in between
            if self._child.exitcode is None:
                with suppress(ProcessLookupError):  # the fork server has found it, and is about to say so
                    os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, at most `timeout_s` seconds. True if it has ended."""
        multiprocessing.connection.wait([self._child.sentinel], timeout_s)
        return not self.running


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Hide this program's main module from multiprocessing, which would run it again in each new process: the
    script of a user of the Python interface need not guard against that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Supervisor:
    """Starts the processes of peers, and kills those that still run when the supervisor is closed.

    threads: of torch, in each process; set in this process's environment. On Linux the fork server starts at
    once, imports in the background, and lasts as long as this process.
    """

    def __init__(self, threads: int) -> None:
        from anabranch.train.numerics.numerics_class import set_environment

        set_environment(threads)
        self._processes: list[Process] = []
        #: Function that runs a peer, in the peer's process.
        self.target: Callable[..., NoReturn] = run_peer
        if _FORKS:
            _context.set_forkserver_preload(["anabranch.node.local_swarm.preloaded"])
            # Ctrl+C must reach the supervisor alone, which stops the leader, and the run with it: the mask is
            # inherited, and a peer removes it once it has a session of its own.
            with interrupts_blocked():
                forkserver.ensure_running()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        namespace: str = "",
        environment: Mapping[str, str] | None = None,
        target: Callable[..., NoReturn] | None = None,
    ) -> Process:
        """Start `anabranch ARGUMENTS` as the process `name`, with its output in `log` and in a network
        namespace if one is named. environment: variables to set. target: function that runs in the process
        instead, with the parameters of `run_peer`. Raises UserError if no process can be started."""
        # The fork server has the environment of its start, which may be before a model was registered.
        models = {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
        values = (name, list(arguments), str(log), namespace, {**models, **(environment or {})})
        child = _context.Process(target=target or self.target, args=values, name=name, daemon=True)
        try:
            with _main_module_hidden():
                child.start()
        except (EOFError, OSError) as error:
            raise UserError(f"the process of {name} cannot be started: {error or 'no fork server'}") from None
        process = Process(name, log, child)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kill the processes that are still running, and wait for their end, at most KILL_S seconds for each.
        The fork server stays."""
        for process in self._processes:
            process.signal(KILL)
        for process in self._processes:
            process.wait(KILL_S)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
