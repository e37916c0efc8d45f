"""Relays that withhold their part of a reduce and are out of the leader's sight, found by review: the honest
replicas of their stage lost their seats."""

from __future__ import annotations

from typing import Any

import msgspec

from anabranch.protocol.messages import AnyMessage, Backward, FencedMessage, Prepared, ReducedPart, ReducePart
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from swarm.byzantine.test_audit import audited_world, others_are_right
from swarm.crashes.test_unreachable_replicas import removed, steps_after, swarm

LIAR = "r1.0"


def withhold(world: World, after_s: float, forges: bool = False) -> None:
    """Have LIAR withhold all that it owes to reduces. forges: True if it also sends the leader one gradient
    with a bad seal."""
    send, forged = world.send, list[float]()

    def lie(sender: Node, peer: str, message: AnyMessage, payload: Any = None) -> None:
        if sender.member.id == LIAR and world.clock.now > after_s and isinstance(message, FencedMessage):
            if isinstance(message, ReducePart | ReducedPart | Prepared):
                return
            if forges and isinstance(message, Backward) and peer == "d0" and not forged:
                forged.append(world.clock.now)
                message = msgspec.structs.replace(message, seal=b"0" * 32)
        send(sender, peer, message, payload)

    world.send = lie  # type: ignore[method-assign, assignment]


def test_a_forger_that_withholds_its_part_takes_nobodys_seat() -> None:
    """The leader trusted it no more, and for that did not judge it."""
    world = audited_world(0.2)
    withhold(world, 1.6, forges=True)
    world.run(60.0)
    assert others_are_right(world, LIAR)
    assert removed(world).keys() == {LIAR}


def test_a_relay_that_cuts_its_link_to_the_leader_takes_nobodys_seat(monkeypatch: Any) -> None:
    """It links again for a moment before it counts as lost for good, and others hear it all the time."""
    end_s = 100.0
    world = swarm(3, end_s)
    dial_via = world._dial_via

    def dial(node: Node, peer: str, carriers: Any) -> None:
        if {node.id, peer} != {LIAR, "d0"}:
            dial_via(node, peer, carriers)

    monkeypatch.setattr(world, "_dial_via", dial)
    withhold(world, 2.0)
    for k in range(10):
        at = 2.0 + 10.0 * k
        world.clock.at(at, lambda: world.cut(LIAR, "d0", 9.0))
        world.clock.at(at + 9.05, lambda: world._dial_direct(world.nodes[LIAR], "d0", ""))
    world.run(end_s + 30.0)
    assert removed(world).keys() == {LIAR}
    assert steps_after(world, 60.0) > 20
