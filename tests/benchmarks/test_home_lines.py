"""Ratios of the benchmark of home lines."""

from __future__ import annotations

import pytest

from benchmarks.overhead.home_lines import Outcome, front, over_alone, over_synchronous, seconds_to

CURVE = [(10.0, 5.0), (100.0, 4.0), (1000.0, 3.5)]


def test_runs_that_a_quicker_one_beats_are_left_out() -> None:
    assert front([(100.0, 4.0), (10.0, 5.0), (50.0, 5.5), (1000.0, 3.5), (200.0, 4.0)]) == CURVE


def test_time_to_a_loss_lies_between_two_runs_by_the_logarithm() -> None:
    found = seconds_to(4.5, CURVE)
    assert found == pytest.approx(10.0 * 10.0**0.5)
    assert seconds_to(4.0, CURVE) == pytest.approx(100.0)
    assert seconds_to(5.1, CURVE) is None
    assert seconds_to(3.4, CURVE) is None


@pytest.mark.parametrize(("loss", "words"), [(4.0, "2.00"), (3.4, "over 20.00"), (5.5, "below 0.20")])
def test_ratio_beyond_the_runs_of_the_machine_alone_is_a_bound(loss: float, words: str) -> None:
    assert over_alone(Outcome(50.0, loss, 9, 0.0), CURVE) == words


def test_islands_count_from_the_round_whose_loss_is_that_of_the_synchronous_run() -> None:
    synchronous = Outcome(300.0, 4.2, 9, 0.0)
    islands = Outcome(300.0, 3.0, 9, 0.0, curve=[(20.0, 5.0), (60.0, 4.1), (100.0, 4.3)])
    assert over_synchronous(islands, synchronous) == "5.00"
    assert over_synchronous(Outcome(300.0, 4.4, 9, 0.0, curve=[(20.0, 5.0)]), synchronous) == "–"
