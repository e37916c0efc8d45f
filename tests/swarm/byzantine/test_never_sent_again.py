"""A relay that gave its gradient back and claims the microbatch, and does not send it on again when a peer of
the next stage died with it (R5, R6): nobody else sent it, and the step never ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.delay import Delay
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from swarm.byzantine.test_review_stalls import altered, go_on, removed, rollbacks

STEPS, AT = 8, 3


def world_with(
    honest: int, stage: int, beside: int, kind: type[msg.Forward | msg.Backward], delayed: bool = False
) -> tuple[World, list[str], list[str]]:
    """Liar at `stage` of two, beside `honest` replicas, with three at the other stage. It sends each message
    of `kind` once. In iteration AT the first peer of stage `beside` dies, but the leader, to which it sent
    one that is claimed there. Returns the world, what was not sent again, and who died."""
    settings = Settings("again", 1, 2, 12, STEPS, min_replicas=1, snapshot_every=2)
    settings = replace(settings, delay=Delay(1)) if delayed else settings
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("x", stage)]
    machines += [Machine(f"r{s}.{k}", s) for s in (1, 2) for k in range(honest if s == stage else 3)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.add("x")
    sent, kept, died = dict[tuple[int, str, int], str](), list[str](), list[str]()

    def once(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        if sender.id == "x" and isinstance(message, kind):
            what = message.fence.t, message.fence.base, message.index
            if what in sent:
                kept.append(peer)
                return None
            sent[what] = peer
        return message

    def watch(node: Node, event: ev.Event) -> None:
        lead = world.nodes["d0"].peer.shared.coordination.coordinator
        if died or lead is None or lead.round is None or lead.round.t != AT:
            return
        for (t, _, index), peer in sent.items():
            held = lead.round.claims.get(beside, {}).get(peer, ())
            if t == AT and peer != "d0" and (index if beside else 2 * index) in held and not died:
                died.append(peer)
                world.crash(peer)

    altered(world, once)
    world.bookkeepers.append(watch)
    return world, kept, died


@pytest.mark.parametrize(("honest", "stage", "delayed"), every_value([1, 2], [1, 2], [False, True]))
def test_another_replica_computes_and_sends_it(honest: int, stage: int, delayed: bool) -> None:
    """A replica of the next stage dies, or the data node at which the microbatches end. An honest data node
    lost its seat, too."""
    world, kept, died = world_with(honest, stage, (stage + 1) % 3, msg.Forward, delayed)
    assert go_on(world, 400.0) == STEPS and kept
    assert [*removed(world)] == died and rollbacks(world) == []
    assert wrong_states(world) == {} and world.clock.now < (120.0 if delayed else 60.0)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_that_is_moved_there_sends_what_the_only_replica_does_not(stage: int) -> None:
    world, kept, _ = world_with(0, stage, (stage + 1) % 3, msg.Forward)
    assert go_on(world, 400.0) == STEPS and kept and rollbacks(world) == []
    moved = [peer for peer, why in removed(world).items() if "whose only replica may hold the" in why]
    assert len(moved) == 1 and "x" not in removed(world)
    assert wrong_states(world) == {} and world.clock.now < 150.0


def test_a_gradient_that_is_not_given_again_is_computed_again() -> None:
    world, kept, died = world_with(1, 2, 1, msg.Backward)
    assert go_on(world, 200.0) == STEPS and kept and [*removed(world)] == died
    assert wrong_states(world) == {} and world.clock.now < 60.0


def test_two_of_adjacent_stages_cost_no_data_node_its_seat() -> None:
    """A replica of the third stage dies with what came through both. (The data node that began it seemed
    late with that, though it had its gradient back.)"""
    settings = Settings("again", 1, 3, 12, STEPS, min_replicas=1, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("d1", 0), Machine("x", 1), Machine("y", 2)]
    machines += [Machine(f"r{s}.{k}", s) for s in (1, 2, 3) for k in range(2 + s // 3)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    world.liars.update("xy")
    sent, kept, died = dict[tuple[str, int, str, int], str](), set[str](), list[str]()

    def once(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        if sender.id in world.liars and isinstance(message, msg.Forward):
            what = sender.id, message.fence.t, message.fence.base, message.index
            if what in sent:
                kept.add(sender.id)
                return None
            sent[what] = peer
        return message

    def watch(node: Node, event: ev.Event) -> None:
        lead = world.nodes["d0"].peer.shared.coordination.coordinator
        if died or lead is None or lead.round is None or lead.round.t != AT:
            return
        for (who, t, base, index), peer in sent.items():
            through = who == "y" and t == AT and sent.get(("x", t, base, index)) == "y"
            if through and index in lead.round.claims.get(3, {}).get(peer, ()) and not died:
                died.append(peer)
                world.crash(peer)

    altered(world, once)
    world.bookkeepers.append(watch)
    assert go_on(world, 400.0) == STEPS and kept == {"x", "y"}
    assert [*removed(world)] == died and wrong_states(world) == {} and world.clock.now < 200.0
