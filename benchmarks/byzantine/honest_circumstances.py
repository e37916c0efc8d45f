"""Circumstances of honest machines that may look like misconduct: slow or lossy lines, slow devices, freezes,
crashes, small stages, rounds, a leader that dies, a run that is taken up again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Forward, Task
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of

#: Name of the machine that a circumstance concerns, of the liar, and of the founder, which leads.
VICTIM, LIAR, FOUNDER = "r1.0", "x", "d0"
STAGES, MICROBATCHES = 3, 6
#: Places of LIAR beside the victim: in its stage, in the next one, or a data node.
ROLES = ("fellow", "next", "data")
#: Seconds of a computation of one microbatch, a step taking about two seconds; delays of a message, and of a
#: payload.
TASK_S, LATENCY_S, PAYLOAD_S = 0.16, (0.005, 0.03), 0.02
#: Seconds after the liar's begin at which what happens once or twice happens.
AT_S = (10.0, 60.0)
#: Seconds after which a machine's supervisor starts its process again.
RESTART_S = 5.0
#: Factors on the seconds of a slow device's tasks, and on the delays of a slow line.
SLOW_DEVICE, SLOW_LINE = 6.0, 25.0
_TASKS = ("Forward", "Head", "InputGradient", "WeightGradient", "InnerForward", "InnerHead", "InnerBackward",
          "StepAhead")  # fmt: skip
_OVER = 1_000_000


@dataclass(frozen=True)
class Circumstance:
    """settings: changes of the run's settings. relays: relays of each stage, without LIAR. beside: those at
    the stage of LIAR (-1: as in `relays`). data_nodes: their number, without LIAR. happens: called when the
    liar begins. from_start: called before the run begins. hidden: True if nobody can dial relays but LIAR.
    where: roles of LIAR (`ROLES`) in which the circumstance is one."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    relays: tuple[int, ...] = (2, 2, 2)
    beside: int = -1
    data_nodes: int = 2
    happens: Callable[[World], None] = lambda world: None
    from_start: Callable[[World], None] = lambda world: None
    hidden: bool = False
    where: tuple[str, ...] = ROLES


def slow_line(world: World, peer: str = VICTIM, factor: float = SLOW_LINE) -> None:
    for other in [*world.nodes, LIAR]:
        world.slow[frozenset((peer, other))] = factor


def slow_device(world: World, peer: str = VICTIM) -> None:
    world.nodes[peer].slowness = SLOW_DEVICE


def hiccups(world: World, peer: str = VICTIM) -> None:
    """Let every sixtieth task of the peer take nine seconds: its owner uses the device otherwise."""
    plain = world.task_s
    count = [0]

    def task_s(node: Node, task: Task) -> float:
        if node.id == peer and type(task).__name__ in _TASKS:
            count[0] += 1
            if count[0] % 60 == 0:
                return 9.0
        return plain(node, task)

    world.task_s = task_s  # type: ignore[method-assign]


def again(world: World, do: Callable[[], None]) -> None:
    for at_s in AT_S:
        world.clock.after(at_s, do)


def freezes(seconds: float, peer: str = VICTIM) -> Callable[[World], None]:
    def freeze(world: World) -> None:
        if world.nodes[peer].running and not world.nodes[peer].frozen:
            world.freeze(peer, seconds)

    return lambda world: again(world, lambda: freeze(world))


def crashes(world: World, peer: str = VICTIM) -> None:
    again(world, lambda: world.crash(peer))


def vanishes(world: World) -> None:
    """The machine has no power for a while; nobody is told."""
    again(world, lambda: world.vanish(VICTIM))


def loses(world: World) -> None:
    """Every few seconds one link of the victim breaks, or nothing gets through one way for a while."""
    others, turn = sorted({*world.nodes, LIAR} - {VICTIM}), [0]

    def fault() -> None:
        other = others[turn[0] % len(others)]
        if world.nodes[VICTIM].running and other in world.nodes:
            if turn[0] % 2:
                world.cut(VICTIM, other, 1.5)
            else:
                world.lose(*((VICTIM, other) if turn[0] % 4 else (other, VICTIM)), 2.0)
        turn[0] += 1
        world.clock.after(4.0, fault)

    fault()


def disorder(world: World) -> None:
    """Delay the victim's messages, both ways, by up to a second, in any order; some come twice."""
    world.disorder(0.3, 1.0, float(_OVER), [VICTIM])


def newcomer(world: World) -> None:
    """Another honest machine comes to the victim's stage over a slow line."""
    member = member_of(Machine("n", 1))

    def come() -> None:
        world.add(member, world.leading().id, world.clock.now)
        slow_line(world, "n", 10.0)

    world.clock.after(AT_S[0], come)


def leader_dies(world: World) -> None:
    """The founder, which leads, crashes, and comes back with its disk."""

    def die() -> None:
        leader = world.leading().id
        world.crash(leader)

    again(world, die)


