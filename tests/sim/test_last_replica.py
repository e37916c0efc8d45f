"""When all replicas of a stage are gone for good, whoever comes says so once and asks less and less often."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.events import Event, Received
from anabranch.protocol.records import Member
from anabranch.protocol.settings import Settings
from anabranch.sim.algebra import ONE_CLASS, Machine, counting_world
from anabranch.sim.node import Node


def test_a_joiner_of_a_lost_stage_says_what_helps_and_asks_seldom() -> None:
    settings = Settings("run", 1, 1, 4, 9, checkpoint_every=2)
    world = counting_world(settings, [Machine("d0", 0), Machine("r1.0", 1)])
    asked: list[float] = []

    def look(node: Node, event: Event) -> None:
        if node.id == "d0" and node.peer.committed == 3 and world.nodes["r1.0"].alive:
            world.crash("r1.0")
            world.add(Member("late", -1, 1, ONE_CLASS, 4, name="late", address="late:1"), "d0", 30.0)
        if isinstance(event, Received) and isinstance(event.message, msg.FetchState):
            asked.append(world.clock.now)

    world.watchers.append(look)
    with pytest.raises(TimeoutError):
        world.run(3600.0)
    texts = [str(fields["text"]) for _, who, kind, fields in world.notes if kind == "note" and who == "late"]
    told = [text for text in texts if "too old" in text]
    assert len(told) == 1 and "anabranch resume" in told[0]
    assert 10 < len(asked) < 90
