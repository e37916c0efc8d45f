"""Goals of benchmarks: met only if the whole interval is on the right side."""

from __future__ import annotations

from benchmarks import harness


def test_a_goal_is_met_only_by_the_whole_interval() -> None:
    assert harness.at_most("less", 0.6, 0.5, "{:.2f}", 0.05).met == "met"
    assert harness.at_most("less", 0.6, 0.58, "{:.2f}", 0.05) == harness.Goal(
        "less", "at most 0.60", "0.58 ± 0.05", "missed"
    )
    assert harness.at_least("more", 0.6, 0.62, "{:.2f}", 0.05).met == "missed"
    assert harness.at_least("more", 0.6, 0.62, "{:.2f}").met == "met"
