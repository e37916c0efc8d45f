"""Exception for a violated invariant."""

from __future__ import annotations


class Violation(AssertionError):
    """Violated invariant, I1 to I7 (docs/explanation/invariants.md), or another demand on a simulated run,
    such as G1 to G5. invariant: its code. text: what happened."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
