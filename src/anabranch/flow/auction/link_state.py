"""State of a link at one end: sequence numbers, acknowledgements, repetition, and the market's unit counts.

A letter is a message with the whole state of one end. The first reply to a version is not repeated: if it is
lost, the other end repeats its own letter and is answered again with the newest state. So a question and its
answer are two datagrams, and only unrequested news need a timer.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

from anabranch.flow.agents.interface import Side, UnitId
from anabranch.flow.auction.messages import Answer, Finding, Letter, Offer, Search
from anabranch.flow.auction.timing import REPEAT_MAX_S, REPEAT_S

_Envelope = tuple[int, int, bool, tuple[Search, ...], tuple[Finding, ...], int]


class Link:
    """State of a link at one end, to the neighbour `peer`; cost: d_ij (s). A letter is a message with the
    whole state. changed: set (as a dict) of the node's links with news to send, shared by its links. owes:
    True if the other end waits for an answer. asks: True if this end repeats its letter until it is
    acknowledged. repeat_at: time (s) of the repetition. searches, findings: source (data node that searches
    for free capacity) -> newest request and answer of its search to send to the other end. heard,
    findings_read: source -> number of the newest search, and newest finding, handled from the other end.
    read: searches and findings in the other end's last letter."""

    # Slots save memory: a node of a large swarm has hundreds of links.
    __slots__ = (
        "_acked", "_answered", "_covered", "_dirty", "_repeat_s", "_seen", "_seq", "asks", "changed", "cost",
        "findings", "findings_read", "heard", "owes", "peer", "read", "repeat_at", "searches",
    )  # fmt: skip
    side: ClassVar[Side]

    def __init__(self, peer: str, cost: float) -> None:
        self.peer = peer
        self.cost = cost
        self.changed: dict[Link, None] = {}
        self.owes = self.asks = False
        self.repeat_at = math.inf
        self.searches: dict[str, Search] = {}
        self.findings: dict[str, Finding] = {}
        self.heard: dict[str, int] = {}
        self.findings_read: dict[str, Finding] = {}
        self.read: tuple[tuple[Search, ...], tuple[Finding, ...]] = ((), ())
        self._dirty = False
        self._seq = self._acked = self._covered = self._seen = self._answered = 0
        self._repeat_s = REPEAT_S

    @property
    def dirty(self) -> bool:
        """True if this end's state has changed since the last letter that it sent. Setting it to True adds
        this link to `changed`."""
        return self._dirty

    @dirty.setter
    def dirty(self, value: bool) -> None:
        self._dirty = value
        if value:
            self.changed[self] = None

    def receive(self, letter: Letter) -> bool:
        """Handle a letter's sequence number and acknowledgement: the repetition ends if it acknowledges this
        end's newest state, and an answer is owed if it asks for one. True if the letter is newer than all
        before."""
        if letter.ack > self._acked:
            self._acked = letter.ack
            if letter.ack >= self._seq:
                self.asks = False
                self.repeat_at = math.inf
        if letter.ask:
            self.owes = True
        if letter.seq <= self._seen:
            return False
        self._seen = letter.seq
        return True

    def is_latest(self, letter: Letter) -> bool:
        """True if `letter`, which `receive` has handled, is the newest received. An older one may still
        acknowledge something."""
        return letter.seq == self._seen

    def _envelope(self, now: float, stir: int) -> _Envelope:
        """Fields of `Letter` for the letter that is sent now, an `Offer` or an `Answer`; updates the link as
        sent: a changed state gets the next version number, the letter's repetition is scheduled if it needs
        one, and the other end is owed no answer any more. stir: number of external changes of the swarm that
        this node knows of."""
        asking, answers = self.asks, self.owes
        if self._dirty:
            self._seq += 1
            self._dirty = False
            self._repeat_s = REPEAT_S
        if self._seen > self._answered:
            if answers and not asking:
                self._covered = self._seq
            self._answered = self._seen
        self.owes = False
        asks = self.asks = self._acked < self._seq > self._covered
        if asks:
            self.repeat_at = now + self._repeat_s
            self._repeat_s = min(2 * self._repeat_s, REPEAT_MAX_S)
        else:
            self.repeat_at = math.inf
        searches, findings = tuple(self.searches.values()), tuple(self.findings.values())
        return self._seq, self._seen, asks, searches, findings, stir


