"""Strangers without end, each with a key of its own, at peers that keep no record of them (I5, I7)."""

from __future__ import annotations

import pytest

from anabranch.net.handshake import INCARNATIONS_KEPT, IncarnationFence
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.grids import every_value

#: Keys whose round trips made a report longer than a message.
KEYS = 13_000
CREDENTIAL = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, "ticket", 0, "192.0.2.0/24")


def swarm(steps: int) -> World:
    settings = Settings("keys", 1, 1, 4, steps, min_replicas=2)
    return counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1), Machine("r1.1", 1)], 1)


def come(node: Node, key: str) -> None:
    """Let a stranger link with `node` and answer its next heartbeat."""
    node.handle(ev.LinkUp(key, 1, CREDENTIAL))
    node.handle(ev.Received(key, msg.Pong(node.peer.connections._number, 0.0, 0.0), None))


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("victim", "stay"), every_value(["d0", "r1.0"], [False, True]))
def test_strangers_are_no_part_of_a_report(victim: str, stay: bool) -> None:
    """Thirteen thousand keys of one ticket answered a heartbeat of a relay, which reported their round trips
    with its next step: the report was longer than a message may be, and the relay's process ended."""
    world, reports, begun = swarm(6), list[int](), list[bool]()
    node = world.nodes[victim]

    def look(seen: Node, event: ev.Event) -> None:
        if seen is node and node.peer.committed == 2 and not begun:
            begun.append(True)
            for number in range(KEYS if stay else 1000):
                come(node, f"{number:064}")
                if not stay:
                    node.handle(ev.LinkDown(f"{number:064}", "gone"))
            applied = node.peer.iterations._applied_report({})
            reports.append(len(msg.encode(applied)))
            assert set(applied.links) <= world.nodes.keys()
            if not stay:
                known = node.peer.ctx.costs.neighbours.keys() | node.peer.ctx.links.incarnations.keys()
                assert known <= world.nodes.keys(), "nothing is kept of them"

    world.watchers.append(look)
    world.run(until_s=300.0)
    assert reports and reports[0] < 4096


def test_a_fence_remembers_so_many_incarnations() -> None:
    fence = IncarnationFence()
    for number in range(INCARNATIONS_KEPT + 10):
        fence.note(f"key {number}", 2)
        fence.note("used", 3)
    assert len(fence._highest) == INCARNATIONS_KEPT
    assert fence._highest["used"] == 3 and "key 0" not in fence._highest
