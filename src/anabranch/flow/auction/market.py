"""One node's market: what its units bid, whom it outbids, what it charges. The working flow.

Every relay is two nodes of the split graph, its entry and its exit, with the capacity between them. A unit is
pushed to the cheapest next hop with a bid: how high that hop's price may go before the next best (or handing
the unit back) is better by more than epsilon. A full relay keeps the highest bids and charges epsilon more
than the last that it turned away. A bid stands for the steps of epsilon-relaxation that the two ends would
otherwise take by messages, up to where the unit would leave (`docs/flow.md`).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable
from itertools import islice

from anabranch.flow.agent import Setup
from anabranch.flow.auction.line import In, Out
from anabranch.flow.auction.messages import Answer, Offer

#: Epsilon is the first cost-to-go per hop over this: relative, because a bid war's length is too. Where a
#: relay has room for more units than it has next hops, there are more messages, and epsilon is coarser.
FINENESS, FINENESS_MANY = 6.6, 4.3
#: ... but at least the greatest link cost over this, or costs of zero would make it endless; a single dear
#: link must not coarsen it, so no more than the median cost to a next hop over half of this.
FINENESS_MAX = 250.0
#: ... and at least so much of the greatest link cost, or it is lost in rounding and two units of one node bid
#: against each other for ever.
RESOLUTION = 1e-13
#: A price that has fallen by less than so many epsilons is not told; likewise a bid.
HUSH = 1.0
#: A tenant goes when its unit costs so many epsilons more than it bids: what epsilons on the way explain.
CONTENT = 4.0
#: A unit moves to another next hop that is cheaper by so many epsilons: from cold, where prices are still
#: settling, and after a change from outside.
MOVE_COLD, MOVE = 7.0, 4.0


class Ranking:
    """The next hops by cost to go: a heap whose outdated entries go when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Out]] = []
        self._lines: set[Out] = set()
        self._two: tuple[Out | None, float, float] | None = None
        """What `two` found last; nothing once a level has changed."""

    def put(self, line: Out) -> None:
        """`line` is new or its level has changed."""
        self._two = None
        self._lines.add(line)
        if line.level < math.inf:
            heapq.heappush(self._heap, (line.level, line.peer, line))
            if len(self._heap) > 4 * len(self._lines) + 16:
                self._heap = [(each.level, each.peer, each) for each in self._lines if each.level < math.inf]
                heapq.heapify(self._heap)

    def remove(self, line: Out) -> None:
        self._two = None
        self._lines.discard(line)
        self._heap = [entry for entry in self._heap if entry[2] is not line]
        heapq.heapify(self._heap)

    def two(self) -> tuple[Out | None, float, float]:
        """(best next hop, its level, the second best level); infinite where there is none."""
        if self._two is None:
            self._two = self._find()
        return self._two

    def _find(self) -> tuple[Out | None, float, float]:
        best = self._top()
        if best is None:
            return None, math.inf, math.inf
        entry = heapq.heappop(self._heap)
        second = self._top()
        while second is best:
            heapq.heappop(self._heap)
            second = self._top()
        heapq.heappush(self._heap, entry)
        return best, best.level, second.level if second is not None else math.inf

    def _top(self) -> Out | None:
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].level:
            heapq.heappop(heap)
        return heap[0][2] if heap else None


