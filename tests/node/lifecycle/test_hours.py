"""Times at which a machine is lent: spans within a day and over midnight, and while its owner is away."""

from __future__ import annotations

from datetime import datetime

import pytest

from anabranch import operating_system
from anabranch.errors import UserError
from anabranch.hours import BUSY_CORES, IDLE_CORES, IDLE_S, LOOK_S, WhenIdle, parse_hours
from anabranch.operating_system import OtherPrograms


def at(hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2026, 11, 24, hour, minute, second)


def test_a_span_over_midnight() -> None:
    night = parse_hours("22:00-07:00")
    assert all(night.open(at(*t)) for t in ((22,), (23, 59), (0,), (6, 59)))
    assert not any(night.open(at(*t)) for t in ((7,), (21, 59)))


def test_a_span_within_a_day() -> None:
    day = parse_hours("9:30-17:00")
    assert day.open(at(9, 30)) and not day.open(at(9, 29)) and not day.open(at(17))
    assert str(day) == "09:30-17:00"


@pytest.mark.parametrize("text", ["", "22", "22:00", "25:00-07:00", "22:00-07:61", "07:00-07:00", "a:b-c:d"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--hours"):
        parse_hours(text)


class Desktop:
    """Machine whose owner uses so many cores."""

    def __init__(self) -> None:
        self.now_s, self.cores = 1000.0, 0.0
        self.hours = WhenIdle(lambda: self.cores, lambda: self.now_s)

    def lent(self, cores: float, seconds: float = LOOK_S) -> list[bool]:
        """True for each look, every LOOK_S, at which the machine is lent."""
        self.cores = cores
        found = []
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            found.append(self.hours.open(at(12)))
        return found


def test_a_machine_is_lent_after_it_was_idle_for_long() -> None:
    desktop = Desktop()
    assert not any(desktop.lent(IDLE_CORES, IDLE_S - LOOK_S))
    assert desktop.lent(IDLE_CORES, IDLE_S) == [True] * round(IDLE_S / LOOK_S)


def test_a_moment_of_work_begins_the_wait_anew() -> None:
    desktop = Desktop()
    desktop.lent(0.0, IDLE_S - LOOK_S)
    assert not any(desktop.lent(IDLE_CORES + 0.01) + desktop.lent(0.0, IDLE_S - LOOK_S))
    assert desktop.lent(0.0)[-1]


def test_the_owner_is_back_at_the_second_busy_look() -> None:
    desktop = Desktop()
    desktop.lent(0.0, IDLE_S)
    assert desktop.lent(BUSY_CORES + 0.01) + desktop.lent(BUSY_CORES) == [True, True], (
        "a program that woke up"
    )
    assert desktop.lent(BUSY_CORES + 0.01, 3 * LOOK_S) == [True, False, False]
    assert not any(desktop.lent(0.0, IDLE_S - LOOK_S)) and desktop.lent(0.0)[-1]


def test_two_questions_at_once_are_one_look() -> None:
    desktop = Desktop()
    desktop.lent(0.0, IDLE_S)
    desktop.cores = 4.0
    desktop.now_s += LOOK_S
    assert [desktop.hours.open(at(12)) for _ in range(5)] == [True] * 5


def test_when_idle_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(parse_hours(" When  idle ")) == "when idle"
    monkeypatch.setattr(operating_system.sys, "platform", "win32")
    monkeypatch.delattr(operating_system.os, "getloadavg")
    with pytest.raises(UserError, match="does not tell how busy it is; give times, as 22:00-07:00"):
        parse_hours("when idle")


@pytest.mark.parametrize(("niced", "expected"), [(0, 1.5), (10, 2.5)])
def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch, niced: int, expected: float) -> None:
    """Ten seconds in which all programs of normal priority used 30 s of processors, this one 10 s (user) and
    5 s (system)."""
    now, used, own = [50.0], [100.0], [(7.0, 3.0)]

    class Times:
        @property
        def user(self) -> float:
            return own[0][0]

        @property
        def system(self) -> float:
            return own[0][1]

    monkeypatch.setattr(operating_system.sys, "platform", "linux")
    monkeypatch.setattr(operating_system, "_normal_cpu_s", lambda: used[0])
    monkeypatch.setattr(operating_system.os, "times", Times)
    monkeypatch.setattr(operating_system.os, "getpriority", lambda *_: niced)
    monkeypatch.setattr(operating_system.time, "monotonic", lambda: now[0])
    meter = OtherPrograms()
    now[0], used[0], own[0] = 60.0, 130.0, (17.0, 8.0)
    assert meter.cores() == pytest.approx(expected)
    assert meter.cores() == 0.0
