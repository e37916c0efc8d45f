"""Task executor that computes with integers instead of tensors, and worlds of peers with such executors.

Every activation, gradient and contribution is a hash of its inputs: the state of the stage, the microbatch,
and the payloads received. A contribution (the weight gradient of a microbatch) is a vector of 64-bit numbers,
and a reduced gradient is the sum of contributions. So a contribution that is lost, added twice, or computed
from a stale state or another microbatch's payload changes the sum, the state after the step, and all later
states. The world models the durations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import NO_DELAY, Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Result, Task, embed_unit, head_unit, part_bounds
from anabranch.protocol.log.records import Genesis, Member
from anabranch.protocol.log.step_parameters import Schedule, StepParameters
from anabranch.protocol.rounds.plan import Plan, Slots, slots_of
from anabranch.sim.kernel.founder import populate
from anabranch.sim.kernel.swarm_world import Model, World

ONE_CLASS = "whole numbers"
#: Numbers in a contribution and in a gradient (a choice).
WORDS = 4

Words = tuple[int, ...]
Batch = tuple[tuple[int, int, int, int], ...]
"""(microbatch, its iteration, 0, 0) each; in a round (slot, `inner_salt`, number that stands for what it
carries, number of the late contribution that is merged) each, 0 where there is nothing."""
Carried = tuple[tuple[int, int], ...]
"""(slot, number that stands for its state after the last round) each."""
#: Pieces of a snapshot, besides the one that contains its iteration (a choice).
PIECES = 4


@dataclass(frozen=True)
class Machine:
    """Machine of a simulated swarm. capacity: microbatches in flight. slowness: factor on the task seconds of
    the world's model. reachable: True if other peers can dial it."""

    id: str
    stage: int
    capacity: int = 4
    slowness: float = 1.0
    reachable: bool = True


# --- the numbers --------------------------------------------------------------------------------------


def mix(*numbers: int) -> int:
    """64-bit hash of the given integers, the same in every process (Python hashes integers without a
    seed)."""
    return hash(numbers) & 0xFFFFFFFFFFFFFFFF


def initial(stage: int) -> int:
    return mix(0, stage)


def embedded(state: int, salt: int, index: int) -> int:
    """Embedding of a microbatch. salt: its iteration, or `inner_salt` of a slot in a round."""
    return mix(1, state, salt, index)


def inner_salt(first: int, steps: int) -> int:
    """Number that stands for the inner steps `first` + 1 to `first` + `steps` of a slot in a round."""
    return mix(9, first, steps)


def with_state(x: int, carried: int) -> int:
    """Input x of a slot at a relay that carries state of the slot (0: it carries none)."""
    return mix(12, x, carried) if carried else x


def slot_state(state: int, x: int) -> int:
    """Number that stands for what a machine carries of a slot after a round. state: before the round. x:
    input of the slot, `with_state`."""
    return mix(11, state, x)


def late_contribution(number: int) -> Words:
    """Stand-in for a contribution that was late. number: `slot_state` after its round; 0: there is none."""
    return tuple(mix(13, word, number) if number else 0 for word in range(WORDS))


def slot_states(states: Sequence[int], plan: Plan, before: Carried) -> Carried:
    """Numbers of all slots of a round after it. states: before the round. before: those of the round
    before."""
    known, found = dict(before), []
    for slot, each in enumerate(plan):
        x = embedded(states[0], inner_salt(each.first, each.steps), slot)
        carried = known.get(slot, 0) if each.carried else 0
        found.append((slot, slot_state(states[1], with_state(x, carried))))
    return tuple(found)


def activated(state: int, stage: int, x: int) -> int:
    return mix(2, state, stage, x)


def loss_of(state: int, x: int) -> float:
    return float(mix(3, state, x) % 10_007)


def loss_gradient(state: int, x: int) -> int:
    return mix(4, state, x)


def input_gradient(state: int, stage: int, x: int, dy: int) -> int:
    return mix(5, state, stage, x, dy)


def contribution(state: int, stage: int, *boundary: int) -> Words:
    """Stand-in for a stage's contribution of a microbatch to its gradient: WORDS 64-bit hashes of all
    arguments.

    state: the stage's state (an integer). boundary: activation and gradient received; at stage 0 the
    activation that the head received, or (t, index, gradient) for the embedding.
    """
    return tuple(mix(6, word, state, stage, *boundary) for word in range(WORDS))


def step(state: int, gradient: Words) -> int:
    """State after a step; it depends on all earlier steps and on their order."""
    return mix(7, state, *gradient)


def digest_of(gradient: Words) -> str:
    return f"{mix(8, *gradient):x}"


def predicted(state: int) -> int:
    """Stand-in for the weights with which the iteration after the next one computes, if it is delayed."""
    return mix(10, state)


