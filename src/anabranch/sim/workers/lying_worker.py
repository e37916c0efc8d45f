"""Worker of a hostile relay that computes falsely: it changes the outputs of some tasks and signs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgspec import structs

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.sim.kernel.simulated_peer import TaskExecutor
from anabranch.sim.workers import integer_worker

#: Kinds of tasks in which a relay may lie: activations, gradients, its part of a sum, sums of all parts.
LIES = (tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart)


class LyingWorker:
    """Worker that gives the results of another one, but false outputs for tasks of one kind, evaluation left
    out. lies: number of false results so far. lies_now(task): True if it lies in this task; asked only for
    such tasks. signs: True for the hashes of the false outputs, False for those of the right ones."""

    def __init__(
        self, worker: TaskExecutor, kind: type[Task], lies_now: Callable[[Task], bool], signs: bool = True
    ) -> None:
        self.worker, self.kind, self._lies_now, self._signs = worker, kind, lies_now, signs
        self.lies = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        result = self.worker.run(task, inputs)
        evaluates = isinstance(task, tasks.Forward) and not task.train
        if not isinstance(task, self.kind) or evaluates or not result.outputs or not self._lies_now(task):
            return result
        self.lies += 1
        outputs = tuple(map(_false, result.outputs))
        hashes = result.hashes
        if hashes and self._signs:
            hashes = hashes[: len(inputs)] + tuple(map(_hash_of, outputs))
        return structs.replace(result, outputs=outputs, hashes=hashes)


def _false(payload: Payload) -> Payload:
    """False payload in place of an output: of the same type and shape, with other values."""
    if isinstance(payload, tuple):
        return tuple(cast(int, word) + 1 for word in payload)
    return payload ^ 1 if isinstance(payload, int) else -cast(Any, payload)


def _hash_of(payload: Payload) -> str:
    if isinstance(payload, tuple | int):
        return integer_worker.payload_hash(payload)
    from anabranch.train.stage.audit import payload_hash

    return payload_hash(cast(Any, payload))
