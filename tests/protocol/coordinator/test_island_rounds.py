"""Speeds of machines at the leader of a run with rounds of islands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.island_rounds import (
    LEAST_ROUND_S,
    OVERDUE,
    RATES_KEPT,
    REMEMBERED,
    IslandRounds,
)
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members, Slot
from anabranch.protocol.rounds.plan import next_plan
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.protocol.telemetry.link_table import LinkMeasurements


def test_speeds_of_former_peers_are_bounded() -> None:
    """Volunteers come with new keys for weeks; each left its speed with the leader for ever."""
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 3, 9), "d")
    rounds = IslandRounds(ctx, cast(Admission, None), bool)
    for number in range(RATES_KEPT + 10):
        peers = ("stays", f"p{number}")
        rounds._units = dict.fromkeys(peers, 6)
        for peer in peers:
            rounds.on_applied(peer, {"Forward": 2.0})
    assert len(rounds._rates) == RATES_KEPT
    assert rounds._rates["stays"] == rounds._rates[f"p{RATES_KEPT + 9}"] == 3.0 and "p0" not in rounds._rates


def test_a_repeated_report_counts_once() -> None:
    """Each report of a machine that was late may double its rate, and reports are repeated every second or
    two, by honest machines too."""
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 3, 9, rounds=Rounds(inner=4, slots=3)), "d")
    rounds = IslandRounds(ctx, cast(Admission, None), bool)
    for rate in (2.0, 4.0):
        rounds._limits.setdefault("late", 1.0)
        rounds._units = {"late": 6}
        for _ in range(5):
            rounds.on_applied("late", {})
            rounds.on_applied("late", {"Forward": 1.0})
        assert rounds._rates["late"] == rounds._limits["late"] == rate


def test_a_joiner_is_believed_as_quick_as_others_with_its_times() -> None:
    """Times at joining lack the optimizer's steps; the lower median of what others reach of theirs counts, so
    that one machine that reports itself far too quick moves nobody else."""
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 3, 9, rounds=Rounds(inner=4, slots=3)), "d")
    times = {"a": 1.0, "b": 2.0, "liar": 1e-9, "joiner": 0.5, "mute": 0.0}
    joined = tuple(Member(p, 1, 1, "", 4, forward_s=s, backward_s=2.0 * s) for p, s in times.items())
    ctx.run.membership.apply(Members(1, joined=joined))
    rounds = IslandRounds(ctx, cast(Admission, None), bool)
    alone = rounds._rate("joiner")
    rounds._units = {"a": 6, "b": 6, "liar": 6}
    for peer, seconds in (("a", 72.0), ("b", 144.0), ("liar", 72.0)):  # four times as long as they measured
        rounds.on_applied(peer, {"Forward": seconds})
    assert rounds._rate("joiner") == alone / 4.0 == 2.0 * rounds._rate("a")
    assert rounds._rate("mute") == 1.0 / rounds._of_inner_step


class WaitingRun:
    """Round 2 of three machines at a leader that waits for late slots; `removed` and `expelled` are its
    decisions."""

    def __init__(self) -> None:
        rounds = Rounds(inner=4, slots=3, drops=False)
        self.ctx = ctx = make_context("d", 1, 0, Settings("r", 1, 1, 3, 9, rounds=rounds), "d")
        machines = [Member(peer, 1, 1, "", 4, forward_s=1.0, backward_s=2.0) for peer in "abc"]
        joined = (Member("d", 0, 1, "", 4), *machines)
        ctx.run.membership.apply(Members(1, joined=joined, active_from=dict.fromkeys("dabc", 1)))
        self.removed, self.expelled = dict[str, str](), dict[str, str]()
        admission = SimpleNamespace(
            going=lambda: {*self.removed, *self.expelled},
            remove=self.removed.setdefault,
            expel=self.expelled.setdefault,
        )
        self.rounds = IslandRounds(ctx, cast(Admission, admission), bool)
        self.open(2)

    def open(self, t: int) -> None:
        """Open round t at this moment; its slots have the machines a, b, c, and that of a is ready when 0.9
        of a slot's time is over."""
        self.round = Round(t, "b", self.ctx.clock.now)
        self.round.slots = tuple(Slot(4 * t, 4, peer) for peer in "abc")
        self.slot_s = self.rounds.expected_s(self.round)
        self.link("abc")
        self.look(0.9)
        self.round.complete = {0}
        self.look(0.0)

    def link(self, peers: str) -> None:
        self.ctx.links.up = {peer: AdaptiveTimeout(self.ctx.clock.now, 1.0) for peer in peers}

    def look(self, slots: float) -> None:
        """Let the leader look at the round after `slots` times what a slot takes."""
        self.ctx.clock.now += slots * self.slot_s
        self.rounds.drop_late(self.round, False)


