"""Figures of a chaos test's hostile guests and of honest seats (docs/reference/json-results.md)."""

from __future__ import annotations

from collections import Counter

import msgspec

from anabranch.node.chaos.run_record import GuestVisit, RunRecord
from anabranch.observe.wording import plain

#: Longest reason in a result (characters).
REASON_CHARS = 160


class GuestFigures(msgspec.Struct):
    """Guest that did its deed. name: of its process. stage: that it asked for. put_out: True if the run put
    it out, for `reason`. seconds: from the deed's beginning until the guest was put out, else until its
    process was ended; steps: those committed meanwhile. links_closed: number of a stranger's links that the
    run closed."""

    name: str
    deed: str
    stage: int
    put_out: bool
    reason: str
    seconds: float
    steps: int
    links_closed: int


class SeatFigures(msgspec.Struct):
    """Removal of an honest member that no fault had hit. name: of its process. reason: of the removal.
    back_s: seconds until it served again, or null."""

    name: str
    reason: str
    back_s: float | None


class Hostile(msgspec.Struct):
    """Guests that did their deeds (guests); removals of honest members without a fault (honest_removed);
    names of the seats that were empty at the end, after up to a minute without faults (empty_seats)."""

    guests: list[GuestFigures] = []
    honest_removed: list[SeatFigures] = []
    empty_seats: list[str] = []

    @property
    def lost(self) -> list[str]:
        """Names, sorted, of honest members that were removed without a fault and did not come back, and of
        seats that were empty at the end."""
        gone = {seat.name for seat in self.honest_removed if seat.back_s is None}
        return sorted(gone | set(self.empty_seats))

    def lines(self) -> list[str]:
        """The figures as lines of text; none without guests."""
        if not self.guests:
            return []
        deeds = sorted({guest.deed for guest in self.guests})
        lines = ["hostile guests:", *(f"  {self._line(deed)}" for deed in deeds)]
        back = [seat.back_s for seat in self.honest_removed if seat.back_s is not None]
        told = f"; those back took at most {max(back):.1f} s" if back else ""
        lost = ", ".join(self.lost) or "none"
        lines.append(
            f"honest members removed without a fault: {len(self.honest_removed)}{told}; lost for good: {lost}"
        )
        return lines

    def _line(self, deed: str) -> str:
        came = [guest for guest in self.guests if guest.deed == deed]
        out = [guest for guest in came if guest.put_out]
        stayed = ", ".join(guest.name for guest in came if not guest.put_out)
        text = f"{deed}: {len(came)} came, {len(out)} put out"
        if out:
            [(reason, count)] = Counter(guest.reason for guest in out).most_common(1)
            slowest = max(guest.seconds for guest in out)
            text += f" within {slowest:.1f} s ({', '.join(guest.name for guest in out)}; {count}: {reason})"
        return text + (f"; stayed: {stayed}" if stayed else "")


def figures_of(record: RunRecord) -> Hostile:
    """Figures of a run's guests that began their deed, and of its seats."""
    removed = [
        SeatFigures(seat.name, _short(seat.reason), seat.back_s if seat.back_s >= 0 else None)
        for seat in record.lost_seats
    ]
    return Hostile([_guest(visit) for visit in record.guests if visit.began], removed, record.empty_seats)


def _short(reason: str) -> str:
    return plain(reason)[:REASON_CHARS]


def _guest(visit: GuestVisit) -> GuestFigures:
    out = bool(visit.put_out)
    return GuestFigures(
        visit.name,
        visit.planned.deed,
        visit.stage,
        out,
        _short(visit.put_out),
        visit.put_out_s if out else visit.ended - visit.began,
        (visit.put_out_t if out else visit.ended_t) - visit.began_t,
        visit.closed,
    )
