"""A stage's only replica works honestly and gives its state to nobody: no newcomer ever serves beside it, and
no checkpoint is written.

Whoever comes first when a run is taken up again is a stage's only replica, though others come soon.
"""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.founder import founder_comes_back
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import go_on, removed, rollbacks

STEPS, STOPS_AT, CHECKPOINT = 40, 12, 10
FIRST, LATER = ("g", "r2.0", "r2.1"), "r1.0"


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("lies", [False, True])
def test_the_last_checkpoint_is_written_all_the_same(lies: bool) -> None:
    """The model at the run's end was lost. Now the log goes back to the last checkpoint, and the other relay
    takes the stage up."""
    settings = Settings("taken up", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=4, checkpoint_every=5)
    relays = [Machine(name, int(name[1])) for name in (LATER, "r2.0", "r2.1")]
    machines = [Machine("d0", 0), *relays, Machine("g", 1)]
    world, stopped = counting_world(settings, machines, 1), list[float]()
    Invariants(world)

    def gives_nothing(said: msg.AnyMessage) -> msg.AnyMessage | None:
        return None if stopped and isinstance(said, msg.StateOffer | msg.Piece | msg.Vouch) else said

    def stop(node: Node, event: ev.Event) -> None:
        if not stopped and world.history().t >= STOPS_AT:
            stopped.append(world.clock.now)
            for name in (*FIRST, LATER, "d0"):
                world.crash(name)

    if lies:
        world.mouths["g"] = gives_nothing
    world.watchers.append(stop)
    world.run(until_s=60.0)
    founder_comes_back(world)
    for name in (*FIRST, LATER):
        at = world.clock.now + (2.5 if name == LATER else 0.5)
        world.add(world.nodes[name].next_life(), "d0", at)
    assert go_on(world, 600.0) == STEPS and stopped and wrong_states(world).keys() <= {"g"}
    assert max(world.checkpoints) == STEPS
    assert [record.t for record in rollbacks(world)] == [CHECKPOINT] * (1 + lies)
    assert ("did not give" in removed(world).get("g", "")) == lies
