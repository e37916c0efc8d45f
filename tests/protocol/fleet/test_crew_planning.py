"""Crews of the next round at the log's leader: second seats, and crews that are put together anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.crew_planning import CrewPlanning
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Crew, Member, Members, Slot
from anabranch.protocol.rounds.late_machines import RESTS, LateMachines
from anabranch.protocol.rounds.plan import Plan

STAGES, SLOTS, COUNT = 4, 2, 32
T = 5


def planning(
    speeds: dict[str, float], shared: int = 0, carries: bool = False, lines: Callable[[str], float] = bool
) -> CrewPlanning:
    """Planning of a leader whose members are one data node and the relays of `speeds` ("NAME.STAGE" -> inner
    steps per second). shared: microbatches of each of two islands that relays can hold (0: they hold one).
    carries: True if slots keep state. lines: measured bits per second of a relay's line."""
    rounds = Rounds(start=2, inner=10, slots=SLOTS, carries=carries, pipeline=True)
    settings = Settings("r", 1, STAGES, SLOTS * COUNT, 9, activation_bytes=1, rounds=rounds)
    ctx = make_context("d", 1, 0, settings, "d")
    relays = [Member(p, int(p[-1]), 1, "", 64, shared=shared) for p in speeds]
    if not shared:
        relays = [Member(p.id, p.stage, 1, "", 64) for p in relays]
    joined = (Member("d", 0, 1, "", 64), *relays)
    ctx.run.membership.apply(Members(1, joined=joined, active_from={member.id: 1 for member in joined}))
    ways = SimpleNamespace(
        latencies=lambda regions: lambda one, other: 0.001, rates=lambda peer: iter([[lines(peer)]])
    )
    admission = cast(Admission, SimpleNamespace(going=list, ways=ways))
    return CrewPlanning(ctx, admission, speeds.__getitem__, LateMachines())


def crews(made: CrewPlanning, plan: Plan, accepted: Collection[int]) -> dict[Crew, float]:
    return made.crews(plan, accepted, T, lambda peer: True)


def fleet(**speeds: float) -> dict[str, float]:
    return {f"{name}.{stage}": speed for name, speed in speeds.items() for stage in range(1, STAGES + 1)}


def crew(*names: str) -> Crew:
    return (*(f"{name}.{stage}" for stage, name in enumerate(names, 1)), "d")


def plan_of(found: Iterable[Crew]) -> Plan:
    """Plan of a round in which these crews have ten inner steps each."""
    return tuple(Slot(0, 10, crew[0], others=crew[1:]) for crew in found)


def measured() -> tuple[CrewPlanning, Plan, float]:
    """Planning in which the second of two crews was half as quick as expected; their plan; the first one's
    inner steps per second, which were as expected."""
    names = crew(*"aaaa"), crew(*"bbbb")
    made = planning(fleet(a=4.0, b=4.0), 8)
    expected = crews(made, (), ())[names[0]]
    made._rates = {names[0]: expected, names[1]: expected / 2.0}
    return made, plan_of(names), expected


def test_two_crews_of_one_relay_share_its_time() -> None:
    """The slow crew needs a quarter of the quick relay, which has the rest for its own."""
    speeds = fleet(a=4.0, b=1.0)
    alone = crews(planning(speeds), (), ())
    del speeds["b.2"]
    found = crews(planning(speeds, shared=8), (), ())
    assert set(found) == {crew(*"aaaa"), crew(*"baaa"[:1], "a", "b", "b")}
    assert found[crew("b", "a", "b", "b")] == pytest.approx(alone[crew(*"bbbb")], rel=0.1)
    assert 0.7 < found[crew(*"aaaa")] / alone[crew(*"aaaa")] < 0.8
    assert set(crews(planning(speeds), (), ())) == {crew(*"aaaa")}, "relays that hold one island"

    speeds = fleet(a=4.0, b=4.0)
    del speeds["b.2"]
    both = crews(planning(speeds, shared=8), (), ())
    assert all(0.45 < rate / alone[crew(*"aaaa")] < 0.6 for rate in both.values()) and len(both) == 2


def test_the_second_seat_goes_to_who_computes_and_sends_it_soonest() -> None:
    speeds = fleet(a=4.0, b=4.0, c=4.0)
    del speeds["c.2"]
    for slow in "ab":
        made = planning(speeds, 8, lines=lambda peer, slow=slow: 1.0 if peer == f"{slow}.2" else 1e9)
        made.ctx.run.settings.rounds.__dict__["slots"] = 3
        other = "b" if slow == "a" else "a"
        assert sum(f"{other}.2" in found for found in crews(made, (), ())) == 2


@pytest.mark.parametrize("why", ["it is back", "another left", "late", "measured by another leader"])
def test_a_relay_that_failed_two_crews_is_of_one_for_a_while(why: str) -> None:
    """It may have died of want of memory: with two seats again, it would cost two slots again."""
    speeds = fleet(a=4.0, b=1.0)
    del speeds["b.2"]
    made = planning(speeds, shared=8)
    plan = plan_of(crews(made, (), ()))
    [shared] = [k for k, slot in enumerate(plan) if slot.peer == "b.1"]
    membership = made.ctx.run.membership
    if why == "it is back":
        again = structs.replace(membership.members["a.2"], incarnation=2)
        left, joined = {"a.2": "its process ended"}, (again,)
        membership.apply(Members(2, removed=left, joined=joined, active_from={"a.2": T}))
    made.opened(T - (why != "measured by another leader"))
    accepted = {1 - shared: plan[1 - shared].crew} if why in ("late", "another left") else {}
    made.measure(T - 1, plan, 0.0, accepted, () if why == "late" else set(range(2)) - accepted.keys())
    assert not made.late, "the machines that share its other crew are not to blame"
    found = made.crews((), (), T, lambda peer: True)
    assert len(found) == (1 if why in ("it is back", "late") else 2)
    assert len(made.crews((), (), T + RESTS, lambda peer: True)) == 2


@pytest.mark.parametrize("carries", [False, True])
def test_crews_in_time_are_put_together_anew_where_others_are(carries: bool) -> None:
    """They keep what they carry, and stay together where nobody comes or goes."""
    speeds = fleet(a=4.0, b=1.0)
    mixed = crew(*"abab"), crew(*"baba")
    plan = plan_of(mixed)
    assert set(crews(planning(speeds, carries=carries), plan, (0, 1))) == set(mixed)
    plan = (plan[0], Slot(0, 0))  # a machine of the second crew was away in the last round
    found = crews(planning(speeds, carries=carries), plan, (0,))
    assert set(found) == set(mixed if carries else (crew(*"aaaa"), crew(*"bbbb")))


def test_a_crew_with_another_machine_is_as_far_from_expected_as_it_was() -> None:
    """Lines are in no estimate: those of one crew are thin, so it takes twice the expected time."""
    made, plan, expected = measured()
    assert crews(made, plan, (0, 1)) == pytest.approx(made._rates)
    made._rates = {plan[0].crew: expected}  # its machine of stage 2 is gone
    membership = made.ctx.run.membership
    membership.apply(Members(2, removed={"b.2": "silent"}))
    found = crews(made, plan, (0,))
    assert found[crew("b", "a", "b", "b")] == pytest.approx(found[plan[0].crew] / 2.0)
