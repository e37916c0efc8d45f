"""Assignment of the parts of a reduce to members and helpers, by links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.counter_rng import CounterRng
from anabranch.protocol.coordinator.reduce_schedule import (
    EVEN,
    OF_SUMS,
    ReducePlan,
    ReduceSchedule,
    by_chance,
    by_program,
    spread,
)
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.messages import Attempt, AttemptId, Fence
from anabranch.protocol.placement.cost_model import LINE
from anabranch.protocol.reduce.partial_sums import PARTS, collectors, misdealt
from anabranch.protocol.telemetry.link_table import GONE_KEPT, LinkEstimate, LinkMeasurements

SIZE = 10**9
SLOW, QUICK = LinkEstimate(0.1, 1e8), LinkEstimate(0.02, 1e9)


def links(slow: set[frozenset[str]]) -> Callable[[str, str], LinkEstimate]:
    return lambda one, other: SLOW if frozenset((one, other)) in slow else QUICK


def attempt(members: tuple[str, ...], helpers: tuple[str, ...], sums: tuple[int, ...]) -> Attempt:
    return Attempt(Fence(1, 1, 1, "base", 1), 1, AttemptId(1, 1), 1, members, (0, 1), helpers, sums)


def test_two_that_are_far_from_each_other_are_helped_by_who_is_near_both() -> None:
    found = spread(("a", "b"), ("x", "y"), SIZE, links({frozenset("ab")}))
    assert found.helpers == ("x", "y")
    parts = Counter(found.sums)
    assert len(found.sums) == PARTS
    assert parts[2] + parts[3] > parts[0] + parts[1]


def test_of_three_the_one_that_is_near_both_sums_most() -> None:
    found = spread(("a", "b", "c"), (), SIZE, links({frozenset("ab")}))
    assert found.helpers == ()
    assert Counter(found.sums)[2] > PARTS / 2


def test_who_has_nothing_to_send_sums_nothing_and_is_told_all() -> None:
    """c has no unit: a and b are helped as if it were not there, and its links count for the way back."""
    found = spread(("a", "b", "c"), ("x", "y"), SIZE, links({frozenset("ab")}), working=(0, 1))
    assert found.helpers == ("x", "y") and 2 not in found.sums
    far = links({frozenset("ab"), frozenset("cx"), frozenset("cy")})
    slow = spread(("a", "b", "c"), ("x", "y"), SIZE, far, working=(0, 1))
    assert Counter(slow.sums)[0] + Counter(slow.sums)[1] > Counter(found.sums)[0] + Counter(found.sums)[1]


def test_what_is_known_of_links_outlives_a_crash() -> None:
    """A peer that returns finds its measurements; only those of the last peers to go are kept."""
    members = {"a", "b"}
    ways = LinkMeasurements(members.__contains__)
    ways.told("a", {"b": (0.1, 1e9)})
    members.discard("b")
    ways.gone("b")
    members.add("b")
    assert ways.measured("a", "b")
    for number in range(2 * GONE_KEPT):
        ways.gone(f"other {number}")
    assert ways.measured("a", "b"), "it is a member again"
    members.discard("b")
    ways.gone("b")
    for number in range(GONE_KEPT):
        ways.gone(f"another {number}")
    assert not ways.measured("a", "b")


def test_nobody_sums_more_than_half_of_much() -> None:
    """The bytes that wait on one link are bounded."""
    found = spread(("a", "b"), ("x",), 100 * SIZE, links({frozenset("ab")}))
    assert max(Counter(found.sums).values()) == PARTS // 2


def test_links_that_are_alike_are_left_even() -> None:
    assert spread(("a", "b", "c"), (), SIZE, links(set())) == EVEN


def test_what_is_soon_told_is_left_even() -> None:
    assert spread(("a", "b"), ("x", "y"), 10**6, links({frozenset("ab")})) == EVEN


def test_who_is_far_from_one_of_them_sums_less() -> None:
    """x is far from b; what it sums goes over a link as slow as theirs, beside it."""
    found = spread(("a", "b"), ("x", "y"), SIZE, links({frozenset("ab"), frozenset("bx")}))
    assert found.helpers[-1] == "y"
    parts = Counter(found.sums)
    assert parts[len(found.helpers) + 1] > 2 * (PARTS - parts[len(found.helpers) + 1]) / 3


def test_a_helper_is_dealt_no_more_than_its_line_takes() -> None:
    """y is near all, and its line is no quicker than LINE times a link: each of four that sends it everything
    would fill it."""
    pairs = {frozenset((one, other)) for one in "abcd" for other in "abcd" if one != other}
    found = spread(("a", "b", "c", "d"), ("y",), SIZE, links(pairs))
    share = Counter(found.sums)[4] / PARTS
    line_s = 4 * share * 8 * OF_SUMS * SIZE / (LINE * QUICK.bandwidth_bps)
    assert line_s <= 8 * OF_SUMS * SIZE / 4 / SLOW.bandwidth_bps


@given(st.integers(2, 5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_every_part_is_summed_by_somebody_once(members: int, helpers: int, rng: Random) -> None:
    everybody = [f"p{n}" for n in range(members + helpers)]
    pairs = [(one, other) for one in everybody for other in everybody]
    ways = {pair: LinkEstimate(rng.uniform(0, 0.3), 10 ** rng.uniform(6, 10)) for pair in pairs}
    found = spread(everybody[:members], everybody[members:], SIZE, lambda *pair: ways[pair])
    chance = by_chance(everybody[:members], everybody[members:], CounterRng(rng.getrandbits(32)))
    for one in (found, chance):
        message = attempt(tuple(everybody[:members]), one.helpers, one.sums)
        assert misdealt(message) is None
        assert set(one.helpers) <= set(everybody[members:])
        assert set(range(members, members + len(one.helpers))) <= set(one.sums)
        assert len(collectors(message)) == len(one.sums) <= PARTS


@pytest.mark.parametrize(
    ("helpers", "sums"), [(("a",), (0, 1)), (("x",), (0, 3)), (("x",), ()), (("x", "x"), (2, 3)), ((), (2,))]
)
def test_parts_that_are_dealt_wrongly_are_refused(helpers: tuple[str, ...], sums: tuple[int, ...]) -> None:
    assert misdealt(attempt(("a", "b"), helpers, sums)) is not None


def test_an_even_reduce_says_nothing_of_parts() -> None:
    assert misdealt(attempt(("a", "b"), (), ())) is None
    assert ReducePlan() == EVEN


def test_what_an_even_reduce_took_counts_more_than_a_guess() -> None:
    assert spread(("a", "b", "c"), (), SIZE, links(set())) == EVEN
    assert spread(("a", "b", "c"), (), SIZE, links(set()), even_s=60.0).sums


def thin_uplink(peer: str) -> Callable[[str, str], LinkEstimate]:
    return lambda one, other: LinkEstimate(0.02, 2e7 if one == peer else 1e9)


def nothing_reported(peer: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (), ()


def test_the_program_gives_a_thin_uplink_no_part() -> None:
    found = by_program("abcd", (), SIZE, thin_uplink("a"), nothing_reported, range(4))
    assert found.helpers == () and sorted(Counter(found.sums).items()) == [(1, 6), (2, 5), (3, 5)]


def test_the_program_leaves_equal_lines_even() -> None:
    found = by_program("abcd", (), SIZE, links(set()), nothing_reported, range(4))
    assert found == EVEN


def test_the_program_uses_a_helper_whose_line_is_idle() -> None:
    """Three members of 20 Mbit/s, one of 1 Gbit/s: a data node with as quick a line shares the work with that
    one; a data node with a thin line sums nothing."""

    def way(one: str, other: str) -> LinkEstimate:
        return LinkEstimate(0.02, 1e9 if one in "dy" else 2e7)

    found = by_program("abcd", "xy", SIZE, way, nothing_reported, range(4))
    assert found.helpers == ("y",) and set(found.sums) == {3, 4}


def test_a_measured_line_counts_more_than_a_guess_of_it() -> None:
    """b reported three links of 20 Mbit/s; what is known of other links says nothing of its line."""

    def rates(peer: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return ((2e7, 2e7, 1.9e7), ()) if peer == "b" else ((), ())

    found = by_program("abcd", (), SIZE, links(set()), rates, range(4))
    assert 1 not in found.sums and len(found.sums) == PARTS


def test_the_program_names_only_machines_with_work_and_helpers() -> None:
    """c and d have no unit, and are told the result only."""
    found = by_program("abcd", "x", SIZE, thin_uplink("a"), nothing_reported, (0, 1))
    assert set(found.sums) <= {1, 4} and found.helpers in ((), ("x",))


def test_in_a_round_only_machines_with_a_slot_sum_parts() -> None:
    """Others may lack the state and could not open the round; more may have slots than there are parts."""
    settings = SimpleNamespace(rounds=Rounds(1, 3, 24), neighbours=24, spread="never")
    run = SimpleNamespace(settings=settings, near=SimpleNamespace(crowded=False))
    ctx: Any = SimpleNamespace(run=run, standby_view=SimpleNamespace(waits={}))
    members = tuple(f"r{number:02}" for number in range(24))
    schedule = ReduceSchedule(ctx, LinkMeasurements(members.__contains__))
    owners = [position if position % 4 else -1 for position in range(24)]
    plan = schedule.of(1, 5, members, frozenset(members), owners)
    assert plan.sums == tuple(sorted(set(owners) - {-1}))[:PARTS]
