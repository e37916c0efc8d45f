"""Times, bytes and verdicts of the benchmark of presets, by hand."""

from __future__ import annotations

import math

import pytest

from anabranch.sim.metrics.iteration_metrics import Outcome, Row
from benchmarks.simulation import preset_fleets, preset_page
from benchmarks.simulation.preset_fleets import FLEETS, ISLANDS, OURS, ROWS, SYNCHRONOUS, Figures, ours
from benchmarks.simulation.preset_page import Trained, begun, over, seconds, sent, step_of
from benchmarks.simulation.preset_times import (
    Curve,
    Pace,
    Ratio,
    Reached,
    best_curves,
    judged,
    loss_goal,
    next_rate,
    ratio,
    ratio_text,
    reached,
    steps_to,
    time_goal,
)

CURVE: Curve = [(100, 3.0), (200, 2.0), (300, 1.5)]


def test_steps_to_a_loss_lie_between_the_points_of_a_curve() -> None:
    assert steps_to(CURVE, 2.5) == 150
    assert steps_to(CURVE, 1.5) == 300
    assert steps_to(CURVE, 3.5) == 100
    assert steps_to(CURVE, 1.0) is None


def test_a_goal_is_open_where_its_interval_crosses_the_limit() -> None:
    assert loss_goal("loss", []).value == "not run"
    assert loss_goal("loss", [1.0]).met == "open"
    assert loss_goal("loss", [1.01, 1.03, 1.02]).met == "open"
    assert loss_goal("loss", [1.001, 1.002, 1.003]).met == "met"
    assert loss_goal("loss", [1.101, 1.102, 1.103]).met == "missed"


def test_a_synchronous_beginning_has_its_own_cost() -> None:
    pace = Pace(start=40, first=3.0, after=0.5)
    assert pace.at(10) == 30
    assert pace.at(40) == 120
    assert pace.at(100) == 120 + 30
    assert reached([(CURVE, pace)], 2.5) == Reached(120 + 55, True)


def test_a_run_without_the_loss_costs_at_least_all_of_it() -> None:
    slow, quick = Pace(0, 0.0, 1.0), Pace(0, 0.0, 0.1)
    assert reached([(CURVE, slow)], 1.0) == Reached(300, False)
    # A longer run has it; it is quicker than the shorter one would be.
    longer: Curve = [(100, 3.5), (600, 1.0)]
    assert reached([(CURVE, slow), (longer, quick)], 1.0) == Reached(60, True)


def test_a_ratio_is_bounded_on_the_side_of_the_run_that_has_the_loss() -> None:
    there, not_there = Reached(10.0, True), Reached(40.0, False)
    assert ratio(there, there) == Ratio(1.0, 1.0)
    assert ratio(there, not_there) == Ratio(0.0, 0.25)
    assert ratio(not_there, there) == Ratio(4.0, math.inf)
    assert ratio(not_there, not_there) == Ratio(0.0, math.inf)


def test_a_verdict_needs_seeds_and_an_interval_on_one_side() -> None:
    def known(*values: float) -> list[Ratio]:
        return [Ratio(value, value) for value in values]

    assert judged(known(0.5)) is None
    assert judged(known(0.5, 0.51, 0.52)) is True
    assert judged(known(0.5, 1.4, 0.9)) is None
    assert judged(known(2.0, 2.1, 2.2)) is False
    assert judged([Ratio(0.0, 0.5), Ratio(0.0, 0.51)]) is True
    assert judged([Ratio(3.0, math.inf), Ratio(3.1, math.inf)]) is False
    assert judged([Ratio(0.5, math.inf), Ratio(0.6, math.inf)]) is None
    assert judged([Ratio(0.0, math.inf)] * 3) is None
    assert ratio_text(known(0.5, 0.6, 0.7)) == "0.6 ± 0.25"  # 4.303 · 0.1 / √3
    assert ratio_text(known(0.5)) == "0.5 (one seed)"
    assert ratio_text([Ratio(0.0, 0.4), Ratio(0.0, 0.5)]) == "under 0.45"
    assert ratio_text([Ratio(2.0, math.inf), Ratio(4.0, 4.0)]) == "over 3"
    assert ratio_text([Ratio(0.0, math.inf)]) == "neither reached it"


