"""Grid of honest circumstances and deeds of one liar: pairs that its seeds cover, and seats that count."""

from __future__ import annotations

from collections import Counter

from benchmarks.byzantine.honest_beside_liar import PARTS, Course, Job, course, jobs, lost_beside
from benchmarks.byzantine.honest_circumstances import CIRCUMSTANCES
from benchmarks.byzantine.liar_deeds import DEEDS


def test_seeds_cover_each_pair_once_beside_its_control() -> None:
    """Deeds against audits are done by relays only, and not in rounds or delayed iterations."""
    found = Counter[tuple[str, str]]()
    for seed in range(PARTS):
        grid = jobs(CIRCUMSTANCES, DEEDS, seed)
        lies = [job for job in grid if job.deed in DEEDS]
        found.update((job.circumstance, job.deed) for job in lies)
        assert all(grid.index(job.control) < grid.index(job) for job in lies)
        assert not any(DEEDS[job.deed].audited and job.role == "data" for job in lies)
    assert set(found.values()) == {1}
    left_out = {(name, deed) for name in CIRCUMSTANCES for deed in DEEDS} - found.keys()
    assert all(DEEDS[deed].audited or DEEDS[deed].early for _, deed in left_out)


def test_seats_that_the_control_or_a_crash_would_cost_do_not_count() -> None:
    control = Course(lost=["a: silent"])
    found = Course(lost=["a: silent", "a: expelled", "b: refused", "c: late"], crashes={"b": 1})
    assert lost_beside(found, control) == ["a: expelled", "c: late"]


def test_a_liar_does_its_deed_and_honest_machines_keep_their_seats() -> None:
    found = course(Job("stage of two", "wrong digest", "fellow", 0))
    assert found.did and found.out_s >= 0.0 and found.steps > 20
    assert not (found.lost or found.wrong or found.skipped)
