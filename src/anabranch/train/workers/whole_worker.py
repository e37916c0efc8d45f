"""Workers of a run without pipeline (`pipeline.stages = 0`): relays hold the whole model, data nodes nothing.

The payload from a data node to a relay is the token ids of a microbatch; the one back to a data node is its
loss sum; the answer of the data node is a byte. In a round the microbatch is a slot: the token ids are those
of all its inner steps, and its weight gradient is the slot's contribution (`inner_steps`). Where the run's
data are private (`data.private`), the payload of a slot is a byte, and the relay takes its own token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Result, Task
from anabranch.train.adapters.frozen import FrozenStore
from anabranch.train.islands.kept_contributions import contribution_digest
from anabranch.train.model.rounds import inner_microbatches
from anabranch.train.model.sizes import ModelConfig, token_bytes
from anabranch.train.stage.inner_steps import (
    Island,
    go_ahead,
    private_tokens,
    slot_tokens,
    steps_with_tokens,
    take_steps,
)
from anabranch.train.stage.optimizer import StepScalars
from anabranch.train.stage.run_objects import Batches, Ids
from anabranch.train.stage.whole_model import WholeModel
from anabranch.train.stage.worker import Refused, outputs
from anabranch.train.workers.rounds_worker import ANSWER, RoundsWorker, SumsOfRounds
from anabranch.train.workers.whole_audit import AuditedWholeSteps


class OwnData(Protocol):
    """Private data of this machine, and its files of the contributions that it computed on them. The run does
    not read these files: `anabranch verify` does."""

    def step_rows(self, slot: int, step: int) -> Ids:
        """Token ids (microbatches · rows, sequence + 1) of inner step `step` (1, 2, ..., over all rounds) of
        a slot."""
        ...

    def keep(self, t: int, slot: int, digest: str, change: Tensor) -> None:
        """Write a slot's contribution to round t (`change`, flat) and its digest to this machine's files, for
        the run's verification."""
        ...


class TokenSource(SumsOfRounds):
    """Worker of a data node whose relays hold whole models: sends token ids (for slots on private data a
    byte), takes losses, and has no parameters."""

    def _embed(self, task: tasks.Embed, inputs: Sequence[Tensor]) -> Result:
        if task.steps and self._run.data.private:
            return outputs(ANSWER)
        if task.steps:
            assert self._batches is not None
            steps = steps_with_tokens(self._run, task.steps)
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
        return replace(result, outputs=(ANSWER,)) if task.train else result

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


