"""A replica that was away for some steps fetches the newest state, and a liar of its stage answers first."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from swarm.byzantine.test_false_checkpoints import false_state
from swarm.byzantine.test_review_stalls import removed

LIAR, AWAY = "r1.0", "r1.1"
AWAY_AT, AWAY_S, END_S = 4.0, 7.5, 22.0


def swarm(seed: int) -> tuple[World, list[float]]:
    """Run in which AWAY is frozen for longer than others keep gradients, and LIAR gives it a state that is
    false and consistent. Returns the world, and when LIAR did so."""
    settings = Settings("away", 1, 2, 6, 1_000_000, min_replicas=2)
    machines = [Machine(f"d{n}", 0) for n in range(2)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(3)]
    world, lies = counting_world(settings, machines, seed), list[float]()
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == LIAR and peer == AWAY and isinstance(said, msg.StateOffer | msg.Piece):
            lies.append(world.clock.now)
            said, payload = false_state(said, payload)
        carry(sender, peer, msg.encode(said), payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    world.clock.at(AWAY_AT, lambda: world.freeze(AWAY, AWAY_S))
    return world, lies


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("silent_leader", "seed"), every_value([False, True], range(2)))
def test_it_works_on_with_the_state_of_the_run(seed: int, silent_leader: bool) -> None:
    """It believed the first answer, worked with that state, and was removed for it. silent_leader: the first
    answers of the leader are lost."""
    world, lies = swarm(seed)
    Invariants(world)
    lost, carry = list[float](), world.carry

    def lose(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        if silent_leader and len(lost) < 2 and isinstance(msg.decode(message), msg.Holders):
            lost.append(world.clock.now)
            return
        carry(sender, peer, message, payload)

    world.carry = lose  # type: ignore[method-assign]
    while world.clock.now < END_S:
        world.clock.step()
    assert lies and len(lost) == 2 * silent_leader
    assert removed(world) == {} and wrong_states(world) == {}
    assert AWAY in world.history().commits[-1].stages[1].members
