"""Joiners whose leader dials them first (issue 22)."""

from __future__ import annotations

from itertools import product

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.grids import first_of


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("seed", "lose"), first_of(product(range(3), (False, True)), 2))
def test_a_member_comes_back_to_a_leader_that_never_saw_its_ticket(seed: int, lose: bool) -> None:
    """The founder, which leads, has forgotten all credentials, and its dial is always faster."""
    settings = Settings("joins", 1, 1, 6, 150, min_replicas=2)
    world = counting_world(settings, [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(3))], seed)
    Invariants(world)
    hung_up: list[float] = []
    dial = world.dial

    def slow_dial(node: Node, peer: str, address: str = "") -> None:
        if node.id == "r1.1" and peer == "d0" and world.clock.now > 5.0:
            world.clock.after(1.0, lambda: dial(node, peer, address))  # it is far slower than the founder's
        else:
            dial(node, peer, address)

    world.dial = slow_dial  # type: ignore[method-assign]
    hang = world.hang_up

    def hang_up(node: Node, peer: str, reason: str) -> None:
        if "show its ticket" in reason:
            hung_up.append(world.clock.now)
        hang(node, peer, reason)

    world.hang_up = hang_up  # type: ignore[method-assign]

    def again() -> None:
        world.crash("r1.1")
        world.nodes["d0"].peer.credentials.clear()
        world.add(world.nodes["r1.1"].next_life(without_disk=lose), "d0", at=world.clock.now + 0.5)

    world.clock.at(6.0, again)
    world.clock.at(25.0, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    world.run(until_s=300.0)
    node = world.nodes["r1.1"]
    assert "r1.1" in world.nodes["d0"].peer.ctx.run.membership.members
    assert node.member.incarnation == 2 and len(hung_up) < 5
