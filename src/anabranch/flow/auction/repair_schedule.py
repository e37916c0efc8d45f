"""Schedule of repairs at a node of the auction. A repair lowers prices and bids and moves units.

A repair needs a rest, in which no unit moves at the node. Each repair doubles the next rest up to a maximum;
then a few more repairs follow at a constant pace, and no more until an external change. So the auction ends.
"""

from __future__ import annotations

import math

from anabranch.flow.auction import timing
from anabranch.flow.auction.changes import Changes
from anabranch.flow.auction.market import Market


class RepairSchedule:
    """Times of one node's repairs (lowering of prices and bids, moves of units). at: time (s) of the next
    repair; infinite if none is due, and while `surveying`. surveying: True if a repair waits until a next hop
    confirms its price."""

    def __init__(self, market: Market, changes: Changes) -> None:
        self.at = math.inf
        self.surveying = False
        self._market = market
        self._changes = changes
        self._lull_s = timing.LULL_COLD_S
        self._more = 0
        """Repairs since the rest reached its maximum."""

    def changed(self, here: bool) -> None:
        """After an external change, allow repairs again and shorten the rest (seconds without moved units)
        before the next one: to at most LULL_S if the change was at this node (`here`), else LULL_MAX_S. The
        time of the repair is set by `moved`."""
        self._lull_s = min(self._lull_s, timing.LULL_S if here else timing.LULL_MAX_S)
        self._more = 0

    def moved(self, now: float) -> None:
        """Put the next repair off after units have moved in the market: by the rest, which each repair
        doubles, and which is at least half of the time since the last external change. Once the rest exceeds
        LULL_MAX_S, only a few repairs follow, MORE_S after a move and only if a price, bid or unit would
        change."""
        self._lull_s = max(self._lull_s, (now - self._changes.last_at) * timing.LULL_SHARE)
        if self._lull_s <= timing.LULL_MAX_S:
            self.at = now + self._lull_s
        else:
            more = self._more < (timing.MORE_MANY if self._market.many else timing.MORE)
            self.at = now + timing.MORE_S if more and self._market.too_high else math.inf

    def act(self, now: float) -> bool:
        """If it is time, ask the best next hop to confirm its price, unless it has in this repair, and once
        it has, repair the market (`Market.repair`: lower prices and bids, move units). True if that was done
        now."""
        if now < self.at and not self.surveying:
            return False
        if not self.surveying:
            self.surveying = True
            self._market.survey()
        self.at = math.inf  # while surveying, an answer or the loss of the link triggers the repair
        doubtful = self._market.doubtful()
        if doubtful is not None:
            if not doubtful.asks:
                doubtful.dirty = True
            return False
        self.surveying = False
        if self._lull_s <= timing.LULL_MAX_S:
            self._lull_s *= 2
        else:
            self._more += 1
        self._market.repair()
        return True
