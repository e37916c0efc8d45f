"""Relays that say after each rollback that they cannot get their stage's state (R12)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Members, Rollback, decode_entry
from anabranch.protocol.recovery.stage_recovery import BEHIND_MOST
from anabranch.sim.workers.integer_world import Machine, counting_world

#: Iteration of which the liars report no state, and seconds between two of their reports.
FROM, AGAIN_S = 3, 0.5


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("liars", [("r1.0",), ("r1.0", "r1.1")])
def test_a_stage_whose_replicas_never_get_a_state_is_restored_by_others(liars: tuple[str, ...]) -> None:
    """The log went back each time, 125 times in 400 s, and the run came no further."""
    settings = Settings("behind", 1, 2, 4, 20, min_replicas=1, snapshot_every=5)
    machines = [Machine("d0", 0), *(Machine(name, 1) for name in liars)]
    machines += [Machine(f"r2.{number}", 2) for number in range(len(liars) + 1)]
    world = counting_world(settings, machines, 1)

    def withhold(message: msg.Message) -> msg.Message | None:
        return None if isinstance(message, msg.Applied) and message.fence.t >= FROM else message

    def lie() -> None:
        lead = world.leading()
        for node in [world.nodes[name] for name in liars]:
            if lead.id in node.links and node.peer.committed >= FROM:
                world.carry(node, lead.id, msg.encode(msg.Behind(node.peer.committed, 1)), None)
        world.clock.after(AGAIN_S, lie)

    for name in liars:
        world.mouths[name] = withhold
        world.liars.add(name)
    world.clock.after(1.0, lie)
    world.run(until_s=120.0)
    records = [decode_entry(line).record for line in world.log]
    removed = [peer for each in records if isinstance(each, Members) for peer in each.removed]
    assert world.nodes["d0"].peer.committed == 20
    assert BEHIND_MOST <= sum(isinstance(each, Rollback) for each in records) <= 3 * BEHIND_MOST
    assert set(liars) <= set(removed)
