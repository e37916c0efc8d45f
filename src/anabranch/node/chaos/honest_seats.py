"""Honest members that a run removed though no fault had hit them, and whether they came back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.observe.events import Event, PeerActive, PeerRemoved


@dataclass
class LostSeat:
    """Removal of an honest member that no fault had hit. name: of its process. peer: its id. reason: that the
    run gave. at: Unix time (s). back_s: seconds until it served again; negative: never."""

    name: str
    peer: str
    reason: str
    at: float
    back_s: float = -1.0


class HonestSeats:
    """Removals of honest members that no fault explains (moves between stages aside), and their returns.
    name_of(peer): name of an honest peer's process, else None. hit(peer, at): True if a fault explains that
    the peer was removed at that Unix time."""

    def __init__(self, name_of: Callable[[str], str | None], hit: Callable[[str, float], bool]) -> None:
        self._name_of, self._hit = name_of, hit
        self.lost: list[LostSeat] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, PeerRemoved) and not event.reason.startswith("moves to"):
            name = self._name_of(event.subject)
            if name is not None and not self._hit(event.subject, event.time):
                self.lost.append(LostSeat(name, event.subject, event.reason, event.time))
        elif isinstance(event, PeerActive):
            for seat in self.lost:
                if seat.peer == event.subject and seat.back_s < 0:
                    seat.back_s = event.time - seat.at

    def struck(self, peer: str) -> None:
        """Forget the unexplained removal of a peer if a fault hits the peer before its return: its absence
        can then not be blamed on the removal."""
        self.lost = [seat for seat in self.lost if seat.peer != peer or seat.back_s >= 0]

    @property
    def waiting(self) -> set[str]:
        """Ids of the removed peers that are not active again yet."""
        return {seat.peer for seat in self.lost if seat.back_s < 0}
