"""The leader's own line is down for a while, and it is the only voter: nobody loses a seat for that (R3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import every_pair
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

STEPS, DOWN_AT = 12, 1.0
EVEN = {"d0": 0, "d1": 0, "a0": 1, "a1": 1, "b0": 2, "b1": 2}
LONE = {"d0": 0, "d1": 0, "a0": 1, "b0": 2, "b1": 2, "b2": 2}


def breaks(world: World, seconds: float) -> None:
    """All its links break at once, and cannot be made again before the time (s) is over."""
    for peer in [peer for peer in world.nodes if peer != "d0"]:
        world.cut("d0", peer, seconds)


def swallows(world: World, seconds: float) -> None:
    """Nothing arrives for a while (s); then all does that was sent meanwhile."""
    world.partition(["d0"], seconds)


def has_another_address(world: World, seconds: float) -> None:
    """Nothing arrives for a while (s); what was sent meanwhile is lost, and its links are made anew."""
    world.partition(["d0"], seconds)
    world.clock.after(seconds - 0.01, lambda: breaks(world, 0.0))


def swarm(fleet: dict[str, int]) -> World:
    settings = Settings("down", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=2, checkpoint_every=4)
    world = counting_world(settings, [Machine(name, stage) for name, stage in fleet.items()], 1)
    Invariants(world)
    return world


@pytest.mark.parametrize(
    ("how", "seconds", "fleet", "comes"),
    every_pair([breaks, swallows, has_another_address], [40.0, 180.0], [EVEN, LONE], [False, True]),
)
def test_nobody_loses_a_seat(
    how: Callable[[World, float], None], seconds: float, fleet: dict[str, int], comes: bool
) -> None:
    """A newcomer may be heard first (`comes`). The members whose links did not come back first were removed,
    as silent for so long, although the leader had heard nobody; others lost their seats, or were moved, for a
    step that could not but stall."""
    world, down = swarm(fleet), list[float]()

    def fall() -> None:
        down.append(world.clock.now)
        how(world, seconds)

    world.clock.after(DOWN_AT, fall)
    if comes:
        world.add(member_of(Machine("new", 1)), "d0", DOWN_AT - 0.05)
    assert go_on(world, 600.0) == STEPS and down and wrong_states(world) == {}
    assert removed(world) == {} and rollbacks(world) == []


def test_reports_of_those_that_are_not_heard_any_more_do_not_contradict_each_other() -> None:
    """The line falls when one stage has reported its state, and another has not: as nobody was heard, no
    state had a majority, and the log went back to a snapshot."""
    world, down = swarm(EVEN), list[float]()

    def late(sender: Node, peer: str, said: msg.Message) -> msg.Message | None:
        if not isinstance(said, msg.Applied) or sender.id[0] != "a" or said.fence.t != 5 or len(down) > 1:
            return said
        if not down:
            down.append(world.clock.now)
            world.clock.after(1.0, fall)
        return None

    def fall() -> None:
        down.append(world.clock.now)
        swallows(world, 40.0)

    altered(world, late)
    assert go_on(world, 600.0) == STEPS and len(down) == 2 and wrong_states(world) == {}
    assert removed(world) == {} and rollbacks(world) == []
