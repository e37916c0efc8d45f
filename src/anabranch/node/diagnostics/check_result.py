"""Result of one check of a machine."""

from __future__ import annotations

from dataclasses import dataclass

GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of a machine. name: what was checked. verdict: GREEN, YELLOW or RED. found:
    finding, as text. repair: remedy, or ""."""

    name: str
    verdict: str
    found: str
    repair: str = ""


def graded(value: float, good: float, bad: float) -> str:
    """Verdict on a value: GREEN from `good` upwards, RED below `bad`, YELLOW between."""
    return GREEN if value >= good else YELLOW if value >= bad else RED
