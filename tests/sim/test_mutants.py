"""The mutation check: every deliberate breakage of the protocol is caught by a named invariant."""

from __future__ import annotations

import pytest
from mutants import MUTANTS

from anabranch.sim.trials.runner import run_seed

#: Those that a few seeds of their profile catch.
QUICK = ("a slot granted twice", "an embedding counted twice", "a repair slot used by admission")
#: Seeds within which each must be caught.
SEEDS = 2000


def caught_by(name: str, seeds: range, patch: pytest.MonkeyPatch) -> tuple[str, int]:
    """(invariant, seed) of the first violation; ("", -1) if the mutant survives."""
    mutant = MUTANTS[name]
    with patch.context() as broken:
        mutant.breaks(broken)
        for seed in seeds:
            outcome = run_seed(seed, mutant.profile)
            if outcome.invariant in mutant.caught_by:
                return outcome.invariant, seed
    return "", -1


@pytest.mark.parametrize("name", QUICK)
def test_a_few_mutants_are_caught_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant, _ = caught_by(name, range(12), monkeypatch)
    assert invariant


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant, _ = caught_by(name, range(SEEDS), monkeypatch)
    assert invariant, f"{name} survives {SEEDS} seeds of {MUTANTS[name].profile}"
