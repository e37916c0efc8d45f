"""Audit of a past iteration of whole models at one worker: the state before it, and its microbatches or slots
computed again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.train.devices.placement import Where, put
from anabranch.train.model.interface import Model
from anabranch.train.model.partition import StageSpec
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import aligned_bounds
from anabranch.train.numerics.exact import Accumulator
from anabranch.train.stage.audit import AuditedSteps
from anabranch.train.stage.inner_steps import Island, contribution_of
from anabranch.train.stage.run_objects import working_weights
from anabranch.train.stage.state import StageState
from anabranch.train.stage.whole_model import WholeModel
from anabranch.train.workers.rounds_worker import ANSWER


@dataclass(frozen=True)
class _Audit:
    """Audit in progress. state: before the audited iteration. passes: with its weights, and the sum of the
    contributions that are computed again."""

    t: int
    state: StageState
    passes: WholeModel


class AuditedWholeSteps(AuditedSteps):
    """States before the last audited iterations, and the sum of the contributions that the present audit
    computes again. States are kept in host memory: the weights before a synchronous step, the moments too
    before a round."""

    def __init__(
        self,
        run: RunConfig,
        model: Model,
        spec: StageSpec,
        dtype: torch.dtype,
        accumulator: Callable[[], Accumulator],
        where: Where,
    ) -> None:
        """dtype: of the working weights. accumulator(): makes an empty sum. where: devices of the model's
        vectors."""
        about = model, spec, lambda state: working_weights(state, dtype), lambda _: None
        super().__init__(*about, accumulator)
        self._run, self._where = run, where
        self._rounds = rounds_of(run)
        self._kept: dict[int, StageState] = {}
        self._audit: _Audit | None = None

    def keep(self, state: StageState) -> None:
        """Keep a copy, in host memory, of what an audit of iteration state.t + 1 needs of `state`, before
        that iteration changes it."""
        vectors, t = [state.weights], state.t + 1
        vectors += [state.exp_avg, state.exp_avg_sq] if self._rounds.has(t) else []
        copies = [vector.to("cpu", copy=True) for vector in vectors]
        copies += [torch.empty(0)] * (3 - len(copies))
        weights, first, second = copies
        self._kept[t] = replace(state, weights=weights, exp_avg=first, exp_avg_sq=second)

    def stepped(self, t: int) -> None:
        self._kept = {k: kept for k, kept in self._kept.items() if k > t - tasks.AUDIT_STEPS}

    def clear(self) -> None:
        self._kept.clear()
        self._audit = None

    def unit(self, task: tasks.AuditUnit, x: Tensor, dy: Tensor | None) -> tuple[Tensor, ...] | None:
        """Compute a microbatch, or the inner steps of a slot, again with the state before iteration task.t.
        x: token ids (rows, sequence + 1). dy: the data node's answer, whose content does not count. Adds the
        contribution to the audit's sum, which `task.first` begins anew, and returns (loss sum in fp64, the
        byte with which a relay answers). Without dy it adds nothing and returns (loss sum,). None if the
        state is not kept. Raises Overflow."""
        audit = self._begun(task)
        if audit is None:
            return None
        if task.steps:
            loss = self._slot(audit, task, x, adds=dy is not None)
        else:
            loss = self._microbatch(audit, task.index, x, adds=dy is not None)
        answer = torch.tensor([loss], dtype=torch.float64)
        return (answer,) if dy is None else (answer, ANSWER)

    def _begun(self, task: tasks.AuditUnit) -> _Audit | None:
        """Audit that a task goes on with, or begins; None if the state before its iteration is not kept."""
        kept = self._kept.get(task.t)
        if kept is None:
            return None
        if task.first or self._audit is None or self._audit.t != task.t:
            vectors = kept.weights, kept.exp_avg, kept.exp_avg_sq
            weights, first, second = (put(each, self._where) if len(each) else each for each in vectors)
            state = replace(kept, weights=weights, exp_avg=first, exp_avg_sq=second)
            passes = WholeModel(self._model, self._spec, self._weights_of(state), self._accumulator())
            passes.accumulator.prepare(None)
            self._audit = _Audit(task.t, state, passes)
        return self._audit

    def _microbatch(self, audit: _Audit, index: int, tokens: Tensor, adds: bool) -> float:
        """Compute a microbatch again and return its loss sum (nats); its gradient is added to the audit's sum
        if `adds`. tokens: (rows, sequence + 1)."""
        batch, passes = self._run.batch, audit.passes
        loss = passes.loss(index, tokens[:, :-1], tokens[:, 1:].contiguous())
        if adds:
            passes.gradient(index, 1.0 / (batch.microbatches * batch.rows * batch.sequence))
            passes.weight_gradient(index)
        else:
            passes.discard(index)
        return loss

    def _slot(self, audit: _Audit, task: tasks.AuditUnit, tokens: Tensor, adds: bool) -> float:
        """Take a slot's inner steps again, as if it carried no state, and return their loss sum (nats); the
        contribution is added to the audit's sum if `adds`. tokens: as of `contribution_of`."""
        island = Island(self._run, audit.state, task.t, task.steps)
        made = contribution_of(self._run, self._model, island, tokens)
        for name, view in audit.state.layout.views(made.change) if adds else ():
            audit.passes.accumulator.add(name, view, 1, self._rounds.slots)
        return made.loss

    def sum(self, task: tasks.AuditSum) -> tuple[Tensor, ...] | None:
        audit, self._audit = self._audit, None
        if audit is None or audit.t != task.t:
            return None
        flat = audit.passes.accumulator.flat
        if not self._rounds.has(task.t):
            return exact.cut(flat, task.parts)
        copy = flat.to("cpu", copy=True)
        return tuple(copy[begin:end] for begin, end in aligned_bounds(len(copy), task.parts))
