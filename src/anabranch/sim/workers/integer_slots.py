"""Tasks on slots that pipeline islands fill, for a peer that computes with integers.

Not here: all other tasks (`integer_worker`), the state of an island (`integer_islands`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.tasks import Payload, Result, Task, embed_unit
from anabranch.sim.workers.integer_arithmetic import Words
from anabranch.sim.workers.integer_islands import StageIsland

_InnerMicrobatch = tasks.InnerForward | tasks.InnerHead | tasks.InnerBackward


@dataclass
class OpenSlot:
    """Slot of an open round at one stage. merges: True if the late contribution of the round before is added
    to its own. last: number of its last inner step, counted over all its rounds as `StageIsland.step` is.
    change: its contribution, once the slot is ended; None until then."""

    island: StageIsland
    merges: bool
    last: int
    change: Words | None = None


class IslandSlots:
    """Slots of pipeline islands at the stage of one peer. add(words, sign): adds a contribution (sign 1) to
    the peer's sum of the open iteration, or subtracts it (-1)."""

    def __init__(self, stage: int, rounds: Rounds, add: Callable[[Words, int], None]) -> None:
        self._stage, self._rounds, self._add = stage, rounds, add
        self._open: dict[int, OpenSlot] = {}
        self._carried: dict[tuple[int, int], int] = {}
        """(Slot, round) -> number that stands for what this machine carries of it after the round."""

    def takes(self, task: Task) -> bool:
        """True if a task is one on a slot, so that `run` does it: any task of a round on microbatches, inner
        steps or contributions, but not on held-out windows. False in runs without pipeline islands."""
        if not self._rounds.pipeline or not self._rounds.has(task.t):
            return False
        match task:
            case tasks.Embed() | tasks.Forward():
                return task.steps > 0
            case tasks.Head(train=train):
                return train
            case tasks.InputGradient() | tasks.WeightGradient() | tasks.Recount():
                return True
        return isinstance(task, _InnerMicrobatch | tasks.InnerStep)

    def run(self, task: Task, inputs: tuple[Payload, ...], t: int, state: int) -> Result:
        """Do a task on a slot and return its result, with an error if the task does not fit the slot's
        progress or the round does not follow step t. state: number that stands for the stage's state after
        step t."""
        received = inputs[0] if inputs else 0
        if task.t != t + 1:
            return Result(error=f"round {task.t} does not follow the state after step {t}")
        if not isinstance(received, int):
            return Result(error="what was received is not one number")
        match task:
            case tasks.Embed() | tasks.Forward():
                return self._begin(task, state, received)
            case tasks.WeightGradient(_, unit):
                return self._count(unit, +1)
            case tasks.Recount(_, unit, sign):
                return self._count(unit, sign)
            case tasks.MicrobatchTask(_, index):
                slot = self._open.get(index)
                if slot is None or slot.change is not None:
                    return Result(error=f"slot {index} is not open")
                if isinstance(task, tasks.Head | tasks.InputGradient):
                    return self._end(task, slot, received)
                return _inner(slot.island, task, received)
        raise AssertionError(task)

    def discard(self, slot: int) -> None:
        self._open.pop(slot, None)

    def drop(self) -> None:
        """Drop all slots of the open round; what is carried stays."""
        self._open.clear()

    def forget(self) -> None:
        """Drop all slots, and all that is carried from earlier rounds: these may be void by the log."""
        self.drop()
        self._carried.clear()

    def _begin(self, task: tasks.Embed | tasks.Forward, state: int, x: int) -> Result:
        carried = self._carried.get((task.index, task.carried), 0) if task.carried else 0
        if task.carried and not carried:
            return Result(error=f"no state of slot {task.index} after round {task.carried} is here")
        island = StageIsland(self._stage, state, task.index, task.first, task.steps, carried, x)
        self._open[task.index] = OpenSlot(island, task.late > 0, task.first + task.steps)
        return Result(outputs=(island.opening,))

    def _end(self, task: tasks.Head | tasks.InputGradient, slot: OpenSlot, received: int) -> Result:
        """End a slot at this stage: make its contribution, which the slot holds until a later task has it
        added (`_count`), and what is carried. Returns the gradient for the stage before (from stage 0: for
        the last one), at stage 0 with the loss; an error if inner steps of the slot are missing. received: as
        of `StageIsland.change`."""
        island = slot.island
        if island.step < slot.last:
            return Result(error=f"slot {task.index} has taken {island.step} inner steps of {slot.last}")
        slot.change = island.change(received, slot.merges)
        self._carried[task.index, task.t] = island.carries
        if isinstance(task, tasks.Head):
            return Result(outputs=(island.head_end(received),), loss_sum=island.loss, tokens=1)
        return Result(outputs=(island.end_gradient(received),))

    def _count(self, unit: int, sign: int) -> Result:
        """Add (sign 1) or subtract (-1) the contribution of a unit's slot in the peer's sum. At stage 0 it
        belongs to the embedding's unit; the head's adds nothing. An error if the slot is not ended here."""
        slot = unit if self._stage else unit // 2
        found = self._open.get(slot)
        if found is None or found.change is None:
            return Result(error=f"no contribution of slot {slot} is held")
        if self._stage or unit == embed_unit(slot):
            self._add(found.change, sign)
        return Result()


def _inner(island: StageIsland, task: Task, received: int) -> Result:
    """Do a task of the open inner step of an island and return its result; an error if it is of another step.
    received: activation or gradient."""
    assert isinstance(task, _InnerMicrobatch | tasks.InnerStep)
    if task.step != island.step + 1:
        taken = f"slot {island.slot} has taken {island.step} inner steps"
        return Result(error=f"{taken}: {type(task).__name__} of step {task.step} is not of its next")
    match task:
        case tasks.InnerForward(number=number):
            return Result(outputs=(island.forward(number, received),))
        case tasks.InnerHead(number=number):
            dy, loss = island.head(number, received)
            return Result(outputs=(dy,), loss_sum=loss, tokens=1)
        case tasks.InnerBackward(number=number):
            dx = island.backward(number, received)
            if dx is None:
                return Result(error=f"no forward of microbatch {number} of slot {island.slot} is held")
            return Result(outputs=(dx,) if island.stage else ())
    island.take_step()
    return Result()
