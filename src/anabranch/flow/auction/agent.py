"""Agent of policy `auction`: it takes a node's events and returns its messages ("letters") to neighbours.

Events change the market (unconfirmed plan), the searches for free capacity and the standing flow (confirmed
plan). The consequences are computed once per tick, so every neighbour gets at most one letter per tick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents import interface as ev
from anabranch.flow.agents.interface import Held, Send, Setup, Side
from anabranch.flow.auction import timing
from anabranch.flow.auction.changes import Changes
from anabranch.flow.auction.excess import Excess
from anabranch.flow.auction.link_state import Deadlines, InLink, Link, OutLink
from anabranch.flow.auction.market import Market
from anabranch.flow.auction.messages import Answer, Letter, Offer
from anabranch.flow.auction.repair_schedule import RepairSchedule
from anabranch.flow.auction.residual_search import Searches
from anabranch.flow.auction.standing_flow import StandingFlow

#: A price above this share of the cost of refusing a unit means that no capacity is left on the way. The cost
#: of refusing is greater than that of any path.
PRICED = 0.5


class AuctionAgent:
    """Agent of policy `auction` at one node (`flow.agents.interface.Agent`). `rng` is not used."""

    def __init__(self, setup: Setup, rng: CounterRng) -> None:
        self._setup = setup
        self._is_data = setup.is_data
        self._market = Market(setup)
        self._searches = Searches(setup.id, self._market, setup.is_data)
        self._standing = StandingFlow(setup, self._market)
        self._changes = Changes()
        self._repairs = RepairSchedule(self._market, self._changes)
        self._excess = Excess(setup, self._market, self._searches, self._changes) if setup.is_data else None
        self._due_at = math.inf
        self._act_at = math.inf
        self._start_at = math.inf
        self._met_at = -math.inf
        self._orphan_at = math.inf
        self._opened = 0
        self._unpriced: set[str] = set()
        """Next hops that have not sent a price yet."""
        self._changed: dict[Link, None] = {}
        self._lingering = Deadlines()
        self._repeating = Deadlines()

    # -- the interface -----------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> Sequence[Send]:
        if isinstance(event, ev.Received):
            self._receive(event, now)
            self._due_at = self._due()
        elif not isinstance(event, ev.Wake):
            self._change(event, now)
            self._due_at = self._due()
        if now < self._due_at:
            return ()
        sends = self._act(now)
        self._due_at = self._due()
        return sends

    def deadline(self) -> float | None:
        return self._due_at if self._due_at < math.inf else None

    def standing(self) -> Sequence[Held]:
        return self._standing.standing()

    def held(self) -> Sequence[Held]:
        return self._standing.held()

    def price(self) -> float:
        market = self._market
        return market.level if market.level < PRICED * market.limit else math.inf

    def quiet(self) -> bool:
        return self._due_at == math.inf

    # -- external changes ----------------------------------------------------------------------------

    def _change(self, event: ev.Event, now: float) -> None:
        """Apply an external change (a neighbour, cost, capacity or demand) to this node, and count it once
        bidding has begun; its consequences follow at the next tick."""
        if self._market.ready:
            self._note_change(self._changes.count + 1, now, here=True)
        if isinstance(event, ev.PeerUp):
            self._add_peer(event, now)
        elif isinstance(event, ev.PeerDown):
            self._remove_peer(event, now)
        elif isinstance(event, ev.CostChanged):
            self._reprice(event, now)
        elif isinstance(event, ev.CapacityChanged):
            self._market.resize(event.capacity)
            self._standing.resized()
            self._act_soon(now)
        elif isinstance(event, ev.DemandChanged):
            self._market.demand = event.demand
            self._standing.shrink()
            self._act_soon(now)

    def _note_change(self, count: int, now: float, here: bool = False) -> None:
        """Note external change number `count` of the swarm: repairs and searches may follow soon, and the
        reserved paths follow the working flow sooner. here: True if the change is at this node."""
        self._changes.note(count, now)
        if self._excess is not None:
            self._excess.changed()
        self._market.stirred = True
        self._repairs.changed(here)
        self._standing.hurry()

    def _add_peer(self, event: ev.PeerUp, now: float) -> None:
        market = self._market
        if event.side is Side.PREVIOUS:
            if event.peer in market.ins:
                self._remove_peer(ev.PeerDown(event.peer, event.side), now)
            self._opened += 1
            link = InLink(event.peer, event.cost, self._opened)
            link.changed = self._changed
            # The price of a data node is known to be 0; a relay sends its price once it has one.
            link.sent_price = 0.0 if self._is_data else math.inf
            link.dirty = market.ready and market.price < link.sent_price
            market.ins[event.peer] = link
        elif event.side is Side.NEXT:
            if event.peer in market.outs:
                self._remove_peer(ev.PeerDown(event.peer, event.side), now)
            to_data = self._setup.stage == self._setup.stages and not self._is_data
            out = OutLink(event.peer, event.cost, 0.0 if to_data else math.inf, to_data=to_data)
            out.changed = self._changed
            market.outs[event.peer] = out
            market.ranking.put(out)
            if not to_data:
                self._unpriced.add(event.peer)
            if not market.ready:
                self._met_at = now
                self._start_at = now + timing.MEET_S if to_data else math.inf
        self._act_soon(now)

    def _remove_peer(self, event: ev.PeerDown, now: float) -> None:
        market = self._market
        if event.side is Side.PREVIOUS:
            source = market.ins.pop(event.peer, None)
            if source is None:
                return
            if not self._is_data:
                market.lost_in(source)
            self._standing.lost_in(source, now)
            self._forget(source)
        elif event.side is Side.NEXT:
            target = market.outs.pop(event.peer, None)
            if target is None:
                return
            market.lost_out(target)
            self._standing.lost_out(target, now)
            self._unpriced.discard(event.peer)
            self._forget(target)
        self._act_soon(now)

    def _forget(self, link: Link) -> None:
        self._searches.forget(link)
        self._changed.pop(link, None)
        self._lingering.drop(link)
        self._repeating.drop(link)

    def _reprice(self, event: ev.CostChanged, now: float) -> None:
        if event.side is Side.NEXT and (link := self._market.outs.get(event.peer)) is not None:
            link.cost = event.cost
            self._market.moved = True
            self._market.ranking.put(link)
            self._act_soon(now)

    # -- letters in --------------------------------------------------------------------------------------

    def _receive(self, event: ev.Received, now: float) -> None:
        letter = event.message
        if isinstance(letter, Letter) and letter.stir > self._changes.count:
            self._note_change(letter.stir, now)
        if event.side is Side.PREVIOUS and isinstance(letter, Offer):
            source = self._market.ins.get(event.peer)
            if source is not None:
                self._take_offer(source, letter, now)
        elif event.side is Side.NEXT and isinstance(letter, Answer):
            target = self._market.outs.get(event.peer)
            if target is not None:
                self._take_answer(target, letter, now)

    def _take_offer(self, link: InLink, offer: Offer, now: float) -> None:
        if link.receive(offer):
            if not self._is_data:  # a data node accepts all units that end at it
                self._market.offered(link, offer)
            self._standing.wanted(link, offer.wants)
            self._searches.read(link, offer.searches, offer.findings)
            self._act_soon(now)
        self._set_timers(link, now)

    def _take_answer(self, link: OutLink, answer: Answer, now: float) -> None:
        if link.receive(answer):
            self._market.answered(link, answer)
            self._searches.read(link, answer.searches, answer.findings)
            if answer.price < math.inf and link.peer in self._unpriced:
                self._unpriced.discard(link.peer)
                if not self._market.ready:
                    wait_s = timing.START_S if self._unpriced else self._met_at + timing.MEET_S - now
                    self._start_at = min(max(self._start_at, now), now + max(wait_s, 0.0))
            self._act_soon(now)
        if link.is_latest(answer):
            if not link.asks:
                link.fresh = True
                if self._repairs.surveying:
                    self._act_soon(now)
            if self._standing.answered(link, answer.whole, answer.stale, now):
                self._act_soon(now)
        self._set_timers(link, now)

    def _set_timers(self, link: Link, now: float) -> None:
        if link.owes and link not in self._lingering:
            self._lingering.put(link, now + timing.LINGER_S)
        if not link.asks:
            self._repeating.drop(link)

    # -- actions -----------------------------------------------------------------------------------------

    def _act_soon(self, now: float) -> None:
        tick_s = timing.TICK_UNCEASING_S if self._changes.unceasing else timing.TICK_S
        if now + tick_s < self._act_at:
            self._act_at = now + tick_s

    def _due(self) -> float:
        return min(
            self._act_at,
            self._start_at,
            self._orphan_at,
            self._repairs.at,
            self._standing.check_at,
            self._repeating.least,
            self._lingering.least,
        )

    def _act(self, now: float) -> list[Send]:
        market = self._market
        self._act_at = math.inf
        if not market.ready and now >= self._start_at:
            self._start_at = math.inf
            self._changes.start(now)
            market.start()
        market.act()
        if self._repairs.act(now) and self._excess is not None:
            self._excess.tell_dearest()
        self._withdraw_orphans(now)
        if self._excess is not None and self._excess.act():
            self._act_at = -math.inf
        if market.moved:
            market.moved = False
            self._repairs.moved(now)
            self._searches.explore()
            self._standing.moved(now)
        self._standing.act(now)
        return self._letters(now)

    def _withdraw_orphans(self, now: float) -> None:
        """Withdraw units from next hops if more are placed there than this node has, because its demand fell,
        or previous hops took units back or were lost. A relay waits for ORPHAN_S first, as other units may
        come."""
        market = self._market
        if market.surplus >= 0:
            self._orphan_at = math.inf
        elif self._is_data or now >= self._orphan_at:
            market.withdraw(-market.surplus)
            self._orphan_at = math.inf
        elif self._orphan_at == math.inf:
            self._orphan_at = now + timing.ORPHAN_S

    # -- letters out -------------------------------------------------------------------------------------

    def _letters(self, now: float) -> list[Send]:
        links = self._changed.copy()
        for deadlines in (self._lingering, self._repeating):
            if deadlines.least <= now:
                links.update(dict.fromkeys(deadlines.due(now)))
        if not links:
            return []
        self._changed.clear()
        sends: list[Send] = []
        for link in links:
            if isinstance(link, OutLink):
                sends.append(Send(link.peer, Side.NEXT, link.letter(now, self._changes.count)))
            elif isinstance(link, InLink):
                answer = link.letter(now, self._changes.count, self._market.price)
                sends.append(Send(link.peer, Side.PREVIOUS, answer))
            self._lingering.drop(link)
            if link.repeat_at < math.inf:  # it asks
                self._repeating.put(link, link.repeat_at)
            else:
                self._repeating.drop(link)
        return sends
