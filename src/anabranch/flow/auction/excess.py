"""Units of a data node beyond the capacity of the swarm: when it searches for capacity and refuses units."""

from __future__ import annotations

import math

from anabranch.flow.agents.interface import Setup
from anabranch.flow.auction import timing
from anabranch.flow.auction.changes import Changes
from anabranch.flow.auction.market import Market
from anabranch.flow.auction.residual_search import Searches


class Excess:
    """Part of the auction at a data node (source) with units beyond the swarm's capacity: its searches for
    free capacity, and the price above which it refuses units (`Market.limit`)."""

    def __init__(self, setup: Setup, market: Market, searches: Searches, changes: Changes) -> None:
        self._market = market
        self._searches = searches
        self._changes = changes
        self._number = setup.incarnation << 32
        self._level = -math.inf
        """Price at which the next search begins; minus infinity until it is set."""
        self._step = timing.SEARCH_MAX_EPSILONS
        self._evened = 0

    def changed(self) -> None:
        """Note an external change. The next search for free capacity begins once this source's price has
        risen by SEARCH_EPSILONS from now on; during churn the rise is raised to SEARCH_MAX_EPSILONS if it is
        smaller, else kept. The refusal price (above which sources refuse a unit) may be announced again."""
        unceasing = self._changes.unceasing
        least = timing.SEARCH_MAX_EPSILONS if unceasing else timing.SEARCH_EPSILONS
        if not unceasing or self._step < least:
            self._step = least
            self._level = -math.inf
        self._evened = 0

    def act(self) -> bool:
        """Apply the result of this source's finished search for free capacity, and begin another if the cost
        of one more unit has risen enough. True if the refusal price (`Market.limit`) changed."""
        again = self._apply_result()
        self._search_at_level()
        return again

    def _apply_result(self) -> bool:
        """Set the refusal price (`Market.limit`) by this source's finished search for free capacity: if no
        free path was found, units that cost more than `Searches.bound` are refused, and other sources are
        told this price. If one was found, no unit is refused. True if the price changed."""
        market, searches = self._market, self._searches
        own = searches.own
        if own is None or not own.done:
            return False
        before = market.limit
        if own.open:
            market.limit = max(before, market.bypass)
            return market.limit != before
        if before == market.bypass:
            # Units admitted during the search must not be refused.
            searches.bound = max(searches.bound, market.dearest)
        market.limit = searches.bound
        self._tell_bound(own.search.bound)
        return market.limit != before

    def _search_at_level(self) -> None:
        """Begin a search for free capacity if the cost of one more unit (`Market.level`) has risen by a step
        since the last search or external change; each search doubles the step up to a maximum. No search
        begins while the last one goes on, or after one that found no free path."""
        market, own = self._market, self._searches.own
        if not market.ready or market.level == math.inf or (own is not None and not own.open):
            return
        if self._level == -math.inf:
            self._level = market.level + self._step * market.epsilon
        if market.level >= self._level:
            most = timing.SEARCH_UNCEASING_EPSILONS if self._changes.unceasing else timing.SEARCH_MAX_EPSILONS
            self._step = min(2 * self._step, most)
            self._level = market.level + self._step * market.epsilon
            self._search(market.level)

    def tell_dearest(self) -> None:
        """Announce the cost of this source's most expensive unit, so that the other sources refuse no cheaper
        unit of theirs. Done only if this source has no excess units, its last search found a free path, and
        another source's search found none from this node. Called after a repair, as no units move then."""
        market, searches = self._market, self._searches
        own = searches.own
        if market.surplus > 0 or own is None or not own.open:
            return
        if searches.others_closed:
            searches.bound = max(searches.bound, market.dearest)
            self._tell_bound(own.search.bound)

    def _tell_bound(self, known: float) -> None:
        """Announce the refusal price (`Searches.bound`) to the other sources, which read it from the requests
        of a new search. Done only if it exceeds `known`, the bound of this source's last search, and at most
        `EVEN` times after an external change."""
        searches = self._searches
        if searches.are_many and self._evened < timing.EVEN and searches.bound > known + self._market.epsilon:
            self._evened += 1
            self._search(searches.bound)

    def _search(self, bound: float) -> None:
        self._number += 1
        self._searches.launch(self._number, bound)
