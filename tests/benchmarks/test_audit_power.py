"""Power of audits: the benchmark's liars lie, and are out once a false contribution is drawn."""

from __future__ import annotations

import pytest

from benchmarks.recovery import audit_power
from benchmarks.recovery.audit_power import KINDS, UNITS, Job


@pytest.mark.parametrize("kind", KINDS)
def test_a_liar_whose_false_unit_is_drawn_is_out(kind: str) -> None:
    outcome = audit_power.simulate(Job(5, 4, kind, 1.0))
    assert outcome.out and outcome.false and outcome.others == 0
    assert 0 < outcome.hit <= outcome.units <= outcome.hit + 2 * 4


def test_draws_find_liars_as_the_formula_says() -> None:
    in_time = [audit_power.first_hit(seed, 4) <= UNITS for seed in range(600)]
    low, high = audit_power.wilson(sum(in_time), len(in_time))
    assert low < audit_power.per_unit(UNITS) < high
    assert low < audit_power.in_time(4, UNITS) < high
