"""A member that is no voter hands made-up log lines to a relay whose links to all voters broke for a moment.

A carrier can break links, and a wireless network does so without anybody's help.
"""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import AnyRecord, Control, Entry, Revoke, Voters, encode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value

VOTERS, VICTIM, LIAR = ("d0", "d1", "d2"), "r1.0", "x"
STEPS, CUT_AT, EVERY_S = 24, 8, 0.05


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("record", "cut_s"),
    every_value([Revoke(VICTIM, "lies"), Voters((LIAR,)), Control("stop", CUT_AT)], [0.3, 3.0]),
)
def test_no_made_up_line_of_a_member_is_applied(cut_s: float, record: AnyRecord) -> None:
    """The relay ended for good by the first, followed a log of the guest's by the second, and left by the
    third."""
    settings = Settings("lines", 1, 2, 12, STEPS, min_replicas=2, voters=3)
    machines = [Machine(name, 0) for name in VOTERS]
    machines += [*(Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(3)), Machine(LIAR, 1)]
    disks = {machine.id: machine.id if machine.id in VOTERS else "" for machine in machines}
    world = counting_world(settings, machines, 1, disks=disks)
    Invariants(world)
    cut, told_at = list[float](), list[float]()

    def lie(node: Node, event: ev.Event) -> None:
        now = world.clock.now
        if not cut and world.history().t >= CUT_AT:
            cut.append(now)
            for voter in VOTERS:
                world.cut(VICTIM, voter, cut_s)
        if cut and node.id == LIAR and now < cut[0] + cut_s and now > max([0.0, *told_at[-1:]]) + EVERY_S:
            told_at.append(now)
            known = world.nodes[VICTIM].peer.progress.position
            entry = Entry(known.index, 1, known.previous, record)
            world.carry(node, VICTIM, msg.encode(msg.Announce((encode_entry(entry),))), None)

    world.bookkeepers.append(lie)
    world.run(until_s=300.0)
    assert len(told_at) >= 3 and world.history().t == STEPS and wrong_states(world) == {}
    assert world.history().removals == 0
    assert world.nodes[VICTIM].peer.progress.committed == STEPS
    assert set(world.nodes[VICTIM].peer.ctx.log.voting_peers) == set(VOTERS)