def test_nobody_is_overdue_while_the_leaders_own_line_is_down() -> None:
    """Machines b and c finished while it was, and their claims come after their links."""
    run = WaitingRun()
    run.link("")
    run.look(2.0)
    run.look(OVERDUE)
    run.link("b")
    run.look(0.01)
    assert not run.removed
    run.round.complete = {0, 1}
    run.look(0.0)
    run.look(OVERDUE - 0.1)
    assert not run.removed, "c begins anew, too: what it needs may not have come"
    run.look(0.1)
    assert set(run.removed) == {"c"}


def test_a_forger_or_a_machine_without_a_link_is_overdue_like_others() -> None:
    run = WaitingRun()
    run.ctx.links.forged("b")
    run.link("ab")
    run.look(OVERDUE)
    assert set(run.removed) == {"b", "c"}


def test_a_machine_is_expelled_if_it_is_overdue_again_soon() -> None:
    run = WaitingRun()
    run.look(OVERDUE)
    for t, expelled in ((2 + REMEMBERED, True), (3 + 2 * REMEMBERED, False)):
        run.removed.clear()
        run.expelled.clear()
        run.open(t)
        run.look(OVERDUE)
        assert set(run.expelled if expelled else run.removed) == {"b", "c"}
        assert not (run.removed if expelled else run.expelled)


def plan_after(lost: str) -> tuple[Slot, ...]:
    """Plan after a skipped round 4 of the machines a and b, which merges late contributions. lost: how b lost
    its own ("": not at all)."""
    rounds = Rounds(inner=4, slots=2, carries=True, merges=True)
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 2, 9, rounds=rounds), "d")
    joined = tuple(Member(peer, int(peer != "d"), 1, "", 4, forward_s=1.0, backward_s=2.0) for peer in "dab")
    active_from = {"d": 1, "a": 1, "b": 4 if lost == "left" else 1}
    ctx.run.membership.apply(Members(1, joined=joined, active_from=active_from))
    admission = SimpleNamespace(going=set, ways=LinkMeasurements())
    current = Round(4, "b", ctx.clock.now)
    current.slots = tuple(Slot(12, 4, peer, 3) for peer in "ab")
    if lost == "overflow":
        current.witnesses = {(1, 1): {"b": "weights"}}
    return IslandRounds(ctx, cast(Admission, admission), lambda peer: True).next(current, {})


def test_a_machine_that_lost_its_contribution_is_not_asked_to_merge_it() -> None:
    """It left and came back in the round, or its contribution overflowed: a plan that merges that all the
    same has a slot that nobody can begin, and if that is the only one the run stands still (I4)."""
    assert [(slot.carried, slot.late) for slot in plan_after("")] == [(4, 4), (4, 4)]
    for lost in ("left", "overflow"):
        assert [(slot.carried, slot.late) for slot in plan_after(lost)] == [(4, 4), (0, 0)], lost


def test_a_round_in_which_nobody_can_begin_a_slot_ends() -> None:
    """Its only slot is to be merged with a contribution that its machine never began: its data node could not
    reach it in the round before (I4)."""
    rounds = Rounds(inner=4, slots=2, carries=True, merges=True)
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 2, 9, rounds=rounds), "d")
    joined = tuple(Member(peer, int(peer != "d"), 1, "", 4, forward_s=1.0, backward_s=2.0) for peer in "db")
    ctx.run.membership.apply(Members(1, joined=joined, active_from={"d": 1, "b": 1}))
    absent = SimpleNamespace(silent=frozenset)
    leader = IslandRounds(ctx, cast(Admission, SimpleNamespace(absent=absent)), bool)
    current = Round(5, "b", ctx.clock.now)
    current.slots = (Slot(12, 0), Slot(16, 4, "b", 4, 4))
    begun_at, slot_s = ctx.clock.now, leader.expected_s(current)
    over_s = OVERDUE * LEAST_ROUND_S
    for seconds, ends in ((0.0, False), (over_s - 1.0, False), (over_s, True)):
        assert slot_s < LEAST_ROUND_S
        ctx.clock.now = begun_at + seconds
        leader.drop_late(current, False)
        assert (leader.stranded(current) is not None) == ends, seconds
    following = next_plan(current.slots, {}, rounds, {("b",): 1.0}, current.t)
    assert (following[1].carried, following[1].late) == (0, 0)
