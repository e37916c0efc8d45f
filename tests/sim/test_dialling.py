"""Who dials whom: a peer that nobody can dial works with those that it can dial."""

from __future__ import annotations

import pytest

from anabranch.node.roles import reachable_address
from anabranch.protocol.settings import Settings
from anabranch.sim.algebra import Machine, counting_world, wrong_states

STEPS = 4


@pytest.mark.parametrize("hidden", ["r1.0", "r2.0"])
@pytest.mark.parametrize("seed", range(3))
def test_one_of_two_that_can_be_dialled_is_enough(hidden: str, seed: int) -> None:
    """Whichever of them joins first."""
    settings = Settings("run", 1, 2, 4, STEPS)
    names = [("d0", 0), ("r1.0", 1), ("r2.0", 2)]
    machines = [Machine(name, stage, reachable=name != hidden) for name, stage in names]
    world = counting_world(settings, machines, seed)
    world.run(600.0)
    assert world.nodes["d0"].peer.committed == STEPS
    assert not wrong_states(world)


def test_loopback_is_announced_only_to_a_run_of_this_machine() -> None:
    assert reachable_address("127.0.0.1", 7700, "127.0.0.1") == "127.0.0.1:7700"
    assert reachable_address("127.0.0.1", 7700, "203.0.113.5") == ""
    assert reachable_address("localhost", 7700, "my.host") == ""
    assert reachable_address("10.0.0.7", 7700, "203.0.113.5") == "10.0.0.7:7700"
