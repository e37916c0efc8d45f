"""Copies of state on their way: several sources at once, keepers without room, lost keepers, prevention."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Described, Event, Received
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from support.grids import first_of
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault, kill
from support.swarms.lost_stages import EVERY, SOON_S, check_whole, joiner, of_stage, rollbacks, swarm


def pieces_by_source(world: World, of: str, stage: int) -> Counter[str]:
    """Pieces of a stage's state that `of` got from each peer, counted as the world runs."""
    got: Counter[str] = Counter()

    def look(node: Node, event: Event) -> None:
        if node.id == of and isinstance(event, Received) and isinstance(event.message, msg.Piece):
            got[event.peer] += event.message.stage == stage

    world.watchers.append(look)
    return got


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_joiner_pulls_from_several_replicas_at_once(seed: int) -> None:
    world = swarm(seed, replicas=3)
    world.clock.at(2.0, lambda: joiner(world, "late", 0.1, stage=1))
    got = pieces_by_source(world, "late", 1)
    world.run(SOON_S)
    check_whole(world)
    assert len([peer for peer in got if peer.startswith("r1")]) >= 2
    # Hardly a piece is pulled twice.
    assert sum(got.values()) <= 2 * 5


def test_of_several_replicas_one_dies_while_it_is_pulled_from() -> None:
    world = swarm(seed=4, replicas=3)
    world.clock.at(2.0, lambda: joiner(world, "late", 0.1, stage=1))
    fault = Fault(world, ("r1.0", "r1.1", "r1.2"), faults.serving_state(), kill())
    world.run(SOON_S)
    assert fault.delivered
    check_whole(world)
    assert "late" in of_stage(world, 1)


def test_who_has_no_room_is_passed_over() -> None:
    """Relays have room for nothing: the data nodes keep the relays' stages, and nobody stage 0."""
    world = swarm(seed=2, data_nodes=3)

    def look(node: Node, event: Event) -> None:
        if node.id.startswith("r") and isinstance(event, Described):
            node.peer.ctx.use_settings(replace(node.peer.ctx.run.settings, snapshot_budget_bytes=0))

    world.watchers.append(look)
    world.run(SOON_S)
    check_whole(world)
    for name, node in world.nodes.items():
        foreign = {stage for stage, _ in node.peer.states.pinned if stage != node.peer.ctx.run.stage}
        assert foreign <= ({1, 2} if name.startswith("d") else set())


def test_a_keeper_that_dies_is_replaced() -> None:
    world = swarm(seed=6, replicas=3, data_nodes=3)
    killed: list[str] = []

    def look(node: Node, event: Event) -> None:
        lead = world.nodes["d0"].peer.lead
        assert lead is not None
        if killed or lead.catalog.complete_t < EVERY:
            return
        t = lead.catalog.complete_t
        keepers = [p for p in lead.catalog.holders(t, 1) if p != "d0" and not p.startswith("r1")]
        killed.append(keepers[0])
        world.crash(keepers[0])

    world.watchers.append(look)
    world.run(SOON_S)
    assert killed
    check_whole(world)
    lead = world.nodes["d0"].peer.lead
    assert lead is not None
    for stage in range(3):
        holders = lead.catalog.holders(lead.catalog.complete_t, stage)
        assert len([p for p in holders if world.nodes[p].peer.ctx.run.stage != stage]) >= 2
        assert all(world.nodes[p].alive for p in holders)


def test_copies_are_spread() -> None:
    """Four stages of two relays: nobody keeps much more than a share, and the two keepers of a stage are of
    different stages."""
    world = swarm(seed=1, stages=4)
    world.run(SOON_S)
    lead = world.nodes["d0"].peer.lead
    assert lead is not None
    kept: Counter[str] = Counter()
    for stage in range(5):
        holders = lead.catalog.holders(lead.catalog.complete_t, stage)
        keepers = [p for p in holders if world.nodes[p].peer.ctx.run.stage != stage]
        assert len({world.nodes[p].peer.ctx.run.stage for p in keepers}) == len(keepers) == 2
        kept.update(keepers)
    assert max(kept.values()) <= 2


@pytest.mark.parametrize("seed", first_of(range(3)))
def test_a_stage_down_to_one_replica_gets_another_before_it_is_lost(seed: int) -> None:
    """It comes from the stage that can spare one; nothing has to be computed again."""
    world = swarm(seed, replicas=3)
    world.clock.at(2.0, lambda: (world.crash("r1.0"), world.crash("r1.1")))
    world.run(SOON_S)
    check_whole(world)
    assert len(of_stage(world, 1)) == 2 and len(of_stage(world, 2)) == 2
    assert rollbacks(world) == []


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_step_that_nobody_left_can_take_is_taken_back(seed: int) -> None:
    """C_t is chosen with the gradient of two replicas; both die before the third has it (R12)."""
    world = swarm(seed, replicas=3)
    third, carry = "r1.2", world.carry
    lost: list[str] = []
    died: list[float] = []

    def but_the_sums(sender: Node, peer: str, message: bytes, payload: tasks.Payload | None) -> None:
        told = msg.decode(message)
        if peer == third and isinstance(told, msg.ReducedPart) and told.fence.t == 7:
            lost.append(sender.id)
        else:
            carry(sender, peer, message, payload)

    def look(node: Node, event: Event) -> None:
        chosen = world.history().t >= 7 if world.log else False
        if chosen and not died:
            died.append(world.clock.now)
            world.crash("r1.0")
            world.crash("r1.1")

    world.carry = but_the_sums  # type: ignore[method-assign]
    world.watchers.append(look)
    world.run(SOON_S)
    assert died and lost and set(lost) <= {"r1.0", "r1.1"}  # a member without a unit sums nothing
    check_whole(world)
    [back] = rollbacks(world)
    assert back.t in (3, 6) and "stage 1" in back.reason
    assert third in of_stage(world, 1)
