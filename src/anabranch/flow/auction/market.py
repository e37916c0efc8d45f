"""Market of one node: which units it accepts and to which next hops it gives them, by bids and prices.

The result is the working flow: units that are not yet confirmed along their whole path. A unit is pushed to
the cheapest next hop with a bid: the highest price of that hop at which the second best next hop, or handing
the unit back, is not better by more than epsilon. A full relay keeps the highest bids, hands the others back
and charges epsilon more than the highest bid that it handed back. A relay counts as two nodes, entry and
exit, with its capacity between them. A bid replaces the steps of epsilon-relaxation that the two ends would
otherwise take by messages (`docs/explanation/flow.md`).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import islice

from anabranch.flow.agents.interface import Setup
from anabranch.flow.auction.link_state import InLink, OutLink
from anabranch.flow.auction.messages import Answer, Offer

#: Epsilon (the least raise of a bid) is the cost of the first path found, per hop, over this. The second
#: holds for a relay with more capacity than next hops, which sends more messages, so epsilon is coarser.
#: Fitted to the families A-F (`benchmarks/flow`), as are MIN_FALL, TOLERANCE and MOVE.
FINENESS, FINENESS_MANY = 6.6, 4.3
#: Least epsilon: the greatest link cost over this (with epsilon 0 bidding would not end); but no more than
#: the median cost to a next hop over half of this, so that one expensive link does not coarsen it.
FINENESS_MAX = 250.0
#: Least epsilon as a share of the greatest link cost: a smaller one is lost in the rounding of floats, and
#: two units would outbid each other for ever.
RESOLUTION = 1e-13
#: Least fall of a price or a bid, in epsilons, that is sent to neighbours.
MIN_FALL = 1.0
#: Excess of a unit's cost over its bid (epsilons) above which it goes back. Raises explain smaller ones.
TOLERANCE = 4.0
#: Least advantage of another next hop, in epsilons, for which a unit moves: before the first external change
#: (prices still settle) and after it.
MOVE_COLD, MOVE = 7.0, 4.0


class Ranking:
    """Next hops of finite cost, sorted by `OutLink.level` (cost of one more unit)."""

    __slots__ = ("_level", "_sorted", "_two")

    def __init__(self) -> None:
        self._sorted: list[tuple[float, str, OutLink]] = []
        self._level: dict[OutLink, float] = {}
        self._two: tuple[OutLink | None, float, float] | None = None

    def put(self, link: OutLink) -> None:
        """Set the link's `level` from its cost and price, and sort it in; out, if the level is infinite."""
        level = link.level = link.cost + link.price
        self.remove(link)
        if level < math.inf:
            insort(self._sorted, (level, link.peer, link))
            self._level[link] = level

    def remove(self, link: OutLink) -> None:
        self._two = None
        level = self._level.pop(link, None)
        if level is not None:
            del self._sorted[bisect_left(self._sorted, (level, link.peer))]

    def best_two(self) -> tuple[OutLink | None, float, float]:
        """(best next hop, its level, second best level); None and infinite levels where there is no such hop.
        """
        if self._two is None:
            first = self._sorted[:2]
            level, _, best = first[0] if first else (math.inf, "", None)
            self._two = (best, level, first[1][0] if len(first) > 1 else math.inf)
        return self._two


