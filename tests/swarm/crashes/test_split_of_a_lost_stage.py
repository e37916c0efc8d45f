"""Data nodes that join while a relay stage is empty, in an iteration whose microbatches are split already."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import wrong_states
from support.swarms.lost_stages import joiner, swarm


def test_a_data_node_that_comes_while_a_stage_is_empty_serves_from_the_next_iteration() -> None:
    """The newcomer would have split the batch over three data nodes, where the others had split it over two
    (R2). The stage is lost before the first step, so that new relays hold its state as they come."""
    world = swarm(1, replicas=1, steps=4, min_replicas=1)
    lost: list[str] = []
    splits: set[tuple[str, ...]] = set()

    def look(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iteration
        if iteration is not None and iteration.t == 1:
            holders = iteration.source.assignments[0].holder
            splits.add(tuple(holder for _, holder in sorted(holders.items())))
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Forward) and not lost:
            lost.extend(name for name in world.nodes if name.startswith("r1."))
            for name in lost:
                world.crash(name)
            joiner(world, "d2", 0.1, 0)
            joiner(world, "n1", 3.0, 1)

    world.watchers.append(look)
    world.run(until_s=120.0)
    assert lost and world.history().t == 4 and not wrong_states(world)
    run = world.nodes["d0"].peer.ctx.run
    assert run.membership.active_from["n1"] == 1 and run.membership.active_from["d2"] == 2
    assert splits == {("d0", "d0", "d1", "d1")}
