"""Swarm of counters with three voters, for tests of voters that leave."""

from __future__ import annotations

from dataclasses import replace

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.06))


def until(world: World, time_s: float) -> int:
    """Let the swarm go on until then; returns the last committed step."""
    while world.clock.now < time_s:
        world.clock.step()
    assert not wrong_states(world)
    return world.history().t


SETTINGS = Settings("run", 1, 2, 6, 1000, min_replicas=2, voters=3)


BEGINS_AT = 6.0


def swarm(seed: int, replicas: int = 3, data_nodes: int = 2) -> World:
    """Three voters keep the log when it begins."""
    machines = [Machine(f"d{n}", 0) for n in range(data_nodes)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(replicas)]
    world = counting_world(replace(SETTINGS, min_replicas=min(2, replicas)), machines, seed, SLOW)
    Invariants(world)
    until(world, BEGINS_AT)
    assert len(keepers(world)) == 3
    return world


def keepers(world: World) -> list[str]:
    return [voter.partition("/")[0] for voter in world.leading().peer.ctx.log.voters]


def ask_to_go(world: World, *peers: str) -> float:
    for peer in peers:
        world.nodes[peer].handle(ev.Stopping("stopped by its user"))
    return world.clock.now


def gone_after(world: World, since: float, *peers: str, within_s: float = 60.0) -> float:
    """Seconds until all of them have stopped, and how."""
    nodes = [world.nodes[peer] for peer in peers]
    while any(node.stopped is None for node in nodes) and world.clock.now < since + within_s:
        world.clock.step()
    assert all(node.stopped is not None and node.stopped[1] for node in nodes), [n.stopped for n in nodes]
    return world.clock.now - since


def leader_without_founder(seed: int, data_nodes: int = 3) -> tuple[World, Node]:
    world = swarm(seed, data_nodes=data_nodes)
    world.crash("d0")
    until(world, world.clock.now + 6.0)
    leader = world.leading()
    assert leader.peer.lead is not None and leader.id != "d0" and len(keepers(world)) == 3
    return world, leader
