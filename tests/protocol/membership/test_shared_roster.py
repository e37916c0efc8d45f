"""Membership follows the log; simulated peers that fold the same records share what it says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.membership.view import Membership
from anabranch.sim.kernel.shared_membership import VALUES_KEPT, MembershipPool, SharedMembership

IDS, STAGES = "abcdefgh", 3


def said(membership: Membership) -> tuple[object, ...]:
    """All there is to see."""
    live = [(s, t, membership.live(s, t)) for s in range(STAGES) for t in range(6)]
    regional = [membership.by_region(s, t) for s in range(STAGES) for t in range(6)]
    of = [sorted(membership.of(s)) for s in range(STAGES)]
    dials = [membership.dials(a, b) for a in IDS for b in IDS]
    known = [(membership.incarnation(peer), membership.knew(peer)) for peer in IDS]
    indices = [membership.assignment(t, range(5)).holder for t in range(4)]
    opened = membership.opening, membership.reopened_t
    members = list(membership.members.items()), sorted(membership.active_from.items())
    return live, regional, of, dials, known, indices, opened, members, membership.number, membership.begun


class Slow:
    """A fold of its own, without anything shared: what the log says, read again from its beginning."""

    def __init__(self, records: Sequence[Members | int]) -> None:
        self.members: dict[str, Member] = {}
        self.active: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        for record in records:
            if isinstance(record, int):
                self.active = {peer: min(since, record + 1) for peer, since in self.active.items()}
                continue
            for peer in [*record.removed, *(member.id for member in record.joined)]:
                self.members.pop(peer, None)
                self.active.pop(peer, None)
            for member in record.joined:
                self.members[member.id] = member
                self.seen[member.id] = max(member.incarnation, self.seen.get(member.id, 0))
            self.active.update({p: t for p, t in record.active_from.items() if p in self.members})

    def agrees(self, membership: Membership) -> bool:
        live = [
            sorted(p for p, m in self.members.items() if m.stage == stage and self.active.get(p, t + 1) <= t)
            for stage in range(STAGES)
            for t in range(6)
        ]
        return (
            list(membership.members.items()) == list(self.members.items())
            and sorted(membership.order, key=membership.order.__getitem__) == list(membership.members)
            and membership.active_from == self.active
            and live == [membership.live(stage, t) for stage in range(STAGES) for t in range(6)]
            and [sorted(peers, key=lambda peer: self.members[peer].region) for peers in live]
            == [membership.by_region(stage, t) for stage in range(STAGES) for t in range(6)]
            and {p: membership.incarnation(p) for p in IDS if membership.knew(p)} == self.seen
        )


@st.composite
def histories(draw: st.DrawFn) -> list[Members | int]:
    """Records, and (numbers) rollbacks."""
    records: list[Members | int] = []
    there: set[str] = set()
    for number in range(1, draw(st.integers(1, 12)) + 1):
        if draw(st.integers(0, 9)) == 0:
            records.append(draw(st.integers(0, 3)))
            continue
        removed = draw(st.sets(st.sampled_from(sorted(there)), max_size=3)) if there else set()
        joined = draw(st.sets(st.sampled_from(IDS), max_size=4)) - (there - removed)
        there = (there - removed) | joined
        members = tuple(
            Member(
                peer, draw(st.integers(0, STAGES - 1)), draw(st.integers(1, 3)), "", 1, address="x",
                region=draw(st.sampled_from(["", "here", "there"])),
            )
            for peer in sorted(joined)
        )
        serve = draw(st.dictionaries(st.sampled_from(IDS), st.integers(0, 4), max_size=4))
        records.append(Members(number, members, serve, dict.fromkeys(sorted(removed), "gone")))
    return records


def fold(membership: Membership, record: Members | int, t: int) -> None:
    if isinstance(record, int):
        membership.rolled_back(record)
    else:
        membership.apply(record)
    membership.open(t, STAGES - 1)


@pytest.mark.slow
@given(histories(), histories(), st.data())
def test_each_fold_says_what_its_own_log_does(
    one: list[Members | int], other: list[Members | int], data: st.DataObject
) -> None:
    """Two logs folded in turns, each by somebody who was there from the beginning and one who comes later."""
    logs = [one, other]
    pool = MembershipPool()
    early = [SharedMembership(pool), SharedMembership(pool)]
    late: list[Membership | None] = [None, None]
    read = [0, 0]
    kept: list[tuple[Membership, tuple[object, ...]]] = []
    while any(read[n] < len(logs[n]) for n in (0, 1)):
        n = data.draw(st.sampled_from([n for n in (0, 1) if read[n] < len(logs[n])]))
        t = data.draw(st.integers(1, 3))
        record = logs[n][read[n]]
        read[n] += 1
        fold(early[n], record, t)
        latecomer = late[n]
        if latecomer is not None:
            fold(latecomer, record, t)
            assert latecomer.members == early[n].members and latecomer.active_from == early[n].active_from
            assert list(latecomer.members) == list(early[n].members)
            assert all(latecomer.dials(a, b) == early[n].dials(a, b) for a in IDS for b in IDS)
        elif data.draw(st.booleans()):
            late[n] = latecomer = data.draw(st.sampled_from([Membership(), SharedMembership(pool)]))
            latecomer.enter(tuple(early[n].members.values()), early[n].active_from, early[n].number)
            latecomer.open(t, STAGES - 1)
        assert Slow(logs[n][: read[n]]).agrees(early[n])
        same = Membership()
        same.adopt(early[n])
        same.remember(early[n])
        kept.append((same, said(same)))
    assert all(said(membership) == before for membership, before in kept), "what was known then has changed"


def test_who_came_later_shares_what_the_others_know() -> None:
    pool = MembershipPool()
    early, late = SharedMembership(pool), SharedMembership(pool)
    members = tuple(Member(peer, n % 2, 1, "", 1) for n, peer in enumerate("abcd"))
    for record in (
        Members(1, members, dict.fromkeys("abcd", 1)),
        Members(2, removed={"d": "gone"}),
    ):
        early.apply(record)
        early.open(1, 1)
    late.enter(tuple(early.members.values()), early.active_from, early.number)
    late.open(2, 1)
    assert late.members is not early.members
    for membership in (late, early):
        membership.apply(Members(3, (Member("e", 1, 1, "", 1),)))
        membership.open(2, 1)
    assert late.members is early.members and late.opening == early.opening
    assert early.opening.data_nodes == ("a", "c")
    assert early.knew("d") and not late.knew("d"), "what was before it came it does not know"


def test_whose_members_came_in_another_order_has_a_log_of_its_own() -> None:
    """The later member dials the earlier one: two who differ would both dial, or neither."""
    members = [Member(peer, 1, 1, "", 1, address="x") for peer in "ab"]
    dials, pool = [], MembershipPool()
    for first, then in (members, reversed(members)):
        membership = SharedMembership(pool)
        membership.apply(Members(1, (first,)))
        membership.apply(Members(2, (then,)))
        dials.append(membership.dials("a", "b"))
    assert dials == [False, True]


def come_and_go(membership: Membership, times: int, opens: bool) -> None:
    """Each time one comes, and who came before leaves."""
    first = tuple(Member(peer, n % 2, 1, "", 1) for n, peer in enumerate("abcd"))
    membership.apply(Members(1, first, dict.fromkeys("abcd", 1)))
    for number in range(2, times + 2):
        comes = Member(f"p{number}", 1, 1, "", 1)
        membership.apply(Members(number, (comes,), removed={f"p{number - 1}": "gone"}))
        if opens:
            membership.open(number, 1)


def test_who_follows_the_log_no_more_keeps_nothing_of_what_came_after() -> None:
    """A peer of a simulated swarm that is dead stays where it was; the others go on from there."""
    pool = MembershipPool()
    dead, others = SharedMembership(pool), SharedMembership(pool)
    for membership in (others, dead):
        come_and_go(membership, 1, opens=True)
    come_and_go(others, 3 * VALUES_KEPT, opens=True)
    kept, value = 0, dead._value
    while value is not None and value.after is not None:
        kept, value = kept + 1, value.after[1]
    assert kept <= VALUES_KEPT


def test_a_log_that_is_read_again_from_its_beginning_leaves_nothing_of_those_who_went() -> None:
    """Nothing is under way that one of them may have had; each value had all of them, and is compared."""
    history, peer = Membership(), Membership()
    come_and_go(history, 20, opens=False)
    assert history.gone == {}
    come_and_go(peer, 20, opens=True)
    assert peer.gone == {}
    peer.apply(Members(30, removed={"a": "gone"}))
    assert peer.gone == {"a": (0, "")}