def fingerprint(t: int, state: int, ahead: int | None = None) -> str:
    """Fingerprint after step t. ahead: what iteration t + 1 computes with, if it is delayed."""
    return f"{t}:{state:x}" if ahead is None else f"{t}:{state:x}:{ahead:x}"


def in_pieces(state: int) -> tuple[int, ...]:
    """State split into PIECES pieces."""
    return tuple(state >> (16 * place) & 0xFFFF for place in range(PIECES))


def from_pieces(t: int, pieces: Sequence[Payload]) -> int | None:
    """State after step t, joined from its pieces; None if they are not the pieces of such a state."""
    numbers = [piece for piece in pieces if isinstance(piece, int) and piece >= 0]
    if len(numbers) != PIECES + 1 or numbers[0] != t or any(number >> 16 for number in numbers[1:]):
        return None
    return sum(number << (16 * place) for place, number in enumerate(numbers[1:]))


class Step(NamedTuple):
    """Results of a step on a single machine: gradient and new state of each stage, by stage, and loss of each
    microbatch of the batch."""

    gradients: tuple[Words, ...]
    states: tuple[int, ...]
    losses: tuple[float, ...]


@lru_cache(maxsize=4096)
def single_machine(t: int, former: tuple[int, ...], batch: Batch, seen: tuple[int, ...] = ()) -> Step:
    """Results of iteration t on a single machine, from the states `former` of stages 0 to S. seen: what the
    iteration computes with, if it is delayed."""
    states = seen or former
    sums = [[0] * WORDS for _ in states]

    def add(stage: int, words: Words) -> None:
        sums[stage] = [total + word for total, word in zip(sums[stage], words, strict=True)]

    losses = []
    for index, salt, carried, late in batch:
        x = with_state(embedded(states[0], salt, index), carried)
        add(1, late_contribution(late))
        inputs = []
        for stage in range(1, len(states)):
            inputs.append(x)
            x = activated(states[stage], stage, x)
        losses.append(loss_of(states[0], x))
        dy = loss_gradient(states[0], x)
        add(0, contribution(states[0], 0, x))
        for stage in range(len(states) - 1, 0, -1):
            add(stage, contribution(states[stage], stage, inputs[stage - 1], dy))
            dy = input_gradient(states[stage], stage, inputs[stage - 1], dy)
        add(0, contribution(states[0], 0, t, index, dy))
    gradients = tuple(map(tuple, sums))
    return Step(gradients, tuple(map(step, former, gradients)), tuple(losses))


def batch_of(t: int, microbatches: int, slots: Slots, before: Carried = ()) -> Batch:
    """Batch of iteration t. slots: those that count; empty if t is no round. before: states of the slots
    after the round before."""
    if not slots:
        return tuple((index, t, 0, 0) for index in range(microbatches))
    known, found = dict(before), []
    for slot, plan in sorted(slots.items()):
        carried = known.get(slot, 0) if plan.carried else 0
        found.append((slot, inner_salt(plan.first, plan.steps), carried, carried if plan.late else 0))
    return tuple(found)


def states_after(t: int, settings: Settings, history: LogReplay | None = None) -> tuple[int, ...]:
    """States of all stages after t steps on a single machine. history: log of a run with rounds, for the
    slots that counted and the rounds that were skipped."""
    states, seen = tuple(map(initial, range(settings.stages + 1))), tuple[int, ...]()
    carried: Carried = ()
    for each in range(1, t + 1):
        slots: Slots = {}
        ahead = tuple(map(predicted, states)) if settings.delay.has(each + 1) else ()
        if history is not None and settings.rounds.has(each):
            commit = history.commits[each - 1]
            slots = slots_of(history.plans[each], commit)
            if commit.verdict == "skip":
                continue
        batch = batch_of(each, settings.microbatches, slots, carried)
        if history is not None:
            carried = slot_states(states, history.plans.get(each, ()), carried)
        states = single_machine(each, states, batch, seen).states
        seen = ahead
    return states


class Begun:
    """Work of an iteration that is open."""

    def __init__(self) -> None:
        self.sum: list[int] = [0] * WORDS
        self.graphs: dict[int, int] = {}
        self.store: dict[int, Words] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        """Slot -> numbers that stand for what it carries, and for the late contribution that it merges."""

    def add(self, words: Words, sign: int) -> None:
        self.sum = [total + sign * word for total, word in zip(self.sum, words, strict=True)]


# --- a peer's worker ------------------------------------------------------------------------------------