class WholeWorker(RoundsWorker):
    """Worker of a relay that holds the whole model; in a round its Forward takes a slot's inner steps."""

    _stage: WholeModel

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        stage: int,
        batches: Batches | None = None,
        initial: Mapping[str, Tensor] | None = None,
        resident: int | None = None,
        frozen: FrozenStore | None = None,
        own: OwnData | None = None,
    ) -> None:
        """own: this machine's private data for its slots, in a run whose data are private. Other arguments
        and errors are those of `Worker`."""
        super().__init__(run, model, stage, batches, initial, resident, frozen)
        self._own = own

    def _handlers(self) -> dict[type[Task], Callable[[Any, Sequence[Tensor]], Result]]:
        return super()._handlers() | {tasks.StepAhead: self._step_ahead}

    def _make_stage(self) -> WholeModel:
        return WholeModel(self.model, self.spec, self._weights, self._make_accumulator())

    def _make_audits(self) -> AuditedWholeSteps:
        about = self._run, self.model, self.spec, self.dtype
        return AuditedWholeSteps(*about, self._make_accumulator, self.where)

    def _audit_unit(self, task: tasks.AuditUnit, inputs: Sequence[Tensor]) -> Result:
        inner = task.steps * inner_microbatches(self._run) if task.steps else 1
        ids = self._checked(inputs[0], inner * self._run.batch.rows)
        again = self._audits.unit(task, ids, inputs[1] if inputs[1:] else None)
        if again is None:
            raise Refused(tasks.WEIGHTS_GONE)
        return Result(outputs=again)

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
        carried = self._carried(task.index, task.carried)
        ids = self._tokens_of(task, tokens)
        island = Island(self._run, self.state, task.t, task.steps, carried, task.late > 0)
        take_steps(self._run, self.model, island, ids, task.steps)
        self._keep(task.index, made := island.close())
        if island.lacks:
            self._ahead_of[task.index] = island, ids
        return made.loss

    def _tokens_of(self, task: tasks.Forward, payload: Tensor) -> Tensor:
        """Token ids of a slot's inner steps, steps ahead included: the received ones, or this machine's own
        where the run's data are private. Raises Refused if the payload holds no such ids, or the machine has
        no data of its own."""
        steps = steps_with_tokens(self._run, task.steps)
        if not self._run.data.private:
            return self._checked(payload, steps * inner_microbatches(self._run) * self._run.batch.rows)
        if self._own is None:
            raise Refused("the run's data are private, and this machine has none")
        return private_tokens(self._own.step_rows, task.index, task.first, steps).to(self.device)

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: Sequence[Tensor]) -> Result:
        result = super()._weight_gradient(task, inputs)
        if self._own is None or not self._rounds.has(task.t) or not self._run.data.private:
            return result
        made = self._contribution(task.unit)
        digest = contribution_digest(self.layout, made.change)
        self._own.keep(task.t, task.unit, digest, made.change)
        return replace(result, digest=digest, loss_sum=made.loss)

    @cached_property
    def _ahead_of(self) -> dict[int, tuple[Island, Tensor]]:
        """Slot -> island that gave its contribution to the open round and lacks steps ahead, and token ids of
        all its steps."""
        return {}

    def _step_ahead(self, task: tasks.StepAhead, inputs: Sequence[Tensor]) -> Result:
        if task.index in self._ahead_of:
            self._go_ahead(task.index, task.step)
        return Result()

    def _go_ahead(self, slot: int, last: int) -> None:
        """Take the steps ahead that an island of `_ahead_of` lacks, up to number `last` (1, 2, ...). After
        all of them, or an overflow, the slot's state is kept for the next round and its island is dropped."""
        island, ids = self._ahead_of[slot]
        go_ahead(self._run, self.model, island, ids, last)
        if not island.lacks:
            del self._ahead_of[slot]
            self._slot_states.keep(slot, island.carry())

    def _finish(self) -> None:
        """Take all steps ahead that islands lack, before the round's outer step changes the state from which
        they began."""
        for slot, (island, _) in sorted(self._ahead_of.items()):
            self._go_ahead(slot, island.ahead)

    def _apply(self, task: tasks.Apply, inputs: Sequence[Tensor]) -> Result:
        self._finish()
        return super()._apply(task, inputs)

    def _skip(self, task: tasks.Skip, inputs: Sequence[Tensor]) -> Result:
        self._finish()
        return super()._skip(task, inputs)

    def _discard(self, task: tasks.MicrobatchTask, inputs: Sequence[Tensor]) -> Result:
        self._ahead_of.pop(task.index, None)
        return super()._discard(task, inputs)

    def _drop_slots(self) -> None:
        super()._drop_slots()
        self._ahead_of.clear()

    def _input_gradient(self, task: tasks.InputGradient, inputs: Sequence[Tensor]) -> Result:
        if self._rounds.has(task.t):
            self._contribution(task.index)
            return outputs(ANSWER)
        if task.again:
            self._stage.loss(task.index, *self._tokens(inputs[1]))
        try:
            self._stage.gradient(task.index, self._scale())
        except KeyError:
            raise Refused(f"no forward of microbatch {task.index} is held") from None
        return outputs(ANSWER)

    def _recount(self, task: tasks.Recount, inputs: Sequence[Tensor]) -> Result:
        if self._rounds.has(task.t):
            return super()._recount(task, inputs)
        self._stage.recount_tokens(*self._tokens(inputs[0]), self._scale(), task.sign)
        return Result()

    def _tokens(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a received microbatch."""
        ids = self._checked(payload, self._run.batch.rows)
        return ids[:, :-1], ids[:, 1:].contiguous()

    def _checked(self, payload: Tensor, rows: int) -> Tensor:
        """Token ids (rows, sequence + 1) in a received payload, on the device. rows: number that must have
        come. Raises Refused for another shape or type, or an id outside the vocabulary."""
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
