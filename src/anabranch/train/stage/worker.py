"""Worker: executes the protocol's tasks on one stage of the model.

Drivers call `Worker.run` only. Payloads are contiguous CPU tensors; `Worker` moves them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload, Result, Task, embed_unit, head_unit
from anabranch.train.adapters.frozen import FrozenError, FrozenLoader, FrozenStore
from anabranch.train.adapters.lora import LoraModel, run_model
from anabranch.train.codec.codecs import BadPayload
from anabranch.train.devices.placement import Where, put
from anabranch.train.model.interface import DTYPES, stage_layout
from anabranch.train.model.layout import Layout
from anabranch.train.model.partition import StageSpec, partition
from anabranch.train.model.rounds import delay_of
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.numerics import exact
from anabranch.train.numerics.moments import moments
from anabranch.train.numerics.numerics_class import devices_of
from anabranch.train.stage.audit import AuditedSteps, payload_hash
from anabranch.train.stage.cuts import ACTIVATION, GRADIENT, Cuts
from anabranch.train.stage.delayed import advance_state, ahead_of, snapshot_form
from anabranch.train.stage.muon import muon_names, take_step
from anabranch.train.stage.optimizer import StepScalars
from anabranch.train.stage.run_objects import (
    Batches,
    check_devices,
    check_shape,
    initial_state,
    is_coarse,
    loss_weight,
    make_accumulator,
    master_dtype,
    next_units,
    part_alignment,
    placement,
    share_out,
    token_ids,
    training_weights,
    units_of,
    working_weights,
)
from anabranch.train.stage.stage import Stage
from anabranch.train.stage.state import Ahead, SnapshotError, StageState, parse_pieces, piece_hashes

#: Tasks on inner steps of a slot, whose island a worker keeps from one to the next.
INNER_TASKS = (tasks.InnerForward, tasks.InnerHead, tasks.InnerBackward, tasks.InnerStep)
#: Tasks that use the weights or the sums of the open iteration.
_OF_OPEN_ITERATION = (
    *(tasks.Embed, tasks.Forward, tasks.Head),
    *(tasks.InputGradient, tasks.WeightGradient, tasks.Recount),
    *INNER_TASKS,
    tasks.StepAhead,
)
#: Tasks that keep something of their microbatch for a later one.
_KEEPING = (tasks.Forward, tasks.Head, tasks.InputGradient, *INNER_TASKS)
#: Tasks that need no state of this worker's own.
_WITHOUT_STATE = (tasks.InitState, tasks.LoadState, tasks.CheckState, tasks.LoadFrozen)


class Refused(Exception):
    """Task that cannot be done; the message becomes Result.error."""


class Worker:
    """Executor of the tasks of one stage on one peer. Without `batches` (a relay) it serves stages 1..S only.
    A task that cannot be done gives Result.error, an overflow Result.overflow. Exhausted memory raises, and a
    task of a kind that the class does not know."""

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        stage: int,
        batches: Batches | None = None,
        initial: Mapping[str, Tensor] | None = None,
        resident: int | None = None,
        frozen: FrozenStore | None = None,
    ) -> None:
        """The worker has no state before the task `InitState` or `LoadState`. initial: tensors by name from
        which `InitState` starts, all those of the stage (None: made from the run's seed). resident: most
        microbatches whose activations stay on the device between forward and backward (None: all); others are
        offloaded. frozen: this machine's store of frozen weights, for a run that trains adapters. Raises
        ConfigError if the run's sequences or devices do not fit, ValueError for stage 0 without batches."""
        check_shape(run, model)
        devices, specs = devices_of(run.compute), partition(model, run.pipeline)
        check_devices(run, specs, len(devices))
        self._run = run
        self._batches = batches
        self._initial = initial
        self._resident = resident
        self.device = devices[0]
        """Device of what the stage receives and sends."""
        self.dtype = DTYPES[run.compute.dtype]
        self.master = master_dtype(self.dtype)
        self.spec: StageSpec = specs[stage]
        self._device_of = share_out(self.spec, devices)
        self.model = run_model(run, model, self.device, self._device_of)
        self._frozen = FrozenLoader(run, self.model, frozen) if isinstance(self.model, LoraModel) else None
        # A stage's input crosses cut `_before`, its output cut `_after`; stage 0 embeds before the first cut,
        # and its head is behind the last one.
        self._cuts = Cuts(run, model)
        self._before, self._after = (stage - 1, stage) if stage else (len(specs) - 1, 0)
        self.layout = stage_layout(self.model, self.spec)
        self.where = self._place(self.layout)
        """Device of weights, moments and sums, or their placement on several."""
        self._matrices = muon_names(self.model, self.spec, run.optimizer)
        if stage == 0 and batches is None:
            raise ValueError("stage 0 needs the batches")
        # Reduced gradients of the last KEPT_GRADIENTS steps, for replicas that catch up.
        self._gradients: dict[int, Tensor] = {}
        self._digests: dict[int, str] = {}
        self._state: StageState | None = None
        self._weights: dict[str, Tensor] = {}
        self._stage = self._make_stage()
        self._delay = delay_of(run)
        self._ahead: Ahead | None = None
        """Weights and units of the iteration after the open one, if that is open, too (a delayed one)."""
        self._ahead_stage, self._true_stage = self._stage, self._stage
        if self._delay.start:
            self._ahead_stage = Stage(self.model, self.spec, {}, self._make_accumulator())
            self._true_stage = Stage(self.model, self.spec, {}, self._stage.accumulator)
        self._align = part_alignment(run)
        self._audits = self._make_audits()
        self._tasks = self._handlers()

    def _handlers(self) -> dict[type[Task], Callable[[Any, Sequence[Tensor]], Result]]:
        return {
            tasks.Embed: self._embed,
            tasks.Forward: self._forward,
            tasks.Head: self._head,
            tasks.InputGradient: self._input_gradient,
            tasks.WeightGradient: self._weight_gradient,
            tasks.Recount: self._recount,
            tasks.Discard: self._discard,
            tasks.Freeze: self._freeze,
            tasks.SumPart: self._sum_part,
            tasks.Assemble: self._assemble,
            tasks.Apply: self._apply,
            tasks.HashInputs: lambda task, inputs: Result(),
            tasks.AuditUnit: self._audit_unit,
            tasks.AuditSum: self._audit_sum,
            tasks.Skip: self._skip,
            tasks.ReadGradient: self._read_gradient,
            tasks.Snapshot: self._snapshot,
            tasks.CheckState: self._check_state,
            tasks.ProveState: self._prove_state,
            tasks.LoadState: self._load_state,
            tasks.LoadFrozen: self._load_frozen,
            tasks.InitState: self._init_state,
        }

    @property
    def state(self) -> StageState:
        """State of the stage. Raises ValueError before InitState or LoadState."""
        if self._state is None:
            raise ValueError("the worker has no state yet: InitState or LoadState comes first")
        return self._state

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        """Execute a task and measure its seconds. `protocol.interface.tasks` documents the inputs and outputs
        of each task."""
        begin = time.perf_counter()
        try:
            if self._state is None and not isinstance(task, _WITHOUT_STATE):
                raise Refused("the worker has no state yet: InitState or LoadState comes first")
            if isinstance(task, _OF_OPEN_ITERATION):
                self._expect_open(task)
            tensors = [tensor_of(payload) for payload in inputs]
            result = self._tasks[type(task)](task, tensors)
            if task.hashed and not result.error:
                whole = [*tensors, *map(tensor_of, result.outputs)]
                result = replace(result, hashes=tuple(map(payload_hash, whole)))
        except Refused as refusal:
            result = Result(error=str(refusal))
        except exact.Overflow as overflow:
            if isinstance(task, _KEEPING):  # the result could not be encoded
                self._discard(task, ())
            result = Result(overflow=overflow.tensor)
        return replace(result, seconds=time.perf_counter() - begin)

    def _working_weights(self, state: StageState) -> dict[str, Tensor]:
        return working_weights(state, self.dtype)

    def _place(self, layout: Layout) -> Where:
        """Device, or placement on several, of vectors in `layout`, one of this stage's parameters."""
        return placement(self.model, layout, self._device_of) if self._device_of else self.device

    def _make_stage(self) -> Stage:
        return Stage(self.model, self.spec, self._weights, self._make_accumulator())

    def _make_accumulator(self) -> exact.Accumulator:
        return make_accumulator(self._run, self.model, self.layout, self.where)

    def _make_audits(self) -> AuditedSteps:
        return AuditedSteps(
            *(self.model, self.spec, self._working_weights),
            *(lambda state: units_of(self._run, state), self._make_accumulator, self._align),
        )

    # --- forward and backward ---------------------------------------------------------------------

    def _embed(self, task: tasks.Embed, inputs: Sequence[Tensor]) -> Result:
        ids, _ = self._ids(task.t, task.index)
        return self._sent(ACTIVATION, task, self._at(task).embed(ids))

    def _forward(self, task: tasks.Forward, inputs: Sequence[Tensor]) -> Result:
        x = self._received(ACTIVATION, inputs)
        if not task.train:
            return self._sent(ACTIVATION, task, self._at(task).evaluate(x))
        stage = self._at(task)
        graphs = stage.graphs if stage is self._stage else stage.graphs + self._stage.graphs
        offload = task.keep and self._resident is not None and graphs >= self._resident
        y = stage.forward(task.index, x, offload)
        if not task.keep:
            stage.discard(task.index)
        return self._sent(ACTIVATION, task, y)

    def _head(self, task: tasks.Head, inputs: Sequence[Tensor]) -> Result:
        x = self._received(ACTIVATION, inputs)
        _, targets = self._ids(task.t, task.index)
        weight = self._weight(task.t, task.index)
        if not task.train:
            loss_sum = self._at(task).evaluation_loss(x, targets, weight)
            return Result(loss_sum=loss_sum, tokens=targets.numel())
        dx, loss_sum = self._at(task).head(head_unit(task.index), x, targets, self._scale(), weight)
        return replace(self._sent(GRADIENT, task, dx), loss_sum=loss_sum, tokens=targets.numel())

    def _input_gradient(self, task: tasks.InputGradient, inputs: Sequence[Tensor]) -> Result:
        dy = self._received(GRADIENT, inputs, 1 + task.again)
        stage = self._at(task)
        if task.again:
            stage.forward(task.index, self._received(ACTIVATION, inputs[1:]))
        try:
            dx = stage.input_gradient(task.index, dy)
        except KeyError:
            raise Refused(f"no forward of microbatch {task.index} is held") from None
        return self._sent(GRADIENT, task, dx)

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: Sequence[Tensor]) -> Result:
        if self._is_embed(task.unit):
            ids, _ = self._ids(task.t, task.unit // 2)
            self._at(task).embed_gradient(ids, self._received(GRADIENT, inputs))
            return Result()
        try:
            self._at(task).weight_gradient(task.unit)
        except KeyError:
            raise Refused(f"no weight gradient of unit {task.unit} is waiting") from None
        return Result()

    def _recount(self, task: tasks.Recount, inputs: Sequence[Tensor]) -> Result:
        if self.spec.stage > 0:
            x, dy = self._received(ACTIVATION, inputs, 2), self._received(GRADIENT, inputs[1:])
            self._at(task).recount(x, dy, task.sign)
            return Result()
        ids, targets = self._ids(task.t, task.unit // 2)
        if self._is_embed(task.unit):
            self._at(task).embed_gradient(ids, self._received(GRADIENT, inputs), task.sign)
        else:
            x = self._received(ACTIVATION, inputs)
            weight = self._weight(task.t, task.unit // 2)
            self._at(task).recount_head(x, targets, self._scale(), task.sign, weight)
        return Result()

    def _discard(self, task: tasks.MicrobatchTask, inputs: Sequence[Tensor]) -> Result:
        if not self._delay.start or task.t > self.state.t:
            self._at(task).discard(head_unit(task.index) if self.spec.stage == 0 else task.index)
        return Result()

    # --- reduce and step --------------------------------------------------------------------------

    def _freeze(self, task: tasks.Freeze, inputs: Sequence[Tensor]) -> Result:
        if self._delay.start and task.t != self.state.t + 1:
            raise Refused(f"a reduce of iteration {task.t} is not open here")
        parts = exact.cut(self._stage.accumulator.flat, task.parts, self._align)
        if task.clear:
            self._stage.accumulator.clear()
        return Result(outputs=parts)

    def _sum_part(self, task: tasks.SumPart, inputs: Sequence[Tensor]) -> Result:
        kind = self._stage.accumulator.flat.dtype
        length = len(inputs[0]) if inputs and inputs[0].dim() == 1 else -1
        if any(part.dtype != kind or tuple(part.shape) != (length,) for part in inputs) or length < 0:
            raise Refused(f"the members' parts are not {kind} vectors of one length")
        limit = exact.float_limit(kind) if kind.is_floating_point else math.inf
        if limit < math.inf and not all(bool((part.abs() <= limit).all()) for part in inputs):
            raise Refused("a member's part is too large: several may overflow together")
        whole = task.whole and not is_coarse(self._run)  # a coarse sum is sent as it is, and packs well
        total = exact.sum_part(inputs, self.master if whole else kind)
        return Result(outputs=(total,), moments=moments(inputs) if task.weighed else ())

    def _assemble(self, task: tasks.Assemble, inputs: Sequence[Tensor]) -> Result:
        own = task.witness is None
        layout = self.layout if task.witness is None else self._layout_of(task.witness)
        parts = [self._summed(part) for part in inputs]
        whole = torch.cat(parts) if parts else None
        gradient = self._flat(whole, layout)
        squares = exact.squares(layout, gradient)
        for name, square in squares.items():
            if not square < float("inf"):
                raise exact.Overflow(name)
        assert whole is not None  # `_flat` refuses
        digest = exact.digest(layout, whole)  # the host's copy: nothing comes back from an accelerator
        if own:
            self._gradients[task.t], self._digests[task.t] = gradient, digest
        return Result(digest=digest, squares=squares)

    def _summed(self, part: Tensor) -> Tensor:
        """Received part of a reduced gradient as a flat vector; the integers of a coarse sum are converted to
        their values in the master dtype."""
        flat = part.reshape(-1)
        coarse = is_coarse(self._run) and flat.dtype == torch.int64
        return exact.reduced(flat, self.master) if coarse else flat

    def _apply(self, task: tasks.Apply, inputs: Sequence[Tensor]) -> Result:
        self._expect_next(task.t)
        if inputs:
            self._gradients[task.t] = self._flat(inputs[0], self.layout)
            self._digests.pop(task.t, None)
        if task.t not in self._gradients:
            raise Refused(f"no reduced gradient of step {task.t} is at hand")
        if task.digest:
            found = self._digests.get(task.t) or exact.digest(self.layout, self._gradients[task.t])
            if found != task.digest:
                raise Refused(f"the reduced gradient at hand is not the one of step {task.t}")
        corrections = task.bias_correction1, task.bias_correction2
        scalars = StepScalars(task.learning_rate, task.clip_factor, *corrections)
        if not all(map(math.isfinite, astuple(scalars))) or min(corrections) <= 0.0:
            raise Refused(f"no step can be taken with {scalars}")
        if task.keep:
            self._audits.keep(self.state)
        self._take_step(task.t, self._gradients[task.t], scalars)
        advance_state(self._delay, self.state, task.t, self._ahead, scalars)
        self._go_on()
        dropped = task.t - tasks.KEPT_GRADIENTS
        self._gradients = {t: gradient for t, gradient in self._gradients.items() if t > dropped}
        self._digests = {t: digest for t, digest in self._digests.items() if t > dropped}
        self._audits.stepped(task.t)
        return Result(fingerprint=self.state.fingerprint())

    def _take_step(self, t: int, gradient: Tensor, scalars: StepScalars) -> None:
        """Change weights, moments and Adam's counter in place by the optimizer step t."""
        take_step(self.state, gradient, scalars, self._run.optimizer, self._matrices)

    def _audit_unit(self, task: tasks.AuditUnit, inputs: Sequence[Tensor]) -> Result:
        x = self._received(ACTIVATION, inputs, max(1, len(inputs)))
        again = self._audits.unit(task, x, self._received(GRADIENT, inputs[1:]) if inputs[1:] else None)
        if again is None:
            raise Refused(tasks.WEIGHTS_GONE)
        kinds = (ACTIVATION, GRADIENT)[: len(again)]
        sent = [self._sent(kind, task, each) for kind, each in zip(kinds, again, strict=True)]
        return Result(outputs=tuple(output for each in sent for output in each.outputs))

    def _audit_sum(self, task: tasks.AuditSum, inputs: Sequence[Tensor]) -> Result:
        parts = self._audits.sum(task)
        if parts is None:
            raise Refused(f"no unit of step {task.t} was audited")
        return Result(outputs=parts)

    def _skip(self, task: tasks.Skip, inputs: Sequence[Tensor]) -> Result:
        self._expect_next(task.t)
        self._gradients.pop(task.t, None)
        self._digests.pop(task.t, None)
        advance_state(self._delay, self.state, task.t, self._ahead, None)
        if self._delay.start:
            self._go_on()
        else:
            self._stage.clear()
        return Result(fingerprint=self.state.fingerprint())

    def _read_gradient(self, task: tasks.ReadGradient, inputs: Sequence[Tensor]) -> Result:
        gradient = self._gradients.get(task.t)
        return Result() if gradient is None else outputs(gradient)

    # --- state ------------------------------------------------------------------------------------

    def _snapshot(self, task: tasks.Snapshot, inputs: Sequence[Tensor]) -> Result:
        if task.t != self.state.t:
            raise Refused(f"the state is that after step {self.state.t}, not {task.t}")
        pieces = self.state.pieces()
        return Result(outputs=pieces, fingerprint=self.state.fingerprint(), hashes=piece_hashes(pieces))

    def _prove_state(self, task: tasks.ProveState, inputs: Sequence[Tensor]) -> Result:
        if task.t != self.state.t:
            raise Refused(f"the state is that after step {self.state.t}, not {task.t}")
        return Result(digest=self.state.fingerprint(task.key))

    def _load_frozen(self, task: tasks.LoadFrozen, inputs: Sequence[Tensor]) -> Result:
        if self._frozen is None:
            raise Refused("the run has no frozen weights")
        assert isinstance(self.model, LoraModel)
        stage = self.spec.stage
        try:
            found = self._frozen.from_pieces(stage, inputs) if inputs else self._frozen.at_hand(stage)
            if found is None or found.hash() != self._frozen.wanted(stage):
                return Result()
        except FrozenError as error:
            raise Refused(str(error)) from None
        if inputs:
            self._frozen.keep(found)
        self.model.use(found.tensors(self._place(found.layout)))
        return Result(outputs=found.pieces(), fingerprint=found.hash())

    def _check_frozen(self, stage: int, inputs: Sequence[Tensor]) -> Result:
        """Hashes of pieces of frozen weights, and of all of them; Result.error if their size is wrong. Raises
        Refused if the run has no such weights."""
        if self._frozen is None or stage >= self._frozen.stages:
            raise Refused(f"the run has no frozen weights of a stage {stage}")
        hashes = piece_hashes(inputs)
        try:
            return Result(fingerprint=self._frozen.from_pieces(stage, inputs).hash(), hashes=hashes)
        except FrozenError as error:
            return Result(error=str(error), hashes=hashes)

    def _check_state(self, task: tasks.CheckState, inputs: Sequence[Tensor]) -> Result:
        if task.stage > self._run.pipeline.relay_stages:
            return self._check_frozen(task.stage - self._run.pipeline.relay_stages - 1, inputs)
        layout = self._layout_of(task.stage)
        hashes = piece_hashes(inputs)
        try:
            form = snapshot_form(self._run, layout)
            state = parse_pieces(task.t, inputs, layout, self.master, torch.device("cpu"), form)
        except SnapshotError as error:
            return Result(error=str(error), hashes=hashes)
        return Result(fingerprint=state.fingerprint(), hashes=hashes)

    def _load_state(self, task: tasks.LoadState, inputs: Sequence[Tensor]) -> Result:
        try:
            form = snapshot_form(self._run, self.layout)
            state = parse_pieces(task.t, inputs, self.layout, self.master, self.where, form)
        except SnapshotError as error:
            raise Refused(str(error)) from None
        return self._begin_from(state)

    def _init_state(self, task: tasks.InitState, inputs: Sequence[Tensor]) -> Result:
        try:
            state = initial_state(self._run, self.model, self.layout, self._initial, self.where)
        except ValueError as error:
            raise Refused(str(error)) from None
        return self._begin_from(state)

    def _begin_from(self, state: StageState) -> Result:
        """Replace the state by one that no step of this worker led to (initial or loaded), and drop kept
        reduced gradients and audits. Returns a result with the new state's fingerprint."""
        self._gradients.clear()
        self._digests.clear()
        self._audits.clear()
        self._install(state)
        return Result(fingerprint=state.fingerprint())

    def _install(self, state: StageState) -> None:
        """Replace the state; drop graphs, stores and gradient sums of the former one."""
        self._state = state
        self._weights.clear()
        self._weights.update(training_weights(state, self.dtype))
        self._stage.weights = self._weights
        self._stage.clear()
        self._stage.accumulator.prepare(next_units(self._run, state))
        self._look_ahead(state)

    def _go_on(self) -> None:
        """Drop the work of the iteration that was stepped or skipped; that of a next, open one stays."""
        if self._ahead is None:
            self._install(self.state)
            return
        self._stage, self._ahead_stage = self._ahead_stage, self._stage
        self._look_ahead(self.state)

    def _look_ahead(self, state: StageState) -> None:
        """After a change of state, in a run with delay: prepare the passes of held-out windows, with the
        weights of `state`, and of iteration state.t + 2, if it is delayed, with predicted weights. Drops the
        work that was kept for the latter."""
        if not self._delay.start:
            return
        self._ahead = ahead_of(self._run, self._delay, state)
        self._true_stage.weights = self._working_weights(state)
        self._ahead_stage.clear()
        if self._ahead is not None:
            weights = self._ahead.weights.to(self.dtype)
            self._ahead_stage.weights = dict(self.layout.views(weights))
            self._ahead_stage.accumulator.prepare(self._ahead.units)

    def _at(self, task: tasks.MicrobatchTask | tasks.WeightGradient | tasks.Recount) -> Stage:
        """Stage object that computes a task: with the weights of the task's iteration, predicted ones if it
        is delayed, but for a held-out window with the state's own weights."""
        if not self._delay.start:
            return self._stage
        if self._is_window(task):
            return self._true_stage
        return self._ahead_stage if task.t == self.state.t + 2 else self._stage

    def _is_window(self, task: Task) -> bool:
        return isinstance(task, tasks.MicrobatchTask) and task.index >= self._run.batch.microbatches

    # --- checks -----------------------------------------------------------------------------------

    def _received(self, kind: str, inputs: Sequence[Tensor], expected: int = 1) -> Tensor:
        """First of at least `expected` inputs (exactly one, if that is 1), decoded on the device. Raises
        Refused if their number is wrong or the payload is no finite tensor of the run's shape, or has invalid
        token ids."""
        if len(inputs) < expected or (expected == 1 and len(inputs) != 1):
            raise Refused(f"{expected} tensor(s) were expected, {len(inputs)} came")
        try:
            return self._cuts.decode(kind, inputs[0], self.device)
        except BadPayload as why:
            raise Refused(f"the received {kind} cannot be used: {why}") from None

    def _sent(self, kind: str, task: tasks.MicrobatchTask, values: Tensor) -> Result:
        """Result with one output: the payload, on the CPU, of an activation for the next stage or of a
        gradient for the previous one. Raises Overflow if a codec cannot represent it."""
        cut = self._after if kind == ACTIVATION else self._before
        payload = self._cuts.encode(kind, values, self._cuts.place(task.t, task.index, cut))
        return Result(outputs=(payload.cpu(),))

    def _layout_of(self, stage: int) -> Layout:
        """Layout of any stage's state."""
        return stage_layout(self.model, partition(self.model.config, self._run.pipeline)[stage])

    def _flat(self, gradient: Tensor | None, layout: Layout) -> Tensor:
        """Whole reduced gradient on this stage's devices; on the first one if it is of another stage. Raises
        Refused unless it has the size of `layout` and the master dtype."""
        if gradient is None or gradient.dtype != self.master or gradient.numel() != layout.elements:
            raise Refused(f"a reduced gradient of this stage is {layout.elements} values of {self.master}")
        return put(gradient.reshape(-1), self.where if layout is self.layout else self.device)

    def _expect_next(self, t: int) -> None:
        if t != self.state.t + 1:
            raise Refused(f"step {t} does not follow the state after step {self.state.t}")

    def _expect_open(self, task: Task) -> None:
        """Raise Refused if a task's iteration is not open, as it may have ended meanwhile."""
        open_t = self.state.t + 1
        if task.t == open_t + 1 and self._ahead is not None and not self._is_window(task):
            return
        if task.t != open_t:
            raise Refused(f"{type(task).__name__} is of iteration {task.t}, but {open_t} is open here")

    def _is_embed(self, unit: int) -> bool:
        return self.spec.stage == 0 and unit == embed_unit(unit // 2)

    def _scale(self) -> float:
        batch = self._run.batch
        return 1.0 / (batch.microbatches * batch.rows * batch.sequence)

    def _weight(self, t: int, index: int) -> float:
        """Factor of a microbatch's or window's loss for targets that do not count (`loss_weight`)."""
        assert self._batches is not None, "only stage 0 computes a loss"
        return loss_weight(self._batches, self._run.batch.microbatches, t, index)

    def _ids(self, t: int, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of microbatch `index`; indices beyond the batch are held-out windows. Raises
        Refused at relays and for a negative index."""
        if self._batches is None or self.spec.stage != 0:
            raise Refused("only stage 0 reads tokens")
        if index < 0:
            raise Refused(f"there is no microbatch {index}")
        return token_ids(self._batches, self._run.batch.microbatches, t, index, self.device)


def tensor_of(payload: Payload) -> Tensor:
    """Payload as the tensor that it is. Raises Refused for another type."""
    if not isinstance(payload, Tensor):
        raise Refused(f"a payload is a {type(payload).__name__}, not a tensor")
    return payload


def outputs(tensor: Tensor) -> Result:
    """Result with `tensor` as its only output, contiguous and on the CPU."""
    return Result(outputs=(tensor.contiguous().cpu(),))
