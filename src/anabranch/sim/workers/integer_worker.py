"""Task executor of a peer that computes with integers (`integer_arithmetic`) instead of tensors.

The world models the durations. Not here: worlds of such peers (`integer_world`).
"""

from __future__ import annotations

import msgspec

from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import NO_DELAY, Delay
from anabranch.protocol.interface.rounds import NO_ROUNDS, Rounds
from anabranch.protocol.interface.tasks import Payload, Result, Task, embed_unit, head_unit, part_bounds
from anabranch.sim.workers.integer_arithmetic import (
    PIECES,
    WORDS,
    Words,
    activated,
    after_step_ahead,
    contribution,
    digest_of,
    embedded,
    fingerprint,
    from_pieces,
    in_pieces,
    initial,
    inner_salt,
    input_gradient,
    late_contribution,
    loss_gradient,
    loss_of,
    mix,
    own_loss,
    predicted,
    slot_state,
    step,
    with_own,
    with_state,
)
from anabranch.sim.workers.integer_slots import IslandSlots


class Begun:
    """Results that a worker has for an open iteration: its gradient sum; by microbatch, inputs of forwards
    (`graphs`) and weight gradients that are not added yet (`store`)."""

    def __init__(self) -> None:
        self.sum: list[int] = [0] * WORDS
        self.graphs: dict[int, int] = {}
        self.store: dict[int, Words] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        """Slot -> numbers that stand for what it carries, and for the late contribution that it merges."""
        self.losses: dict[int, float] = {}
        """Slot on private data -> its loss sum."""

    def add(self, words: Words, sign: int) -> None:
        self.sum = [total + sign * word for total, word in zip(self.sum, words, strict=True)]


