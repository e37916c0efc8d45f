"""End of a step: parity of the replicas' states (I2), and release once enough of them agree (R11)."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Commit, Members, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import first_of

STEPS = 6


def swarm(seed: int) -> World:
    settings = Settings("parity", 1, 2, 6, STEPS, min_replicas=2)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{number}", stage) for stage in (1, 2) for number in range(3)]
    world = counting_world(settings, machines, seed)
    Invariants(world)
    return world


def test_a_replica_whose_state_differs_is_removed() -> None:
    """Its fingerprint of step 3 is another than that of its stage (I2): the others go on without it."""
    world = swarm(1)
    carry = world.carry

    def another_state(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id == "r1.1" and isinstance(said, msg.Applied) and said.fence.t == 3:
            message = msg.encode(msgspec.structs.replace(said, fingerprint="another"))
        carry(sender, peer, message, payload)

    world.carry = another_state  # type: ignore[method-assign]
    world.run(until_s=300.0)
    records = [decode_entry(line).record for line in world.log]
    removed = [each.removed for each in records if isinstance(each, Members) and each.removed]
    assert removed == [{"r1.1": "state after iteration 3 differs from its stage's"}]
    assert world.history().t == STEPS and wrong_states(world) == {}


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_step_is_released_once_two_of_each_stage_have_it(seed: int) -> None:
    """The next iteration may run before, but its commit is not proposed (R11)."""
    world = swarm(seed)
    applied: dict[tuple[int, int], dict[str, str]] = {}
    released: set[int] = set()
    full: list[int] = []

    def look(node: Node, event: ev.Event) -> None:
        if not isinstance(event, ev.Received):
            return
        said = event.message
        if isinstance(said, msg.Applied) and node.peer.lead is not None:
            applied.setdefault((said.fence.t, said.stage), {})[event.peer] = said.fingerprint
        elif isinstance(said, msg.Release) and said.fence.t not in released:
            released.add(said.fence.t)
            members = world.leading().peer.ctx.run.membership
            for stage in range(3):
                live, found = members.live(stage, said.fence.t), applied.get((said.fence.t, stage), {})
                # The leader serves stage 0, and does not send itself a message.
                assert len(found) + (stage == 0) >= min(2, len(live)), (said.fence.t, stage, found)
                assert len(set(found.values())) <= 1
                full.append(len(live))
        if world.log and isinstance(commit := decode_entry(world.log[-1]).record, Commit) and commit.t > 1:
            assert node.peer.lead is None or node.peer.lead.released.t >= commit.t - 1

    world.watchers.append(look)
    world.run(until_s=300.0)
    assert released >= set(range(1, STEPS)) and full.count(3) > STEPS and wrong_states(world) == {}
