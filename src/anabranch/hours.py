"""Hours of the day at which a machine is lent, in its local time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from anabranch.errors import UserError

_MINUTES = 24 * 60


@dataclass(frozen=True)
class Hours:
    """Hours of every day in which a volunteer lends the machine, in minutes since midnight; they may pass
    midnight."""

    start: int
    end: int

    def open(self, now: datetime) -> bool:
        """True if the machine is lent now."""
        return (_minute(now) - self.start) % _MINUTES < (self.end - self.start) % _MINUTES

    def changes_in_s(self, now: datetime) -> float:
        """Seconds until lending ends (if the machine is lent now), or until it begins."""
        wait = ((self.end if self.open(now) else self.start) - _minute(now)) % _MINUTES or _MINUTES
        return timedelta(minutes=wait).total_seconds() - now.second - now.microsecond / 1e6

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.end))


def parse_hours(text: str) -> Hours:
    """Parse "22:00-07:00". Raises UserError."""
    found = re.fullmatch(r"(\d{1,2}):(\d{2})[-–](\d{1,2}):(\d{2})", text.strip())
    numbers = [int(word) for word in found.groups()] if found else []
    if not found or max(numbers[0::2]) > 23 or max(numbers[1::2]) > 59:
        raise UserError(f'--hours "{text}": write them as 22:00-07:00')
    hours = Hours(60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3])
    if hours.start == hours.end:
        raise UserError(f'--hours "{text}": the two times are equal; leave --hours out to lend all day')
    return hours


def _minute(now: datetime) -> int:
    return 60 * now.hour + now.minute