class Market:
    """Working units of one node: `arrived` from its tenants (or demanded), `placed` at next hops.

    limit: what a unit of a data node may cost before it is turned away (the bypass arc).
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.capacity = setup.capacity
        self.demand = setup.demand
        scale = setup.cost_max if setup.cost_max > 0 else 1.0
        self._scale = scale
        # The longest way through the residual graph, and room for what epsilons add to prices on a path.
        self.bypass = (setup.relays + 1 + setup.stages + 1) * scale
        self.limit = self.bypass
        self.epsilon = scale / FINENESS_MAX
        self.outs: dict[str, Out] = {}
        self.ins: dict[str, In] = {}
        self.ranking = Ranking()
        self.price = 0.0 if setup.is_data else math.inf
        self.level = math.inf
        """Least cost to go from the exit."""
        self.ready = False
        self.moved = False
        """Whether a working unit has come, gone or been placed since this was last cleared."""
        self.stirred = False
        """Whether something has changed from outside, here or elsewhere, since the start."""
        self._tenants: dict[In, None] = {}
        self._guests: dict[Out, None] = {}
        self._mark = -math.inf
        self._looked_at = math.inf
        """The greatest price since previous hops were last looked through for those who think it higher."""
        self._arrived = 0
        self._taken = False
        self._placed = 0

    # -- what is here ------------------------------------------------------------------------------------

    @property
    def arrived(self) -> int:
        return self.demand if self._setup.is_data else self._arrived

    @property
    def placed(self) -> int:
        return self._placed

    @property
    def surplus(self) -> int:
        return self.arrived - self._placed

    @property
    def tenants(self) -> Iterable[In]:
        return self._tenants

    @property
    def guests(self) -> Iterable[Out]:
        """Next hops that have units of ours."""
        return self._guests

    @property
    def dearest(self) -> float:
        """Greatest cost to go among the units placed, as far as prices are known: not of those on their way
        to a next hop that has just lost its own."""
        return max((line.level for line in self._guests if line.level < math.inf), default=0.0)

    @property
    def many(self) -> bool:
        """Whether there is room for more units than there are next hops."""
        return self.capacity > len(self.outs)

    @property
    def is_last(self) -> bool:
        """Whether the next hops are data nodes, at the end of the way."""
        return any(line.to_data for line in islice(self.outs.values(), 1))

    @property
    def full(self) -> bool:
        return self._arrived >= self.capacity

    # -- news --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prices of next hops are known as far as they will be: begin."""
        self.ready = True
        self.level = self.ranking.two()[1]
        if self.level < math.inf:
            hops = self._setup.stages - self._setup.stage + 1
            fineness = FINENESS_MANY if self.many else FINENESS
            floor = self._scale / FINENESS_MAX
            costs = [line.cost for line in self.outs.values() if line.cost > 0.0]
            if costs:
                floor = min(floor, 2.0 * statistics.median(costs) / FINENESS_MAX)
            floor = max(floor, self._scale * RESOLUTION)
            self.epsilon = max(self.level / (hops * fineness), floor)
        if not self._setup.is_data:
            self._set_price()
            self.tell_lower()

    def offered(self, line: In, offer: Offer) -> None:
        gained = offer.pushed - line.pushed
        line.pushed = offer.pushed
        line.bid = offer.bid
        line.recalled = offer.recalled
        if gained:
            self._arrived += gained
            self._taken = True
            self._tenants[line] = None
            self.moved = True
        wanted_back = min(line.recalled - line.returned, line.units)
        if wanted_back > 0:
            self._hand_back(line, wanted_back)

    def answered(self, line: Out, answer: Answer) -> None:
        if answer.returned != line.returned:
            before = line.units
            line.returned = answer.returned
            self._recount(line, before)
        if answer.price != line.price:
            # A price that falls may leave bids and prices here too high.
            self.moved = self.moved or answer.price < line.price
            line.price = answer.price
            self.ranking.put(line)

    def resize(self, capacity: int) -> None:
        """What no longer fits goes back; its places further on are given up at once."""
        self.capacity = capacity
        self.moved = True
        if self.ready and self._arrived > capacity:
            self._keep_capacity()
            self.withdraw(self._placed - self._arrived)

    def lost_in(self, line: In) -> None:
        self._arrived -= line.units
        self._tenants.pop(line, None)
        self.moved = True

    def lost_out(self, line: Out) -> None:
        self._placed -= line.units
        self._guests.pop(line, None)
        self.ranking.remove(line)
        self.moved = True

    # -- what follows ------------------------------------------------------------------------------------

    def act(self) -> None:
        """Take in, hand back and place, raising prices; lines that have news are left `dirty`."""
        if not self.ready:
            return
        if not self._setup.is_data:
            self._keep_capacity()
        self._place()
        self.level = self.ranking.two()[1]
        if not self._setup.is_data:
            self._set_price()
            if not self._taken:
                self.tell_lower()  # nobody has come yet: the first prices are still on their way

    def survey(self) -> None:
        """A lull has passed: what next hops said before it may have risen since, in silence."""
        for line in self.outs.values():
            line.fresh = line.to_data

    def doubtful(self) -> Out | None:
        """A next hop whose price has to be asked for before anything is lowered because of it."""
        if not self.too_high:
            return None
        best = self.ranking.two()[0]
        return best if best is not None and not best.fresh else None

    @property
    def too_high(self) -> bool:
        """Whether a repair would lower a price or a bid, or move a unit."""
        if not self.ready:
            return False
        best, level, second = self.ranking.two()
        if not self._setup.is_data:
            asked, hush = self._asked(level), HUSH * self.epsilon
            for line in self.ins.values():
                if asked < line.told - hush:
                    return True
        if self._dear():
            return True
        return any(bid < line.bid - HUSH * self.epsilon for line, bid in self._lower(best, level, second))

    def repair(self) -> None:
        """After a lull: lower what is too high. Raising and lowering at once would chase each other."""
        if not self.ready:
            return
        self._keep_content()
        best, self.level, second = self.ranking.two()
        self._move_over()
        self._lower_bids(best, second)
        if not self._setup.is_data:
            if not self.full:
                self._mark = -math.inf
            self._set_price()
            self.tell_lower()

    def withdraw(self, count: int) -> None:
        """Take `count` placed units back from where they cost most."""
        while count > 0 and self._guests:
            line = max(self._guests, key=lambda guest: (guest.level, guest.peer))
            taken = min(count, line.units)
            self._take_back(line, taken)
            count -= taken

    def _keep_capacity(self) -> None:
        while self._arrived > self.capacity:
            line = self._lowest()
            self._mark = max(self._mark, line.bid + self.epsilon)
            self._hand_back(line, min(line.units, self._arrived - self.capacity))

    def _place(self) -> None:
        while (surplus := self.surplus) > 0:
            best, level, second = self.ranking.two()
            low = None if self._setup.is_data else self._lowest()
            most = self.limit if low is None else low.bid
            if best is None or level > most or (low is None and level >= most):
                if low is None:
                    return  # turned away: the bypass arc takes them
                self._hand_back(low, min(low.units, surplus))
                continue
            self._push(best, surplus, min(second, most) - best.cost + self.epsilon)

    def _keep_content(self) -> None:
        """A unit that costs more than its tenant would pay goes back; its tail waits for another."""
        slack = CONTENT * self.epsilon
        while self._guests and (self._setup.is_data or self._tenants):
            dear = max(self._guests, key=lambda guest: (guest.level, guest.peer))
            if self._setup.is_data:
                if dear.level <= self.limit + slack * (self._setup.stages + 1):
                    return
                self._take_back(dear, dear.units)
            else:
                low = self._lowest()
                if self.surplus < 0 or dear.level <= low.bid + slack:
                    return
                self._hand_back(low, 1)

    def _move_over(self) -> None:
        """Units that would be cheaper at another next hop are called back, to go there; a few at a time."""
        for line in self._dear():
            self._take_back(line, max(1, line.units // 4))

    def _dear(self) -> list[Out]:
        """Next hops where a unit costs more than it would at another."""
        most = self.ranking.two()[1] + (MOVE if self.stirred else MOVE_COLD) * self.epsilon
        return [line for line in self._guests if line.level > most]

    def _lower_bids(self, best: Out | None, second: float) -> None:
        for line, bid in self._lower(best, self.level, second):
            if bid < line.bid - HUSH * self.epsilon:
                line.bid = bid
                line.dirty = not line.to_data or line.dirty

    def _lower(self, best: Out | None, level: float, second: float) -> Iterable[tuple[Out, float]]:
        """Next hops with units of ours, and what would be bid there now."""
        if not self._guests:
            return
        most = self.limit
        if not self._setup.is_data:
            most = self._lowest().bid if self._tenants else math.inf
        for line in self._guests:
            other = second if line is best else level
            yield line, min(other, most) - line.cost + self.epsilon

    def _asked(self, level: float) -> float:
        """What one more unit would cost: from here on, and to outbid the lowest where it is full."""
        if self.capacity <= 0:
            return math.inf
        if self.full and self._tenants:
            return max(level, min(self._mark, self._lowest().bid + self.epsilon))
        return level

    def _set_price(self) -> None:
        if self.full and self._tenants:
            self._mark = min(self._mark, self._lowest().bid + self.epsilon)
        self.price = self._asked(self.level)
        self._looked_at = max(self._looked_at, self.price)

    def tell_lower(self) -> None:
        """Prices rise in silence, but a fall is told to all who think it higher."""
        if self.price >= self._looked_at:
            return
        self._looked_at = self.price
        hush = HUSH * self.epsilon
        for line in self.ins.values():
            if self.price < line.told - hush:
                line.dirty = True

    # -- single moves ------------------------------------------------------------------------------------

    def _lowest(self) -> In:
        least: In | None = None
        for line in self._tenants:
            if least is None or line.bid < least.bid or (line.bid == least.bid and line.peer < least.peer):
                least = line
        assert least is not None
        return least

    def _push(self, line: Out, count: int, bid: float) -> None:
        before = line.units
        line.pushed += count
        if line.recalled < line.returned:
            line.recalled = line.returned
        line.bid = bid
        line.dirty = not line.to_data or line.dirty
        self._recount(line, before)

    def _take_back(self, line: Out, count: int) -> None:
        before = line.units
        line.recalled = max(line.recalled, line.returned) + count
        line.dirty = not line.to_data or line.dirty
        self._recount(line, before)

    def _recount(self, line: Out, before: int) -> None:
        after = line.units
        self._placed += after - before
        self.moved = True
        if after:
            self._guests[line] = None
        else:
            self._guests.pop(line, None)

    def _hand_back(self, line: In, count: int) -> None:
        line.returned += count
        self._arrived -= count
        self.moved = True
        line.dirty = True
        if not line.units:
            del self._tenants[line]
