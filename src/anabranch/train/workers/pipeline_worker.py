"""Worker of one stage of a pipeline whose rounds are of islands: a relay of each stage and a data node.

In a round a microbatch is a slot. Its forward pass begins the slot at each stage, its backward pass ends it,
with a byte as payload of both; between them come the microbatches of its inner steps. Each stage has its own
part of the island, with its own inner optimizer, contribution and carried state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Result, Task
from anabranch.train.model.rounds import inner_microbatches
from anabranch.train.stage.cuts import ACTIVATION, GRADIENT
from anabranch.train.stage.inner_steps import Contribution, Island, inner_place
from anabranch.train.stage.island_stage import IslandStage, OutOfOrder
from anabranch.train.stage.worker import Refused, outputs
from anabranch.train.workers.rounds_worker import ANSWER, RoundsWorker

InnerPass = tasks.InnerForward | tasks.InnerHead | tasks.InnerBackward
InnerTask = InnerPass | tasks.InnerStep


@dataclass(frozen=True)
class _OpenSlot:
    """Slot that was begun at this worker and has not ended. first: number of inner steps that it took in
    earlier rounds, as in `records.Slot`. steps: number that it takes in this round. stage: passes of its
    inner steps."""

    first: int
    steps: int
    stage: IslandStage


class PipelineWorker(RoundsWorker):
    """Worker of a stage in a run with pipeline islands."""

    @cached_property
    def _slots(self) -> dict[int, _OpenSlot]:
        return {}

    def _handlers(self) -> dict[type[Task], Callable[[Any, Sequence[Tensor]], Result]]:
        return super()._handlers() | {
            tasks.InnerForward: self._inner_forward,
            tasks.InnerHead: self._inner_head,
            tasks.InnerBackward: self._inner_backward,
            tasks.InnerStep: self._inner_step,
        }

    # --- begin and end of a slot ----------------------------------------------------------------

    def _embed(self, task: tasks.Embed, inputs: Sequence[Tensor]) -> Result:
        if not self._is_slot(task):
            return super()._embed(task, inputs)
        self._begin(task)
        return outputs(ANSWER)

    def _forward(self, task: tasks.Forward, inputs: Sequence[Tensor]) -> Result:
        if not self._is_slot(task):
            return super()._forward(task, inputs)
        byte = _byte(inputs)
        self._begin(task)
        return outputs(byte)

    def _head(self, task: tasks.Head, inputs: Sequence[Tensor]) -> Result:
        if not self._is_slot(task):
            return super()._head(task, inputs)
        byte, made = _byte(inputs), self._end(task.index)
        return replace(outputs(byte), loss_sum=made.loss, tokens=task.steps * self._tokens)

    def _input_gradient(self, task: tasks.InputGradient, inputs: Sequence[Tensor]) -> Result:
        if not self._is_slot(task):
            return super()._input_gradient(task, inputs)
        byte = _byte(inputs)
        self._end(task.index)
        return outputs(byte)

    def _is_slot(self, task: tasks.MicrobatchTask) -> bool:
        return self._rounds.has(task.t) and not self._is_window(task)

    def _begin(self, task: tasks.Embed | tasks.Forward) -> None:
        """Begin the slot task.index at this stage: make its island, before any inner step. A slot that is
        open begins anew. Raises Refused if this worker does not have the state that the slot carries, or its
        number or number of inner steps is out of range, and Overflow as `Island`."""
        if not (0 <= task.index < self._rounds.slots and 0 < task.steps <= self._rounds.most_steps):
            raise Refused(f"there is no slot {task.index} with {task.steps} inner steps")
        carried = self._carried(task.index, task.carried)
        island = Island(self._run, self.state, task.t, task.steps, carried, task.late > 0)
        stage = IslandStage(self.model, self.spec, island, inner_microbatches(self._run), self._tokens)
        self._slots[task.index] = _OpenSlot(task.first, task.steps, stage)

    def _end(self, index: int) -> Contribution:
        """End an open slot: close its island, keep the contribution and return it. Of a slot that has ended,
        returns the contribution that is held. Raises Refused while inner steps are missing, or if there is
        neither."""
        slot = self._slots.get(index)
        if slot is None:
            return self._contribution(index)
        if slot.stage.taken != slot.steps:
            raise Refused(f"slot {index} has taken {slot.stage.taken} of its {slot.steps} inner steps")
        self._keep(index, made := slot.stage.close())
        del self._slots[index]
        return made

    def _discard(self, task: tasks.MicrobatchTask, inputs: Sequence[Tensor]) -> Result:
        self._slots.pop(task.index, None)
        return super()._discard(task, inputs)

    def _drop_slots(self) -> None:
        super()._drop_slots()
        self._slots.clear()

    # --- inner steps ----------------------------------------------------------------------------

    def _inner_forward(self, task: tasks.InnerForward, inputs: Sequence[Tensor]) -> Result:
        with self._next(task) as stage:
            if self.spec.stage == 0:
                ids, _ = self._ids(*self._batch_place(task))
                return self._inner_sent(ACTIVATION, task, stage.embed(ids))
            y = stage.forward(task.number, self._received(ACTIVATION, inputs), task.keep)
            return self._inner_sent(ACTIVATION, task, y)

    def _inner_head(self, task: tasks.InnerHead, inputs: Sequence[Tensor]) -> Result:
        with self._next(task) as stage:
            place = self._batch_place(task)
            _, targets = self._ids(*place)
            x = self._received(ACTIVATION, inputs)
            dx, loss_sum = stage.head(task.number, x, targets, self._weight(*place))
            result = self._inner_sent(GRADIENT, task, dx)
            return replace(result, loss_sum=loss_sum, tokens=targets.numel())

    def _inner_backward(self, task: tasks.InnerBackward, inputs: Sequence[Tensor]) -> Result:
        with self._next(task) as stage:
            dy = self._received(GRADIENT, inputs)
            if self.spec.stage:
                return self._inner_sent(GRADIENT, task, stage.backward(task.number, dy))
            ids, _ = self._ids(*self._batch_place(task))
            stage.embedding_gradient(task.number, ids, dy)
            return Result()

    def _inner_step(self, task: tasks.InnerStep, inputs: Sequence[Tensor]) -> Result:
        with self._next(task) as stage:
            stage.step()
        return Result()

    @contextmanager
    def _next(self, task: InnerTask) -> Iterator[IslandStage]:
        """Context of a task on an inner step, with this stage of its slot's island. Raises Refused unless the
        slot is open, the step is its next one, and the task follows those before it."""
        slot = self._slots.get(task.index)
        if slot is None:
            raise Refused(f"slot {task.index} is not open here")
        open_step = slot.first + slot.stage.taken + 1
        if task.step != open_step or slot.stage.taken == slot.steps:
            done = f"{open_step - 1} of {slot.first + slot.steps}"
            raise Refused(f"inner step {task.step} of slot {task.index} is not open: {done} are taken")
        count = inner_microbatches(self._run)
        if not isinstance(task, tasks.InnerStep) and not 0 <= task.number < count:
            raise Refused(f"an inner step has {count} microbatches, none with number {task.number}")
        try:
            yield slot.stage
        except OutOfOrder as why:
            raise Refused(f"slot {task.index}: {why}") from None

    def _batch_place(self, task: InnerPass) -> tuple[int, int]:
        """Iteration and index of the microbatch in the run's batches (`inner_place`)."""
        return inner_place(self._run, task.index, task.step, task.number)

    def _inner_sent(self, kind: str, task: InnerPass, values: Tensor) -> Result:
        """Result with one output: the payload of an inner step's activation for the next stage, or of its
        gradient for the previous one. Raises Overflow if a codec cannot represent it."""
        cut = self._after if kind == ACTIVATION else self._before
        return outputs(self._cuts.encode(kind, values, self._cuts.place(*self._batch_place(task), cut)))

    @property
    def _tokens(self) -> int:
        """Tokens of an inner step of one island."""
        return inner_microbatches(self._run) * self._run.batch.rows * self._run.batch.sequence


def _byte(inputs: Sequence[Tensor]) -> Tensor:
    """First of the inputs, which must be one byte, the payload that begins or ends a slot. Raises Refused if
    it is anything else."""
    if not inputs or inputs[0].dtype != torch.uint8 or tuple(inputs[0].shape) != (1,):
        raise Refused("a slot is begun and ended with one byte, which did not come")
    return inputs[0]