def test_the_goal_of_time_is_decided_by_every_preset() -> None:
    quick, slow = [Ratio(0.5, 0.5)] * 3, [Ratio(2.0, 2.0)] * 3
    assert time_goal("time", {}, ["sparse"]).value == "not run"
    met = time_goal("time", {"diloco": quick, "gaia": [Ratio(0.1, 0.1)] * 3}, [])
    assert (met.met, met.value) == ("met", "diloco: 0.5 ± 0")
    assert time_goal("time", {"diloco": quick, "gaia": slow}, ["sparse"]).met == "missed"
    assert time_goal("time", {"diloco": quick}, ["sparse"]).met == "open"
    # Which one might be quickest is unknown, and another one is quicker for sure.
    unknown = [Ratio(0.0, math.inf)] * 3
    both = time_goal("time", {"diloco": unknown, "gaia": slow}, [])
    assert (both.met, both.value) == ("missed", "diloco: neither reached it; gaia: 2 ± 0")


def test_rates_are_those_that_the_first_seed_tuned() -> None:
    good, bad = [(10, 1.0)], [(10, 2.0)]
    tried = {0.1: {0: bad}, 0.2: {0: good, 1: bad}}
    assert best_curves(tried, 0) == tried[0.2]
    assert best_curves({0.1: {1: good}}, 0) == {}
    assert best_curves(None, 0) == {}


