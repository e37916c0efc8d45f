"""The owner stops the run: it ends soon, with a checkpoint of its last step, whatever was going on."""

from __future__ import annotations

import random

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of
from support.swarms.lost_stages import joiner

#: Virtual seconds within which a stopped run ends. A checkpoint that nobody can complete any more must not
#: be waited for.
SOON_S = 40.0


@pytest.mark.parametrize("seed", first_of(range(12), 4))
def test_a_stopped_run_ends_soon_with_its_last_state(seed: int) -> None:
    draw = random.Random(seed)
    every = draw.choice([1, 2])
    settings = Settings(f"stopped {seed}", 1, 2, 6, 1000, 3, 2, checkpoint_every=every, min_replicas=2)
    relays = [Machine(f"r{s}.{n}", s, slowness=draw.uniform(0.5, 2.0)) for s in (1, 2) for n in (0, 1)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *relays], seed)
    leader = world.nodes["d0"]
    # A relay dies while a checkpoint may be on its way from it; the run is stopped a little later.
    world.clock.at(2.0 + draw.random(), lambda: world.crash("r2.0"))
    stop_at = 3.0 + draw.random()
    world.clock.at(stop_at, lambda: leader.handle(ev.Stopping("enough")))
    while leader.stopped is None and world.clock.now < stop_at + SOON_S:
        world.clock.step()
    assert leader.stopped == ("enough", True)
    assert max(world.checkpoints) == world.history().t and wrong_states(world) == {}


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_who_leaves_finishes_what_it_began(seed: int) -> None:
    """Ctrl+C at a relay: it goes between two steps, and nothing that it computed is computed again."""
    settings = Settings("run", 1, 2, 6, 8, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{n}", s) for s in (1, 2) for n in (0, 1))]
    world = counting_world(settings, machines, seed)
    watched = Invariants(world)
    leaver = world.nodes["r1.1"]

    def look(node: Node, event: ev.Event) -> None:
        iteration = leaver.peer.iteration
        if node is not leaver or iteration is None or asked:
            return
        if iteration.t == 4 and iteration.claims.held:
            asked.append(world.clock.now)
            leaver.handle(ev.Stopping("stopped by its user"))

    asked: list[float] = []
    world.watchers.append(look)
    world.run(200.0)
    assert asked and leaver.stopped == ("left: stopped by its user", True)
    assert world.history().t == 8 and wrong_states(world) == {}
    # The leaver's share of iteration 4 counts, and nobody else added it.
    fourth = next(commit for commit in world.history().commits if commit.t == 4)
    stage = fourth.stages[1]
    assert stage.members.index("r1.1") in stage.owners
    doubles = [key for key, peers in watched.computed.items() if len(peers) > 1]
    assert all(base != fourth.previous_base for base, *_ in doubles)


def test_the_last_of_a_stage_goes_when_its_patience_ends() -> None:
    """Nobody can take over: after a while it goes all the same; a joiner gets the stage from the keepers."""
    settings = Settings("run", 1, 2, 4, 16, snapshot_every=3)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r1.0", 1), Machine("r2.0", 2)]
    slow = Model(task_s=dict.fromkeys(("Forward", "Head", "InputGradient", "WeightGradient"), 0.5))
    world = counting_world(settings, machines, seed=1, model=slow)
    leaver = world.nodes["r1.0"]
    world.clock.at(3.0, lambda: leaver.handle(ev.Stopping("stopped by its user")))
    world.clock.at(60.0, lambda: joiner(world, "late"))
    world.run(300.0)
    assert leaver.stopped is not None and leaver.stopped[1] and "nobody took over" in leaver.stopped[0]
    assert world.history().t == 16 and wrong_states(world) == {}