def resumes(world: World) -> None:
    """All machines lose power, and come back: the founder takes the run up."""

    def all_off() -> None:
        for name in sorted(world.nodes):
            if world.nodes[name].running:
                world.crash(name)

    world.clock.after(AT_S[0], all_off)


def inner_steps_count(world: World) -> None:
    """A slot of a machine with the whole model takes as long as its inner steps."""
    plain = world.task_s
    world.task_s = lambda node, task: (  # type: ignore[method-assign]
        plain(node, task) * max(1, task.steps if isinstance(task, Forward) else 1)
    )


CREWS = Rounds(start=2, inner=2, slots=2, pipeline=True)
ISLANDS = {"stages": 1, "microbatches": 8}

CIRCUMSTANCES: Mapping[str, Circumstance] = {
    "calm": Circumstance(),
    "slow line": Circumstance(from_start=slow_line),
    "slow device": Circumstance(from_start=slow_device),
    "device busy now and then": Circumstance(from_start=hiccups),
    "freezes for 20 s": Circumstance(happens=freezes(20.0)),
    "freezes for 60 s": Circumstance(happens=freezes(60.0)),
    "crashes, returns": Circumstance(happens=crashes),
    "loses power, returns": Circumstance(happens=vanishes),
    "lossy line": Circumstance(happens=loses),
    "late, repeated messages": Circumstance(happens=disorder),
    "a slow newcomer": Circumstance(happens=newcomer),
    "stage of two": Circumstance(beside=1, where=ROLES[:2]),
    "stage of one": Circumstance(relays=(1, 2, 2), where=ROLES[1:]),
    "liar alone at its stage": Circumstance(beside=0, where=ROLES[1:2]),
    "delay = 1": Circumstance({"delay": Delay(2)}),
    "delay = 1, slow line": Circumstance({"delay": Delay(2)}, from_start=slow_line),
    "no snapshots": Circumstance({"snapshot_every": 0}),
    "no snapshots, crashes": Circumstance({"snapshot_every": 0}, happens=crashes),
    "one data node": Circumstance(data_nodes=1),
    "data node on a slow line": Circumstance(from_start=lambda world: slow_line(world, "d1")),
    "data node freezes for 20 s": Circumstance(happens=freezes(20.0, "d1")),
    "three voters, leaders die": Circumstance({"voters": 3}, happens=leader_dies),
    "resumed": Circumstance({"checkpoint_every": 3}, happens=resumes),
    "pipeline islands": Circumstance({"rounds": CREWS}),
    "pipeline islands, slow line": Circumstance({"rounds": CREWS}, from_start=slow_line),
    "islands": Circumstance({**ISLANDS, "rounds": Rounds(2, 4, 4)}, (3,), from_start=inner_steps_count),
    "islands that are waited for": Circumstance(
        {**ISLANDS, "rounds": Rounds(2, 4, 4, drops=False)}, (3,), from_start=inner_steps_count
    ),
    "hidden, through carriers": Circumstance(hidden=True),
}


def stage_of(circumstance: Circumstance, role: str) -> int:
    """Stage of LIAR in this role."""
    stages = circumstance.settings.get("stages", STAGES)
    return min({"fellow": 1, "next": 2, "data": 0}[role], stages)


def world_of(circumstance: Circumstance, role: str, seed: int, audited: bool, hidden: bool) -> World:
    """World of a circumstance, not yet running. role: of LIAR, which is honest so far."""
    plain = Settings(
        "beside a liar", 2, STAGES, MICROBATCHES, _OVER, min_replicas=1, heartbeat_s=2.0, snapshot_every=4,
        audit_share=1.0 if audited else 0.0,
    )  # fmt: skip
    settings = replace(plain, **circumstance.settings)
    stage, hidden = stage_of(circumstance, role), hidden or circumstance.hidden
    machines = [Machine(f"d{number}", 0) for number in range(circumstance.data_nodes)]
    for at, count in enumerate(circumstance.relays[: settings.stages], 1):
        count = circumstance.beside if at == stage and circumstance.beside >= 0 else count
        machines += [Machine(f"r{at}.{n}", at, reachable=not hidden) for n in range(count)]
    machines.append(Machine(LIAR, stage))
    task_s = {**dict.fromkeys(_TASKS, TASK_S), "Embed": 0.002}
    world = counting_world(settings, machines, seed, Model(LATENCY_S, PAYLOAD_S, task_s))
    circumstance.from_start(world)
    return world


def starts_again(world: World, name: str) -> None:
    """Start the next process of a machine that has ended, as its supervisor does."""
    node = world.nodes[name]
    if name == FOUNDER:
        founder_comes_back(world)
    else:
        world.trouble.gone.discard(name)
        world.add(node.next_life(), world.leading().id, world.clock.now, node.slowness)
