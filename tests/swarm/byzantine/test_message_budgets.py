"""Budgets of messages: a flood ends with the link and a ban, and no honest peer is met (I5, I7)."""

from __future__ import annotations

import pytest
import torch

from anabranch.config import RunConfig
from anabranch.protocol import messages as msg
from anabranch.protocol.context.rate_limits_and_bans import RateLimits
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members, decode_entry
from anabranch.protocol.messages import Fence
from anabranch.protocol.messages.table import ALLOWANCES, PAST, Rate
from anabranch.protocol.observers.report_buffer import LINES_AT_ONCE, LINES_MAX, PAUSE_S
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Link, Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms import fault_points as faults
from support.swarms.fault_points import Fault
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world

STRANGER = "stranger"


def world_of(run: RunConfig) -> World:
    return training_world(run, small_model(run), MadeUpBatches(run), [2, 2], 1, 1, capacity=2)


def connect_stranger(world: World, target: Node) -> None:
    """Link a process with a relay ticket, which is no member, to the target; answers to it are lost."""
    peer = Peer(STRANGER, 1, world.genesis.leader, world.settings)
    node = Node(world, peer, Member(id=STRANGER, stage=-1, incarnation=1, numerics_class="", capacity=1), 1.0)
    node.alive = False
    world.nodes[STRANGER] = node
    credential = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S)
    target.link_up(Link(node, target), STRANGER, 1, credential)


def ping(fence: Fence) -> msg.AnyMessage:
    return msg.Ping(1, 0)


def past_forward(fence: Fence) -> msg.AnyMessage:
    return msg.Forward(Fence(fence.epoch, 1, fence.t - 1, fence.base, 0), 0, ("d0",), True, False, True, 1)


@pytest.mark.parametrize(
    ("flood", "budget"), [(ping, ALLOWANCES[Rate.HEARTBEAT]), (past_forward, PAST)], ids=["ping", "past"]
)
def test_a_flood_ends_with_the_link_and_costs_no_step(flood: object, budget: object) -> None:
    run = small_run(minimum=2, steps=3)
    world = world_of(run)
    notes: list[str] = []
    taken: list[int] = []

    def attack(world: World, node: Node) -> None:
        iteration = node.peer.iteration
        assert iteration is not None and callable(flood)
        connect_stranger(world, node)
        message, before, count = flood(Fence(1, 1, iteration.t, iteration.base, 0)), len(world.notes), 0
        while STRANGER in node.peer.ctx.links.up:
            node.handle(ev.Received(STRANGER, message, torch.ones(1, 8, 16)))
            count += 1
        taken.append(count)
        notes.extend(str(f["reason"]) for _, _, kind, f in world.notes[before:] if kind == "refused")
        assert node.peer.ctx.rate_limits.banned(STRANGER, node.peer.ctx.clock.now)
        node.link_up(Link(world.nodes[STRANGER], node), STRANGER, 1, None)
        assert STRANGER not in node.links

    fault = Fault(world, ("r1.0",), faults.received(msg.Forward, 2), attack)
    world.run(until_s=300)
    check_equal(world, run)
    assert fault.delivered
    assert taken == [budget.burst + 1]  # type: ignore[attr-defined]
    assert any("the connection: too many messages" in note for note in notes)


def test_a_member_that_floods_the_leader_loses_its_seat() -> None:
    """Its link to the leader is closed, others hear it: the leader waited for it for as long as it was heard,
    and its stage could not reduce (17 s in a run of real processes, until the guest ended)."""
    settings = Settings("flood", 1, 2, 6, 30, min_replicas=2)
    machines = [Machine("d0", 0), *(Machine(f"r{s}.{n}", s, capacity=3) for s in (1, 2) for n in range(3))]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    flooded: list[float] = []

    def attack(node: Node, event: object) -> None:
        if node.id == "d0" and world.history().t >= 5 and not flooded and "r1.1" in node.links:
            flooded.append(world.clock.now)
            while "r1.1" in node.peer.ctx.links.up:
                node.handle(ev.Received("r1.1", msg.Ping(1, 0), None))

    world.watchers.append(attack)
    world.run(until_s=300.0)
    assert flooded and world.history().t == 30 and wrong_states(world) == {}
    records = [decode_entry(line).record for line in world.log]
    removed = {p: why for one in records if isinstance(one, Members) for p, why in one.removed.items()}
    assert removed.keys() == {"r1.1"} and "too many messages" in removed["r1.1"]
    assert world.clock.now < 60.0


def test_a_voter_that_hands_on_kept_reports_stays_within_the_budget() -> None:
    """Reports of a single line each, as fast as `ReportBuffer` sends them, until none is left."""
    limits, now = RateLimits(), 0.0
    for number in range(LINES_MAX):
        now += PAUSE_S if number % LINES_AT_ONCE == 0 else 0.0
        assert limits.charge("voter", ALLOWANCES[Rate.EVENTS], now)


def test_no_honest_peer_is_met_by_a_budget() -> None:
    run = small_run(minimum=2, steps=3)
    world = world_of(run)
    world.run(until_s=300)
    check_equal(world, run)
    assert not any(node.peer.ctx.rate_limits.over_budget for node in world.nodes.values())
