"""The mutation check: every deliberate breakage of the protocol is caught by a named invariant."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, SEEDS, caught

#: Those that a few seeds of their profile catch.
QUICK = ("a slot granted twice", "an embedding counted twice", "a repair slot used by admission")


@pytest.mark.parametrize("name", QUICK)
def test_a_few_mutants_are_caught_at_once(name: str) -> None:
    assert caught(name, range(12))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    outcome = caught(name, range(SEEDS))
    assert outcome is not None, f"{name} survives {SEEDS} seeds of {MUTANTS[name].profile}"
    print(f"{name}: seed {outcome.seed} of {outcome.profile}: {outcome.violation}")
