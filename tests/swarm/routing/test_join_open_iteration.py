"""Joiners of the open iteration: they take over what their stage has not begun (R14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of
from support.swarms.lost_stages import go_on
from support.swarms.open_iteration import MODEL, SETTINGS, again


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("newcomer_s", "crowded"), first_of([(0.0, False), (0.0, True), (1e9, False), (1e9, True)], 3)
)
def test_a_relay_that_is_back_takes_over_what_waits(newcomer_s: float, crowded: bool) -> None:
    """A replica of two dies when its units are there; the other is sent them, and all of its own. Its next
    process serves at once and has its part in the step, each unit counted once; not where less is left to
    do than makes it worth while, nor where it would change neighbours."""
    settings = replace(SETTINGS, microbatches=24, newcomer_s=newcomer_s, neighbours=1 if crowded else 4)
    machines = [Machine("d0", 0), Machine("r1.0", 1, 24), Machine("r1.1", 1, 24), Machine("r1.2", 1, 24)]
    world = counting_world(settings, [*machines, Machine("r2.0", 2, 24), Machine("r2.1", 2, 24)], 1, MODEL)
    Invariants(world)
    struck: list[int] = []
    called: list[str] = []

    def look(node: Node, event: ev.Event) -> None:
        if not isinstance(event, ev.Received):
            return
        if isinstance(event.message, msg.Forward) and node.id == "r2.1" and not struck:
            if event.message.fence.t == 4:
                struck.append(event.message.fence.t)
                again(world, "r2.1")
        elif isinstance(event.message, msg.CallBack):
            called.append(node.id)

    world.watchers.append(look)
    go_on(world, 60.0)
    assert struck == [4] and not wrong_states(world)
    commit = world.history().commits[3]
    assert commit.t == 4
    served = "r2.1" in commit.stages[2].members
    assert served == (not newcomer_s and not crowded)
    assert set(called) == ({"r2.0"} if served else set())
    moved = [f for _, _, kind, f in world.notes if kind == "repair" and f["lost"] == "r2.0" and f["t"] == 4]
    assert bool(moved) == served
    if served:
        assert commit.stages[2].members.index("r2.1") in commit.stages[2].owners
