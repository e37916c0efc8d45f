"""Two members that move by one stage, the same way, in one iteration: what they said in their former roles
is not taken for what they say in the new ones (same process, iteration and base).

Found by `anabranch simtest --trace 2098324 --profile partition` (I3: a gradient counted in the wrong stage).
"""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members
from anabranch.protocol.pipeline.outgoing import OutgoingState
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of


def shifted(seed: int, slow: float, checked: bool) -> World:
    """a2 of stage 2 has sent a3 of stage 3 a microbatch, over a link that has become slow, when the log moves
    a2 to stage 1 and a3 to stage 2."""
    settings = Settings("found", 1, 3, 24, 3, min_replicas=2, newcomer_s=0.0)
    machines = [Machine("d0", 0), Machine("a2", 2, 8), Machine("a3", 3, 8)]
    machines += [Machine(name, int(name[1]), 8) for name in ("r1.0", "r1.1", "r2.1", "r3.1")]
    world = counting_world(settings, machines, seed)
    if checked:
        Invariants(world)
    moved: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        lead, iteration = world.nodes["d0"].peer, world.nodes["a2"].peer.iteration
        if iteration is None or iteration.t != 2 or moved:
            return
        world.slow[frozenset(("a2", "a3"))] = slow
        if node.id != "a2" or lead.lead is None or lead.voter.busy:
            return
        items = iteration.sender.items.values()
        if not any(
            item.peer == "a3" and item.leg is OutgoingState.SENT and not item.returned for item in items
        ):
            return
        moved.append(world.clock.now)
        members = lead.ctx.run.membership.members
        joined = tuple(msgspec.structs.replace(members[p], stage=members[p].stage - 1) for p in ("a2", "a3"))
        number = lead.ctx.run.membership.number + 1
        lead.lead.log.append(Members(number, removed=dict.fromkeys(("a2", "a3"), "moves"), joined=joined))

    world.watchers.append(look)
    world.run(until_s=300)
    assert moved
    return world


@pytest.mark.parametrize(("seed", "slow"), first_of(product(range(4), (10.0, 30.0)), 2))
def test_what_was_sent_in_a_former_role_is_not_computed_with(seed: int, slow: float) -> None:
    world = shifted(seed, slow, checked=False)
    assert world.history().t == 3
    assert wrong_states(world) == {}


@pytest.mark.parametrize("seed", first_of(range(4), 2))
def test_slots_granted_in_a_former_role_are_none(seed: int) -> None:
    world = shifted(seed, 10.0, checked=True)
    assert world.history().t == 3

