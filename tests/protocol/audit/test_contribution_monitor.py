"""Monitor of contributions: it finds what is far off, and honest owners pass."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocol.audit.contribution_monitor import (
    REST_STEPS,
    Contribution,
    ContributionMonitor,
    FarOff,
)

ELEMENTS, PARTS = 48, 4
BY = tuple(f"collector {part}" for part in range(PARTS))


def gradients(draw: random.Random, units: list[int], spike: float) -> list[list[float]]:
    """Sums over each owner's units of a common gradient and noise, all multiplied by `spike`."""
    return [[spike * (n * 0.3 + n**0.5 * draw.gauss(0.0, 1.0)) for _ in range(ELEMENTS)] for n in units]


def reported(vectors: list[list[float]], units: list[int]) -> dict[str, Contribution]:
    total = [sum(column) for column in zip(*vectors, strict=True)]
    found = {}
    for owner, (vector, n) in enumerate(zip(vectors, units, strict=True)):
        cuts = [range(part, ELEMENTS, PARTS) for part in range(PARTS)]
        squares = tuple(sum(vector[i] ** 2 for i in cut) for cut in cuts)
        dots = tuple(sum(vector[i] * total[i] for i in cut) for cut in cuts)
        found[str(owner)] = Contribution(n, squares, dots, BY)
    return found


@pytest.mark.parametrize("units", [[1] * 6, [1, 2, 4, 8, 3], [5, 5, 1]])
def test_honest_owners_pass(units: list[int]) -> None:
    """No honest owner is held, slow ones with few units and spikes of the loss included."""
    draw, monitor = random.Random(1), ContributionMonitor()
    for _ in range(400):
        spike = draw.choice([1.0, 1.0, 100.0])
        assert monitor.judge(reported(gradients(draw, units, spike), units)) == {}


@pytest.mark.parametrize(("factor", "within"), [(-50.0, 1), (0.0, 1), (-1.0, 60)])
def test_a_liar_is_found(factor: float, within: int) -> None:
    """A scaled or empty contribution is found at once, a flipped one within 60 iterations; nobody else is."""
    draw, monitor, units = random.Random(2), ContributionMonitor(), [2] * 6
    held: set[str] = set()
    for _ in range(within):
        vectors = gradients(draw, units, 1.0)
        vectors[3] = [factor * value for value in vectors[3]]
        held |= monitor.judge(reported(vectors, units)).keys()
    assert held == {"3"}


def test_one_false_report_decides_nothing() -> None:
    """Moments that one of four collectors makes up get no honest owner held."""
    draw, monitor, units = random.Random(4), ContributionMonitor(), [2] * 4
    for _ in range(200):
        found = reported(gradients(draw, units, 1.0), units)
        one = found["1"]
        found["1"] = Contribution(2, (1e9, *one.squares[1:]), (-1e9, *one.dots[1:]), BY)
        assert monitor.judge(found) == {}


def test_two_owners_are_not_compared() -> None:
    found = reported([[1.0] * ELEMENTS, [-50.0] * ELEMENTS], [1, 1])
    assert ContributionMonitor().judge(found) == {}


@pytest.mark.parametrize("units", [[2, 2, 2, 1], [1, 3, 3, 3, 3]])
def test_directions_of_equally_many_units_are_compared(units: list[int]) -> None:
    """Owners of other numbers of units are not exchangeable with them: they are left out."""
    draw, monitor = random.Random(6), ContributionMonitor()
    liar = str(units.index(max(units)) + 1)
    held: set[str] = set()
    for _ in range(120):
        vectors = gradients(draw, units, 1.0)
        vectors[int(liar)] = [-value for value in vectors[int(liar)]]
        held |= monitor.judge(reported(vectors, units)).keys()
    assert held == {liar}


def scaled(draw: random.Random, factors: dict[int, float]) -> dict[str, Contribution]:
    """Contributions of six owners, some of them multiplied."""
    units = [2] * 6
    vectors = gradients(draw, units, 1.0)
    for owner, factor in factors.items():
        vectors[owner] = [factor * value for value in vectors[owner]]
    return reported(vectors, units)


def test_one_contribution_is_chosen_of_each_step_the_farthest_first() -> None:
    """A chosen peer rests for REST_STEPS, and the next one is chosen. A new leader begins anew."""
    draw, far_off = random.Random(5), FarOff()
    chosen = [far_off.choose(t, 1, scaled(draw, {1: 50.0, 4: -900.0}))[0] for t in range(1, 2 * REST_STEPS)]
    rests = [""] * (REST_STEPS - 2)
    assert chosen == ["4", "1", *rests, "4", "1", *rests][: len(chosen)]
    peer, reason = FarOff().choose(REST_STEPS, 1, scaled(draw, {4: -900.0}))
    assert peer == "4" and reason.startswith("its norm is ") and " times that of the others" in reason


def test_stages_are_judged_apart_and_a_removed_peer_is_forgotten() -> None:
    draw, far_off = random.Random(5), FarOff()
    assert far_off.choose(1, 1, scaled(draw, {1: 50.0}))[0] == "1"
    assert far_off.choose(1, 2, scaled(draw, {2: 50.0}))[0] == "2"
    far_off.removed("1")
    assert far_off.choose(2, 1, scaled(draw, {1: 50.0}))[0] == "1"


def test_a_peer_is_forgotten_as_an_owner_or_altogether() -> None:
    monitor = ContributionMonitor(against={("a", "b"): 1.0, ("b", "a"): 2.0, ("b", "c"): 3.0})
    monitor.forget("a")
    assert monitor.against == {("b", "a"): 2.0, ("b", "c"): 3.0}
    monitor.forget("a", reports=True)
    assert monitor.against == {("b", "c"): 3.0}


@given(st.lists(st.tuples(st.floats(), st.floats()), min_size=3, max_size=3), st.integers(0, 3))
def test_moments_that_are_no_numbers_decide_nothing_alone(
    claims: list[tuple[float, float]], liar: int
) -> None:
    """Whatever a peer reports about the contributions to its part."""
    draw, monitor = random.Random(7), ContributionMonitor()
    for _ in range(20):
        honest = reported(gradients(draw, [1, 1, 2], 1.0), [1, 1, 2])
        found = {
            peer: Contribution(
                each.units,
                tuple(square if part == liar else old for part, old in enumerate(each.squares)),
                tuple(dot if part == liar else old for part, old in enumerate(each.dots)),
                BY,
            )
            for (peer, each), (square, dot) in zip(honest.items(), claims, strict=True)
        }
        assert monitor.judge(found) == {}


@pytest.mark.parametrize(("owners", "growth"), [(3, 1.4), (5, 1.15)])
def test_a_liar_that_lies_more_and_more_is_found(owners: int, growth: float) -> None:
    """It widened the deviation with which it is measured: of three owners, one was at thousands of times the
    others' norm after thirty steps, and not far off."""
    draw, monitor, units = random.Random(8), ContributionMonitor(), [2] * owners
    factors: list[float] = []
    found: dict[str, str] = {}
    while not found and len(factors) < 30:
        factors.append(10.0 * growth ** len(factors))
        vectors = gradients(draw, units, 1.0)
        vectors[0] = [factors[-1] * value for value in vectors[0]]
        found = monitor.judge(reported(vectors, units))
    assert found.keys() == {"0"} and factors[-1] < 40.0
