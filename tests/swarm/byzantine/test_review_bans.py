"""Honest peers keep their seats although the leader bans members that flood it (I5, I7)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from anabranch.protocol import messages as msg
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.context.rate_limits_and_bans import REFUSALS
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members, decode_entry
from anabranch.protocol.observers.report_budget import PEER, TICKET
from anabranch.protocol.observers.report_buffer import LINES_AT_ONCE, ReportBuffer
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states

STEPS = 12
#: Time (s) for which a process is stopped: a machine that sleeps, or a debugger.
STOPPED_S = 600.0


def world_of(replicas: int, voters: int = 1) -> World:
    settings = Settings("bans", 1, 2, 6, STEPS, min_replicas=1, voters=voters)
    relays = (Machine(f"r{s}.{n}", s, capacity=3) for s in (1, 2) for n in range(replicas))
    world = counting_world(settings, [Machine("d0", 0), *relays], 1)
    Invariants(world)
    return world


def removed(world: World) -> dict[str, str]:
    """Members that the log removes -> the reason."""
    records = [decode_entry(line).record for line in world.log]
    return {p: why for one in records if isinstance(one, Members) for p, why in one.removed.items()}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("stopped", "replicas"), [("d0", 2), ("r1.0", 1)])
def test_a_process_that_was_stopped_bans_nobody_and_is_not_banned(stopped: str, replicas: int) -> None:
    """The run needs it, so that it stays a member. It was pinged all the time, and answers hundreds of pings
    at once: the leader banned all members, or all banned it, and the run had stopped for good."""
    world, since = world_of(replicas), list[float]()

    def stop(node: Node, event: ev.Event) -> None:
        if world.history().t >= 5 and not since:
            since.append(world.clock.now)
            world.clock.after(0.0, world.nodes[stopped].freeze)
            world.clock.after(STOPPED_S, world.nodes[stopped].thaw)

    world.watchers.append(stop)
    world.run(until_s=STOPPED_S + 100.0)
    assert since and world.clock.now > STOPPED_S and world.history().t == STEPS and wrong_states(world) == {}
    assert not any(node.peer.ctx.rate_limits.over_budget for node in world.nodes.values())
    assert removed(world) == {}


def test_the_last_replica_of_a_stage_keeps_its_seat_when_the_leader_bans_it() -> None:
    """Without it the run would have stopped for good; now it waits until the ban is over."""
    world, flooded = world_of(1), list[float]()

    def flood(node: Node, event: ev.Event) -> None:
        if node.id == "d0" and world.history().t >= 5 and not flooded:
            flooded.append(world.clock.now)
            while "r1.0" in node.peer.ctx.links.up:
                node.handle(ev.Received("r1.0", msg.Ping(1, 0), None))

    world.watchers.append(flood)
    world.run(until_s=200.0)
    assert flooded and world.history().t == STEPS and wrong_states(world) == {}
    assert world.nodes["d0"].peer.ctx.rate_limits.over_budget["Ping"] and removed(world) == {}


def test_a_peer_whose_ticket_others_have_used_up_keeps_its_seat_although_it_reports() -> None:
    """Guests with its ticket fill the event log; the lines that are refused then cost it nothing."""
    world, sent = world_of(2), list[str]()
    ticket = "ticket of many"

    def report(node: Node, event: ev.Event) -> None:
        if node.id != "d0" or world.history().t < 5 or sent:
            return
        budget, peer = node.peer.reception.handlers.report_budget, node.peer
        peer.credentials["r1.0"] = replace(peer.credentials["r1.0"], ticket=ticket)
        for guest in range(int(TICKET.burst / PEER.burst)):
            assert budget.take(f"guest {guest}", ticket, int(PEER.burst), peer.ctx.clock.now)
        for number in range(int(REFUSALS.burst) + 10):
            sent.append(f"line {number}")
            node.handle(ev.Received("r1.0", msg.Report((sent[-1].encode() * 1000,)), None))

    world.watchers.append(report)
    world.run(until_s=200.0)
    counts = world.nodes["d0"].peer.ctx.rate_limits.counts["r1.0"]
    assert counts["Report"] > REFUSALS.burst and removed(world) == {}
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_peer_that_votes_no_longer_hands_no_reports_over() -> None:
    """The founder refuses them: some hundred in a second, after which it bans the peer."""
    ctx = make_context("v", 1, 1, Settings("run", 1, 1, 4, 100), "d")
    ctx.run.found_by("d")
    members = (Member("d", 0, 1, "", 1), Member("v", 1, 1, "", 1))
    ctx.run.membership.apply(Members(1, members, {"d": 1, "v": 1}))
    ctx.links.up["d"] = AdaptiveTimeout(0.0, 1.0)
    buffer = ReportBuffer(ctx)
    for voters, handed in ((("d/0",), 0), (("d/0", "v/0"), LINES_AT_ONCE)):
        for number in range(2 * LINES_AT_ONCE):
            buffer.keep("r", (b"%d" % number,))
        ctx.log.elect(voters)
        buffer.tick()
        assert len(ctx.outbox.take_effects()) == handed
        ctx.clock.now += 1.0
