"""False overflow reports: they skip no step, stop no run, and cost the liar its seat."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of

STEPS = 8


@pytest.mark.parametrize("seed", first_of(range(2)))
def test_overflows_that_one_relay_makes_up(seed: int) -> None:
    """It reports one in every iteration, as soon as that is open. No step is skipped, and it is removed."""
    settings = Settings("false overflows", 1, 1, 6, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{number}", 1) for number in range(3))]
    world: World = counting_world(settings, machines, seed)
    Invariants(world)
    told: set[int] = set()

    def lie(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iteration
        if node.id != "r1.0" or iteration is None or iteration.t in told:
            return
        told.add(iteration.t)
        fence = node.peer.ctx.fence(iteration.t, iteration.base)
        for index in range(settings.microbatches):
            world.carry(node, "d0", msg.encode(msg.Overflow(fence, 1, index, "made up")), None)

    world.watchers.append(lie)
    world.run(until_s=300.0)
    assert len(told) >= 3
    history = world.history()
    assert [commit.verdict for commit in history.commits] == ["step"] * STEPS
    entries = [decode_entry(line).record for line in world.log]
    removed = [record.removed for record in entries if isinstance(record, Members) and record.removed]
    assert removed == [{"r1.0": "it reported 3 overflows that others did not find"}]
    assert wrong_states(world) == {}
