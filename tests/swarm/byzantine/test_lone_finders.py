"""Leaders that came late, and relays whose word alone some skipped steps are."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Rollback
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms.lost_stages import joiner
from swarm.byzantine.test_review_messages import lone_relay, records, removed
from swarm.byzantine.test_review_stalls import overflowing


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
        assert late.peer.shared.summary.overflows.skips == 3 and lead._lone_finder() == "r2.0"
        lead._overflows = late.peer.shared.summary.overflows
        assert lead._lone_finder() is None

    world.bookkeepers.append(look)
    world.run(200.0)
    assert looked


def test_a_new_leader_believes_the_second_relay_that_finds_the_overflows() -> None:
    """There are some. The leader dies when it has expelled the first relay, and the run went back."""
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("r2.0", 2)]
    machines += [Machine(f"r1.{n}", 1) for n in range(5)]
    settings = Settings("sole", 1, 2, 6, 40, voters=3, snapshot_every=2, snapshot_copies=2)
    world, crashed = counting_world(settings, machines, 1), list[float]()
    overflowing(world, 2, lambda task, _: isinstance(task, tasks.Forward) and not task.index and task.t >= 6)

    def look(node: Node, event: ev.Event) -> None:
        if not crashed and any(isinstance(record, Rollback) for record in records(world)):
            crashed.append(world.clock.now)
            world.crash("d0")

    world.bookkeepers.append(look)
    with pytest.raises(TimeoutError):  # for the founder
        world.run(100.0)
    alone = [peer for peer, reason in removed(world).items() if "it alone found" in reason]
    leads = [node.peer.lead for node in world.nodes.values() if node.alive]
    reasons = [lead.tip.stop_reason for lead in leads if lead is not None]
    assert crashed and alone == ["r2.0"]
    assert len(reasons) == 1 and "3 skipped steps in a row" in (reasons[0] or "")
