"""The leader's own line is down for a while, and it is the only voter: nobody loses a seat for that (R3)."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from swarm.byzantine.test_review_stalls import go_on, removed, rollbacks

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


@pytest.mark.parametrize(
    ("how", "seconds", "fleet"),
    every_value([breaks, swallows, has_another_address], [40.0, 180.0], [EVEN, LONE]),
)
def test_nobody_loses_a_seat(how, seconds: float, fleet: dict[str, int]) -> None:  # type: ignore[no-untyped-def]
    """The members whose links did not come back first were removed, as silent for so long, although the
    leader had heard nobody; others lost their seats, or were moved, for a step that could not but stall."""
    settings = Settings("down", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=2, checkpoint_every=4)
    world = counting_world(settings, [Machine(name, stage) for name, stage in fleet.items()], 1)
    Invariants(world)
    down = list[float]()

    def fall() -> None:
        down.append(world.clock.now)
        how(world, seconds)

    world.clock.after(DOWN_AT, fall)
    assert go_on(world, 600.0) == STEPS and down and wrong_states(world) == {}
    assert removed(world) == {} and rollbacks(world) == []
