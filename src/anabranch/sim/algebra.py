"""A swarm that computes with whole numbers instead of tensors: quick, and exact about what was counted.

Every unit's contribution is a number drawn from (t, stage, unit), so a gradient tells which units it holds
and how often: the state after a run is right only if every committed step counted each unit exactly once.
Times are the world's model; nothing is really computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch import PROTOCOL_VERSION
from anabranch.protocol import tasks
from anabranch.protocol.founding import lead
from anabranch.protocol.leader import Schedule, StepParameters
from anabranch.protocol.records import Genesis, Member
from anabranch.protocol.settings import Settings
from anabranch.protocol.tasks import Payload, Result, Task
from anabranch.sim.world import Model, World

ONE_CLASS = "whole numbers"


@dataclass(frozen=True)
class Machine:
    """A simulated machine. slowness: factor on the model's task seconds. reachable: whether it can be
    dialled."""

    id: str
    stage: int
    capacity: int = 4
    slowness: float = 1.0
    reachable: bool = True


def contribution(t: int, stage: int, unit: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{t} {stage} {unit}".encode(), digest_size=8).digest(), "big")


def step(state: int, gradient: int) -> int:
    """The state after a step: it depends on every one before it, and on their order."""
    digest = hashlib.blake2b(f"{state} {gradient}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def state_after(t: int, stage: int, settings: Settings) -> int:
    """What a single machine would have at `stage` after iteration t."""
    state = contribution(0, stage, 0)
    for each in range(1, t + 1):
        units = settings.cover(stage)
        state = step(state, sum(contribution(each, stage, unit) for unit in units))
    return state


def fingerprint(t: int, state: int) -> str:
    return f"{t}:{state:x}"


class Counter:
    """Runs tasks on whole numbers (`sim.node.Computer`). Payloads are ints."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.t = 0
        self.state = contribution(0, stage, 0)
        self._sum = 0
        self._gradients: dict[int, int] = {}

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        numbers = [number for number in inputs if isinstance(number, int)]
        match task:
            case tasks.Embed(t, index) | tasks.Forward(t, index, _):
                return Result(outputs=(contribution(t, self.stage, index),))
            case tasks.Head(t, index, train):
                outputs = (contribution(t, 0, index),) if train else ()
                return Result(outputs=outputs, loss_sum=float(index + 1), tokens=1)
            case tasks.InputGradient(t, index):
                return Result(outputs=(contribution(t, self.stage, index),))
            case tasks.WeightGradient(t, unit):
                self._sum += contribution(t, self.stage, unit)
                return Result()
            case tasks.Recount(t, unit, sign):
                self._sum += sign * contribution(t, self.stage, unit)
                return Result()
            case tasks.Freeze(_, parts, clear):
                frozen = (self._sum, *[0] * (parts - 1))
                self._sum = 0 if clear else self._sum
                return Result(outputs=frozen)
            case tasks.SumPart():
                return Result(outputs=(sum(numbers),))
            case tasks.Assemble(t):
                self._gradients[t] = gradient = sum(numbers)
                return Result(digest=f"{gradient:x}", squares={"sum": float(gradient % 1000)})
            case tasks.ReadGradient(t):
                return Result(outputs=(self._gradients[t],) if t in self._gradients else ())
            case _:
                return self._state_task(task, numbers)

    def _state_task(self, task: Task, numbers: Sequence[int]) -> Result:
        match task:
            case tasks.Apply(t, digest=digest):
                gradient = numbers[0] if numbers else self._gradients.get(t)
                if gradient is None or (digest and f"{gradient:x}" != digest) or t != self.t + 1:
                    return Result(error=f"the gradient at hand is not that of step {t}")
                self.t, self.state = t, step(self.state, gradient)
                self._gradients = {k: v for k, v in self._gradients.items() if k > t - tasks.KEPT_GRADIENTS}
            case tasks.Skip(t):
                self.t = t
            case tasks.Snapshot():
                return Result(outputs=(self.t, self.state), fingerprint=fingerprint(self.t, self.state))
            case tasks.LoadState(t):
                if len(numbers) != 2 or numbers[0] != t:
                    return Result(error=f"not the state after step {t}")
                self.t, self.state = numbers
            case tasks.InitState():
                self.t, self.state = 0, contribution(0, self.stage, 0)
            case tasks.Discard():
                return Result()
        self._sum = 0
        return Result(fingerprint=fingerprint(self.t, self.state))


def counting_world(
    settings: Settings, machines: Sequence[Machine], seed: int = 0, model: Model | None = None
) -> World:
    """A world of these machines, not yet running; the first one, of stage 0, keeps the log."""
    members = {machine.id: _member(machine) for machine in machines}
    leader = machines[0]
    fingerprints = tuple(fingerprint(0, state_after(0, s, settings)) for s in range(settings.stages + 1))
    genesis = Genesis(
        run=settings.run,
        epoch=settings.epoch,
        protocol_version=PROTOCOL_VERSION,
        owner=leader.id,
        leader=leader.id,
        config="",
        stages=settings.stages,
        microbatches=settings.microbatches,
        parameters=0,
        corpus_fingerprint="whole numbers",
        tokenizer_hash="whole numbers",
        numerics_class=ONE_CLASS,
        initial_weights_hash="",
        fingerprints=fingerprints,
    )
    schedule = Schedule("batch {}".format, _parameters, settings.microbatches, 1)
    world = World(seed, settings, genesis, Counter, model)
    first = members[leader.id]
    world.add_leader(lead(first, settings, schedule, genesis), first).slowness = leader.slowness
    for machine in machines[1:]:
        at = world.random.uniform(0.0, 0.5)
        world.add(members[machine.id], leader.id, at=at, slowness=machine.slowness)
    return world


def wrong_states(world: World) -> Mapping[str, str]:
    """Peers whose state is not what a single machine would have after as many steps: peer -> what differs."""
    wrong = {}
    for node in world.nodes.values():
        if not node.alive or not isinstance(node.computer, Counter):
            continue
        counter = node.computer
        right = state_after(counter.t, counter.stage, world.settings)
        if counter.state != right:
            wrong[node.id] = f"after step {counter.t}: {counter.state:x}, not {right:x}"
    return wrong


def _member(machine: Machine) -> Member:
    return Member(
        machine.id,
        machine.stage,
        1,
        ONE_CLASS,
        machine.capacity,
        name=machine.id,
        address=f"{machine.id}:1" if machine.reachable else "",
        forward_s=0.02 * machine.slowness,
    )


def _parameters(t: int, adam_step: int, norm: float) -> StepParameters:
    return StepParameters(1.0, 1e-3, 1.0, 1.0)
