"""Feasibility: each rule that a flow can break is told."""

from __future__ import annotations

import pytest

from anabranch.counter_rng import CounterRng
from anabranch.flow.graph.problem import DataNode, Flow, Instance, Path, Relay, paths_from_link_flows
from benchmarks.flow.feasibility import violations

INSTANCE = Instance(
    2,
    "own",
    (DataNode("d", 2), DataNode("e", 1)),
    (Relay("a", 1, 2), Relay("b", 2, 1), Relay("c", 2, 9)),
    {
        **{("d", "a"): 1.0, ("e", "a"): 2.0, ("a", "b"): 4.0, ("a", "c"): 8.0},
        **{("b", "d"): 16.0, ("c", "d"): 32.0, ("b", "e"): 64.0},
    },
)
GOOD: Path = ("d", "a", "b", "d")


def test_costs_are_sums_over_links() -> None:
    flow = Flow((GOOD, ("d", "a", "c", "d")))
    assert not violations(flow, INSTANCE)
    assert flow.cost(INSTANCE) == 21.0 + 41.0
    assert flow.max_path_cost(INSTANCE) == 41.0
    assert (Flow().cost(INSTANCE), Flow().max_path_cost(INSTANCE)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ((GOOD, GOOD), "b serves 2 microbatches with capacity 1"),
        ((("e", "a", "b", "e"), ("e", "a", "c", "d")), "e sends 2 microbatches of 1"),
        ((("e", "a", "c", "e"),), "uses c→e, which is no link"),
        ((("e", "a", "b", "d"),), "does not return to its own data node"),
        ((("d", "a", "d"),), "has 3 nodes, not 4"),
        ((("d", "b", "a", "d"),), "does not pass the stages in order"),
        ((("x", "a", "b", "d"),), "uses x→a, which is no link"),
        (((),), "has 0 nodes"),
    ],
)
def test_every_broken_rule_is_told(paths: tuple[Path, ...], sentence: str) -> None:
    assert any(sentence in wrong for wrong in violations(Flow(paths), INSTANCE))


def test_paths_carry_exactly_the_flow_on_links() -> None:
    amounts = {("d", "a"): 2, ("a", "b"): 1, ("a", "c"): 1, ("b", "d"): 1, ("c", "d"): 1, ("e", "a"): 0}
    assert sorted(paths_from_link_flows(INSTANCE, amounts)) == [GOOD, ("d", "a", "c", "d")]


def test_what_the_dead_leave() -> None:
    left = INSTANCE.without(["b"])
    assert set(left.relay) == {"a", "c"}
    assert set(left.links) == {("d", "a"), ("e", "a"), ("a", "c"), ("c", "d")}


def test_dice_are_fair_enough_and_their_streams_differ() -> None:
    draws = [CounterRng(1, stream).below(6) for stream in range(6000)]
    assert all(900 < draws.count(face) < 1100 for face in range(6))
    rng = CounterRng(2)
    mean = sum(rng.uniform(2.0, 4.0) for _ in range(10_000)) / 10_000
    assert 2.97 < mean < 3.03
    cards = list(range(50))
    rng.shuffle(cards)
    assert sorted(cards) == list(range(50)) != cards