# --- rows and fleets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", FLEETS)
def test_every_row_has_the_same_tokens_in_a_step_of_a_fleet(fleet: str) -> None:
    relays = {"volunteers": 24, "100 Mbit/s": 24, "wan10": 16}[fleet]
    for row in ROWS:
        scenario = preset_fleets.load_scenario(*preset_fleets.fleet_changes(fleet, row))
        assert scenario.model.microbatches == 16 * relays
        assert scenario.fleet.relays == relays
        assert scenario.work.tokens * scenario.model.microbatches == step_of(fleet)
        assert scenario.round.slots == (relays // 2 if row == "ravnest" else relays if row in ISLANDS else 0)


def test_a_row_has_the_bytes_that_it_says() -> None:
    def of(row: str) -> tuple[float, float]:
        scenario = preset_fleets.load_scenario(*preset_fleets.fleet_changes("wan10", row))
        return scenario.round_bytes

    assert of(OURS) == (0.53125, 1.03125)
    assert of("diloco") == (4.0, 4.0)
    assert of("streaming-diloco") == pytest.approx((0.53125 / 3, 0.53125 / 3))
    assert of("sparse") == pytest.approx((112 / 4096, 16 * 112 / 4096))


def test_beginnings_are_those_of_the_presets() -> None:
    assert [begun(row, 4000) for row in (SYNCHRONOUS, "swarm", "dedloc")] == [0, 0, 0]
    assert (begun(OURS, 4000), begun("diloco", 4000), begun("gaia", 4000)) == (80, 1080, 40)


def test_figures_are_those_of_the_iterations_that_count() -> None:
    scenario = preset_fleets.load_scenario("wan10", {"run.iterations": 3, "run.warm_up": 1})
    rows = [_row(9.0, 1, 0.0), _row(8.0, 20, 1e6), _row(2.0, 20, 3e6)]
    found = preset_fleets.figures_of(scenario, Outcome("auction", 0, rows), quickest=False)
    assert found.tokens_per_s == 40 * 4096 / 10.0
    assert found.bytes_per_token == 4e6 / (40 * 4096)
    quickest = preset_fleets.figures_of(scenario, Outcome("auction", 0, rows), quickest=True)
    assert quickest.tokens_per_s == 20 * 4096 / 2.0


def _row(seconds: float, microbatches: int, payload_bytes: float) -> Row:
    return Row(
        *(1, seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0, payload_bytes),
        microbatches=microbatches,
    )


def test_time_and_bytes_of_a_run_on_a_fleet() -> None:
    each = step_of("wan10")
    figures = {fleet: {} for fleet in FLEETS} | {
        "wan10": {
            SYNCHRONOUS: Figures(1.0 * each, 4.0 / each, alone_tokens_per_s=2.0 * each),
            OURS: Figures(10.0 * each, 0.5 / each),
            "diloco": Figures(20.0 * each, 0.25 / each),
        }
    }
    ours: Curve = [(2000, 3.0), (4080, 2.0)]
    theirs: Curve = [(1080, 3.0), (4000, 2.5)]
    found = {SYNCHRONOUS: {0.1: {0: [(4000, 2.0)]}}, OURS: {0.1: {0: ours}}, "diloco": {0.1: {0: theirs}}}
    trained = Trained("llama-tiny", 256, 0, 4000, found, {})
    pace = seconds(figures, "wan10", OURS, 4000)
    assert pace and (pace.start, pace.first, pace.after) == (80, 1.0, pytest.approx(0.1))
    assert pace.at(4080) == pytest.approx(80 + 400)
    spent = sent(figures, "wan10", OURS, 4000)
    assert spent and spent.at(4080) == pytest.approx(80 * 4 + 4000 * 0.5)
    assert seconds(figures, "volunteers", OURS, 4000) is None
    # 480 s over the 4,000 s of the synchronous run; diloco, which does not get there, has 1,080 + 146 s.
    assert over(trained, figures, "wan10", SYNCHRONOUS) == [Ratio(pytest.approx(0.12), pytest.approx(0.12))]
    assert over(trained, figures, "wan10", "diloco") == [Ratio(0.0, pytest.approx(480 / 1226))]
    assert over(trained, figures, "wan10", "sparse") == []
    # Synchronous steps on a machine twice as quick: 40 + 400 s over 540 + 146 s, and over 2,000 s.
    alone = over(trained, figures, "wan10", "diloco", alone=True)
    assert alone == [Ratio(0.0, pytest.approx(440 / 686))]
    alone = over(trained, figures, "wan10", SYNCHRONOUS, alone=True)
    assert alone == [Ratio(pytest.approx(0.22), pytest.approx(0.22))]


def test_longer_runs_have_the_rate_that_was_tuned_and_may_lack_the_first_seed() -> None:
    short, long = [(10, 2.0)], [(20, 1.0)]
    found = {OURS: {0.1: {0: short, 1: short}, 0.2: {0: [(10, 3.0)]}}}
    trained = Trained("llama-tiny", 256, 0, 10, found, {20: {OURS: {0.1: {1: long}, 0.2: {0: long}}}})
    assert trained.curves(OURS) == {0: short, 1: short}
    assert trained.curves(OURS, 20) == {1: long}
    assert trained.curves("diloco", 20) == {}


def test_a_page_of_no_runs_says_what_is_missing() -> None:
    figures = {fleet: dict.fromkeys(ROWS) for fleet in FLEETS}
    trained = Trained("llama-tiny", 256, 0, 4000, {}, {12000: {}})
    goals = preset_page.goals_of(trained, figures)
    assert {goal.met for goal in goals} == {"open"} and {goal.value for goal in goals} == {"not run"}
    assert "synchronous (all)" in preset_page.missing_of(trained, [0], 0.1)
    assert preset_page.loss_table(trained, figures).count("not run") == len(ISLANDS) + 1
    assert preset_page.published_table([trained], figures)


def test_a_fleet_has_the_shortest_rounds_that_are_not_much_slower() -> None:
    def chosen(*speeds: float) -> str:
        rows = ("anabranch", "anabranch-10", "anabranch-1", "diloco")
        return ours({row: Figures(speed, 1.0) for row, speed in zip(rows, speeds, strict=True)})

    assert chosen(100.0, 99.0, 97.0, 500.0) == "anabranch-1"
    assert chosen(100.0, 44.0, 19.0, 500.0) == "anabranch-10"
    assert chosen(100.0, 39.0, 19.0, 500.0) == "anabranch"
    assert ours({}) == ours({"anabranch": None}) == "anabranch"


def test_rates_are_tried_until_both_neighbours_of_the_best_are_worse() -> None:
    def tried(**losses: float) -> dict[float, dict[int, list[tuple[int, float]]]]:
        return {float(rate[1:]) / 8: {0: [(10, loss)]} for rate, loss in losses.items()}

    assert next_rate({}, 0, 1.0) == 1.0
    assert next_rate(tried(r8=3.0), 0, 1.0) == 0.5
    assert next_rate(tried(r8=3.0, r4=2.0), 0, 1.0) == 0.25
    assert next_rate(tried(r8=3.0, r4=2.0, r2=2.5), 0, 1.0) is None
    assert next_rate(tried(r8=3.0, r4=3.5), 0, 1.0) == 2.0
    assert next_rate(tried(r8=3.0, r4=3.5), 1, 1.0) == 1.0  # seed 1 has none yet
