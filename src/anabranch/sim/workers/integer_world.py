"""Worlds of peers that compute with integers, and the comparison of their states with a single machine's.

Not here: their tasks (`integer_worker`), and the arithmetic (`integer_arithmetic`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from msgspec import UNSET, UnsetType, structs

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Genesis, Member
from anabranch.protocol.log.step_parameters import Schedule, StepParameters
from anabranch.sim.kernel.founder import populate
from anabranch.sim.kernel.simulated_peer import TaskExecutor
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_arithmetic import fingerprint, initial, own_data
from anabranch.sim.workers.integer_worker import IntegerWorker
from anabranch.sim.workers.single_machine import states_after

ONE_CLASS = "whole numbers"
MakeWorld = Callable[[int, Settings, Genesis, Callable[[int], TaskExecutor], Model | None], World]


@dataclass(frozen=True)
class Machine:
    """Machine of a simulated swarm. capacity: microbatches in flight. slowness: factor on the task seconds of
    the world's model. reachable: True if other peers can dial it."""

    id: str
    stage: int
    capacity: int = 4
    slowness: float = 1.0
    reachable: bool = True


def genesis_of(settings: Settings, leader: str) -> Genesis:
    """First log record of a run with these settings whose workers compute with integers. leader: id of the
    founder, which is the owner, too."""
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
    make_world: MakeWorld = World,
) -> World:
    """World of these machines, not yet running, whose workers compute with integers instead of tensors
    (`integer_worker`). model: durations (None: the default). machines: the first one, of stage 0, founds the
    run, the others join soon after. disks: machine -> name of its disk ("": it keeps no log; default "0").
    make_world: class of the world, or a function that makes one of the same arguments."""
    members = {machine.id: member_of(machine, disks.get(machine.id, "0")) for machine in machines}
    members = {
        peer: structs.replace(member, shared=shared(member.capacity, settings))
        for peer, member in members.items()
    }
    schedule = schedule_of(settings, 1)
    make = partial(IntegerWorker, delay=settings.delay, rounds=settings.rounds)
    world = make_world(seed, settings, genesis_of(settings, machines[0].id), make, model)
    if settings.rounds.private:
        world.make_own = lambda peer, stage: make(stage, own=own_data(peer))
    populate(world, schedule, ((members[machine.id], machine.slowness) for machine in machines))
    return world


def wrong_states(world: World) -> Mapping[str, str]:
    """Peers whose state differs from that of a single machine after as many steps: peer -> the difference in
    words. Empty if all are right. Killed processes, and peers that do not compute with integers, are left
    out."""
    wrong, known = {}, dict[int, tuple[int, ...]]()
    for node in world.nodes.values():
        if not node.alive or not isinstance(node.computer, IntegerWorker):
            continue
        worker = node.computer
        history = world.history() if world.settings.rounds.inner else None
        if worker.t not in known:
            known[worker.t] = states_after(worker.t, world.settings, history)
        right = known[worker.t][worker.stage]
        if worker.state != right:
            wrong[node.id] = f"after step {worker.t}: {worker.state:x}, not {right:x}"
    return wrong


def member_of(machine: Machine, disk: str = "0") -> Member:
    """Member record with which a machine joins for the first time. disk: name of its disk ("": none for the
    log)."""
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


def shared(capacity: int, settings: Settings) -> int | UnsetType:
    """Capacity of a simulated machine for each of two pipeline islands (`Member.shared`): half, rounded up;
    unset in a run without such islands. capacity: for one."""
    return (capacity + 1) // 2 if settings.rounds.pipeline else UNSET


def schedule_of(settings: Settings, window_tokens: int) -> Schedule:
    """Schedule (batch hash and step parameters by iteration, which the leader logs) with the same parameters
    in every step. window_tokens: tokens of an evaluation window, a number that the log contains."""
    inner = settings.microbatches // max(1, settings.rounds.slots)
    same = StepParameters(1.0, 1e-3, 1.0, 1.0)
    return Schedule(
        "batch {}".format, lambda *_: same, settings.microbatches, window_tokens, lambda steps: same, inner
    )
