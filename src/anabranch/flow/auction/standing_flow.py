"""Standing flow of one node: units with reserved places along their whole path, the plan that dispatch may
use.

It follows the market's working flow. Each node sends the next hop the units that it `wants` to pass through
it, and gets an answer which of them are `whole`: reserved from the next hop to the end of the path. A source
counts a unit as standing while it is whole. When the working flow has moved, a node changes the unit's next
hop: the path over the new one is reserved first, then the old one is dropped. If there is no capacity for
both, the source gives the unit up and starts another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from anabranch.flow.agents.interface import Held, Setup, UnitId
from anabranch.flow.auction import timing
from anabranch.flow.auction.link_state import InLink, OutLink
from anabranch.flow.auction.market import Market


@dataclass(slots=True, eq=False)
class Place:
    """Place (capacity for one microbatch) reserved for a unit at this node. next: link to the next hop.
    since: time (s) since which the unit waits for a next hop, a previous hop or confirmation; infinite if it
    does not. previous: in-links that want the unit. new_next: link to another next hop, over which the path
    is being reserved. stale: True if the place cannot be kept."""

    next: OutLink | None
    since: float = math.inf
    previous: dict[InLink, None] = field(default_factory=dict)
    new_next: OutLink | None = None
    stale: bool = False

    def is_whole(self, unit: UnitId) -> bool:
        """True if the path of `unit` is reserved from the next hop to its end."""
        return self.next is not None and unit in self.next.whole


class StandingFlow:
    """Reserved places (each for a microbatch's confirmed path) of one node. They follow the working flow,
    which the node's market negotiates. check_at: time (s) at which `act`, which adapts the places, is due."""

    def __init__(self, setup: Setup, market: Market) -> None:
        self._setup = setup
        self._market = market
        self._places: dict[UnitId, Place] = {}
        self._units_on: dict[OutLink, set[UnitId]] = {}
        """Units whose `next` or `new_next` each out-link is."""
        self._queue: dict[UnitId, dict[InLink, None]] = {}
        """Units that wait for a place at this relay -> the in-links that want them."""
        self._listeners: dict[InLink, None] = {}
        """In-links that want units at this node, or were answered about some."""
        self._settle_s = timing.SETTLE_S
        self._followed_at = -math.inf
        self._changed_at = -math.inf
        self._next_number = setup.incarnation << 32
        self._recheck = True
        self._depart_at = -math.inf
        self._pauses = 0
        self.check_at = math.inf

    # -- places ------------------------------------------------------------------------------------------

    def standing(self) -> list[Held]:
        if not self._setup.is_data:
            return []
        return [
            Held(unit, None, place.next.peer)
            for unit, place in self._places.items()
            if place.next is not None and unit in place.next.whole
        ]

    def held(self) -> list[Held]:
        arrivals: list[Held] = []
        if self._setup.is_data:
            ins = self._market.ins.values()
            arrivals = [Held(unit, link.peer, None) for link in ins for unit in link.wants]
        return arrivals + [
            Held(
                unit,
                next(reversed(place.previous)).peer if place.previous else None,
                place.next.peer if place.next is not None else None,
            )
            for unit, place in self._places.items()
        ]

    # -- events ------------------------------------------------------------------------------------------

    def wanted(self, link: InLink, wants: Iterable[UnitId]) -> None:
        """Handle the list `wants` of all units that the previous hop of `link` wants to pass through this
        node. Places of units that no previous hop wants any more are given up; units new in the list wait for
        a place, which `act` reserves. A data node takes all at once."""
        fresh = dict.fromkeys(wants)
        gone = [unit for unit in link.wants if unit not in fresh]
        added = [unit for unit in fresh if unit not in link.wants]
        if not gone and not added:
            return
        link.wants = fresh
        self._listeners[link] = None
        self._recheck = True
        if self._setup.is_data:
            self._report(link)
            return
        for unit in gone:
            self._no_longer_wanted(unit, link)
        for unit in added:
            if (place := self._places.get(unit)) is not None:
                place.previous[link] = None
                if place.new_next is None and place.is_whole(unit):
                    place.since = math.inf
            else:
                self._queue.setdefault(unit, {})[link] = None

    def answered(
        self, link: OutLink, whole: tuple[UnitId, ...], stale: tuple[UnitId, ...], now: float
    ) -> bool:
        """Apply the next hop's answer about the units that this node wants to pass through it. A unit counts
        only if the next hop knew the newest request for it. True if this changed which units are whole or
        stale. A unit that was whole and is not any more has to become whole again within a time limit."""
        if not (whole or stale or link.whole or link.stale):
            return False
        # An answer about a unit counts only if the next hop knew of the newest request for it.
        now_whole = frozenset(unit for unit in whole if link.knows_of(unit))
        now_stale = frozenset(unit for unit in stale if link.knows_of(unit))
        if (now_whole, now_stale) == (link.whole, link.stale):
            return False
        for unit in link.whole - now_whole:
            if (place := self._places.get(unit)) is not None and place.next is link:
                place.since = now  # the next hop may reserve its path again, within a time limit
        link.whole, link.stale = now_whole, now_stale
        self._recheck = True
        return True

    def lost_in(self, link: InLink, now: float) -> None:
        self._recheck = True
        self._listeners.pop(link, None)
        for unit in link.wants:
            place = self._places.get(unit)
            if place is None:
                self._no_longer_wanted(unit, link)
            elif link in place.previous:
                del place.previous[link]
                if not place.previous:
                    place.since = now  # another previous hop may want the unit

    def lost_out(self, link: OutLink, now: float) -> None:
        self._recheck = True
        for unit in self._units_on.pop(link, ()):
            place = self._places[unit]
            if place.new_next is link:
                place.new_next = None
            else:
                place.next = place.new_next
                place.new_next = None
                if place.next is None:
                    place.since = now

    def moved(self, now: float) -> None:
        """Note that the market has changed the working flow (its plan before paths are reserved) at this
        node: the reserved paths follow after a delay."""
        self._changed_at = now
        self._depart_at, self._pauses = -math.inf, 0
        self._recheck = True

    def hurry(self) -> None:
        """After an external change, reset to its least value (SETTLE_S) the delay between a change of the
        working flow and that of the reserved paths."""
        self._settle_s = timing.SETTLE_S

    def resized(self) -> None:
        self._recheck = True

    def shrink(self) -> None:
        """At a source: drop the newest units beyond the demand at once."""
        self._recheck = True
        while len(self._places) > self._market.demand:
            self._drop(next(reversed(self._places)))

    # -- actions -----------------------------------------------------------------------------------------

    def act(self, now: float) -> None:
        if not self._recheck and now < self.check_at:
            return
        self._recheck = False
        self.check_at = math.inf
        if self._setup.is_data and not self._places and not self._market.placed:
            return
        self._switch()
        self._drop_orphans(now)
        self._admit()
        if now >= self._changed_at + self._settle_s:
            if self._followed_at < self._changed_at:
                self._followed_at = now
                self._settle_s = min(2 * self._settle_s, timing.SETTLE_MAX_S)
            self._follow(now)
            if self._setup.is_data:
                self._depart(now)
        else:
            self._check(self._changed_at + self._settle_s)
        for link in sorted(self._listeners, key=_by_number):
            self._report(link)
            if not (link.wants or link.whole or link.stale):
                del self._listeners[link]

    def _switch(self) -> None:
        """Replace the next hop of each unit whose path over the new next hop is reserved."""
        for unit, place in self._places.items():
            if place.new_next is not None and unit in place.new_next.whole:
                if place.next is not None:
                    self._unwant(unit, place.next)
                place.next, place.new_next = place.new_next, None
                place.stale = False
            if place.new_next is None and (place.previous or self._setup.is_data) and place.is_whole(unit):
                place.since = math.inf

    def _drop_orphans(self, now: float) -> None:
        """At a relay, drop reserved places of units that no previous hop wants to pass through this node,
        after a delay or at once if other units wait for a place."""
        for unit, place in list(self._places.items()):
            if self._setup.is_data or place.previous:
                continue
            if now >= place.since + timing.PATIENCE_S or self._queue:
                self._drop(unit)
            else:
                self._check(place.since + timing.PATIENCE_S)

    def _admit(self) -> None:
        """Reserve places for units that wait for one, within the capacity, each towards a next hop at which
        the market has placed more units of this node than have places."""
        for unit, previous in list(self._queue.items()):
            if len(self._places) >= self._market.capacity:
                return
            link = self._free_link()
            if link is None:
                continue
            del self._queue[unit]
            self._places[unit] = Place(link, previous=previous)
            self._want(unit, link)

    def _depart(self, now: float) -> None:
        """At a source: begin to reserve a path for each unit of the working flow that has none. Nothing is
        begun during a pause, which follows a unit that was never confirmed."""
        if now < self._depart_at:
            self._check(self._depart_at)
            return
        while len(self._places) < min(self._market.placed, self._market.demand):
            link = self._free_link()
            if link is None:
                return
            self._next_number += 1
            unit = UnitId(self._setup.id, self._next_number)
            self._places[unit] = Place(link, now)
            self._check(now + timing.FIRST_S)
            self._want(unit, link)

    def _follow(self, now: float) -> None:
        """Adapt the reserved paths to the working flow. A unit gets another next hop if the present one has
        more reserved than working units of this node, or cannot keep the unit. Units beyond the capacity (at
        a source: the demand) are given up."""
        excess = Counter({link: len(units) - link.units for link, units in self._units_on.items()})
        over = len(self._places) - (self._market.demand if self._setup.is_data else self._market.capacity)
        for unit, place in list(self._places.items()):
            current = place.next
            must_move = current is not None and unit in current.stale
            if over > 0 and not must_move:
                over -= 1
                self._give_up(unit, place)
                continue
            if place.new_next is not None:
                if excess[place.new_next] <= 0:
                    if current is not None:
                        excess[current] -= 1
                    self._wait(unit, place, now)
                    continue
                excess[place.new_next] -= 1
                self._unwant(unit, place.new_next)
                place.new_next = None
            if current is not None and not must_move and excess[current] <= 0:
                place.stale = False
                if place.since < math.inf:
                    self._wait(unit, place, now)
                continue
            if current is not None:
                excess[current] -= 1
            self._move(unit, place, now)

    def _move(self, unit: UnitId, place: Place, now: float) -> None:
        """Choose another next hop for a reserved unit, and begin to reserve the path over it. If no other has
        room, a unit with a next hop is given up (at a relay: marked as stale), and one without waits."""
        link = self._free_link(besides=place.next)
        if link is not None:
            place.since = now
            self._want(unit, link)
            self._check(now + timing.PATIENCE_S)
            if place.next is None:
                place.next = link
            else:
                place.new_next = link
        elif place.next is not None:
            self._give_up(unit, place)
        else:
            self._wait(unit, place, now)

    def _wait(self, unit: UnitId, place: Place, now: float) -> None:
        if place.since == math.inf:
            place.since = now
        patience_s = timing.FIRST_S if self._setup.is_data and place.new_next is None else timing.PATIENCE_S
        if now < place.since + patience_s:
            self._check(place.since + patience_s)
            return
        self._give_up(unit, place)
        if self._setup.is_data and now >= self._depart_at:
            pause_s = min(timing.PAUSE_S * 2.0**self._pauses, timing.PAUSE_MAX_S)
            self._pauses += 1
            self._depart_at = now + pause_s if self._pauses <= timing.PAUSES else math.inf

    def _give_up(self, unit: UnitId, place: Place) -> None:
        if self._setup.is_data:
            self._drop(unit)
        else:
            place.stale = True

    # -- single steps ------------------------------------------------------------------------------------

    def _free_link(self, besides: OutLink | None = None) -> OutLink | None:
        """First next hop, other than `besides`, at which the market has placed more units of this node than
        have a reserved place towards it; None if there is none."""
        for link in self._market.users:
            if link is not besides and link.units > len(self._units_on.get(link, ())):
                return link
        return None

    def _want(self, unit: UnitId, link: OutLink) -> None:
        self._units_on.setdefault(link, set()).add(unit)
        link.want(unit)

    def _unwant(self, unit: UnitId, link: OutLink) -> None:
        self._units_on[link].discard(unit)
        link.unwant(unit)

    def _no_longer_wanted(self, unit: UnitId, link: InLink) -> None:
        """Note that the previous hop over `link` no longer wants `unit`; give it up when none does."""
        queued = self._queue.get(unit)
        if queued is not None:
            queued.pop(link, None)
            if not queued:
                del self._queue[unit]
        place = self._places.get(unit)
        if place is not None:
            place.previous.pop(link, None)
            if not place.previous:
                self._drop(unit)

    def _drop(self, unit: UnitId) -> None:
        place = self._places.pop(unit)
        for link in (place.next, place.new_next):
            if link is not None:
                self._unwant(unit, link)

    def _report(self, link: InLink) -> None:
        """Update this node's answer to the previous hop of `link`: which units wanted by that hop are
        reserved to the end of their path (`whole`), and which cannot be kept (`stale`)."""
        if self._setup.is_data:
            whole = tuple(link.wants)
            stale: tuple[UnitId, ...] = ()
        else:
            places = self._places
            mine = [(unit, places[unit]) for unit in link.wants if unit in places]
            # A unit that lost its next hop counts as whole until it is stale: another hop may be found.
            whole = tuple(
                u for u, place in mine if place.is_whole(u) or (u in link.whole and not place.stale)
            )
            stale = tuple(unit for unit, place in mine if place.stale)
        if whole != link.whole or stale != link.stale:
            link.whole, link.stale = whole, stale
            link.dirty = True

    def _check(self, time: float) -> None:
        self.check_at = min(self.check_at, time)


def _by_number(link: InLink) -> int:
    return link.number
