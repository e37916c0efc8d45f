"""Cost model of an iteration under an assignment, and search for better assignments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.counter_rng import CounterRng
from anabranch.protocol.log.records import Member
from anabranch.protocol.placement.cost_model import LINE, CostModel
from anabranch.protocol.placement.local_search import bettered
from anabranch.protocol.placement.rates import Batch
from anabranch.protocol.telemetry.link_table import LinkEstimate

BATCH = Batch(microbatches=8, activation_bytes=10**6, block_bytes=10**8)


def member(peer: str, stage: int, block_s: float = 0.1, capacity: int = 100) -> Member:
    """Its forward takes a third of a block's seconds."""
    return Member(peer, stage, 1, "", capacity, peer, "", "", block_s / 3, backward_s=2 * block_s / 3)


def alike(latency_s: float = 0.1, bandwidth_bps: float = 1e9) -> Callable[[str, str], LinkEstimate]:
    return lambda one, other: LinkEstimate(latency_s, bandwidth_bps)


def by_place(one: str, other: str) -> LinkEstimate:
    """Near if the first letters of both names are the same."""
    return LinkEstimate(0.001, 1e9) if one[0] == other[0] else LinkEstimate(0.1, 1e8)


def mixed() -> list[Member]:
    """Two of either place, one of each at both stages."""
    return [member("x1", 1), member("y1", 1), member("x2", 2), member("y2", 2)]


def test_one_pipeline_takes_its_computing_the_way_and_no_reduce() -> None:
    members = [member("d", 0), member("a", 1), member("b", 2)]
    seconds = CostModel(members, (1, 2), BATCH, alike()).seconds({"a": 1, "b": 2})
    # Stage 2 computes 8 microbatches for 0.2 s each. A way is three links of 0.1 s and 8 ms, and at either
    # end of a link a quarter of a pass without its weight gradient (two thirds of it), there and back.
    way_s = 3 * (0.1 + 0.008) + 2 * (0.1 + 0.2) * 2 / 3 / 4
    assert seconds == pytest.approx(8 * 0.2 + 2 * way_s)


def test_two_replicas_share_the_batch_by_speed_and_reduce() -> None:
    members = [member("d", 0), member("a", 1, 0.1), member("b", 1, 0.3)]
    seconds = CostModel(members, (1,), BATCH, alike()).seconds({"a": 1, "b": 1})
    # Six and two microbatches. Each tells the other half of the sums and of the reduced gradient.
    way_s = 2 * (0.1 + 0.008) + 2 * (6 * 0.1 + 2 * 0.3) / 8 * 2 / 3 / 4
    reduce_s = 2 * 0.1 + 8 * 10**8 / 2 / 1e9
    assert seconds == pytest.approx(0.6 + 2 * way_s + reduce_s)


def test_few_places_hold_the_batch_up() -> None:
    members = [member("d", 0), member("a", 1, 0.001, capacity=1)]
    seconds = CostModel(members, (1,), BATCH, alike()).seconds({"a": 1})
    hop_s = 0.1 + 0.008 + 0.001 * 2 / 3 / 4
    assert seconds == pytest.approx(8 * 2 * hop_s + 2 * 2 * hop_s)


def test_a_stage_without_anybody_takes_for_ever() -> None:
    members = [member("d", 0), member("a", 1), member("b", 2)]
    assert CostModel(members, (1, 1), BATCH, alike()).seconds({"a": 1, "b": 1}) == math.inf


def test_who_is_near_reduces_together() -> None:
    """Sums are more than activations: two of one place serve one stage, whatever they served before."""
    arithmetic = CostModel([member("d", 0), *mixed()], (1, 1), BATCH, by_place)
    *_, deal = bettered(arithmetic, arithmetic.deal, arithmetic.deal, CounterRng(0))
    assert {deal["x1"], deal["y1"]} == {1, 2}
    assert deal["x1"] == deal["x2"] and deal["y1"] == deal["y2"]


