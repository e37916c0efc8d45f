"""Leaders that came late, and relays whose word alone some skipped steps are."""

from __future__ import annotations

from anabranch.protocol.interface import events as ev
from anabranch.sim.kernel.simulated_peer import Node
from support.swarms.lost_stages import joiner
from swarm.byzantine.test_review_messages import lone_relay


def test_who_joined_while_steps_were_skipped_does_not_know_a_lone_finder() -> None:
    """Another relay may have found the first of the overflows: as the leader it would have expelled the one
    that found those after."""
    world, looked = lone_relay(3, lies=False), list[bool]()

    def look(node: Node, event: ev.Event) -> None:
        lead = world.nodes["d0"].peer.lead
        if node.id == "d0" and node.peer.committed == 3 and "late" not in world.nodes:
            joiner(world, "late", 0.0, stage=1)
        late = world.nodes.get("late")
        if late is None or lead is None or looked or late.peer.committed != 5 or lead.t != 5:
            return
        looked.append(True)
        assert late.peer.shared.summary.skips == 3 and lead._lone_finder() == "r2.0"
        lead._finders = late.peer.shared.summary.finders
        assert lead._lone_finder() is None

    world.bookkeepers.append(look)
    world.run(200.0)
    assert looked
