"""Other systems' placements, on fleets where the best one is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations

import pytest

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import Fleet, fleet_of, load_scenario
from benchmarks.placement.baselines import Links, Objective, arranged, at_random, dealt, swapped
from support.grids import first_of

SEEDS = range(3)


def fleet(relays: int = 8, stages: int = 4, seed: int = 0) -> Fleet:
    changes = {"fleet.relays": relays, "model.stages": stages}
    return fleet_of(load_scenario("wan10", changes), find_profile("wan10"), seed)


def sizes(deal: dict[str, int]) -> Counter[int]:
    return Counter(deal.values())


def cost_of(fleet: Fleet, deal: dict[str, int]) -> float:
    """DT-FM's objective with the stages in their order."""
    objective, links = Objective(Links(fleet)), Links(fleet)
    stages = sorted(set(deal.values()))
    groups = [tuple(sorted(name for name in deal if deal[name] == stage)) for stage in stages]
    hops = sum(objective.matching_s(one, other) for one, other in pairwise(groups))
    return max(links.reduce_s(member, group) for group in groups for member in group) + 2.0 * hops


@pytest.mark.parametrize("seed", first_of(SEEDS))
def test_a_placement_keeps_how_many_each_stage_has(seed: int) -> None:
    some = fleet(10, 4, seed)
    for deal in (at_random(some, seed), arranged(some, seed, 5), swapped(some, seed, 5)):
        assert deal.keys() == dealt(some).keys()
        assert sorted(sizes(deal).values()) == sorted(sizes(dealt(some)).values())
    assert sizes(swapped(some, seed, 5)) == sizes(at_random(some, seed)) == sizes(dealt(some))
    assert at_random(some, 1) == at_random(some, 1) != at_random(some, 2)
    assert arranged(some, 1, 5) == arranged(some, 1, 5) and swapped(some, 1, 5) == swapped(some, 1, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tour_over_the_groups_is_the_cheapest_of_all(seed: int) -> None:
    some = fleet(10, 5, seed)
    deal = dealt(some)
    groups = [tuple(sorted(name for name in deal if deal[name] == stage)) for stage in range(1, 6)]
    objective = Objective(Links(some))

    def length(order: Sequence[int]) -> float:
        return sum(objective.matching_s(groups[a], groups[b]) for a, b in pairwise(order))

    cost, order = objective.tour(groups)
    assert sorted(order) == list(range(5)) and length(order) == pytest.approx(cost, abs=1e-12)
    assert cost == pytest.approx(min(map(length, permutations(range(5)))), abs=1e-12)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_finds_the_best_of_all_where_these_are_few(seed: int) -> None:
    some = fleet(6, 3, seed)
    relays, stages = list(dealt(some)), list(dealt(some).values())
    every = [dict(zip(relays, order, strict=True)) for order in set(permutations(stages))]
    least = min(cost_of(some, deal) for deal in every)
    assert cost_of(some, arranged(some, seed)) == pytest.approx(least, rel=1e-9)


def test_a_matching_leaves_nobody_of_the_larger_group_out() -> None:
    some = fleet(5, 2)
    links = Links(some)
    three, two = ("r1.0", "r1.1", "r1.2"), ("r2.0", "r2.1")
    worst = Objective(links).matching_s(three, two)
    assert worst == Objective(links).matching_s(two, three)
    ways = [
        max(links.hop_s(name, partner) for name, partner in zip(three, chosen, strict=True))
        for chosen in ((a, b, c) for a in two for b in two for c in two)
        if len(set(chosen)) == 2
    ]
    assert worst == min(ways)


def test_swaps_lower_what_links_cost() -> None:
    """On average: each looks at its own links alone, and some swaps are taken by chance."""
    found = [fleet(12, 4, seed) for seed in range(4)]
    before = sum(cost_of(some, dealt(some)) for some in found)
    after = sum(cost_of(some, swapped(some, seed)) for seed, some in enumerate(found))
    best = sum(cost_of(some, arranged(some, seed, 10)) for seed, some in enumerate(found))
    assert best < after < 0.95 * before
