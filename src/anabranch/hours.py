"""Times at which a machine is lent: hours of the day, in its local time, or while it is idle."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from anabranch.errors import UserError
from anabranch.operating_system import OtherPrograms

_MINUTES = 24 * 60
#: Text of `WhenIdle`.
WHEN_IDLE = "when idle"
#: Processor cores that other programs use at most while a machine is idle, and from which its owner is back.
#: Choices: a desktop that nobody uses takes a twentieth of a core, a video a third to a whole one.
IDLE_CORES, BUSY_CORES = 0.25, 0.5
#: Seconds for which a machine must be idle before it is lent. A choice: longer than a pause in reading.
IDLE_S = 300.0
#: Seconds between looks, and looks in a row that must find the owner back, not one busy moment.
LOOK_S, LOOKS = 10.0, 2


@dataclass(frozen=True)
class Hours:
    """Hours of a day in which a machine is lent: from `start` until `end`, in minutes since midnight of its
    local time. With `end` before `start` they pass midnight; equal ones are never open."""

    start: int
    end: int

    def open(self, now: datetime) -> bool:
        """True if the machine is lent at `now`, a local time."""
        return (_minute(now) - self.start) % _MINUTES < (self.end - self.start) % _MINUTES

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.end))


class WhenIdle:
    """Times at which other programs leave the processors of a machine alone: lent once they did so for IDLE_S
    seconds, no longer once LOOKS looks in a row found them busy. Not lent at first.

    cores(): mean number of processor cores that other programs used since its last call. clock(): seconds.
    """

    def __init__(self, cores: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._cores, self._clock = cores, clock
        self._looked_at = -math.inf
        self._lent = False
        self._idle_since: float | None = None
        """Begin (s) of the looks that all found the machine idle until it was lent; None if the last look
        before did not."""
        self._busy_looks = 0

    def open(self, now: datetime) -> bool:
        """True if the machine is lent now. To be asked every few seconds; measures the use of the processors
        (`cores`) at most once in LOOK_S seconds. now: ignored."""
        at = self._clock()
        if at - self._looked_at >= LOOK_S:
            self._look(at)
        return self._lent

    def _look(self, at: float) -> None:
        cores, before, self._looked_at = self._cores(), self._looked_at, at
        if self._lent:
            self._busy_looks = self._busy_looks + 1 if cores > BUSY_CORES else 0
            if self._busy_looks >= LOOKS:
                self._lent, self._idle_since = False, None
        elif cores > IDLE_CORES:
            self._idle_since = None
        else:
            if self._idle_since is None:
                self._idle_since = max(before, at - LOOK_S)
            self._lent, self._busy_looks = at - self._idle_since >= IDLE_S, 0

    def __str__(self) -> str:
        return WHEN_IDLE


def parse_hours(text: str) -> Hours | WhenIdle:
    """Parse a user's times such as "22:00-07:00", or "when idle". Raises UserError for another text, for two
    equal times, and for "when idle" on a system that does not tell how busy it is."""
    if " ".join(text.lower().split()) == WHEN_IDLE:
        try:
            return WhenIdle(OtherPrograms().cores)
        except OSError as error:
            raise UserError(f'--hours "{text}": {error}; give times, as 22:00-07:00') from None
    found = re.fullmatch(r"(\d{1,2}):(\d{2})[-–](\d{1,2}):(\d{2})", text.strip())
    numbers = [int(word) for word in found.groups()] if found else []
    if not found or max(numbers[0::2]) > 23 or max(numbers[1::2]) > 59:
        raise UserError(f'--hours "{text}": write them as 22:00-07:00, or as "when idle"')
    hours = Hours(60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3])
    if hours.start == hours.end:
        raise UserError(f'--hours "{text}": the two times are equal; leave --hours out to lend all day')
    return hours


def _minute(now: datetime) -> int:
    return 60 * now.hour + now.minute
