"""Live estimates are right within bounds, deaf to noise, and follow what lasts."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.flow.graph.problem import link_cost
from anabranch.protocol.telemetry.estimators import (
    AGE_S,
    CHANGE,
    KEPT,
    LATENCY_WINDOW,
    PRIOR_BPS,
    TOGETHER,
    WINDOW,
    Bandwidth,
    Latency,
    LinkCost,
    Samples,
    StableEstimate,
)
from anabranch.protocol.telemetry.peer_costs import PeerCosts

SEEDS = st.integers(0, 2**32 - 1)
#: 10 us to 100 s.
SCALES = st.floats(-5.0, 2.0).map(lambda exponent: 10.0**exponent)
#: 10 us to 10 s: a pause of 50 times as much is not yet a silence (AGE_S).
TRANSFERS = st.floats(-5.0, 1.0).map(lambda exponent: 10.0**exponent)
ABSURD = [-1.0, 0.0, -0.0, math.nan, math.inf, -math.inf]
#: By then the window is full and the published value has settled.
SETTLED = 2 * WINDOW + CHANGE


def noisy(draw: random.Random, truth: float, outliers: float = 0.05) -> float:
    """+-20 %, and now and then a pause of 50 times as much."""
    return truth * (50.0 if draw.random() < outliers else draw.uniform(0.8, 1.2))


def published(samples: Samples, steady: StableEstimate, value: float, now: float) -> float:
    samples.add(value, now)
    held = steady.offer(samples.median() or 0.0)
    assert held is not None
    return held


# --- compute ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(SEEDS, SCALES)
def test_noise_and_pauses_do_not_change_a_settled_value(seed: int, truth: float) -> None:
    draw, samples, steady, close = random.Random(seed), Samples(), StableEstimate(), 0
    for step in range(SETTLED):
        published(samples, steady, noisy(draw, truth), step * truth)
    settled = steady.published
    for step in range(SETTLED, SETTLED + 200):
        assert published(samples, steady, noisy(draw, truth), step * truth) == settled
        close += abs((samples.median() or 0.0) / truth - 1.0) < 0.1
    assert settled is not None and abs(settled / truth - 1.0) < 0.25
    assert close >= 160


@given(SEEDS, SCALES, st.sampled_from([0.5, 2.0]), st.integers(1, 2 * WINDOW))
def test_a_lasting_change_is_followed_in_few_samples(
    seed: int, truth: float, factor: float, before: int
) -> None:
    draw, samples, steady = random.Random(seed), Samples(), StableEstimate()
    for step in range(before):
        published(samples, steady, noisy(draw, truth, outliers=0.0), step * truth)
    for step in range(before, before + CHANGE):
        published(samples, steady, noisy(draw, truth * factor, outliers=0.0), step * truth)
    assert abs((samples.median() or 0.0) / (truth * factor) - 1.0) <= 0.2
    for step in range(before + CHANGE, before + CHANGE + 2):
        published(samples, steady, noisy(draw, truth * factor, outliers=0.0), step * truth)
    assert steady.published is not None
    assert abs(steady.published / (truth * factor) - 1.0) <= 0.2


@given(SEEDS, SCALES, st.sampled_from([0.5, 2.0]))
def test_a_lasting_change_is_followed_among_pauses_too(seed: int, truth: float, factor: float) -> None:
    draw, samples, steady = random.Random(seed), Samples(), StableEstimate()
    for step in range(SETTLED):
        published(samples, steady, noisy(draw, truth), step * truth)
    for step in range(SETTLED, SETTLED + WINDOW):
        published(samples, steady, noisy(draw, truth * factor), step * truth)
    assert steady.published is not None
    assert abs(steady.published / (truth * factor) - 1.0) < 0.25


@given(SEEDS, SCALES, st.integers(2, 100), st.sampled_from([1e-3, 50.0, 1e6]))
def test_one_pause_does_not_move_the_estimate(seed: int, truth: float, before: int, factor: float) -> None:
    draw, samples = random.Random(seed), Samples()
    for step in range(before):
        samples.add(noisy(draw, truth, outliers=0.0), step * truth)
    samples.add(truth * factor, before * truth)
    median = samples.median()
    assert median is not None and abs(median / truth - 1.0) <= 0.2 + 1e-9


def test_after_a_silence_few_samples_outvote_the_old_ones() -> None:
    """A change of 15 % is too small to be told from noise at once."""
    busy, quiet = Samples(), Samples()
    for step in range(WINDOW):
        busy.add(1.0, float(step))
        quiet.add(1.0, float(step))
    for step in range(KEPT + 1):
        busy.add(1.15, WINDOW + float(step))
        quiet.add(1.15, WINDOW + 2.0 * AGE_S + step)
    assert (busy.median(), quiet.median()) == (1.0, 1.15)


def test_the_first_sample_after_a_silence_may_be_a_pause() -> None:
    samples = Samples()
    for step in range(WINDOW):
        samples.add(1.0, float(step))
    samples.add(2.0 * AGE_S, 2.0 * AGE_S + WINDOW)
    assert samples.median() == 1.0


def test_a_small_change_waits_for_the_window() -> None:
    samples = Samples()
    for step in range(WINDOW + CHANGE):
        samples.add(1.0 if step < WINDOW else 1.15, float(step))
    assert samples.median() == 1.0


def test_a_run_of_what_is_usual_is_no_change() -> None:
    """A third of the tasks take three times as long; eight of these in a row are chance."""
    samples = Samples()
    for step in range(WINDOW + CHANGE):
        samples.add(3.0 if step >= WINDOW or step % 3 == 0 else 1.0, float(step))
    assert samples.median() == 1.0


def test_a_slow_drift_is_followed() -> None:
    samples, truth = Samples(), 1.0
    for step in range(1000):
        truth *= 1.001
        samples.add(truth, float(step))
    assert 0.95 * truth < (samples.median() or 0.0) <= truth


def test_the_compute_part_of_a_cost_averages_forward_and_backward() -> None:
    costs = PeerCosts()
    assert costs.pass_s("me", "me") == 0.0
    costs.computed("Forward", 1.0, 0.0)
    assert costs.pass_s("me", "me") == 1.0
    costs.computed("InputGradient", 2.0, 0.0)
    assert costs.pass_s("me", "me") == 1.5


# --- latency ---------------------------------------------------------------------------------------


@given(SEEDS, SCALES, st.floats(0.0, 0.6))
def test_queueing_behind_payloads_does_not_move_the_latency(seed: int, truth: float, queued: float) -> None:
    """Up to 60 % of the round trips wait for up to 100 times the latency; jitter adds up to 20 %."""
    draw, latency = random.Random(seed), Latency()
    for step in range(200):
        wait = truth * draw.uniform(0.0, 100.0) if draw.random() < queued else 0.0
        latency.add(truth * draw.uniform(1.0, 1.2) + wait, float(step))
        if step > LATENCY_WINDOW:
            assert truth <= (latency.round_trip_s() or 0.0) < 1.3 * truth


@given(SEEDS, SCALES)
def test_the_latency_is_right_within_a_tenth(seed: int, truth: float) -> None:
    draw, latency = random.Random(seed), Latency()
    for step in range(100):
        wait = 50.0 * truth if draw.random() < 0.05 else 0.0
        latency.add(truth * draw.uniform(1.0, 1.2) + wait, float(step))
    assert truth <= (latency.round_trip_s() or 0.0) < 1.1 * truth


@given(SEEDS, SCALES, st.sampled_from([(0.5, 4), (2.0, LATENCY_WINDOW)]))
def test_a_true_change_of_the_latency_is_followed(seed: int, truth: float, change: tuple[float, int]) -> None:
    (factor, within), draw, latency = change, random.Random(seed), Latency()
    for step in range(100):
        latency.add(truth * draw.uniform(1.0, 1.2), float(step))
    for step in range(100, 100 + within):
        latency.add(factor * truth * draw.uniform(1.0, 1.2), float(step))
    assert factor * truth <= (latency.round_trip_s() or 0.0) <= 1.2 * factor * truth


def test_after_a_silence_a_risen_latency_is_followed_at_once() -> None:
    latency = Latency()
    for step in range(100):
        latency.add(1.0, float(step))
    latency.add(2.0, 100.0 + 2.0 * AGE_S)
    assert latency.round_trip_s() == 2.0


# --- bandwidth -------------------------------------------------------------------------------------


def transfer_s_of(bandwidth: Bandwidth, size_bytes: float) -> float | None:
    bps = bandwidth.bps(size_bytes)
    return None if bps is None else 8.0 * size_bytes / bps


class Wire:
    """A link that carries payloads one after the other; `done` gets (size, seconds, completed at)."""

    def __init__(self, draw: random.Random, byte_s: float, latency_s: float, outliers: float = 0.05) -> None:
        self.draw, self.byte_s, self.latency_s, self.outliers = draw, byte_s, latency_s, outliers
        self.free_at = 0.0

    def send(self, size_bytes: float, sent_at: float) -> tuple[float, float, float]:
        took = noisy(self.draw, size_bytes * self.byte_s, self.outliers)
        self.free_at = max(self.free_at, sent_at) + took
        done_at = self.free_at + self.latency_s
        return size_bytes, done_at - sent_at, done_at


def burst(wire: Wire, bandwidth: Bandwidth, size_bytes: float, start: float, payloads: int) -> float:
    """`payloads` handed over at once at `start`; when the last is there."""
    at = start
    for _ in range(payloads):
        size, seconds, at = wire.send(size_bytes, start)
        bandwidth.add(size, seconds, at, wire.latency_s)
    return at


@given(SEEDS, TRANSFERS, st.sampled_from([0.0, 0.1, 1.0, 3.0]), st.integers(1, 20))
def test_the_bandwidth_is_right_whatever_waits_on_the_link(
    seed: int, transfer_s: float, latency: float, payloads: int
) -> None:
    size, bandwidth, at = 1e6, Bandwidth(), 0.0
    wire = Wire(random.Random(seed), transfer_s / size, latency * transfer_s, outliers=0.02)
    for _ in range(4 * WINDOW // payloads + 1):
        at = burst(wire, bandwidth, size, at + 10.0 * transfer_s, payloads)
    bps = bandwidth.bps(size)
    assert bps is not None
    assert abs(8.0 * size / bps / transfer_s - 1.0) < 0.1


@given(SEEDS, SCALES, st.sampled_from([0.5, 2.0]), st.integers(1, 8))
def test_a_lasting_change_of_the_bandwidth_is_followed(
    seed: int, transfer_s: float, factor: float, payloads: int
) -> None:
    size, bandwidth, at = 1e6, Bandwidth(), 0.0
    wire = Wire(random.Random(seed), transfer_s / size, transfer_s, outliers=0.0)
    for _ in range(WINDOW):
        at = burst(wire, bandwidth, size, at + transfer_s, payloads)
    wire.byte_s *= factor
    for _ in range(CHANGE):
        at = burst(wire, bandwidth, size, at + transfer_s, payloads)
    bps = bandwidth.bps(size)
    assert bps is not None and abs(8.0 * size / bps / (factor * transfer_s) - 1.0) <= 0.2


def test_completions_that_are_learnt_in_pairs_count_once_each() -> None:
    """Payloads of 1 s each; the peer is busy and sees every second completion together with the next."""
    bandwidth = Bandwidth()
    for pair in range(40):
        at = 2.0 * pair + 2.0
        bandwidth.add(100.0, at - max(0.0, 2.0 * pair - 1.0), at)
        bandwidth.add(100.0, at - max(0.0, 2.0 * pair - 0.5), at)
    assert bandwidth.bps(100.0) == pytest.approx(800.0)


def test_completions_that_are_learnt_all_at_once_count_once_each() -> None:
    bandwidth = Bandwidth()
    for burst_at in range(0, 1000, 100):
        for _ in range(10):
            bandwidth.add(100.0, 10.0, burst_at + 10.0)
    assert bandwidth.bps(100.0) == pytest.approx(800.0)


def test_payloads_that_share_the_link_are_taken_together() -> None:
    """Two payloads of 1 s each, piece by piece in turn: both are there after 2 s."""
    bandwidth = Bandwidth()
    for pair in range(10):
        bandwidth.add(100.0, 1.99, 10.0 * pair + 1.99)
        bandwidth.add(100.0, 2.0, 10.0 * pair + 2.0)
    assert bandwidth.bps(100.0) == pytest.approx(800.0)


def test_a_link_that_is_never_idle_is_measured_all_the_same() -> None:
    bandwidth, at = Bandwidth(), 0.0
    for step in range(100 + TOGETHER * CHANGE):
        at += 1.0 if step < 100 else 2.0
        bandwidth.add(100.0, 5.0, at)
    assert transfer_s_of(bandwidth, 100.0) == pytest.approx(2.0)


def test_small_payloads_say_little_about_large_ones() -> None:
    bandwidth = Bandwidth()
    for step in range(10):
        bandwidth.add(1e6, 1.1, 10.0 * step + 5.0, latency_s=0.1)
        for small in range(4):
            bandwidth.add(100.0, 0.11, 10.0 * step + 6.0 + small, latency_s=0.1)
    assert transfer_s_of(bandwidth, 1e6) == pytest.approx(1.0)


def test_a_download_of_large_pieces_does_not_outvote_activations() -> None:
    bandwidth = Bandwidth()
    for step in range(20):
        bandwidth.add(1e6, 1.0, 10.0 * step + 5.0)
    bandwidth.add(1e9, 1e5, 2e5)
    assert transfer_s_of(bandwidth, 1e6) == pytest.approx(1.0)


def test_a_latency_above_the_whole_transfer_gives_no_infinite_bandwidth() -> None:
    bandwidth = Bandwidth()
    for step in range(20):
        bandwidth.add(1e3, 0.1, float(step), latency_s=0.2)
    assert transfer_s_of(bandwidth, 1e3) == pytest.approx(0.01)


# --- published values ------------------------------------------------------------------------------


def test_the_first_value_is_published_at_once() -> None:
    assert StableEstimate().offer(3.0) == 3.0


def test_a_change_must_last() -> None:
    steady = StableEstimate()
    steady.offer(1.0)
    assert [steady.offer(2.0) for _ in range(3)] == [1.0, 1.0, 2.0]
    assert [steady.offer(1.0) for _ in range(3)] == [2.0, 2.0, 1.0]


def test_a_change_within_the_floor_is_not_published() -> None:
    steady = StableEstimate(floor=1e-3)
    steady.offer(1e-5)
    assert {steady.offer(9e-4) for now in range(1, 50)} == {1e-5}
    assert [steady.offer(2e-3) for now in range(50, 53)] == [1e-5, 1e-5, 2e-3]


def test_an_estimate_that_swings_about_the_published_value_does_not_move_it() -> None:
    steady = StableEstimate()
    steady.offer(1.0)
    assert {steady.offer(5.0 if now % 3 else 0.2) for now in range(1, 200)} == {1.0}


def test_a_value_that_comes_back_each_time_is_not_left() -> None:
    steady = StableEstimate()
    steady.offer(1.0)
    assert {steady.offer(2.0 if now % 3 else 1.0) for now in range(1, 200)} == {1.0}


def test_a_value_published_within_a_change_is_set_right() -> None:
    """The estimate climbs from 1 to 2 over 20 samples: what is published ends near 2."""
    steady = StableEstimate()
    for _ in range(200):
        steady.offer(1.0)
    for step in range(60):
        steady.offer(min(2.0, 1.0 + step / 20.0))
    assert steady.published is not None and 1.87 < steady.published <= 2.0


def test_a_settled_value_stays_within_its_margin_unless_left_for_good() -> None:
    steady = StableEstimate()
    for _ in range(200):
        steady.offer(1.0)
    assert {steady.offer(1.24) for _ in range(100)} == {1.0}
    assert [steady.offer(1.26) for _ in range(3)] == [1.0, 1.0, 1.26]


# --- the cost of a link ----------------------------------------------------------------------------


def test_the_cost_is_that_of_the_flow_problem() -> None:
    link = LinkCost()
    link.latency.add(0.3, 0.0)
    link.out.add(1e6, 1.15, 10.0, latency_s=0.15)
    link.back_bps = 4e6
    expected = link_cost((2.0, 4.0), (0.15, 0.15), (8e6, 4e6), 5e5)
    assert link.seconds(5e5, 2.0, 4.0) == pytest.approx(expected)
    assert link.seconds(5e5) == pytest.approx(expected - 3.0)


def test_priors_stand_in_until_there_is_a_sample() -> None:
    link = LinkCost()
    assert link.seconds(1e6) == pytest.approx(8e6 / PRIOR_BPS)
    assert link.seconds(1e6, like_bps=8e6) == pytest.approx(1.0)
    link.back_bps = 16e6
    assert link.seconds(1e6) == pytest.approx(0.5)
    link.out.add(1e6, 0.25, 10.0)
    assert link.seconds(1e6) == pytest.approx(2.0 / (2.0 + 4.0))
    link.latency.add(0.2, 10.0)
    assert link.seconds(1e6) == pytest.approx(0.1 + 2.0 / (2.0 + 4.0))


@settings(max_examples=20)
@given(SEEDS, TRANSFERS, TRANSFERS, TRANSFERS)
def test_the_published_cost_is_right_deaf_to_noise_and_follows(
    seed: int, trip_s: float, transfer_s: float, pass_s: float
) -> None:
    draw, size, now = random.Random(seed), 1e6, 0.0
    link, compute = LinkCost(), PeerCosts()
    wire = Wire(draw, transfer_s / size, trip_s / 2.0)

    def step(compute_s: float) -> float:
        nonlocal now
        wait = wire.byte_s * size if draw.random() < 0.3 else 0.0
        link.latency.add(draw.uniform(1.0, 1.2) * trip_s + wait, now)
        compute.computed("Forward", noisy(draw, compute_s), now)
        compute.computed("InputGradient", noisy(draw, compute_s), now)
        now = burst(wire, link.out, size, now + transfer_s, 1)
        return link.published_s(link.seconds(size, compute.pass_s("me", "me"), pass_s))

    def truth(compute_s: float) -> float:
        return (compute_s + pass_s) / 2.0 + trip_s / 2.0 + wire.byte_s * size

    for _ in range(SETTLED):
        settled = step(pass_s)
    assert {step(pass_s) for _ in range(100)} == {settled}
    assert abs(settled / truth(pass_s) - 1.0) < 0.25
    wire.byte_s *= 4.0
    for _ in range(WINDOW):
        changed = step(4.0 * pass_s)
    assert abs(changed / truth(4.0 * pass_s) - 1.0) < 0.35


# --- garbage and bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ABSURD)
def test_absurd_samples_are_left_out(value: float) -> None:
    link, samples, steady = LinkCost(), Samples(), StableEstimate()
    link.latency.add(1.0, 0.0)
    link.out.add(1e6, 1.0, 1.0)
    samples.add(1.0, 0.0)
    steady.offer(1.0)
    before = link.seconds(1e6, 1.0, 1.0)
    link.latency.add(value, 2.0)
    link.out.add(value, 1.0, 4.0)
    link.out.add(1e6, value, 5.0)
    link.out.add(1e6, 1.0, 10.0, latency_s=value)
    link.back_bps = value
    samples.add(value, 2.0)
    assert steady.offer(value) == 1.0
    assert link.seconds(1e6, 1.0, 1.0) == before
    assert link.seconds(1e6, value, value) == before - 1.0
    assert samples.median() == 1.0


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats(0.0, 1e9)), max_size=60), st.floats(1.0, 1e12))
def test_no_sample_makes_a_cost_that_is_not_a_number(
    samples: list[tuple[float, float, float]], size_bytes: float
) -> None:
    link, now = LinkCost(), 0.0
    for first, second, later in samples:
        now += later
        link.latency.add(first, now)
        link.out.add(first, second, now, latency_s=second)
        link.back_bps = second
        cost = link.published_s(link.seconds(size_bytes, first, second))
        assert 0.0 < cost < math.inf and 0.0 <= link.line_s(size_bytes) < math.inf


@pytest.mark.parametrize("make", [LinkCost, PeerCosts])
def test_memory_is_bounded(make: Callable[[], LinkCost | PeerCosts]) -> None:
    kept = make()
    sizes = []
    for step in range(4 * WINDOW):
        now = float(step)
        if isinstance(kept, LinkCost):
            kept.latency.add(0.1 + step * 1e-6, now)
            kept.out.add(1e6 + step, 0.5, now)
            kept.published_s(kept.seconds(1e6))
        else:
            kept.computed("Forward", 0.1 + step * 1e-6, now)
            kept.computed("InputGradient", 0.1 + step * 1e-6, now)
        sizes.append(len(pickle.dumps(kept)))
    assert max(sizes[2 * WINDOW :]) <= max(sizes[: 2 * WINDOW]) + 64
