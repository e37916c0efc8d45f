"""Members that block a reduce whose parts the coordinator sums: who loses its seat, who gets more time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol.coordinator.reduce_attempts import STALL_FLOOR_S
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.coordinator.witnessed_reduces import MOST_BYTES, TRIES_LATE, WITNESSED_FOR
from anabranch.protocol.messages import Prepared
from anabranch.protocol.reduce.partial_sums import ReduceAccount
from protocol.coordinator.test_prepared import BASE, TRUE, Stage, T


class Stalls(Stage):
    """Stalls of witnessed reduces of a stage of three."""

    def __init__(self) -> None:
        super().__init__("a b c", summed=TRUE)
        self.admission.has_last = lambda peer: True

    def stall(self, current: Round, *lacking: str, unusable: str = "") -> tuple[set[str], list[str]]:
        """Members to remove, and members that are given more time, as the parts of `lacking` did not come and
        the sum of `unusable` is no gradient."""
        account = ReduceAccount(dict.fromkeys(lacking, 0), {unusable}, not lacking, None)
        self.reduces.witnessing.account = lambda _: account
        found = self.reduces.witnessing.at_fault(current, self.attempt, {})
        assert found is not None
        return set(found[0]), found[1]


def in_iteration(t: int) -> Round:
    return Round(t, BASE, 0.0)


def test_a_late_member_gets_more_time_once() -> None:
    stalls, current = Stalls(), in_iteration(T)
    assert stalls.stall(current, "a") == (set(), ["a"])
    assert stalls.stall(current, "a") == ({"a"}, [])
    assert stalls.stall(in_iteration(T + WITNESSED_FOR), "a", "b") == ({"a"}, ["b"])
    assert stalls.stall(in_iteration(T + WITNESSED_FOR + 1), "a") == (set(), ["a"])


def test_a_repeated_reduce_gives_no_more_time() -> None:
    """Its patience is doubled already."""
    stalls, current = Stalls(), in_iteration(T)
    current.retries[1] = 1
    assert stalls.stall(current, "a") == ({"a"}, [])


def test_a_sum_that_is_no_gradient_is_no_matter_of_time() -> None:
    assert Stalls().stall(in_iteration(T), unusable="a") == ({"a"}, [])


def test_a_report_withheld_by_all_is_asked_for_again_first() -> None:
    stalls, current = Stalls(), in_iteration(T)
    assert stalls.stall(current) == (set(), [])
    assert stalls.stall(current) == (set(), ["a", "b", "c"])


def test_a_member_without_a_link_is_judged_by_its_parts_too() -> None:
    """The leader does not reach it, and others hear it: it stayed in every attempt, and others lost their
    seats for it."""
    stalls, current = Stalls(), in_iteration(T)
    del stalls.reduces.ctx.links.up["a"]
    for _ in range(TRIES_LATE):
        assert stalls.stall(current, "a") == (set(), [])
        current.retries[1] = current.retries.get(1, 0) + 1
    assert stalls.stall(current, "a") == ({"a"}, [])


def test_a_member_without_a_link_is_banned_when_it_does_that_again() -> None:
    """It may be honest and cut off the first time."""
    for again_at, bans in ((T + 1, True), (T + WITNESSED_FOR, True), (T + WITNESSED_FOR + 1, False)):
        stalls = Stalls()
        ctx, witnessing = stalls.reduces.ctx, stalls.reduces.witnessing
        del ctx.links.up["a"]
        witnessing.take_out("a", "late", T)
        assert list(stalls.admission.going()) == ["a"] and not ctx.rate_limits.banned("a", 0.0)
        stalls.admission._removals.clear()  # it left, and came back
        witnessing.take_out("a", "late", again_at)
        assert list(stalls.admission.going()) == ["a"] and ctx.rate_limits.banned("a", 0.0) == bans


def test_a_forger_is_judged_by_its_parts_as_others_are() -> None:
    stalls, current = Stalls(), in_iteration(T)
    stalls.reduces.ctx.links.forged("a")
    current.retries[1] = 1
    assert stalls.stall(current, "a") == ({"a"}, [])


def test_whose_parts_came_is_not_blamed_for_a_sum_that_lacks_others() -> None:
    stalls, current = Stalls(), in_iteration(T)
    stalls.stall(current, "a")
    assert stalls.reduces.witnessing.blocking(stalls.attempt, ()) == ["a"]
    stalls.stall(current)
    assert stalls.reduces.witnessing.blocking(stalls.attempt, ("b",)) == ["a", "c"]


def test_a_reduce_repeated_early_gives_more_time_to_all_but_those_that_none_confirms() -> None:
    """`a` and `b` have lost each other; `c` alone says that it does not reach `a`."""
    stalls, current = Stalls(), in_iteration(T)
    current.attempts, current.retries[1] = {1: stalls.attempt}, 1
    parted = stalls.admission.parted
    for peer, others in (("a", "b"), ("b", "a"), ("c", "a")):
        parted.told(peer, others)
    current.hurried[1] = parted.unconfirmed(stalls.attempt.members)
    assert stalls.stall(current, "a", "b", "c") == ({"c"}, ["a", "b"])
    assert stalls.stall(current, "a", "b") == ({"a", "b"}, [])


class Waits(Stage):
    """Waits for a step that lacks the reduce of stage 1 alone, none of which is witnessed yet."""

    def __init__(self) -> None:
        super().__init__("a b c")
        ends = msgspec.structs.replace(self.attempt, stage=0, members=("d0",), owners=(0, 0, 0, 0))
        done = Prepared(ends.fence, 0, ends.attempt, TRUE, {})
        self.current = Round(T, BASE, 0.0, attempts={0: ends, 1: self.attempt}, prepared={0: {"d0": done}})

    def patience_s(self) -> float:
        return self.reduces.patience_s(self.current)

    def told(self, peer: str, other: str, at: float) -> None:
        self.reduces.ctx.clock.now = at
        self.admission.parted.told(peer, (other,))


def test_a_reduce_whose_members_cannot_reach_each_other_is_repeated_soon() -> None:
    """After a quarter of the usual wait, and as long after they said so: one of them may be gone, and the
    leader not know it yet."""
    waits = Waits()
    assert waits.patience_s() == STALL_FLOOR_S
    waits.told("a", "b", 0.0)
    assert waits.patience_s() == STALL_FLOOR_S / 4
    waits.told("a", "c", 3.0)
    assert waits.patience_s() == STALL_FLOOR_S / 4, "it has said so since the beginning"
    later = Waits()
    later.told("a", "b", 3.0)
    assert later.patience_s() == 3.0 + STALL_FLOOR_S / 4
    much_later = Waits()
    much_later.told("a", "b", 4.0)
    assert much_later.patience_s() == STALL_FLOOR_S


def test_a_leader_that_saw_no_step_yet_gives_a_reduce_the_time_that_it_should_need() -> None:
    """A quarter of that would end each reduce in which a member says that it cannot reach another, before it
    could end by itself."""
    waits = Waits()
    waits.told("a", "b", 0.0)
    waits.current.worked_s = 40.0
    assert waits.patience_s() == 40.0
    waits.current.worked_s = 2.0
    assert waits.patience_s() == 2.0
    waits.reduces.step_s = 40.0
    assert waits.patience_s() == 40.0


@pytest.mark.parametrize("case", ["unheard", "no member", "early", "repeated", "others lack", "too large"])
def test_a_reduce_that_another_reason_may_hold_up_takes_its_time(case: str) -> None:
    waits = Waits()
    waits.told("a", "z" if case == "no member" else "b", 0.0)
    if case == "unheard":
        waits.reduces.ctx.links.suspects.add("b")
    elif case == "early":
        waits.current.early.add(1)
    elif case == "repeated":
        waits.current.retries[1] = 1
    elif case == "others lack":
        waits.current.prepared.clear()
    elif case == "too large":
        run = waits.reduces.ctx.run
        run.settings = replace(run.settings, blocks=(1,), block_bytes=MOST_BYTES)
    assert waits.patience_s() == STALL_FLOOR_S * (2.0 if case == "repeated" else 1.0)


def test_reports_that_differ_are_no_error_in_a_reduce_that_waits_for_nothing_else() -> None:
    """Whoever asks how long to wait may be the first to compare the reports, and gives the reduce up (a
    KeyError at the leader, by one replica of two that claims not to reach the other)."""
    waits = Waits()
    waits.told("a", "b", 0.0)
    about = waits.attempt.fence, 1, waits.attempt.attempt
    waits.current.prepared[1] = {peer: Prepared(*about, f"digest of {peer}", {}) for peer in ("a", "b", "c")}
    assert waits.patience_s() == STALL_FLOOR_S and 1 not in waits.current.attempts
