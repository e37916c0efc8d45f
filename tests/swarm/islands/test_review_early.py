"""Attacks of a reviewer on contributions that are sent early: false orders, thin lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from msgspec.structs import replace

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.island_rounds import IslandRounds
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.rounds.plan import even_plan, next_plan
from swarm.islands.test_early_contributions import Sent, uneven_world
from swarm.islands.test_rounds import check_replayed, island_run


def test_a_data_node_refuses_units_that_it_does_not_hold() -> None:
    """Units of stage 0 are twice as many as slots: an order for all of them is no reason to fail."""
    run = island_run()
    world = uneven_world(run)
    answers: list[str | None] = []

    def ask(sender: str) -> None:
        lead = world.leading().peer.lead
        assert lead is not None and lead.round is not None
        units, order = 2 * len(lead.round.slots), lead.round.attempts[1]
        for at, peer in enumerate(("d0", "d1")):
            all_reduce = world.nodes[peer].peer.replica.all_reduce
            assert all_reduce.iteration is not None
            lacking = set(range(units // 2, units)) - all_reduce.iteration.claims.held
            owners = tuple(at if unit in lacking else 1 - at for unit in range(units))
            false = replace(order, stage=0, members=("d0", "d1"), owners=owners, helpers=(), sums=())
            answers.append(all_reduce.on_attempt(false) if lacking else None)

    sent = Sent(world, ask)
    world.run(until_s=2000)
    assert sent.acted
    assert [answer for answer in answers if answer and "do not hold" in answer]
    check_replayed(run, world)


def test_quick_machines_are_in_time_in_a_fleet_of_thin_lines() -> None:
    """Six of eight machines take few steps, since they send for long. The other two take the others' steps,
    and are not late by the time in which those six are ready."""
    rounds = Rounds(inner=10, slots=8)
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 8, 9, rounds=rounds), "d")
    peers = [f"r{k}" for k in range(8)]
    machines = [Member(peer, 1, 1, "", 4, forward_s=1.0, backward_s=2.0) for peer in peers]
    joined = (Member("d", 0, 1, "", 4), *machines)
    ctx.run.membership.apply(Members(1, joined=joined, active_from=dict.fromkeys(["d", *peers], 1)))
    absent = SimpleNamespace(silent=frozenset, present=ctx.run.membership.live)
    leader = IslandRounds(ctx, cast(Admission, SimpleNamespace(absent=absent)), bool)
    rates = {(peer,): leader._rate(peer) for peer in peers}
    sends_s = {(peer,): 45.0 for peer in peers[:6]}
    plan = next_plan(even_plan(rounds), {}, rounds, rates, 1, sends_s=sends_s)
    current = Round(2, "b", ctx.clock.now)
    current.slots = plan
    current.planned_s = leader.planned_s(current)
    ends = {k: slot.steps / rates[slot.crew] for k, slot in enumerate(plan)}
    assert max(ends.values()) > 2.0 * sorted(ends.values())[5], ends
    opened_at = ctx.clock.now
    for at in sorted({*ends.values()}):
        ctx.clock.now = opened_at + at
        leader.drop_late(current, False)
        current.complete = {k for k, end in ends.items() if end <= at}
        leader.drop_late(current, False)
    assert not current.dropped
