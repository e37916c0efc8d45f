"""Workers of a run with rounds of islands, whatever an island is: contributions of slots, their sums, outer
steps.

Not here: how a contribution comes about (`whole_worker`, `pipeline_worker`, `train.stage.inner_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from msgspec.structs import replace
from torch import Tensor

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.tasks import Result
from anabranch.train.islands.slot_state import SlotState, SlotStates
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, aligned_bounds, from_bytes, rounded_sums, to_bytes
from anabranch.train.stage.inner_steps import Contribution
from anabranch.train.stage.optimizer import StepScalars
from anabranch.train.stage.outer_step import exchange_moments, outer_step
from anabranch.train.stage.state import StageState
from anabranch.train.stage.worker import Refused, Worker, tensor_of

#: Payload of tasks that only tell of a slot's begin or end.
ANSWER = torch.zeros(1, dtype=torch.uint8)


class SumsOfRounds(Worker):
    """Worker of a run with rounds of islands: rounds each finished part of a round's result (not the sums of
    single cells) to the bits that `round.results` sets, and joins received parts into the whole, for any
    stage."""

    @cached_property
    def _rounds(self) -> Rounds:
        return rounds_of(self._run)

    def _sum_part(self, task: tasks.SumPart, inputs: Sequence[Tensor]) -> Result:
        bits = BITS[self._run.round.results] if self._rounds.has(task.t) and task.whole else 0
        if not bits:
            return super()._sum_part(task, inputs)
        result = super()._sum_part(replace(task, whole=False), inputs)
        return Result(outputs=tuple(rounded_sums(tensor_of(part), bits) for part in result.outputs))

    def _packs(self, t: int) -> bool:
        """True if a kept result of iteration t is sent in bytes to a peer that catches up, 8 bits a value."""
        return self._rounds.has(t) and BITS[self._run.round.results] in (4, 8)

    def _read_gradient(self, task: tasks.ReadGradient, inputs: Sequence[Tensor]) -> Result:
        gradient = self._gradients.get(task.t)
        if gradient is None or not self._packs(task.t):
            return super()._read_gradient(task, inputs)
        return Result(outputs=(to_bytes(gradient),))

    def _assemble(self, task: tasks.Assemble, inputs: Sequence[Tensor]) -> Result:
        if task.witness is None and self._packs(task.t) and [x.dtype for x in inputs] == [torch.uint8]:
            try:
                inputs = [from_bytes(inputs[0], self.layout.elements, self.master)]
            except ValueError as error:
                raise Refused(str(error)) from None
        if self._rounds.has(task.t) and BITS[self._run.round.results]:
            # A peer that catches up has the kept gradient of another in floats.
            if any(part.dim() != 1 for part in inputs) or len({part.dtype for part in inputs}) > 1:
                raise Refused("the parts of a round's result are not vectors of one type")
            if inputs and inputs[0].dtype == torch.int64:
                inputs = [exact.reduced(part, self.master) for part in inputs]
        return super()._assemble(task, inputs)


class RoundsWorker(SumsOfRounds):
    """Base of `WholeWorker` and `PipelineWorker`, which make the contributions of slots. It keeps these until
    the round ends, adds them to the sums, and takes the outer step. Iterations that are no rounds are those
    of `Worker`."""

    @cached_property
    def _contributions(self) -> dict[int, Contribution]:
        """Slot -> its contribution to the open round."""
        return {}

    @cached_property
    def _slot_states(self) -> SlotStates:
        return SlotStates()

    # --- contributions --------------------------------------------------------------------------

    def _carried(self, slot: int, t: int) -> SlotState | None:
        """State that a slot carries from round t, as this worker kept it; None if t is 0, as the slot begins
        anew. Raises Refused if it was not kept."""
        carried = self._slot_states.find(slot, t) if t else None
        if t and carried is None:
            raise Refused(f"no state of slot {slot} after round {t} is here")
        return carried

    def _keep(self, slot: int, made: Contribution) -> None:
        """Keep a slot's contribution until the round ends, and what it carries to the next one."""
        self._contributions[slot] = made
        if made.state is not None:
            self._slot_states.keep(slot, made.state)

    def _contribution(self, slot: int) -> Contribution:
        """Contribution of a slot to the open round. Raises Refused if none is held."""
        if slot not in self._contributions:
            raise Refused(f"no contribution of slot {slot} is held")
        return self._contributions[slot]

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: Sequence[Tensor]) -> Result:
        if not self._rounds.has(task.t):
            return super()._weight_gradient(task, inputs)
        self._add(task.unit, 1)
        return Result()

    def _recount(self, task: tasks.Recount, inputs: Sequence[Tensor]) -> Result:
        if not self._rounds.has(task.t):
            return super()._recount(task, inputs)
        self._add(task.unit, task.sign)
        return Result()

    def _add(self, unit: int, sign: int) -> None:
        """Add the contribution of a unit's slot to the sum `sign` times (±1). At stage 0 the embedding's unit
        stands for the contribution, and nothing is added for the head's. On Overflow nothing was added.
        Raises Refused if no contribution of the slot is held."""
        if self.spec.stage == 0 and not self._is_embed(unit):
            return
        change = self._contribution(unit if self.spec.stage else unit // 2).change
        done, most = list[str](), self._rounds.slots
        try:
            for name, view in self.layout.views(change):
                self._stage.accumulator.add(name, view, sign, most)
                done.append(name)
        except exact.Overflow:
            for name in done:
                self._stage.accumulator.add(name, self.layout.view(change, name), -sign, most)
            raise

    def _discard(self, task: tasks.MicrobatchTask, inputs: Sequence[Tensor]) -> Result:
        self._contributions.pop(task.index, None)
        return super()._discard(task, inputs)

    # --- reduce and step --------------------------------------------------------------------------

    def _freeze(self, task: tasks.Freeze, inputs: Sequence[Tensor]) -> Result:
        if not self._rounds.has(task.t):
            return super()._freeze(task, inputs)
        copy = self._stage.accumulator.flat.to("cpu", copy=True)
        return Result(outputs=tuple(copy[begin:end] for begin, end in aligned_bounds(len(copy), task.parts)))

    def _take_step(self, t: int, gradient: Tensor, scalars: StepScalars) -> None:
        if self._rounds.has(t):
            outer_step(self._run, self.state, gradient, scalars.learning_rate, scalars.clip_factor, t)
        else:
            super()._take_step(t, gradient, scalars)
        exchange_moments(self._run, self.state, t)

    def _begin_from(self, state: StageState) -> Result:
        self._slot_states.clear()  # they may be of rounds that the log made void
        return super()._begin_from(state)

    def _install(self, state: StageState) -> None:
        self._drop_slots()
        super()._install(state)

    def _skip(self, task: tasks.Skip, inputs: Sequence[Tensor]) -> Result:
        self._expect_next(task.t)
        exchange_moments(self._run, self.state, task.t)
        result = super()._skip(task, inputs)
        self._drop_slots()
        return result

    def _drop_slots(self) -> None:
        """Drop the contributions and other work of all slots of a round that is over; carried states stay."""
        self._contributions.clear()