def test_a_thin_line_hides_nobodys_links() -> None:
    """With one that takes minutes to tell its sum, the others still go where they are near each other."""

    def way(one: str, other: str) -> LinkEstimate:
        return LinkEstimate(0.1, 1e6) if "home" in (one, other) else by_place(one, other)

    members, small = [member("d", 0), member("home", 1), *mixed()], Batch(8, 10, BATCH.block_bytes)
    arithmetic = CostModel(members, (1, 1), small, way)
    *_, deal = bettered(arithmetic, arithmetic.deal, ["x1", "x2", "y1", "y2"], CounterRng(0), keeps=2)
    assert deal["x1"] == deal["x2"] and deal["y1"] == deal["y2"] and deal["home"] == 1


def test_a_machine_that_nobody_needs_elsewhere_goes_to_the_slowest_stage() -> None:
    relays = [member("a", 1), member("b", 1), member("c", 1), member("e", 2)]
    arithmetic = CostModel([member("d", 0), *relays], (1, 1), BATCH, alike(0.0, 1e12))
    *_, deal = bettered(arithmetic, arithmetic.deal, arithmetic.deal, CounterRng(0))
    assert sorted(deal.values()) == [1, 1, 2, 2]


def test_where_nobody_helps_a_reduce_takes_the_slow_link_between_the_replicas() -> None:
    """Two replicas far apart, and a helper near both."""

    def way(one: str, other: str) -> LinkEstimate:
        return LinkEstimate(0.0, 1e7 if {one, other} == {"a", "b"} else 1e9)

    members = [member("d", 0), member("a", 1), member("b", 1), member("e", 2)]
    alone, helped = (CostModel(members, (1, 1), BATCH, way, spread=spread) for spread in (False, True))
    slow_s = 8.0 * BATCH.block_bytes / 2 / 1e7
    assert alone.seconds(alone.deal) - helped.seconds(helped.deal) > 0.9 * slow_s


@given(st.data())
def test_each_change_is_better_and_within_what_may_change(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(stages, 7))
    keeps = data.draw(st.integers(1, 2))
    seconds = st.floats(0.01, 1.0)
    relays = [
        member(f"r{n}", 1 + n % stages, data.draw(seconds), data.draw(st.integers(1, 8)))
        for n in range(count)
    ]
    links = {
        (one, other): LinkEstimate(data.draw(st.floats(0.0, 0.3)), data.draw(st.floats(1e6, 1e10)))
        for one in ["d", *(relay.id for relay in relays)]
        for other in ["d", *(relay.id for relay in relays)]
    }
    arithmetic = CostModel([member("d", 0), *relays], (1,) * stages, BATCH, lambda *pair: links[pair])
    movable = data.draw(st.sets(st.sampled_from([relay.id for relay in relays])))
    before = arithmetic.deal
    deals = list(bettered(arithmetic, before, movable, CounterRng(0), steps=5, keeps=keeps))
    assert len(deals) <= 5
    for former, deal in zip([before, *deals], deals, strict=False):
        assert arithmetic.seconds(deal) < arithmetic.seconds(former)
        assert {peer for peer in deal if deal[peer] != former[peer]} <= movable
        for stage in range(1, stages + 1):
            left, had = list(deal.values()).count(stage), list(former.values()).count(stage)
            assert left >= min(keeps, had)


def test_a_line_is_more_than_its_best_link() -> None:
    """The bytes of a microbatch on a line count where the line takes longer than computing."""
    members = [member("d", 0), member("a", 1, 0.001)]
    slow = CostModel(members, (1,), BATCH, alike(0.0, 1e6)).seconds({"a": 1})
    carried_s = 8 * 2 * 8 * 10**6 / (LINE * 1e6)
    assert slow == pytest.approx(carried_s + 2 * 2 * (8.0 + 0.001 * 2 / 3 / 4))