class IntegerWorker:
    """Executor of a peer's tasks on integers, for one stage.

    Activations and their gradients are integers; parts of a reduce and weight gradients are tuples of
    integers.
    """

    def __init__(self, stage: int, delay: Delay = NO_DELAY) -> None:
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

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        return hashed(task, inputs, self._run(task, inputs))

    def _work(self, t: int) -> Begun:
        """Work of iteration t, or of the open one."""
        return self._begun[t == self.t + 2 and self.delay.has(t)]

    def _weights(self, task: Task) -> int:
        """Number that stands for the weights with which a task computes."""
        window = isinstance(task, tasks.Forward | tasks.Head) and not task.train
        if task.t == self.t + 2 and self.delay.has(task.t):
            return predicted(self.state)
        return self.state if self.ahead is None or window else self.ahead

    def _refusal(self, task: Task) -> str:
        """Reason why a task on microbatches cannot be done where iterations are delayed; "" if it can."""
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
            case tasks.Forward(_, index, train, keep):
                x = _number(inputs[0])
                if task.steps:
                    if task.carried and (index, task.carried) not in self._slots:
                        return Result(error=f"no state of slot {index} after round {task.carried} is here")
                    x = self._begin_slot(task, work, weights, x)
                if train and keep:
                    work.graphs[index] = x
                return Result(outputs=(activated(weights, self.stage, x),))
            case tasks.Head():
                return self._head(task, _number(inputs[0]))
            case tasks.InputGradient(_, index):
                return self._input_gradient(task, _number(inputs[0]))
            case tasks.WeightGradient():
                return self._weight_gradient(task, inputs)
            case tasks.Recount():
                return self._recount(task, inputs)
            case tasks.Discard(t, index):
                if not self.delay.start or t > self.t:
                    work.graphs.pop(index, None)
                    work.store.pop(index, None)
                return Result()
            case tasks.Freeze(_, parts, clear):
                bounds = part_bounds(WORDS, parts)
                frozen = tuple(tuple(work.sum[begin:end]) for begin, end in bounds)
                work.sum = [0] * WORDS if clear else work.sum
                return Result(outputs=frozen)
            case tasks.HashInputs():
                return Result()
            case tasks.AuditUnit(t, index, first):
                return self._audit_unit(t, first, *map(_number, inputs))
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

    def _begin_slot(self, task: tasks.Forward, work: Begun, weights: int, x: int) -> int:
        """Input of a slot with what this machine carries of it; what it will carry is kept."""
        number = self._slots.get((task.index, task.carried), 0) if task.carried else 0
        work.slots[task.index] = number, number if task.late else 0
        x = with_state(x, number)
        if task.t == self.t + 1:
            self._slots[task.index, task.t] = slot_state(weights, x)
        return x

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
        work.store[index] = self._contribution(work, index, x, dy, weights)
        return Result(outputs=(input_gradient(weights, self.stage, x, dy),))

    def _weight_gradient(self, task: tasks.WeightGradient, inputs: tuple[Payload, ...]) -> Result:
        t, unit, work = task.t, task.unit, self._work(task.t)
        if self._embeds(unit):
            if not _numbers(inputs):
                return Result(error="the gradient received is not a number")
            work.add(contribution(self._weights(task), 0, t, unit // 2, _number(inputs[0])), +1)
        elif unit in work.store:
            work.add(work.store.pop(unit), +1)
        else:
            return Result(error=f"no weight gradient of unit {unit} is waiting")
        return Result()

    def _contribution(self, work: Begun, index: int, x: int, dy: int, weights: int) -> Words:
        """Contribution of a microbatch, or of a slot with the late one that is merged. x: as computed
        with."""
        words = contribution(weights, self.stage, x, dy)
        late = late_contribution(work.slots.get(index, (0, 0))[1])
        return tuple(word + other for word, other in zip(words, late, strict=True))

    def _recount(self, task: tasks.Recount, inputs: tuple[Payload, ...]) -> Result:
        boundary, work = tuple(map(_number, inputs)), self._work(task.t)
        if self.stage and task.unit in work.slots:
            x, weights = with_state(boundary[0], work.slots[task.unit][0]), self._weights(task)
            work.add(self._contribution(work, task.unit, x, boundary[1], weights), task.sign)
            return Result()
        if self._embeds(task.unit):
            boundary = (task.t, task.unit // 2, *boundary)
        work.add(contribution(self._weights(task), self.stage, *boundary), task.sign)
        return Result()

    def _audit_unit(self, t: int, first: bool, x: int, dy: int) -> Result:
        state, stage = self._before.get(t), self.stage
        if state is None:
            return Result(error=tasks.WEIGHTS_GONE)
        former = [0] * WORDS if first else self._audited
        words = contribution(state, stage, x, dy)
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
                self.t, (self.state, self.ahead) = t, loaded
                self._gradients.clear()
                self._slots.clear()
                self._begun = Begun(), Begun()
            case tasks.InitState():
                self.t, self.state, self.ahead = 0, initial(self.stage), None
                self._gradients.clear()
                self._begun = Begun(), Begun()
        return Result(fingerprint=fingerprint(self.t, self.state, self.ahead))

    def _go_on(self, t: int, state: int) -> None:
        """Reach the state after step t; the work of a delayed iteration after it stays."""
        delayed = self.delay.has(t + 1)
        self.t, self.state, self.ahead = t, state, predicted(self.state) if delayed else None
        self._begun = (self._begun[1] if delayed else Begun()), Begun()

    def _loaded(self, t: int, pieces: tuple[Payload, ...]) -> tuple[int, int | None] | None:
        """State after step t from its pieces, with what iteration t + 1 computes with if it is delayed; None
        if they are not the pieces of such a state."""
        if not self.delay.has(t + 1):
            state = from_pieces(t, pieces)
            return None if state is None else (state, None)
        state, ahead = from_pieces(t, pieces[: PIECES + 1]), from_pieces(t, (t, *pieces[PIECES + 1 :]))
        return None if state is None or ahead is None else (state, ahead)


def hashed(task: Task, inputs: tuple[Payload, ...], result: Result) -> Result:
    """Result with the hashes of inputs and outputs, if the task asks for them."""
    if not task.hashed or result.error:
        return result
    return msgspec.structs.replace(result, hashes=tuple(map(payload_hash, (*inputs, *result.outputs))))


def payload_hash(payload: Payload) -> str:
    """Hash of a number, or of numbers."""
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


# --- a world of them --------------------------------------------------------------------------------------


def genesis_of(settings: Settings, leader: str) -> Genesis:
    """First log record of a run whose workers compute with integers. leader: name of the machine that founds
    it."""
    return Genesis(
        run=settings.run,
        epoch=settings.epoch,
        protocol_version=PROTOCOL_VERSION,
        owner=leader,
        leader=leader,
        config="",
        stages=settings.stages,
        microbatches=settings.microbatches,
        parameters=0,
        corpus_fingerprint="whole numbers",
        tokenizer_hash="whole numbers",
        numerics_class=ONE_CLASS,
        initial_weights_hash="",
        fingerprints=tuple(fingerprint(0, initial(stage)) for stage in range(settings.stages + 1)),
    )


def counting_world(
    settings: Settings,
    machines: Sequence[Machine],
    seed: int = 0,
    model: Model | None = None,
    disks: Mapping[str, str] = MappingProxyType({}),
) -> World:
    """World of these machines with integer workers, not yet running.

    :param machines: the first one, of stage 0, founds the run.
    :param disks: machine -> name of its disk ("": no disk for the log).
    """
    members = {machine.id: member_of(machine, disks.get(machine.id, "0")) for machine in machines}
    schedule = schedule_of(settings, 1)
    make = partial(IntegerWorker, delay=settings.delay) if settings.delay.start else IntegerWorker
    world = World(seed, settings, genesis_of(settings, machines[0].id), make, model)
    populate(world, schedule, ((members[machine.id], machine.slowness) for machine in machines))
    return world


def wrong_states(world: World) -> Mapping[str, str]:
    """Live peers whose state differs from that of a single machine after as many steps: peer -> the
    difference in words. Empty if the run is right."""
    wrong = {}
    for node in world.nodes.values():
        if not node.alive or not isinstance(node.computer, IntegerWorker):
            continue
        worker = node.computer
        history = world.history() if world.settings.rounds.inner else None
        right = states_after(worker.t, world.settings, history)[worker.stage]
        if worker.state != right:
            wrong[node.id] = f"after step {worker.t}: {worker.state:x}, not {right:x}"
    return wrong


def member_of(machine: Machine, disk: str = "0") -> Member:
    """Member record with which a machine joins. disk: name of its disk."""
    return Member(
        id=machine.id,
        stage=machine.stage,
        incarnation=1,
        numerics_class=ONE_CLASS,
        capacity=machine.capacity,
        name=machine.id,
        address=f"{machine.id}:1" if machine.reachable else "",
        forward_s=0.02 * machine.slowness,
        disk=disk,
    )


def schedule_of(settings: Settings, window_tokens: int) -> Schedule:
    """Schedule whose parameters are the same in every step. window_tokens: tokens of an evaluation window."""
    inner = settings.microbatches // max(1, settings.rounds.slots)
    return Schedule(
        "batch {}".format, constant_step, settings.microbatches, window_tokens,
        lambda steps: constant_step(0, 0, 0.0), inner,
    )  # fmt: skip


def constant_step(t: int, adam_step: int, norm: float) -> StepParameters:
    """Parameters of an optimizer step, the same for every step."""
    return StepParameters(1.0, 1e-3, 1.0, 1.0)
