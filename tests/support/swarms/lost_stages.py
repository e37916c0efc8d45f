"""Small swarm of counters that loses stages: its faults, and the checks at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anabranch.protocol import messages as msg
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Event
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Rollback, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import ONE_CLASS, Machine, counting_world, wrong_states
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, Moment, kill

STEPS = 10
EVERY = 3
#: Virtual seconds within which every run ends.
SOON_S = 200.0
#: (t, stage, whether somebody comes) of a stage that is lost.
LOSSES = [(2, 2, True), (8, 1, False), (6, 1, False), (7, 2, True)]
SETTINGS = Settings("run", 1, 2, 4, STEPS, checkpoint_every=0, min_replicas=2, snapshot_every=EVERY)


def swarm(
    seed: int, replicas: int = 2, data_nodes: int = 2, settings: Settings = SETTINGS, **changes: int
) -> World:
    """`replicas` relays at each stage and some data nodes, d0 the leader, under watch."""
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    machines = [Machine(f"d{number}", 0) for number in range(data_nodes)]
    for stage in range(1, settings.stages + 1):
        machines += [Machine(f"r{stage}.{number}", stage) for number in range(replicas)]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    return world


def of_stage(world: World, stage: int) -> list[str]:
    return sorted(n for n, node in world.nodes.items() if node.alive and node.peer.ctx.run.stage == stage)


def lose(world: World, stage: int, moment: Moment) -> Fault:
    """All replicas of a relay stage die at once, at a moment of one of them."""
    victims = tuple(sorted(name for name in world.nodes if name.startswith(f"r{stage}.")))
    return Fault(world, victims, moment, kill(*victims))


def joiner(world: World, name: str, after_s: float = 0.5, stage: int = -1) -> None:
    """A stranger comes a while from now."""
    member = Member(name, stage, 1, ONE_CLASS, 4, name=name, address=f"{name}:1", forward_s=0.02)
    world.add(member, "d0", world.clock.now + after_s)


def rollbacks(world: World) -> list[Rollback]:
    records = [decode_entry(line).record for line in world.log]
    return [record for record in records if isinstance(record, Rollback)]


def check_whole(world: World) -> LogReplay:
    """Every step is committed, and every state is what a single machine would have."""
    history = world.history()
    assert history.t == world.settings.steps
    assert [commit.t for commit in history.commits] == list(range(1, history.t + 1))
    assert wrong_states(world) == {}
    serving = {world.nodes[p].peer.ctx.run.stage for p in world.nodes if world.nodes[p].alive}
    assert serving == set(range(world.settings.stages + 1))
    return history


def go_on(world: World, until_s: float) -> None:
    """Every state is that of a single machine then."""
    while world.clock.now < until_s:
        world.clock.step()
    assert not wrong_states(world)


PHASES: dict[str, Callable[[int], Moment]] = {
    "forward": lambda t: faults.received(msg.Forward, t),
    "backward": lambda t: faults.received(msg.Backward, t),
    "between acknowledgement and weight gradient": faults.sent_backward,
    "reduce": lambda t: faults.received(msg.ReducePart, t),
    "prepared": lambda t: faults.ended(tasks.Assemble, t),
    "chosen": faults.chosen,
    "applied": lambda t: faults.ended(tasks.Apply, t),
}


def come_when(world: World, due: Callable[[], bool]) -> None:
    """A stranger comes when it is due."""

    def look(node: Node, event: Event) -> None:
        if "late" not in world.nodes and due():
            joiner(world, "late")

    world.watchers.append(look)