class Market:
    """Working units of one node, their bids, and the node's price.

    placed: units at next hops. ins, outs: links by peer. ranking: see `Ranking`. senders: in-links with units
    at this node. users: out-links with units of this node. price: cost (s) of one more unit from this node to
    the end of its path, with the price of this node's capacity (0 at a data node: paths end there); level:
    the same without that price (at a data node: of a unit that begins there). capacity: most units at a
    relay; demand: units of a source. epsilon: least raise of a bid (s). limit: price above which a source
    refuses a unit; bypass: greatest value of `limit`, above the cost of every path. ready: True once bidding
    has begun. moved: True if a unit was received, handed back or placed, or this node's bids and prices may
    be too high (a price fell, a cost, the capacity or a link changed); the agent clears it. stirred: True if
    there was an external change at any node since the start.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._is_data = setup.is_data
        self.capacity = setup.capacity
        self.demand = setup.demand
        scale = setup.cost_max if setup.cost_max > 0 else 1.0
        self._scale = scale
        # The longest path through the residual graph, and a margin for the epsilons in prices along it.
        self.bypass = (setup.relays + 1 + setup.stages + 1) * scale
        self.limit = self.bypass
        self.epsilon = scale / FINENESS_MAX
        self.outs: dict[str, OutLink] = {}
        self.ins: dict[str, InLink] = {}
        self.ranking = Ranking()
        self.price = 0.0 if setup.is_data else math.inf
        self.level = math.inf
        self.ready = False
        self.moved = False
        self.stirred = False
        self.placed = 0
        self._arrived = 0
        self._had_units = False
        self.senders: dict[InLink, None] = {}
        self.users: dict[OutLink, None] = {}
        self._outbid = -math.inf
        """Highest bid that was handed back, plus epsilon."""
        self._compared = math.inf
        """Greatest price since in-links were last compared with it (`tell_fall`)."""
        # Cache; None once it may be wrong.
        self._lowest_sender: InLink | None = None

    # -- units and links ---------------------------------------------------------------------------------

    @property
    def surplus(self) -> int:
        """Units at this node without a next hop; negative if more are placed than there are."""
        return (self.demand if self._is_data else self._arrived) - self.placed

    @property
    def dearest(self) -> float:
        """Greatest finite cost (s) of a path from this node to its end, of units placed at next hops; 0:
        none."""
        return max((link.level for link in self.users if link.level < math.inf), default=0.0)

    @property
    def many(self) -> bool:
        """True if the node's capacity exceeds its number of next hops. Such a node sends more messages, so
        its epsilon (least raise of a bid) is coarser."""
        return self.capacity > len(self.outs)

    @property
    def is_last(self) -> bool:
        """True if this node is of the last stage: its next hops are data nodes, at the end of the path. False
        while it has none."""
        return any(link.to_data for link in islice(self.outs.values(), 1))

    @property
    def full(self) -> bool:
        return self._arrived >= self.capacity

    # -- events ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to bid. Sets epsilon, the least raise of a bid, from the known prices of next hops; at a
        relay also the price, which is told to previous hops."""
        self.ready = True
        self.level = self.ranking.best_two()[1]
        if self.level < math.inf:
            hops = self._setup.stages - self._setup.stage + 1
            fineness = FINENESS_MANY if self.many else FINENESS
            floor, least = self._scale / FINENESS_MAX, self._scale * RESOLUTION
            costs = [link.cost for link in self.outs.values() if link.cost > least]  # others: as good as 0
            if costs:
                floor = max(least, min(floor, 2.0 * statistics.median(costs) / FINENESS_MAX))
            self.epsilon = max(self.level / (hops * fineness), floor)
        if not self._is_data:
            self._set_price()
            self.tell_fall()

    def offered(self, link: InLink, offer: Offer) -> None:
        gained = offer.pushed - link.pushed
        link.pushed = offer.pushed
        link.bid = offer.bid
        link.recalled = offer.recalled
        self._lowest_sender = None
        if gained:
            self._arrived += gained
            self._had_units = True
            self.senders[link] = None
            self.moved = True
        recalled = min(link.recalled - link.returned, link.units)
        if recalled > 0:
            self._hand_back(link, recalled)

    def answered(self, link: OutLink, answer: Answer) -> None:
        if answer.returned != link.returned:
            link.returned = answer.returned
            self._recount(link)
        if answer.price != link.price:
            # After a fall, bids and prices of this node may be too high.
            self.moved = self.moved or answer.price < link.price
            link.price = answer.price
            self.ranking.put(link)

    def resize(self, capacity: int) -> None:
        """Set the capacity; once bidding has begun, hand back units beyond it, those with the lowest bids,
        and withdraw from next hops, at once, what is placed there beyond the units that are left."""
        self.capacity = capacity
        self.moved = True
        if self.ready and self._arrived > capacity:
            self._keep_capacity()
            self.withdraw(self.placed - self._arrived)

    def lost_in(self, link: InLink) -> None:
        self._arrived -= link.units
        self.senders.pop(link, None)
        self._lowest_sender = None
        self.moved = True

    def lost_out(self, link: OutLink) -> None:
        self.placed -= link.units
        self.users.pop(link, None)
        self.ranking.remove(link)
        self.moved = True

    # -- bidding: prices rise ----------------------------------------------------------------------------

    def act(self) -> None:
        """Hand back units beyond capacity, place the others at next hops, set the price, and mark changed
        links as dirty. Units whose bid is below the cost of every next hop are handed back too; a source
        leaves those unplaced that would cost `limit` or more. Nothing before the start."""
        if not self.ready:
            return
        if not self._is_data:
            self._keep_capacity()
        self._place()
        self.level = self.ranking.best_two()[1]
        if not self._is_data:
            self._set_price()
            if not self._had_units:
                self.tell_fall()  # first prices of next hops are still arriving

    def withdraw(self, count: int) -> None:
        """Withdraw `count` placed units (all, if they are fewer) from the most expensive next hops."""
        while count > 0 and self.users:
            link = max(self.users, key=lambda user: (user.level, user.peer))
            taken = min(count, link.units)
            self._take_back(link, taken)
            count -= taken

    def _keep_capacity(self) -> None:
        while self._arrived > self.capacity:
            link = self._lowest_bidder()
            self._outbid = max(self._outbid, link.bid + self.epsilon)
            self._hand_back(link, min(link.units, self._arrived - self.capacity))

    def _place(self) -> None:
        while (surplus := self.surplus) > 0:
            best, level, second = self.ranking.best_two()
            low = None if self._is_data else self._lowest_bidder()
            most = self.limit if low is None else low.bid
            if best is None or level > most or (low is None and level >= most):
                if low is None:
                    return  # the source refuses the rest
                self._hand_back(low, min(low.units, surplus))
                continue
            self._push(best, surplus, min(second, most) - best.cost + self.epsilon)

    def _asking_price(self, level: float) -> float:
        """Price to ask for one more unit: `level` (cost by the best next hop); at a full relay at least
        enough to outbid a unit that the relay has; infinite without capacity."""
        if self.capacity <= 0:
            return math.inf
        if self.full and self.senders:
            return max(level, min(self._outbid, self._lowest_bidder().bid + self.epsilon))
        return level

    def _set_price(self) -> None:
        if self.full and self.senders:
            self._outbid = min(self._outbid, self._lowest_bidder().bid + self.epsilon)
        self.price = self._asking_price(self.level)
        self._compared = max(self._compared, self.price)

    # -- repair: prices fall -----------------------------------------------------------------------------

    def survey(self) -> None:
        """Begin a repair: mark the prices of all next hops that are relays as unconfirmed, since they do not
        announce rises."""
        for link in self.outs.values():
            link.fresh = link.to_data

    def doubtful(self) -> OutLink | None:
        """Next hop whose price must be confirmed before `repair` is called: the best one, if a repair would
        change anything and the price is unconfirmed. None otherwise."""
        if not self.too_high:
            return None
        best = self.ranking.best_two()[0]
        return best if best is not None and not best.fresh else None

    @property
    def too_high(self) -> bool:
        """True if a repair would change anything: lower a price or a bid, or move a unit."""
        if not self.ready:
            return False
        best, level, second = self.ranking.best_two()
        least = MIN_FALL * self.epsilon
        highest_sent = max((link.sent_price for link in self.ins.values()), default=-math.inf)
        if (not self._is_data and self._asking_price(level) < highest_sent - least) or self._dear_hops():
            return True
        return any(bid < link.bid - least for link, bid in self._current_bids(best, level, second))

    def repair(self) -> None:
        """Repair: lower prices and bids that are too high, and take units back from dear next hops, a few at
        a time, for `act` to place anew; a relay also hands back units that cost more than their bids. Changed
        links are marked as dirty. Nothing before the start. Call it only after a time in which no unit moved:
        prices raised and lowered at once chase each other."""
        if not self.ready:
            return
        self._return_dear_units()
        best, self.level, second = self.ranking.best_two()
        for link in self._dear_hops():
            self._take_back(link, max(1, link.units // 4))  # to move to another next hop, a few at a time
        least = MIN_FALL * self.epsilon
        for link, bid in self._current_bids(best, self.level, second):
            if bid < link.bid - least:
                link.bid = bid
                link.dirty = not link.to_data or link.dirty
        if not self._is_data:
            if not self.full:
                self._outbid = -math.inf
            self._set_price()
            self.tell_fall()

    def _return_dear_units(self) -> None:
        """At a relay: hand units whose cost exceeds their bid back to previous hops; those placed at next
        hops stay there for others. At a source: take units that cost more than `limit` back."""
        slack = TOLERANCE * self.epsilon
        while self.users and (self._is_data or self.senders):
            dear = max(self.users, key=lambda user: (user.level, user.peer))
            if self._is_data:
                if dear.level <= self.limit + slack * (self._setup.stages + 1):
                    return
                self._take_back(dear, dear.units)
            else:
                low = self._lowest_bidder()
                if self.surplus < 0 or dear.level <= low.bid + slack:
                    return
                self._hand_back(low, 1)

    def _dear_hops(self) -> list[OutLink]:
        """Next hops with units of this node at which a unit costs over `MOVE` epsilons more (`MOVE_COLD`
        before the first external change) than at the best next hop."""
        most = self.ranking.best_two()[1] + (MOVE if self.stirred else MOVE_COLD) * self.epsilon
        return [link for link in self.users if link.level > most]

    def _current_bids(
        self, best: OutLink | None, level: float, second: float
    ) -> Iterable[tuple[OutLink, float]]:
        """Pairs (next hop that has units of this node, bid that this node would set for these units at the
        current prices). best, level, second: result of `Ranking.best_two`."""
        if not self.users:
            return
        most = self.limit
        if not self._is_data:
            most = self._lowest_bidder().bid if self.senders else math.inf
        for link in self.users:
            other = second if link is best else level
            yield link, min(other, most) - link.cost + self.epsilon

    # -- telling prices ----------------------------------------------------------------------------------

    def tell_fall(self) -> None:
        """Mark the links to previous hops that know a price higher by over `MIN_FALL` epsilons as dirty;
        rises are not sent."""
        if self.price >= self._compared:
            return
        self._compared = self.price
        least = MIN_FALL * self.epsilon
        for link in self.ins.values():
            if self.price < link.sent_price - least:
                link.dirty = True

    # -- single moves ------------------------------------------------------------------------------------

    def _lowest_bidder(self) -> InLink:
        """In-link with the lowest bid of those that have units at this node, which there must be."""
        least = self._lowest_sender
        if least is None:
            for link in self.senders:
                if least is None or (link.bid, link.peer) < (least.bid, least.peer):
                    least = link
            assert least is not None
            self._lowest_sender = least
        return least

    def _push(self, link: OutLink, count: int, bid: float) -> None:
        link.pushed += count
        if link.recalled < link.returned:
            link.recalled = link.returned
        link.bid = bid
        link.dirty = not link.to_data or link.dirty
        self._recount(link)

    def _take_back(self, link: OutLink, count: int) -> None:
        link.recalled = max(link.recalled, link.returned) + count
        link.dirty = not link.to_data or link.dirty
        self._recount(link)

    def _recount(self, link: OutLink) -> None:
        before = link.units
        units = link.units = link.pushed - max(link.returned, link.recalled)
        self.placed += units - before
        self.moved = True
        if units:
            self.users[link] = None
        else:
            self.users.pop(link, None)

    def _hand_back(self, link: InLink, count: int) -> None:
        link.returned += count
        self._arrived -= count
        self.moved = True
        link.dirty = True
        if not link.units:
            del self.senders[link]
            self._lowest_sender = None
