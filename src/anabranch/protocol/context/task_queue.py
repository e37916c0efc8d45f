"""Priority queue of tasks for a peer's one worker.

Order: the step itself (reduce, apply, state transfer), then losses and input gradients, then forwards, then
weight gradients (they fill the gaps), then repeated work for which nobody upstream waits, then held-out
windows, then checks of states for others, then steps ahead of the next round; within a rank the lowest
(iteration, index) first.
Where two iterations are in flight, all work on microbatches of the first comes before that of the second.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from anabranch.protocol.interface.tasks import Payload, Result, Task, WeightGradient

Then = Callable[[Result], None]


class TaskPriority(IntEnum):
    """Priority of a task, most urgent first."""

    STEP = 0
    GRADIENT = 1
    FORWARD = 2
    WEIGHTS = 3
    REDO = 4
    EVALUATION = 5
    BACKGROUND = 6
    AHEAD = 7


#: Priorities of work that outlives its iteration.
_OUTLIVING = (TaskPriority.STEP, TaskPriority.BACKGROUND)


@dataclass(order=True)
class _Job:
    group: tuple[int, int]
    rank: int
    t: int
    index: int
    order: int
    task: Task = field(compare=False)
    inputs: tuple[Payload, ...] = field(compare=False)
    then: Then = field(compare=False)


class WorkQueue:
    """Queue of the tasks of the peer's worker: the waiting ones and the running one. seconds: kind of task ->
    compute seconds since the last `take_seconds`, without those of tasks that were dropped while they ran."""

    def __init__(self) -> None:
        self._by_iteration = False
        self._heap: list[_Job] = []
        self._order = 0
        self.running: _Job | None = None
        self.seconds: dict[str, float] = {}

    def put_iterations_first(self, by_iteration: bool) -> None:
        """Set whether tasks are ordered by iteration before rank, where two iterations are in flight. To be
        called before the first task."""
        self._by_iteration = by_iteration

    def submit(
        self, rank: TaskPriority, task: Task, inputs: tuple[Payload, ...], then: Then, index: int = 0
    ) -> None:
        """Queue a task. `then` is called with its result, unless it is dropped or withdrawn before. index:
        order among tasks of one rank and iteration, lowest first."""

        def timed(result: Result) -> None:
            kind = type(task).__name__
            self.seconds[kind] = self.seconds.get(kind, 0.0) + result.seconds
            then(result)

        self._order += 1
        group, number = self._group(rank, task.t), self._order
        heapq.heappush(self._heap, _Job(group, int(rank), task.t, index, number, task, inputs, timed))

    def _group(self, rank: TaskPriority, t: int) -> tuple[int, int]:
        """First part of a task's sort key, compared before its priority: the same for all tasks, or where the
        queue orders by iteration: steps first, then microbatch work by iteration, then background work."""
        if not self._by_iteration or rank is TaskPriority.STEP:
            return 0, 0
        return (2, 0) if rank is TaskPriority.BACKGROUND else (1, t)

    def take_seconds(self) -> dict[str, float]:
        """Return the compute seconds by kind of task and restart at zero."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def next(self) -> tuple[Task, tuple[Payload, ...]] | None:
        """Mark the most urgent waiting task as running and return it; None: busy, or none waits."""
        if self.running is not None or not self._heap:
            return None
        self.running = heapq.heappop(self._heap)
        return self.running.task, self.running.inputs

    def finish(self, task: Task) -> Then | None:
        """Note that the running task has ended; returns the function that takes its result (one that ignores
        it, if the task was dropped meanwhile; never None). Raises RuntimeError if `task` is another one;
        nothing runs then."""
        job, self.running = self.running, None
        if job is None or job.task is not task:
            raise RuntimeError(f"the driver finished {task}, which was not running")
        return job.then

    def waits(self, kinds: tuple[type[Task], ...]) -> list[tuple[TaskPriority, Task]]:
        """Waiting tasks of the given kinds with their priorities, last in the queue first."""
        jobs = sorted((job for job in self._heap if isinstance(job.task, kinds)), reverse=True)
        return [(TaskPriority(job.rank), job.task) for job in jobs]

    def withdraw(self, task: Task) -> None:
        """Remove a waiting task; it gets no result. One that runs, or is not in the queue, is left alone."""
        self._heap = [job for job in self._heap if job.task is not task]
        heapq.heapify(self._heap)

    def hurry(self, t: int) -> None:
        """Give the waiting tasks of rank AHEAD of iteration `t` (steps of the next round) the first place in
        the queue: they must be done before the result of `t` is applied."""
        for job in self._heap:
            if job.rank == TaskPriority.AHEAD and job.t == t:
                job.rank, job.index = int(TaskPriority.STEP), -1
        heapq.heapify(self._heap)

    def drop(self, t: int) -> None:
        """Drop microbatch work of iterations up to `t`: waiting tasks, and the result of the running one.
        Work of steps, and checks in the background, stay."""
        self._forget(lambda job: job.rank not in _OUTLIVING and job.t <= t)

    def drop_after(self, t: int) -> None:
        """Drop all work of iterations after `t`, that of steps too, for a rollback to `t` or a move to
        another stage (-1): waiting tasks, and the result of the running one."""
        self._forget(lambda job: job.t > t)

    def _forget(self, void: Callable[[_Job], bool]) -> None:
        self._heap = [job for job in self._heap if not void(job)]
        heapq.heapify(self._heap)
        if self.running is not None and void(self.running):
            self.running.then = lambda result: None

    @property
    def adding(self) -> bool:
        """True while the worker computes and adds a weight gradient: the claims of units do not match the
        gradient sum then."""
        return self.running is not None and isinstance(self.running.task, WeightGradient)

    @property
    def waiting(self) -> int:
        return len(self._heap)
