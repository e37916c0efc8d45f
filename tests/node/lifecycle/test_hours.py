"""Hours at which a machine is lent: spans within a day and over midnight, and when they change."""

from __future__ import annotations

from datetime import datetime

import pytest

from anabranch.errors import UserError
from anabranch.hours import parse_hours


def at(hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2026, 11, 24, hour, minute, second)


def test_a_span_over_midnight() -> None:
    night = parse_hours("22:00-07:00")
    assert all(night.open(at(*t)) for t in ((22,), (23, 59), (0,), (6, 59)))
    assert not any(night.open(at(*t)) for t in ((7,), (21, 59)))
    assert night.changes_in_s(at(23)) == 8 * 3600
    assert night.changes_in_s(at(7)) == 15 * 3600
    assert night.changes_in_s(at(21, 59, 30)) == 30


def test_a_span_within_a_day() -> None:
    day = parse_hours("9:30-17:00")
    assert day.open(at(9, 30)) and not day.open(at(9, 29)) and not day.open(at(17))
    assert str(day) == "09:30-17:00"


@pytest.mark.parametrize("text", ["", "22", "22:00", "25:00-07:00", "22:00-07:61", "07:00-07:00", "a:b-c:d"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--hours"):
        parse_hours(text)
