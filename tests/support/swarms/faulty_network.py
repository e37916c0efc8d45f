"""Swarm of counters whose network fails for a while, and the check that it recovers."""

from __future__ import annotations

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import Model, World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

QUIET_S = 40.0


#: Steps of two or three seconds: a trial is cheap.
SLOW = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.25))


def swarm(seed: int, policy: str = "greedy", data_nodes: int = 2) -> World:
    """A swarm that counts; its run has no end of its own."""
    name = f"trouble {seed}"
    settings = Settings(name, 1, 2, 6, 10_000, min_replicas=2, policy=policy, activation_bytes=1024)
    machines = [Machine(f"d{n}", 0) for n in range(data_nodes)]
    machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2)]
    return counting_world(settings, machines, seed, SLOW)


def carry_on(world: World, trouble_ends_s: float, quiet_s: float = QUIET_S) -> None:
    """Steps are committed after the trouble's end too, and all that was summed is right."""
    then: list[int] = []
    world.clock.at(trouble_ends_s, lambda: then.append(world.history().t))
    end_s = trouble_ends_s + quiet_s
    world.clock.at(end_s, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    Invariants(world)
    world.run(end_s + 300.0)
    assert not wrong_states(world)
    assert world.history().t >= then[0] + 3, f"{then[0]} steps, then {world.history().t}"
