"""Replicas that cannot reach each other: which of them leave when their reduce is stuck."""

from __future__ import annotations

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.fleet.unreachable_pairs import TRIES, TRIES_APART, UnreachablePairs
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members


def taken_out(
    served_since: dict[str, int], apart: dict[str, set[str]], t: int = 40, tries: int = TRIES_APART
) -> set[str]:
    """Replicas of stage 1 that leave at iteration t. served_since: replica -> its first iteration."""
    ctx = make_context("d", 1, 0, Settings("apart", 1, 1, 4, 100), "d")
    members = (Member("d", 0, 1, "", 4), *(Member(peer, 1, 1, "", 4) for peer in served_since))
    ctx.run.membership.apply(Members(1, joined=members, active_from={"d": 1, **served_since}))
    ctx.run.membership.open(t, 1)
    pairs = UnreachablePairs(ctx)
    for peer, others in apart.items():
        pairs.told(peer, others)
    return set(pairs.take_out(sorted(served_since), tries, {}, ()))


@pytest.mark.parametrize("newcomers", [1, 3, 5])
def test_newcomers_do_not_talk_an_old_replica_out(newcomers: int) -> None:
    """Each of them claims not to reach the one that served from the beginning."""
    guests = [f"guest{number}" for number in range(newcomers)]
    served = {"old": 1, "other": 2, **dict.fromkeys(guests, 39)}
    assert taken_out(served, {guest: {"old"} for guest in guests}) == set(guests)


def test_who_is_cut_off_from_most_leaves() -> None:
    served = dict.fromkeys(("a", "b", "c", "e"), 1)
    assert taken_out(served, {"b": {"a"}, "c": {"a"}, "e": {"a"}}) == {"a"}


def test_of_those_that_report_nothing_the_newest_leaves() -> None:
    """The one with the highest id left, which says nothing about it."""
    assert taken_out({"guest": 39, "old": 1, "other": 2}, {}, tries=TRIES) == {"guest"}


def test_nobody_confirms_its_own_report() -> None:
    pairs = UnreachablePairs(make_context("d", 1, 0, Settings("apart", 1, 1, 4, 100), "d"))
    pairs.told("a", {"a"})
    assert not pairs.reported and not pairs.among(["a", "b"])
    pairs.told("a", {"a", "b"})
    assert pairs.among(["a", "b"]) and not pairs.among(["a", "c"])
    assert pairs.unconfirmed(["a", "b"]) == {"a"} and pairs.unconfirmed(["a", "c"]) == frozenset()
    pairs.told("b", {"a", "c"})
    assert pairs.unconfirmed(["a", "b", "c"]) == frozenset()
    pairs.told("b", ())
    assert pairs.unconfirmed(["a", "b", "c"]) == {"a"}