class IntegerWorker:
    """Executor of a peer's tasks on integers, for one stage: `run` returns a task's result, with an error if
    the task cannot be done. Activations and their gradients are integers; parts of a reduce and weight
    gradients are tuples."""

    def __init__(
        self, stage: int, delay: Delay = NO_DELAY, rounds: Rounds = NO_ROUNDS, own: int = 0
    ) -> None:
        """Worker in the initial state of a stage. delay, rounds: settings of the run. own: number that stands
        for this machine's private data, on which its slots' contributions depend (0: it has none; used at
        stage 1 only)."""
        self._own = own if stage == 1 else 0
        self.stage = stage
        self.delay = delay
        self.t = 0
        self.state = initial(stage)
        self.ahead: int | None = None
        """Stand-in for the weights of iteration t + 1, if it is delayed."""
        self._begun = Begun(), Begun()
        """Work of iterations t + 1 and t + 2."""
        self._gradients: dict[int, Words] = {}
        self._before: dict[int, int] = {}
        self._audited: list[int] = [0] * WORDS
        self._slots: dict[tuple[int, int], int] = {}
        """(Slot, round) -> number that stands for what this machine carries of it after the round."""
        self._rounds = rounds
        self._ahead_of: dict[int, tuple[int, int]] = {}
        """Slot of the open round that lacks steps ahead -> how many it lacks, and number that stands for its
        state after those that it took."""
        self._islands = IslandSlots(stage, rounds, lambda words, sign: self._begun[0].add(words, sign))

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        return hashed(task, inputs, self._run(task, inputs))

    def _work(self, t: int) -> Begun:
        """Results for iteration t so far: those of the second open iteration if t is that one, else of the
        first."""
        return self._begun[t == self.t + 2 and self.delay.has(t)]

    def _weights(self, task: Task) -> int:
        """Number that stands for the weights with which a task computes: predicted ones in a delayed
        iteration, else the state. Held-out windows always use the state."""
        window = isinstance(task, tasks.Forward | tasks.Head) and not task.train
        if task.t == self.t + 2 and self.delay.has(task.t):
            return predicted(self.state)
        return self.state if self.ahead is None or window else self.ahead

    def _refusal(self, task: Task) -> str:
        """Reason to refuse a task on a microbatch or its sum in a run with delayed iterations, because its
        iteration is not open here; "" if it is. Always "" for other tasks and other runs."""
        kinds = tasks.MicrobatchTask | tasks.WeightGradient | tasks.Recount | tasks.Freeze
        if not self.delay.start or not isinstance(task, kinds) or isinstance(task, tasks.Discard):
            return ""
        window = isinstance(task, tasks.Forward | tasks.Head) and not task.train
        second = self.delay.has(task.t) and not window and not isinstance(task, tasks.Freeze)
        fits = self.t + 1 <= task.t <= self.t + 1 + second
        return "" if fits else f"{type(task).__name__} is of iteration {task.t}, after step {self.t}"

    def _run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if refusal := self._refusal(task):
            return Result(error=refusal)
        if self._islands.takes(task):
            return self._islands.run(task, inputs, self.t, self.state)
        work, weights = self._work(task.t), self._weights(task)
        match task:
            case tasks.InputGradient(_, index, True) if len(inputs) == 2 and _numbers(inputs[1:]):
                work.graphs[index] = _number(inputs[1])
                return self._run(tasks.InputGradient(task.t, index), inputs[:1])
            case tasks.Forward() | tasks.Head() | tasks.InputGradient() if not _numbers(inputs):
                return Result(error="what was received is not one number")
            case tasks.Embed(t, index, first, steps):
                salt = inner_salt(first, steps) if steps else t
                return Result(outputs=(embedded(weights, salt, index),))
            case tasks.Forward():
                return self._forward(task, work, weights, _number(inputs[0]))
            case tasks.Head():
                return self._head(task, _number(inputs[0]))
            case tasks.InputGradient(_, index):
                return self._input_gradient(task, _number(inputs[0]))
            case tasks.WeightGradient():
                return self._weight_gradient(task, inputs)
            case tasks.Recount():
                return self._recount(task, inputs)
            case tasks.StepAhead(_, index):
                return self._go_ahead(index, 1)
            case tasks.Discard():
                return self._discard(task, work)
            case tasks.Freeze(_, parts, clear):
                bounds = part_bounds(WORDS, parts)
                frozen = tuple(tuple(work.sum[begin:end]) for begin, end in bounds)
                work.sum = [0] * WORDS if clear else work.sum
                return Result(outputs=frozen)
            case tasks.HashInputs():
                return Result()
            case tasks.AuditUnit():
                return self._audit_unit(task, *map(_number, inputs))
            case tasks.AuditSum(_, parts):
                bounds = part_bounds(WORDS, parts)
                return Result(outputs=tuple(tuple(self._audited[begin:end]) for begin, end in bounds))
            case tasks.SumPart():
                return _sum_part(inputs)
            case tasks.Assemble(t, witness):
                return self._assemble(t, inputs, kept=witness is None)
            case tasks.ProveState(t, key) if t == self.t:
                return Result(digest=f"{mix(self.state, self.stage, *key.encode()):x}")
            case tasks.ProveState(t):
                return Result(error=f"the state is that after step {self.t}, not {t}")
            case tasks.ReadGradient(t):
                return Result(outputs=(self._gradients[t],) if t in self._gradients else ())
            case _:
                return self._state_task(task, inputs)

    def _discard(self, task: tasks.Discard, work: Begun) -> Result:
        if not self.delay.start or task.t > self.t:
            work.graphs.pop(task.index, None)
            work.store.pop(task.index, None)
            self._islands.discard(task.index)
            self._ahead_of.pop(task.index, None)
        return Result()

    def _forward(self, task: tasks.Forward, work: Begun, weights: int, x: int) -> Result:
        """Do a forward pass on the activation x. Of a slot it also stores the contribution, which needs no
        gradient; an error if the state that it is to carry is not here."""
        if task.steps:
            if task.carried and (task.index, task.carried) not in self._slots:
                return Result(error=f"no state of slot {task.index} after round {task.carried} is here")
            x = self._begin_slot(task, work, weights, x)
            work.store[task.index] = self._contribution(work, task.index, x, 0, weights)
        if task.train and task.keep:
            work.graphs[task.index] = x
        return Result(outputs=(activated(weights, self.stage, x),))

    def _begin_slot(self, task: tasks.Forward, work: Begun, weights: int, x: int) -> int:
        """Begin a slot of a round that one machine fills, and return its input, mixed with what this machine
        carries of it (nothing if that is not here). Records in `work` what the slot carries and merges. In
        the first open iteration it also prepares what is carried after the round."""
        number = self._slots.get((task.index, task.carried), 0) if task.carried else 0
        work.slots[task.index] = number, number if task.late else 0
        x = with_state(x, number)
        if task.t == self.t + 1:
            state = slot_state(weights, with_own(x, self._own))
            self._ahead_of[task.index] = self._rounds.ahead(task.steps), state
            self._go_ahead(task.index, 0)
        return x

    def _go_ahead(self, slot: int, steps: int) -> Result:
        """Take up to `steps` of the steps ahead that a slot of the open round still lacks; with the last of
        them, what is carried of the slot is kept. Nothing happens if the slot lacks none. The result is
        empty."""
        if slot in self._ahead_of:
            lacks, state = self._ahead_of.pop(slot)
            for _ in range(min(steps, lacks)):
                state = after_step_ahead(state)
            if steps < lacks:
                self._ahead_of[slot] = lacks - steps, state
            else:
                self._slots[slot, self.t + 1] = state
        return Result()

    def _head(self, task: tasks.Head, x: int) -> Result:
        weights = self._weights(task)
        loss = loss_of(weights, x)
        if not task.train:
            return Result(loss_sum=loss, tokens=1)
        self._work(task.t).store[head_unit(task.index)] = contribution(weights, 0, x)
        return Result(outputs=(loss_gradient(weights, x),), loss_sum=loss, tokens=1)

    def _input_gradient(self, task: tasks.InputGradient, dy: int) -> Result:
        index, work, weights = task.index, self._work(task.t), self._weights(task)
        if index not in work.graphs:
            return Result(error=f"no forward of microbatch {index} is held")
        x = work.graphs.pop(index)
        if index not in work.slots:
            work.store[index] = self._contribution(work, index, x, dy, weights)
        return Result(outputs=(input_gradient(weights, self.stage, x, dy),))

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: tuple[Payload, ...]) -> Result:
        t, unit, work = task.t, task.unit, self._work(task.t)
        if self._embeds(unit):
            if not _numbers(inputs):
                return Result(error="the gradient received is not a number")
            work.add(contribution(self._weights(task), 0, t, unit // 2, _number(inputs[0])), +1)
        elif unit in work.store:
            words = work.store.pop(unit)
            work.add(words, +1)
            if self._own and unit in work.slots:
                return Result(digest=digest_of(words), loss_sum=work.losses[unit])
        else:
            return Result(error=f"no weight gradient of unit {unit} is waiting")
        return Result()

    def _contribution(self, work: Begun, index: int, x: int, dy: int, weights: int) -> Words:
        """Contribution of a microbatch, or of a slot with the late one that it merges; on private data the
        slot's loss is recorded in `work`, too. x: activation as the forward used it (`with_state`). dy:
        gradient received, 0 for a slot."""
        if self._own and index in work.slots:
            x = with_own(x, self._own)
            work.losses[index] = own_loss(weights, x)
        words = contribution(weights, self.stage, x, dy)
        late = late_contribution(work.slots.get(index, (0, 0))[1])
        return tuple(word + other for word, other in zip(words, late, strict=True))

    def _recount(self, task: tasks.Recount, inputs: tuple[Payload, ...]) -> Result:
        boundary, work, weights = tuple(map(_number, inputs)), self._work(task.t), self._weights(task)
        if self.stage and task.unit in work.slots:
            x = with_state(boundary[0], work.slots[task.unit][0])
            words = self._contribution(work, task.unit, x, 0, weights)
        else:
            first = (task.t, task.unit // 2) if self._embeds(task.unit) else ()
            words = contribution(weights, self.stage, *first, *boundary)
        work.add(words, task.sign)
        return Result()

    def _audit_unit(self, task: tasks.AuditUnit, x: int, dy: int | None = None) -> Result:
        state, stage = self._before.get(task.t), self.stage
        if state is None:
            return Result(error=tasks.WEIGHTS_GONE)
        if bool(task.steps) != self._rounds.has(task.t):
            return Result(error=f"iteration {task.t} has no unit of {task.steps} inner steps")
        if dy is None:
            return Result(outputs=(activated(state, stage, x),))
        former = [0] * WORDS if task.first else self._audited
        words = contribution(state, stage, x, 0 if task.steps else dy)
        self._audited = [total + word for total, word in zip(former, words, strict=True)]
        return Result(outputs=(activated(state, stage, x), input_gradient(state, stage, x, dy)))

    def _assemble(self, t: int, inputs: tuple[Payload, ...], kept: bool) -> Result:
        gradient = tuple(word for part in inputs if isinstance(part, tuple) for word in part)
        if len(gradient) != WORDS:
            return Result(error=f"a gradient is {WORDS} numbers, not {len(gradient)}")
        if kept:
            self._gradients[t] = gradient
        return Result(digest=digest_of(gradient), squares={"sum": float(gradient[0] % 1000)})

    def _embeds(self, unit: int) -> bool:
        return self.stage == 0 and unit == embed_unit(unit // 2)

    def _state_task(self, task: Task, inputs: tuple[Payload, ...]) -> Result:
        match task:
            case tasks.Apply(t, digest=digest, keep=keep):
                gradient = self._gradients.get(t) if not inputs else inputs[0]
                if not isinstance(gradient, tuple) or (digest and digest_of(gradient) != digest):
                    return Result(error=f"the gradient at hand is not that of step {t}")
                if t != self.t + 1:
                    return Result(error=f"step {t} does not follow the state after step {self.t}")
                if keep:
                    self._before[t] = self.state
                self._before = {k: v for k, v in self._before.items() if k > t - tasks.AUDIT_STEPS}
                self._go_on(t, step(self.state, gradient))
                self._gradients = {k: v for k, v in self._gradients.items() if k > t - tasks.KEPT_GRADIENTS}
            case tasks.Skip(t) if self.delay.start and t != self.t + 1:
                return Result(error=f"step {t} does not follow the state after step {self.t}")
            case tasks.Skip(t):
                self._go_on(t, self.state)
            case tasks.Snapshot(t) if t != self.t:
                return Result(error=f"the state is that after step {self.t}, not {t}")
            case tasks.Snapshot():
                ahead = () if self.ahead is None else in_pieces(self.ahead)
                pieces = (self.t, *in_pieces(self.state), *ahead)
                hashes = tuple(map(str, pieces))
                whole = fingerprint(self.t, self.state, self.ahead)
                return Result(pieces, fingerprint=whole, hashes=hashes)
            case tasks.CheckState(t):
                hashes, checked = tuple(map(str, inputs)), self._loaded(t, inputs)
                if checked is None:
                    return Result(error=f"not the state after step {t}", hashes=hashes)
                return Result(fingerprint=fingerprint(t, *checked), hashes=hashes)
            case tasks.LoadState(t):
                loaded = self._loaded(t, inputs)
                if loaded is None:
                    return Result(error=f"not the state after step {t}")
                self._begin_with(t, *loaded)
            case tasks.InitState():
                self._begin_with(0, initial(self.stage), None)
        return Result(fingerprint=fingerprint(self.t, self.state, self.ahead))

    def _begin_with(self, t: int, state: int, ahead: int | None) -> None:
        """Take a state, which is not the one after the last step, and drop all that came from others."""
        self.t, self.state, self.ahead = t, state, ahead
        for kept in (self._gradients, self._before, self._slots, self._ahead_of):
            kept.clear()
        self._islands.forget()
        self._begun = Begun(), Begun()

    def _go_on(self, t: int, state: int) -> None:
        """Take `state` as the state after step t, and finish the steps ahead of all slots. Work on iteration
        t + 1 is kept if that iteration is delayed, and its weights are predicted from the former state; all
        other work is dropped."""
        for slot, (lacks, _) in sorted(self._ahead_of.items()):
            self._go_ahead(slot, lacks)
        delayed = self.delay.has(t + 1)
        self.t, self.state, self.ahead = t, state, predicted(self.state) if delayed else None
        self._begun = (self._begun[1] if delayed else Begun()), Begun()
        self._islands.drop()

    def _loaded(self, t: int, pieces: tuple[Payload, ...]) -> tuple[int, int | None] | None:
        """(State after step t, number of the weights of iteration t + 1 if that is delayed, else None) from
        the pieces of a snapshot; None if they are not the pieces of such a state. The worker does not
        change."""
        if not self.delay.has(t + 1):
            state = from_pieces(t, pieces)
            return None if state is None else (state, None)
        state, ahead = from_pieces(t, pieces[: PIECES + 1]), from_pieces(t, (t, *pieces[PIECES + 1 :]))
        return None if state is None or ahead is None else (state, ahead)


def hashed(task: Task, inputs: tuple[Payload, ...], result: Result) -> Result:
    """The same result with the hashes of all inputs, then outputs, if the task asks for them; unchanged if it
    does not or has failed."""
    if not task.hashed or result.error:
        return result
    return msgspec.structs.replace(result, hashes=tuple(map(payload_hash, (*inputs, *result.outputs))))


def payload_hash(payload: Payload) -> str:
    """Hash of a payload: an integer, or a tuple of integers."""
    numbers = payload if isinstance(payload, tuple) else (payload,)
    return f"{mix(9, len(numbers), *map(_number, numbers)):016x}"


def _numbers(inputs: tuple[Payload, ...]) -> bool:
    return len(inputs) == 1 and isinstance(inputs[0], int)


def _number(payload: Payload) -> int:
    return payload if isinstance(payload, int) else 0


def _sum_part(inputs: tuple[Payload, ...]) -> Result:
    parts = [part for part in inputs if isinstance(part, tuple)]
    if len(parts) != len(inputs) or len({len(part) for part in parts}) != 1:
        return Result(error="the members' parts are not of one length")
    return Result(outputs=(tuple(map(sum, zip(*parts, strict=True))),))
