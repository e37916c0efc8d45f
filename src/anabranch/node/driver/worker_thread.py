"""Thread that runs a peer's tasks one at a time, so that heartbeats never wait for them."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from anabranch.node.driver.allocator import keep_freed_memory
from anabranch.operating_system import lower_priority
from anabranch.protocol.interface.tasks import Payload, Result, Task

_T = TypeVar("_T")
#: Seconds for which the end of a peer waits for its running task.
CLOSE_S = 30.0


class Computer(Protocol):
    """Worker of a model stage. run(task, inputs): carries out one of the stage's compute tasks, such as a
    forward pass, and returns its result; blocks meanwhile."""

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result: ...


#: Work, and the callable that gets its result.
_Job = tuple[Callable[[], Any], Callable[[Any], object]]


class WorkerThread:
    """A queue of jobs and the thread that runs them, one at a time.

    deliver: runs a callable on the event loop. failed: gets the traceback of an exception in a job, which is
    a defect or an exhausted machine; the thread then ends, and later jobs do not run. nice: priority of the
    thread and of those that its jobs start, as for `lower_priority`.
    """

    def __init__(
        self,
        deliver: Callable[[Callable[[], None]], None],
        failed: Callable[[str], None],
        nice: int = 0,
    ) -> None:
        keep_freed_memory()  # before the thread's first allocation, which chooses its arena
        self._deliver = deliver
        self._failed = failed
        self._nice = nice
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="anabranch worker", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _T], done: Callable[[_T], object]) -> None:
        """Queue `work` for the thread; its result goes to `done`, on the event loop. `done` is not called if
        `work` raises, or if the thread has ended or is closed before its turn."""
        self._jobs.put((work, done))

    def close(self) -> None:
        """Discard waiting jobs, and wait up to CLOSE_S seconds for the running one: the interpreter must not
        exit while a thread is inside a library that it would have to unwind."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        lower_priority(self._nice)
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                result = work()
            except BaseException:
                text = traceback.format_exc()
                self._deliver(lambda text=text: self._failed(text))  # type: ignore[misc]
                return
            self._deliver(lambda done=done, result=result: done(result))  # type: ignore[misc]