class OutLink(Link):
    """Link to a next hop, at this node's end.

    price: last price from the next hop, a lower bound: it announces only falls, and tells a rise in its next
    letter. fresh: True if the price was confirmed in the current repair. to_data: True if the next hop is a
    data node. level: `cost` + `price`, set by the market. pushed, returned: numbers of units handed over and
    handed back so far. recalled: number that `returned` must reach at least. units: units placed at the next
    hop, recalled ones not counted. bid: see `Offer`. wants: standing unit -> version of this end's state that
    first wanted it. whole, stale: units of `wants` that, by the next hop's answer, are reserved to the end of
    the path, or cannot be kept.
    """

    __slots__ = (
        "bid", "fresh", "level", "price", "pushed", "recalled", "returned", "stale", "to_data", "units",
        "wants", "whole",
    )  # fmt: skip
    side = Side.NEXT

    def __init__(self, peer: str, cost: float, price: float, *, to_data: bool) -> None:
        super().__init__(peer, cost)
        self.price = price
        self.to_data = self.fresh = to_data
        self.level = cost + price
        self.pushed = self.returned = self.recalled = self.units = 0
        self.bid = -math.inf
        self.wants: dict[UnitId, int] = {}
        self.whole: frozenset[UnitId] = frozenset()
        self.stale: frozenset[UnitId] = frozenset()

    def want(self, unit: UnitId) -> None:
        self.wants[unit] = self._seq + 1
        self._forget_answer(unit)

    def unwant(self, unit: UnitId) -> None:
        self.wants.pop(unit, None)
        self._forget_answer(unit)

    def _forget_answer(self, unit: UnitId) -> None:
        self.whole -= {unit}
        self.stale -= {unit}
        self.dirty = True

    def knows_of(self, unit: UnitId) -> bool:
        """True if the other end has acknowledged that this end wants to pass `unit` through it."""
        return self.wants.get(unit, math.inf) <= self._acked

    def letter(self, now: float, stir: int) -> Offer:
        envelope = self._envelope(now, stir)
        return Offer(*envelope, self.pushed, self.recalled, self.bid, tuple(self.wants))


class InLink(Link):
    """Link from a previous hop, at this node's end. number: ascends in the order in which the node's links
    opened. pushed, returned, recalled, bid: as in `OutLink`, of the previous hop. sent_price: price in the
    last letter to it. wants: standing units that the previous hop wants to pass through this node. whole,
    stale: this node's answer about them."""

    __slots__ = (
        "bid", "number", "pushed", "recalled", "returned", "sent_price", "stale", "wants", "whole",
    )  # fmt: skip
    side = Side.PREVIOUS

    def __init__(self, peer: str, cost: float, number: int = 0) -> None:
        super().__init__(peer, cost)
        self.number = number
        self.pushed = self.returned = self.recalled = 0
        self.bid = -math.inf
        self.sent_price = math.inf
        self.wants: Collection[UnitId] = ()
        self.whole: tuple[UnitId, ...] = ()
        self.stale: tuple[UnitId, ...] = ()

    @property
    def units(self) -> int:
        """Number of units of the previous hop that are placed at this node."""
        return self.pushed - self.returned

    def letter(self, now: float, stir: int, price: float) -> Answer:
        if self.owes and price != self.sent_price:
            self._dirty = True  # the other end may have asked for the price
        if self._dirty:
            self.sent_price = price  # a repetition of a version says what that version said
        return Answer(*self._envelope(now, stir), self.returned, self.sent_price, self.whole, self.stale)


class Deadlines:
    """Deadlines, times in seconds, of a node's links, at most one for each. least: the earliest; infinite if
    there are none. `put` replaces a link's deadline; `due` does not remove those that it returns."""

    __slots__ = ("_times", "least")

    def __init__(self) -> None:
        self._times: dict[Link, float] = {}
        self.least = math.inf

    def __contains__(self, link: Link) -> bool:
        return link in self._times

    def put(self, link: Link, time: float) -> None:
        before = self._times.get(link, math.inf)
        self._times[link] = time
        if time <= self.least:
            self.least = time
        elif before <= self.least:
            self.least = min(self._times.values())

    def drop(self, link: Link) -> None:
        time = self._times.pop(link, None)
        if time is not None and time <= self.least:
            self.least = min(self._times.values(), default=math.inf)

    def due(self, now: float) -> list[Link]:
        if self.least > now:
            return []
        return [link for link, time in self._times.items() if time <= now]
