"""A member that waits at a stage, never reports itself ready, and keeps everybody else out of it once the
stage is lost."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_review_stalls import go_on, removed, rollbacks

STEPS, LOST_AT, LAST = 30, 8, "r2.0"


def lost_stage(liar: str = "") -> tuple[World, list[float]]:
    """Three replicas of stage 1, and one of stage 2, which crashes for good. liar: peer that never reports
    itself ready once that has happened; "g" waits at stage 2 before. Returns
    world and times (s) of the crash."""
    settings = Settings("lost", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=2, checkpoint_every=2)
    machines = [Machine("d0", 0), *(Machine(f"r1.{k}", 1) for k in range(3)), Machine(LAST, 2)]
    world, crashed = counting_world(settings, machines, 1), list[float]()
    Invariants(world)
    if liar == "g":
        world.add(member_of(Machine(liar, 2)), "d0", at=0.5)

    def unready(said: msg.AnyMessage) -> msg.AnyMessage | None:
        return None if isinstance(said, msg.Ready) and (liar == "g" or crashed) else said

    if liar:
        world.mouths[liar] = unready

    def look(node: Node, event: ev.Event) -> None:
        if not crashed and world.history().t >= LOST_AT:
            crashed.append(world.clock.now)
            world.crash(LAST)

    world.watchers.append(look)
    return world, crashed


def test_a_relay_of_another_stage_takes_up_a_lost_one() -> None:
    world, crashed = lost_stage()
    assert go_on(world, 60.0) == STEPS and crashed and wrong_states(world) == {}


@pytest.mark.costly
@pytest.mark.parametrize("liar", ["g", "r1.0"])
def test_a_member_that_never_reports_itself_ready_does_not_keep_it_out(liar: str) -> None:
    """The run stood still until somebody else came; now it loses its seat after 50 s. The leader moves one
    that keeps copies of the lost stage's state first, here r1.0."""
    world, crashed = lost_stage(liar)
    assert go_on(world, 600.0) == STEPS and crashed and wrong_states(world).keys() <= {liar}
    out = {peer for peer, why in removed(world).items() if not why.startswith("moves to")}
    assert out <= {LAST, liar} and len(rollbacks(world)) <= 2
