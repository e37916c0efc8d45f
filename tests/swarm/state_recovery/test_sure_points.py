"""A lost stage of whose states after a change of leader one keeper is left: the log does not go back to the
run's beginning, of which every peer can make the states."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from swarm.byzantine.test_review_stalls import go_on, rollbacks

STEPS, LOST_AT, EVERY, COPY_S, LAST = 40, 28, 5, 30.0, "r2.0"


def test_one_keeper_that_is_left_is_believed_rather_than_all_work_lost() -> None:
    """A power cut takes the leader and the only replica of a stage. The leader kept one of the two copies of
    its state, and another is made only slowly."""
    settings = Settings("cut", 1, 2, 6, STEPS, min_replicas=1, snapshot_every=EVERY, voters=3)
    relays = [*(Machine(f"r1.{k}", 1) for k in range(3)), Machine(LAST, 2)]
    world = counting_world(settings, [Machine("d0", 0), Machine("d1", 0), *relays], 1)
    cut, kept, carry = list[float](), list[str](), world.carry
    Invariants(world)

    def slowly(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        late = bool(cut) and isinstance(msg.decode(message), msg.Piece)
        world.clock.after(COPY_S if late else 0.0, lambda: carry(sender, peer, message, payload))

    def look(node: Node, event: ev.Event) -> None:
        if not cut and world.history().t >= LOST_AT:
            cut.append(world.clock.now)
            lead = world.nodes["d0"].peer.lead
            assert lead is not None
            kept.extend(lead.catalog.holders(lead.catalog.complete_t, 2))
            world.crash("d0")
            world.crash(LAST)

    world.carry = slowly  # type: ignore[method-assign]
    world.watchers.append(look)
    assert go_on(world, 600.0) == STEPS and cut and wrong_states(world) == {}
    assert len(set(kept) - {"d0", LAST}) == 1
    assert [record.t for record in rollbacks(world)] == [LOST_AT - LOST_AT % EVERY]
