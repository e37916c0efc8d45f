"""Cover of the batch: every unit counts exactly once, by pure functions (I1, R7)."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocol.interface.tasks import embed_unit, full_cover, head_unit, part_bounds
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.membership.assignment import Assignment, split_indices
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.messages import Attempt, AttemptId, Fence
from anabranch.protocol.reduce.coverage import global_norm, missing, settle
from anabranch.protocol.reduce.partial_sums import attempt_sets

claims_of = st.dictionaries(st.sampled_from("abcd"), st.frozensets(st.integers(0, 7)), min_size=1)


@given(claims_of)
def test_settle_gives_each_unit_to_a_claimer_the_lower_id_first(claims: dict[str, frozenset[int]]) -> None:
    members = sorted(claims, reverse=True)
    cover = frozenset(range(8))
    lacking = missing(cover, claims)
    assert lacking == {u for u in cover if not any(u in units for units in claims.values())}
    if lacking:
        with pytest.raises(ValueError, match="claimed by none"):
            settle(cover, claims, members)
        return
    owners = settle(cover, claims, members)
    assert len(owners) == len(cover)
    for unit, owner in enumerate(owners):
        assert members[owner] == min(peer for peer, units in claims.items() if unit in units)


def test_claims_of_others_than_the_members_do_not_count() -> None:
    with pytest.raises(ValueError, match="unit 1"):
        settle(frozenset({0, 1}), {"a": {0}, "removed": {1}}, ["a"])


def test_stage_0_counts_heads_and_embeddings() -> None:
    assert full_cover(0, 3) == {head_unit(i) for i in range(3)} | {embed_unit(i) for i in range(3)}
    assert full_cover(2, 3) == {0, 1, 2}


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20), st.integers(0, 1000))
def test_the_norm_does_not_depend_on_the_partition(squares: list[float], seed: int) -> None:
    draw = random.Random(seed)
    stages: list[dict[str, float]] = [{} for _ in range(4)]
    for number, value in enumerate(squares):
        draw.choice(stages)[str(number)] = value
    assert global_norm(stages) == math.sqrt(math.fsum(squares))


@given(st.integers(0, 40), st.lists(st.sampled_from("abcdef"), min_size=1, unique=True), st.integers(0, 99))
def test_indices_are_split_and_handed_on_exactly_once(count: int, nodes: list[str], seed: int) -> None:
    """The split is a pure function of the data nodes; a removal splits only its own indices again (R2)."""
    ranges = split_indices(count, nodes)
    sizes = [len(found) for found in ranges.values()]
    assert sorted(i for found in ranges.values() for i in found) == list(range(count))
    assert max(sizes) - min(sizes) <= 1
    assignment, draw, left = Assignment(range(count), nodes), random.Random(seed), sorted(nodes)
    while len(left) > 1:
        gone = left.pop(draw.randrange(len(left)))
        kept = {peer: assignment.of(peer) for peer in left}
        orphans = assignment.remove(gone, left)
        assert sorted(i for peer in left for i in assignment.of(peer)) == list(range(count))
        for peer in left:
            assert set(kept[peer]) <= set(assignment.of(peer))
        assert not set(orphans) & {i for indices in kept.values() for i in indices}


def member(peer: str, stage: int) -> Member:
    return Member(peer, stage, 1, "class", 4)


def test_a_late_opener_splits_indices_as_an_early_one_did() -> None:
    """Once an iteration is open in the log, removals hand indices on; they do not deal them anew (R2)."""
    records = [
        Members(1, joined=(*(member(d, 0) for d in ("d0", "d1", "d2")), member("r", 1))),
        Members(2, active_from={"d0": 1, "d1": 1, "d2": 1, "r": 1}),
        Members(3, removed={"d2": "gone"}),
    ]
    early, late = Membership(), Membership()
    for record in records[:2]:
        early.apply(record)
        early.open(1, 1)
    assignment = early.assignment(1, range(6))
    assignment.remove("d2", ["d0", "d1"])
    for record in records:
        late.apply(record)
        late.open(1, 1)
    assert (
        late.assignment(1, range(6)).holder
        == assignment.holder
        == {0: "d0", 1: "d0", 2: "d1", 3: "d1", 4: "d0", 5: "d1"}
    )
    late.open(2, 1)
    assert late.assignment(2, range(6)).of("d0") == [0, 1, 2]


def test_only_active_members_count_as_live() -> None:
    """Only records decide (R3), and a joiner is live from the iteration of its second record (R14)."""
    membership = Membership()
    membership.apply(Members(1, joined=(member("a", 1), member("b", 1))))
    membership.apply(Members(2, active_from={"a": 3}))
    assert membership.live(1, 2) == []
    assert membership.live(1, 3) == ["a"]
    membership.apply(Members(3, removed={"a": "gone"}))
    assert membership.live(1, 3) == []
    assert membership.stage_of("a") is None


@given(st.integers(0, 1000), st.integers(1, 9))
def test_part_bounds_cut_without_gaps(elements: int, parts: int) -> None:
    bounds = part_bounds(elements, parts)
    assert len(bounds) == parts
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == elements


def test_sets_of_an_attempt_are_those_of_its_own_members_owners_and_cover() -> None:
    """They are kept by the object: an equal place in memory, another cover or another round is asked anew."""
    for owners in ((0, 1, 1), (1, 0, 0)) * 8:  # more than are kept
        fence, number = Fence(1, 1, 1, "base", 1), AttemptId(1, 1)
        message = Attempt(fence, 1, number, 1, ("a", "b", "c"), owners)
        sets = attempt_sets(message)
        assert sets is attempt_sets(message)
        assert [sets.units_of(peer) for peer in "abc"] == [
            frozenset(unit for unit, owner in enumerate(owners) if owner == at) for at in range(3)
        ]
        assert sets.refusal(frozenset(range(3)), 0) is None
        assert sets.refusal(frozenset(range(4)), 0) is not None
        assert sets.refusal(frozenset(range(3)), 3) is None
        assert sets.refusal(frozenset(range(3)), 4) is not None
    twice = Attempt(fence, 1, number, 1, ("a", "b", "a"), (0, 1, 1))
    assert "twice" in (attempt_sets(twice).refusal(frozenset(range(3)), 0) or "")
