"""Reservation of capacity along paths: the confirmed plan of policy `gwtf`, whose negotiated plan keeps
changing.

The negotiated plan is made of working units between two neighbours, named by `link`. A source sends `Reserve`
along them. Every relay on the path reserves a place, never more than its capacity. The sink answers
`Reserved` back along the path, and only then the source counts the unit as standing (confirmed). A relay
whose working unit goes elsewhere tells the source (`Stale`), which gives the path up (`Release`) and reserves
one with a new number. So a standing path is always whole and within capacity. Periodic confirmations between
neighbours replace a lost `Release` or `Stale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from anabranch.flow.agents.interface import Held, Message, Send, Setup, Side, UnitId


class Reserve(Message, frozen=True):
    """Message to the next hop: reserve a place for `unit`, which arrives there by the working unit `link`."""

    unit: UnitId
    link: UnitId


class Reserved(Message, frozen=True):
    """Message to the previous hop: places for `unit` are reserved from the sender to the end of the path."""

    unit: UnitId


class Stale(Message, frozen=True):
    """Message to the previous hop, which relays pass on to the source (data node where the unit begins): the
    paths of these units changed. The source alone gives them up, and frees their places by `Release`."""

    units: tuple[UnitId, ...]


class Release(Message, frozen=True):
    """Message to the next hop, passed on along the path: these units are given up. Each receiver frees its
    places for them."""

    units: tuple[UnitId, ...]


@dataclass(slots=True, eq=False)
class _Reservation:
    """Place (capacity for one microbatch) that this node reserves for a unit. link: the working unit by which
    it arrives (at the source: departs). previous, next: nodes before and after this one on its path; None at
    the path's ends. reported: True if `Stale` was sent for it since the last confirmation from a neighbour.
    """

    link: UnitId
    previous: str | None
    next: str | None
    reported: bool = False


#: Function from (incoming working unit, previous hop) to (next hop, outgoing working unit), or None if the
#: incoming one leads nowhere. At the end of the path the result is (None, the incoming working unit).
Onward = Callable[[UnitId, str | None], "tuple[str | None, UnitId] | None"]


class Reservations:
    """Places (capacity for one microbatch each) that one node has reserved, and at a data node the units that
    begin there. onward: function that gives the next hop of a unit of the negotiated plan (working unit), see
    `Onward`. capacity: greatest number of places at a relay; a data node has no limit. Most methods return
    the messages that the node's agent has to send."""

    def __init__(self, setup: Setup, onward: Onward) -> None:
        self._setup = setup
        self._onward = onward
        self._through: dict[UnitId, _Reservation] = {}
        """Units through a relay, or units that end at a data node."""
        self._departing: dict[UnitId, _Reservation] = {}
        self._standing: dict[UnitId, _Reservation] = {}
        self._by_link: dict[UnitId, UnitId] = {}
        """Working unit that departs from this source -> the unit reserved along it."""
        # A restarted node must not use a number that its earlier incarnation used.
        self._number = setup.incarnation << 32
        self.capacity = setup.capacity

    # -- at the source -----------------------------------------------------------------------------------

    def depart(self, link: UnitId, peer: str) -> list[Send]:
        """Begin to reserve a path whose first hop is the working unit `link` to `peer`, unless this node, the
        path's source, has a unit with that first hop already. Returns the request to send."""
        if link in self._by_link:
            return []
        self._number += 1
        unit = UnitId(self._setup.id, self._number)
        self._by_link[link] = unit
        self._departing[unit] = _Reservation(link, None, peer)
        return [Send(peer, Side.NEXT, Reserve(unit, link))]

    def repeat(self) -> list[Send]:
        """Messages that make all unconfirmed reservation requests of this source again: a message was lost,
        or a relay was full."""
        return [
            Send(place.next, Side.NEXT, Reserve(unit, place.link))
            for unit, place in self._departing.items()
            if place.next is not None
        ]

    def keep_only(self, links: Iterable[UnitId]) -> list[Send]:
        """Give up this source's units, confirmed or not, whose first hop (of the negotiated plan) is not in
        `links`, and return the messages that tell their next hops."""
        alive = set(links)
        gone = [unit for link, unit in self._by_link.items() if link not in alive]
        return self._give_up(gone)

    @property
    def reserving(self) -> bool:
        """True if some unit that begins at this node is not confirmed yet."""
        return bool(self._departing)

    def _give_up(self, units: Iterable[UnitId]) -> list[Send]:
        sends: list[Send] = []
        for unit in units:
            place = self._departing.pop(unit, None) or self._standing.pop(unit, None)
            if place is not None:
                del self._by_link[place.link]
                if place.next is not None:
                    sends.append(Send(place.next, Side.NEXT, Release((unit,))))
        return sends

    # -- along the path --------------------------------------------------------------------------------------

    def reserve(self, peer: str, message: Reserve) -> list[Send]:
        unit = message.unit
        onward = self._onward(message.link, peer)
        place = self._through.get(unit)
        if onward is None:
            # An existing place stays: this may be a late copy of the request for a unit that stands by now.
            return [Send(peer, Side.PREVIOUS, Stale((unit,)))]
        following, link = onward
        if place is not None and (place.previous, place.next) != (peer, following):
            return [Send(peer, Side.PREVIOUS, Stale((unit,)))]
        if place is None:
            if not self._setup.is_data and len(self._through) >= self.capacity:
                return []  # the source repeats the request; by then an older unit will have been released
            self._through[unit] = _Reservation(message.link, peer, following)
        if following is None:
            return [Send(peer, Side.PREVIOUS, Reserved(unit))]
        return [Send(following, Side.NEXT, Reserve(unit, link))]

    def reserved(self, peer: str, unit: UnitId) -> list[Send]:
        place = self._departing.get(unit)
        if place is not None and place.next == peer:
            self._standing[unit] = self._departing.pop(unit)
            return []
        place = self._through.get(unit)
        if place is None or place.next != peer or place.previous is None:
            return []
        return [Send(place.previous, Side.PREVIOUS, Reserved(unit))]

    def stale(self, peer: str, units: Iterable[UnitId]) -> list[Send]:
        sends: list[Send] = []
        for unit in units:
            place = self._through.get(unit)
            if place is not None and place.next == peer and place.previous is not None:
                sends.append(Send(place.previous, Side.PREVIOUS, Stale((unit,))))
            elif unit.source == self._setup.id:
                sends += self._give_up([unit])
        return sends

    def release(self, peer: str, units: Iterable[UnitId]) -> list[Send]:
        sends: list[Send] = []
        for unit in units:
            if unit in self._through and self._through[unit].previous == peer:
                sends += self._drop(unit)
        return sends

    def moved(self) -> list[Send]:
        """Return messages (`Stale`, to the previous hops) that notify the sources of units whose working path
        left their reserved path, once for each until the next `confirm`."""
        sends: list[Send] = []
        for unit, place in self._through.items():
            onward = self._onward(place.link, place.previous)
            has_moved = onward is None or onward[0] != place.next
            if has_moved and not place.reported and place.previous is not None:
                place.reported = True
                sends.append(Send(place.previous, Side.PREVIOUS, Stale((unit,))))
        return sends

    def lost(self, peer: str, side: Side) -> list[Send]:
        """Free the places of units whose path goes through the lost neighbour (peer, side), and return the
        messages that notify their other neighbours (`Stale`, `Release`); give up those that begin at this
        node and leave by it."""
        sends: list[Send] = []
        for unit, place in list(self._through.items()):
            if side is Side.NEXT and place.next == peer:
                del self._through[unit]
                if place.previous is not None:
                    sends.append(Send(place.previous, Side.PREVIOUS, Stale((unit,))))
            elif side is Side.PREVIOUS and place.previous == peer:
                sends += self._drop(unit)
        if side is Side.NEXT:
            for table in (self._departing, self._standing):
                for unit in [unit for unit, place in table.items() if place.next == peer]:
                    del self._by_link[table.pop(unit).link]
        return sends

    def _drop(self, unit: UnitId) -> list[Send]:
        place = self._through.pop(unit, None)
        if place is None or place.next is None:
            return []
        return [Send(place.next, Side.NEXT, Release((unit,)))]

    # -- confirmation ------------------------------------------------------------------------------------

    def towards(self, peer: str) -> tuple[UnitId, ...]:
        """Units, confirmed or not, whose reserved path goes from this node to `peer` of the next stage."""
        tables = (self._through, self._departing, self._standing)
        return tuple(unit for table in tables for unit, place in table.items() if place.next == peer)

    def coming_from(self, peer: str) -> tuple[UnitId, ...]:
        """Units, confirmed or not, whose reserved path comes to this node from `peer` of the previous stage.
        """
        return tuple(unit for unit, place in self._through.items() if place.previous == peer)

    def confirm(self, peer: str, side: Side, units: Iterable[UnitId]) -> list[Send]:
        """Return the answer to the periodic confirmation of neighbour (peer, side): the units that this node
        lacks, in a `Stale` to a previous hop, in a `Release` to a next hop. units: those whose path, by the
        neighbour's list, uses the link. The next `moved` notifies all sources again, since a `Stale` may have
        been lost. A node keeps its place as long as any node before it does. So a unit that the previous node
        lacks cannot stand, and freeing its place is safe however late the confirmation arrives."""
        for place in self._through.values():
            place.reported = False  # `Stale` may have been lost: send it again
        known = set(self.coming_from(peer) if side is Side.PREVIOUS else self.towards(peer))
        missing = tuple(unit for unit in units if unit not in known)
        if not missing:
            return []
        return [Send(peer, side, Stale(missing) if side is Side.PREVIOUS else Release(missing))]

    def standing(self) -> list[Held]:
        return [Held(unit, None, place.next) for unit, place in self._standing.items()]

    def held(self) -> list[Held]:
        departures = {**self._standing, **self._departing}
        tables = (self._through, departures)
        return [Held(unit, place.previous, place.next) for table in tables for unit, place in table.items()]

    @property
    def unsettled(self) -> bool:
        """True if the plan is not settled: the reserved path of a unit through this node differs from its
        negotiated (working) path, and will be given up."""
        return any(
            (onward := self._onward(place.link, place.previous)) is None or onward[0] != place.next
            for place in self._through.values()
        )
