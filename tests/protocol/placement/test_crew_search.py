"""Search for quick crews: formulas of an inner step's time, exchanges against all arrangements."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest

from anabranch.protocol.placement import crew_search
from anabranch.protocol.placement.crew_search import CrewTimes, quicker

COUNT = 32


def test_an_inner_step_takes_a_round_trip_and_then_what_binds() -> None:
    computing = {"a": 0.5, "b": 0.25}
    crew, held = ("a", "b", "d"), {"a": 100, "b": 100}
    alone = CrewTimes(COUNT, computing, held, lambda one, other: 0.0)
    assert alone.seconds(crew) == pytest.approx(0.75 + 31 * 0.5), "the slowest machine"
    far = CrewTimes(COUNT, computing, held, lambda one, other: 1.0)
    assert far.seconds(crew) == pytest.approx(6.75 + 31 * 0.5), "a longer trip, which others hide"
    few = CrewTimes(COUNT, computing, {"a": 100, "b": 4}, lambda one, other: 1.0)
    assert few.seconds(crew) == pytest.approx(6.75 + 31 * 6.75 / 4), "four under way"


def test_a_crew_that_shares_relays_with_two_others_is_slower_by_both() -> None:
    computing = {"a1": 0.5, "a2": 0.5, "b1": 0.25, "c2": 0.25}
    times = CrewTimes(COUNT, computing, dict.fromkeys(computing, 100), lambda one, other: 0.0)
    crews = [("a1", "a2", "d"), ("b1", "a2", "d"), ("a1", "c2", "d")]
    both = times.together(crews)[crews[0]]
    assert both == pytest.approx(times.seconds(crews[0], {"a1": 0.5, "a2": 0.5}))
    computing["a2"] = 0.4  # then the relay that it shares with the second one binds less
    for order in (crews, crews[::-1]):
        assert times.together(order)[crews[0]] == pytest.approx(times.seconds(crews[0], {"a1": 0.5}))


def drawn(rng: random.Random, crews: int, stages: int) -> tuple[list[tuple[str, ...]], CrewTimes]:
    """Crews of drawn machines, in two far regions."""
    peers = [[f"r{stage}.{n}" for n in range(crews)] for stage in range(1, stages + 1)]
    relays = [peer for of_stage in peers for peer in of_stage]
    region = {peer: rng.random() < 0.5 for peer in [*relays, "d0"]}
    computing = {peer: rng.choice([0.05, 0.1]) for peer in relays}

    def latency_s(one: str, other: str) -> float:
        return 0.01 if region[one] == region[other] else 0.2

    times = CrewTimes(COUNT, computing, dict.fromkeys(relays, 8), latency_s)
    return [(*of_crew, "d0") for of_crew in zip(*peers, strict=True)], times


def speed(crews: list[tuple[str, ...]], times: CrewTimes) -> float:
    return sum(1.0 / times.seconds(crew) for crew in crews)


def test_exchanges_come_near_the_best_arrangement() -> None:
    gains, shares = [], []
    for seed in range(8):
        crews, times = drawn(random.Random(seed), 3, 3)
        found = quicker(crews, times)
        columns = [*zip(*crews, strict=True)]
        assert [sorted(column) for column in zip(*found, strict=True)] == [*map(sorted, columns)]
        orders = product(*(permutations(column) for column in columns[1:-1]))
        best = max(speed([*zip(columns[0], *order, columns[-1], strict=True)], times) for order in orders)
        gains.append(speed(found, times) / speed(crews, times))
        shares.append(speed(found, times) / best)
    assert min(gains) >= 1.0 and sum(gains) / len(gains) > 1.1, gains
    assert 0.95 <= min(shares) <= max(shares) <= 1.0 + 1e-9, shares


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    crews, times = drawn(random.Random(0), 12, 6)
    monkeypatch.setattr(crew_search, "TRIALS_MAX", 40)
    found = quicker(crews, times)
    assert speed(found, times) > speed(crews, times)
    assert quicker(crews[:1], times) == crews[:1]
