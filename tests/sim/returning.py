"""What the tests of voters that die and come back share."""

from __future__ import annotations

import msgspec

from anabranch.protocol import events as ev
from anabranch.protocol.founding import Saved, lead
from anabranch.sim.faults import Moment
from anabranch.sim.node import Node
from anabranch.sim.world import World


def leads_three(steps: int) -> Moment:
    """The peer leads three voters, and so many steps are committed."""

    def moment(node: Node, event: ev.Event) -> bool:
        raft = node.peer.voter.raft
        own = node.peer.lead is not None and raft.chosen > raft.log.voters_since
        return own and len(node.peer.core.voters) == 3 and node.peer.committed >= steps

    return moment


def founder_comes_back(world: World) -> None:
    """Its next process, with its disk and its newest checkpoint."""
    former = world.nodes["d0"]
    member = msgspec.structs.replace(former.member, incarnation=former.member.incarnation + 1)
    t = max(world.checkpoints)
    saved = Saved(t, tuple(world.checkpoints[t][stage][1] for stage in range(world.settings.stages + 1)))
    assert world.schedule is not None
    kept = former.disk.kept(9)
    peer = lead(member, world.settings, world.schedule, world.genesis, kept, saved)
    world.add_leader(peer, member, former.disk)
