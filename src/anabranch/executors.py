"""Executors: where the independent parts of a sweep are computed, in processes of this machine or on Ray.

An executor maps a picklable function over jobs and yields (number of the job, result) as results come. The
function must be repeatable: Ray computes a job whose machine dies again.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, redirect_stdout
from itertools import islice
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol, TextIO, TypeVar, cast

from anabranch.errors import UserError, missing_package_named
from anabranch.operating_system import interrupts_blocked

NAMES = ("processes", "ray")
#: Jobs that are handed out for each process: the next one waits where it is needed.
AHEAD = 2
#: Further tries that Ray gives a job whose process or node dies. A plain choice: spot machines are lost a few
#: times, and a job that kills its process does so each time.
RETRIES = 20

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Executor(Protocol):
    """Executor of the jobs of a sweep, such as the processes of this machine or a Ray cluster."""

    def completed(
        self, work: Callable[[_Job], _Result], jobs: Iterable[_Job]
    ) -> Iterator[tuple[int, _Result]]:
        """Compute `work(job)` for each job; yields (number of the job from 0 on, result), in the order in
        which results come. The first exception of `work` is raised here; closing the iterator ends what is
        still computed. Classes and functions of the module `__main__` are not found on other machines."""
        ...


def executor(name: str, processes: int) -> Executor:
    """Executor with this name, one of NAMES. processes: how many of this machine compute; ignored for Ray,
    which counts the processors of its cluster itself."""
    return Ray() if name == "ray" else Processes(processes)


class Processes:
    """Processes of this machine. count: their number; with 1 or less the caller's own process computes.
    method: how they start, as in `multiprocessing`; None for the system's own way. died: the error if one
    dies."""

    def __init__(
        self,
        count: int,
        method: str | None = "spawn",
        died: str = "a process of the sweep died; fewer processes take less memory",
    ) -> None:
        self.count, self._context, self._died = count, multiprocessing.get_context(method), died

    def completed(
        self, work: Callable[[_Job], _Result], jobs: Iterable[_Job]
    ) -> Iterator[tuple[int, _Result]]:
        """Compute `work(job)` for each job in these processes, a few jobs for each process at a time; results
        as of `Executor.completed`. Raises UserError if a process dies."""
        numbered = enumerate(jobs)
        if self.count <= 1:
            for number, job in numbered:
                yield number, work(job)
            return
        others = multiprocessing.active_children()
        pool = ProcessPoolExecutor(self.count, self._context, _ignore_interrupts)
        running: dict[Future[_Result], int] = {}
        try:
            while True:
                with interrupts_blocked():
                    for number, job in islice(numbered, AHEAD * self.count - len(running)):
                        running[pool.submit(work, job)] = number
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
            pool.shutdown()
        except BrokenProcessPool:
            raise UserError(self._died) from None
        finally:
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            pool.shutdown(wait=False, cancel_futures=True)


def in_order(results: Iterable[tuple[int, _Result]]) -> Iterator[_Result]:
    """Results of `Executor.completed` in the order of the jobs: each is held back until those before it."""
    held: dict[int, _Result] = {}
    following = 0
    for number, result in results:
        held[number] = result
        while following in held:
            yield held.pop(following)
            following += 1


def _ignore_interrupts() -> None:
    """Ignore Ctrl+C in a process that its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Ray:
    """Processors of a Ray cluster: that of the environment variable RAY_ADDRESS or one that runs here, else
    a new one on this machine for the time of the sweep.

    The nodes get this program's source, so that all compute the same (not if the program was connected to Ray
    before); they need its dependencies. A node that dies is replaced by others of the cluster, and nodes that
    join later are used. The end of the connection ends the jobs: in a program that was connected to Ray
    before, those that were handed out are computed to their end. `ray.cancel` would end them, but aborts this
    process where it meets a job that ends (Ray 2.60).
    """

    def completed(
        self, work: Callable[[_Job], _Result], jobs: Iterable[_Job]
    ) -> Iterator[tuple[int, _Result]]:
        """Compute `work(job)` for each job on the cluster; results as of `Executor.completed`. Raises
        UserError if Ray is missing, or fails."""
        message = 'the executor "ray" needs Ray; install it with: pip install "anabranch[ray]"'
        with missing_package_named(UserError(message)):
            import ray
        ours, own_output = not ray.is_initialized(), ExitStack()
        try:
            if ours:
                environment = {"py_modules": [str(path) for path in _sources(work)]}
                try:
                    ray.init(runtime_env=environment, include_dashboard=False, log_to_driver=False)
                except Exception as error:  # Ray raises bare Exception, too
                    message = f"Ray does not start: {error}; see RAY_ADDRESS, and `ray status`"
                    raise UserError(message) from None
                own_output.enter_context(redirect_stdout(cast(TextIO, _OutputOfOneThread(sys.stdout))))
            yield from _on_cluster(ray, work, jobs)
        except ray.exceptions.RayError as error:
            if (cause := getattr(error, "cause", None)) is not None:
                raise cause from error  # raised by `work`; the text of `error` is a traceback
            reason = str(error).partition("\n")[0]
            raise UserError(f"Ray gave a job of the sweep up: {reason}; see `ray status`") from None
        finally:
            if ours:
                with own_output, redirect_stdout(sys.stderr):
                    ray.shutdown()


def _on_cluster(
    ray: Any, work: Callable[[_Job], _Result], jobs: Iterable[_Job]
) -> Iterator[tuple[int, _Result]]:
    task, shared = ray.remote(num_cpus=1, max_retries=RETRIES)(_call), ray.put(work)
    numbered, running = enumerate(jobs), dict[Any, int]()
    while True:
        most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        for number, job in islice(numbered, max(0, most - len(running))):
            running[task.remote(shared, job)] = number
        if not running:
            return
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            result: _Result = ray.get(reference)
            yield running.pop(reference), result


class _OutputOfOneThread:
    """Standard output that only the thread which makes this object writes to; what other threads print goes
    to standard error. A thread of Ray prints what it has to say of lost nodes to standard output, where a
    result in JSON may be."""

    def __init__(self, output: TextIO) -> None:
        self._output, self._thread = output, get_ident()

    def write(self, text: str) -> int:
        return (self._output if get_ident() == self._thread else sys.stderr).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def _call(work: Callable[[_Job], _Result], job: _Job) -> _Result:
    return work(job)


def _sources(work: Callable[..., object]) -> Iterator[Path]:
    """Folders of the packages that `work` needs on another machine: anabranch's own, and that in which `work`
    is defined."""
    yield Path(__file__).parent
    function = getattr(work, "func", work)  # inside a functools.partial
    package = sys.modules.get(function.__module__.partition(".")[0])
    own = getattr(package, "__path__", None)
    if own and Path(next(iter(own))) != Path(__file__).parent:
        yield Path(next(iter(own)))
