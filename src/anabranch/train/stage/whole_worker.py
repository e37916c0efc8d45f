"""Workers of a run without pipeline (`pipeline.stages = 0`): relays hold the whole model, data nodes nothing.

The payload from a data node to a relay is the token ids of a microbatch; the one back to a data node is its
loss sum; the answer of the data node is a byte. In a round the microbatch is a slot: the token ids are those
of all its inner steps, and its weight gradient is the slot's contribution (`inner_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from msgspec.structs import replace
from torch import Tensor

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.tasks import Result
from anabranch.train.islands.slot_state import SlotStates
from anabranch.train.model.rounds import inner_microbatches, rounds_of
from anabranch.train.model.sizes import token_bytes
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, aligned_bounds, rounded_sums
from anabranch.train.stage.inner_steps import (
    begin_rounds,
    contribution,
    end_rounds,
    outer_step,
    slot_tokens,
    taken,
)
from anabranch.train.stage.optimizer import StepScalars
from anabranch.train.stage.state import StageState
from anabranch.train.stage.whole_model import WholeModel
from anabranch.train.stage.worker import Refused, Worker, outputs, tensor_of

#: Answer of a data node to a loss, and of a relay to that.
_ANSWER = torch.zeros(1, dtype=torch.uint8)


class _SumsOfRounds(Worker):
    """Worker of a run with rounds of islands: rounds each summed part of a round's result to the bits that
    `round.results` sets, and joins received parts into the whole, for any stage."""

    @cached_property
    def _rounds(self) -> Rounds:
        return rounds_of(self._run)

    def _sum_part(self, task: tasks.SumPart, inputs: Sequence[Tensor]) -> Result:
        bits = BITS[self._run.round.results] if self._rounds.has(task.t) and task.whole else 0
        if not bits:
            return super()._sum_part(task, inputs)
        result = super()._sum_part(replace(task, whole=False), inputs)
        return Result(outputs=tuple(rounded_sums(tensor_of(part), bits) for part in result.outputs))

    def _assemble(self, task: tasks.Assemble, inputs: Sequence[Tensor]) -> Result:
        if self._rounds.has(task.t) and BITS[self._run.round.results]:
            # A peer that catches up puts together the kept gradient of another, which is in floats already.
            if any(part.dim() != 1 for part in inputs) or len({part.dtype for part in inputs}) > 1:
                raise Refused("the parts of a round's result are not vectors of one type")
            if inputs and inputs[0].dtype == torch.int64:
                inputs = [exact.reduced(part, self.master) for part in inputs]
        return super()._assemble(task, inputs)


class TokenSource(_SumsOfRounds):
    """Worker of a data node whose relays hold whole models: sends token ids, takes losses, no parameters."""

    def _embed(self, task: tasks.Embed, inputs: Sequence[Tensor]) -> Result:
        if task.steps:
            assert self._batches is not None
            steps = taken(self._run, task.steps)
            tokens = slot_tokens(self._batches, self._run, task.index, task.first, steps)
            return outputs(packed_ids(tokens, self.model.config.vocab_size))
        ids, targets = self._ids(task.t, task.index)
        return outputs(packed_ids(torch.cat((ids, targets[:, -1:]), 1), self.model.config.vocab_size))

    def _head(self, task: tasks.Head, inputs: Sequence[Tensor]) -> Result:
        loss = inputs[0]
        if loss.dtype != torch.float64 or loss.numel() != 1 or not math.isfinite(float(loss)):
            raise Refused("what came is not the loss of a microbatch")
        tokens = self._run.batch.rows * self._run.batch.sequence
        result = Result(loss_sum=float(loss), tokens=tokens * max(1, task.steps * self._inner))
        return replace(result, outputs=(_ANSWER,)) if task.train else result

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: Sequence[Tensor]) -> Result:
        return Result()

    def _recount(self, task: tasks.Recount, inputs: Sequence[Tensor]) -> Result:
        return Result()

    @property
    def _inner(self) -> int:
        return inner_microbatches(self._run) if self._run.round.slots else 1

    def _take_step(self, t: int, gradient: Tensor, scalars: StepScalars) -> None:
        if not self._rounds.has(t):  # the state is empty, but for its counter
            self.state.adam_step += 1


class WholeWorker(_SumsOfRounds):
    """Worker of a relay that holds the whole model."""

    _stage: WholeModel

    def _make_stage(self) -> WholeModel:
        self._contributions: dict[int, Tensor] = {}
        """Slot -> its contribution to the open round."""
        self._slot_states = SlotStates()
        return WholeModel(self.model, self.spec, self._weights, self._make_accumulator())

    # --- microbatches and slots -----------------------------------------------------------------

    def _forward(self, task: tasks.Forward, inputs: Sequence[Tensor]) -> Result:
        if task.steps:
            loss = self._take_inner_steps(task, inputs[0])
        else:
            ids, targets = self._tokens(inputs[0])
            if not task.train:
                loss = self._stage.evaluate_tokens(ids, targets)
            else:
                loss = self._stage.loss(task.index, ids, targets)
                if not task.keep:
                    self._stage.discard(task.index)
        return outputs(torch.tensor([loss], dtype=torch.float64))

    def _take_inner_steps(self, task: tasks.Forward, tokens: Tensor) -> float:
        carried = self._slot_states.find(task.index, task.carried) if task.carried else None
        if task.carried and carried is None:
            raise Refused(f"no state of slot {task.index} after round {task.carried} is here")
        rows = taken(self._run, task.steps) * inner_microbatches(self._run) * self._run.batch.rows
        ids = self._checked(tokens, rows)
        made = contribution(
            self._run, self.model, self.state, task.t, task.steps, ids, carried, task.late > 0
        )
        self._contributions[task.index] = made.change
        if made.state is not None:
            self._slot_states.keep(task.index, made.state)
        return made.loss

    def _input_gradient(self, task: tasks.InputGradient, inputs: Sequence[Tensor]) -> Result:
        if self._rounds.has(task.t):
            if task.index not in self._contributions:
                raise Refused(f"no contribution of slot {task.index} is held")
            return outputs(_ANSWER)
        if task.again:
            self._stage.loss(task.index, *self._tokens(inputs[1]))
        try:
            self._stage.gradient(task.index, self._scale())
        except KeyError:
            raise Refused(f"no forward of microbatch {task.index} is held") from None
        return outputs(_ANSWER)

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: Sequence[Tensor]) -> Result:
        if not self._rounds.has(task.t):
            return super()._weight_gradient(task, inputs)
        self._add(task.unit, 1)
        return Result()

    def _recount(self, task: tasks.Recount, inputs: Sequence[Tensor]) -> Result:
        if self._rounds.has(task.t):
            self._add(task.unit, task.sign)
        else:
            self._stage.recount_tokens(*self._tokens(inputs[0]), self._scale(), task.sign)
        return Result()

    def _add(self, slot: int, sign: int) -> None:
        """Add a slot's contribution to the sum `sign` times (±1). On Overflow nothing was added. Raises
        Refused if none is held."""
        if slot not in self._contributions:
            raise Refused(f"no contribution of slot {slot} is held")
        change, done, most = self._contributions[slot], list[str](), self._rounds.slots
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
        self._passed(t)

    def _passed(self, t: int) -> None:
        """Exchange the two meanings of the state's first moment after iteration t, skipped or not: Adam's
        becomes the outer momentum before the first round, and the reverse after the last one."""
        if t == self._rounds.start:
            begin_rounds(self._run, self.state)
        elif self._rounds.has(t) and t == self._rounds.last:
            end_rounds(self._run, self.state)

    def _begin_from(self, state: StageState) -> Result:
        self._slot_states.clear()  # they may be of rounds that the log made void
        return super()._begin_from(state)

    def _install(self, state: StageState) -> None:
        self._contributions.clear()
        super()._install(state)

    def _skip(self, task: tasks.Skip, inputs: Sequence[Tensor]) -> Result:
        self._expect_next(task.t)
        self._passed(task.t)
        result = super()._skip(task, inputs)
        self._contributions.clear()
        return result

    # --- checks -----------------------------------------------------------------------------------

    def _tokens(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a received microbatch."""
        ids = self._checked(payload, self._run.batch.rows)
        return ids[:, :-1], ids[:, 1:].contiguous()

    def _checked(self, payload: Tensor, rows: int) -> Tensor:
        """Received token ids (rows, sequence + 1) on the device. Raises Refused (shape, type, vocabulary)."""
        vocabulary = self.model.config.vocab_size
        shape = (rows, self._run.batch.sequence + 1, token_bytes(vocabulary))
        if payload.dtype != torch.uint8 or tuple(payload.shape) != shape:
            found = f"{payload.dtype} {tuple(payload.shape)}"
            raise Refused(f"the received tokens are {found}, not uint8 {shape}")
        ids = torch.zeros(shape[:2], dtype=torch.int64)
        for place in range(shape[2]):
            ids += payload[..., place].to(torch.int64) << (8 * place)
        if int(ids.max()) >= vocabulary:
            raise Refused("a received token is not in the vocabulary")
        return ids.to(self.device)


def packed_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids (rows, n) as their bytes, lowest first, (rows, n, bytes of an id) uint8."""
    places = [(ids >> (8 * place)) & 255 for place in range(token_bytes(vocab_size))]
    return torch.stack(places, -1).to(torch.uint8)
