"""Who is whose neighbour where not everybody can know everybody (`protocol.neighbours`)."""

from __future__ import annotations

import pytest

from anabranch.protocol.membership import Membership
from anabranch.protocol.neighbours import Neighbours, edges
from anabranch.protocol.records import Member

PICKS = 3


def ids(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{number}" for number in range(count))


def test_small_stages_know_each_other_whole() -> None:
    one, other = ids("a", 2), ids("b", 2 * PICKS)
    graph = edges(one, other, PICKS)
    assert all(graph[peer] == set(other) for peer in one)
    assert all(graph[peer] == set(one) for peer in other)
    assert edges(other, other, PICKS)["b0"] == set(other) - {"b0"}


@pytest.mark.parametrize(("many", "more"), [(83, 83), (40, 83), (7, 2), (2, 100)])
def test_both_ends_see_the_same_edges_and_nobody_has_fewer_than_it_picks(many: int, more: int) -> None:
    one, other = ids("a", many), ids("b", more)
    graph, mirrored = edges(one, other, PICKS), edges(other, one, PICKS)
    assert graph == mirrored
    for here, there in ((one, other), (other, one)):
        for peer in here:
            assert len(graph[peer]) >= min(PICKS, len(there))
            assert all(peer in graph[neighbour] for neighbour in graph[peer])
    pairs = sum(len(graph[peer]) for peer in one)
    assert pairs <= PICKS * (many + more)


def test_a_large_stage_with_itself() -> None:
    stage = ids("a", 60)
    graph = edges(stage, stage, PICKS)
    assert all(peer not in graph[peer] and len(graph[peer]) >= PICKS for peer in stage)
    assert all(peer in graph[other] for peer in stage for other in graph[peer])


def test_every_way_through_a_hundred_stages_of_a_hundred_is_short() -> None:
    """From one peer the whole of a later stage is reached after a few stages: there are no islands."""
    reached = frozenset({"s0.0"})
    for stage in range(4):
        here = tuple(f"s{stage}.{n}" for n in range(100))
        following = tuple(f"s{stage + 1}.{n}" for n in range(100))
        graph = edges(here, following, PICKS)
        reached = frozenset().union(*(graph[peer] for peer in reached))
    assert len(reached) == 100


def test_who_goes_changes_the_edges_of_few() -> None:
    one, other = ids("a", 50), ids("b", 50)
    before = edges(one, other, PICKS)
    after = edges(tuple(p for p in one if p != "a7"), other, PICKS)
    touched = [peer for peer in other if after[peer] != before[peer]]
    assert set(touched) <= before["a7"]
    assert all(after[peer] >= before[peer] - {"a7"} for peer in other)


def test_a_swarm_is_crowded_from_the_first_stage_that_is_too_large() -> None:
    membership = Membership()
    near = Neighbours("a0", lambda: membership, PICKS, stages=2)
    for stage, letter in enumerate("dab"):
        for peer in ids(letter, 2 * PICKS):
            membership.restore(Member(peer, stage, 1, "", 4, peer, "", ""))
            membership.serve({peer: 1})
    assert not near.crowded
    assert near.beside(2, 1, 1) == sorted(ids("b", 2 * PICKS))
    membership.restore(Member("b6", 2, 1, "", 4, "b6", "", ""))
    membership.serve({"b6": 2})
    assert near.crowded
    assert set(near.beside(2, 1, 1)) == set(ids("b", 2 * PICKS)), "b6 does not serve yet"
    assert PICKS <= len(near.beside(2, 1, 2)) <= 7
    assert near.all(1) >= set(near.beside(2, 1, 2)) | set(near.beside(0, 1, 2))
