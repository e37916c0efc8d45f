"""Distributed search for free capacity: can the excess units of a data node still be placed?

Units beyond the maximum flow would outbid one another up to the price of refusal, which takes very long. The
search decides sooner. It goes through the residual graph: each node that it reaches asks on all neighbours to
which a unit could go: from a relay's exit the next hops, from its entry the previous hops of units that it
holds (the new unit would replace one of them). A node answers when all that it asked have answered (Chang,
IEEE TSE 8(4), 1982), or at once when it knows a free path. If there is none, the source may refuse its excess
units. A node that finds a free path later, after a change, reports it, and the source tries again.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.flow.agents.interface import Side
from anabranch.flow.auction.link_state import Link, OutLink
from anabranch.flow.auction.market import Market
from anabranch.flow.auction.messages import Finding, Search

#: Most unanswered questions of one node in one search: no limit in practice. The number doubles from 1.
WIDTH_MAX = 1 << 20


class Explorer:
    """Part of one node in a distributed search for a path with free capacity: the newest search of one source
    (data node with excess units). open: True if a free path from this node was found."""

    def __init__(self, market: Market, search: Search, is_data: bool) -> None:
        self.search = search
        self.open = False
        self._market = market
        self._is_data = is_data
        self._at_entry = False
        self._at_exit = False
        self._parents: dict[Link, None] = {}
        self._others: dict[Link, None] = {}
        """Links that asked while a parent waited; they become parents when all parents are lost."""
        self._engaged = False
        self._asked: set[Link] = set()
        self._waiting: set[Link] = set()
        self._width = 1

    @property
    def done(self) -> bool:
        """True if a free path was found, or no neighbour that this node asked has still to answer (so also
        before it asks any)."""
        return self.open or not self._waiting

    def begin(self) -> None:
        """Begin the search for a free path; called at the data node that searches (the source)."""
        self._at_exit = True
        self._engaged = True
        self.explore()

    def reached(self, link: Link) -> None:
        """Handle a neighbour's request, received over `link`, to search for a free path from this node.
        Searches on; or answers at once: True if a path is known, False while one that asked first waits."""
        if link.side is Side.PREVIOUS:
            self._at_entry = True
        else:
            self._at_exit = True
        if self._engaged and not self.done:
            self._others[link] = None
            self._answer(link, False)  # the first that asked gets the result; this one need not wait
            return
        self._engaged = True
        self._parents[link] = None
        if self.open:
            self._answer(link, True)
        self.explore()

    def found(self, link: Link, is_open: bool) -> None:
        """Handle a neighbour's answer, received over `link`, to this node's request. is_open: True if the
        neighbour knows a free path, which ends the search at this node; else it goes on."""
        self._waiting.discard(link)
        if is_open:
            self._succeed()
        else:
            self.explore()

    def forget(self, link: Link) -> None:
        """Handle the loss of a link: the search awaits no answer over it, and answers no request of it. If no
        neighbour is left that gets the result, those that asked later do."""
        self._others.pop(link, None)
        if link in self._parents:
            del self._parents[link]
            if not self._parents:
                self._parents, self._others = self._others, {}
                for parent in self._parents if self.open else ():
                    self._answer(parent, True)
        self._asked.discard(link)
        if link in self._waiting:
            self._waiting.discard(link)
            self.explore()

    def explore(self) -> None:
        """Pass the search on to neighbours to which a unit could go, a few at a time: few requests suffice
        where a path exists. Once a free path is found or all have answered, answer the neighbours that
        requested the search of this node."""
        if self.open or not self._engaged:
            return
        market = self._market
        if self._at_entry and not self._is_data and not market.full:
            self._at_exit = True
        if self._at_exit and market.placed and not self._is_data:
            self._at_entry = True
        if self._at_exit and market.is_last:
            self._succeed()
            return
        if not self._waiting:
            for link in self._next():
                self._ask(link)
                if len(self._waiting) >= self._width:
                    break
            self._width = min(2 * self._width, WIDTH_MAX)
        if not self._waiting:
            for link in self._parents:
                self._answer(link, False)

    def _next(self) -> Iterable[Link]:
        asked, market = self._asked, self._market
        if self._at_exit:
            outs = [link for link in market.outs.values() if link not in asked]
            yield from sorted(outs, key=_by_level)
        if self._at_entry:
            yield from [link for link in market.senders if link not in asked]

    def _ask(self, link: Link) -> None:
        self._asked.add(link)
        self._waiting.add(link)
        link.searches[self.search.source] = self.search
        link.dirty = True

    def _succeed(self) -> None:
        self.open = True
        self._waiting.clear()
        for link in self._parents:
            self._answer(link, True)

    def _answer(self, link: Link, is_open: bool) -> None:
        finding = Finding(self.search.source, self.search.number, is_open)
        if link.findings.get(finding.source) != finding:
            link.findings[finding.source] = finding
            link.dirty = True


def _by_level(link: OutLink) -> tuple[float, str]:
    return link.level, link.peer


class Searches:
    """Part of one node in the distributed searches for paths with free capacity: the newest search of each
    source (data node with excess units). bound: greatest `Search.bound` of any source; sources that find no
    free path refuse units that cost more."""

    def __init__(self, name: str, market: Market, is_data: bool) -> None:
        self._name = name
        self._market = market
        self._is_data = is_data
        self._explorers: dict[str, Explorer] = {}
        self.bound = 0.0

    def launch(self, number: int, bound: float) -> None:
        """Start a search for a free path, with this node as the source. number: of the search, higher than of
        those before. bound: this node's price of one more unit, or the refusal price that it announces."""
        self.bound = max(self.bound, bound)
        explorer = Explorer(self._market, Search(self._name, number, self.bound), self._is_data)
        self._explorers[self._name] = explorer
        explorer.begin()

    @property
    def own(self) -> Explorer | None:
        """Part of this node in the newest search of which it is the source; None if it has not searched."""
        return self._explorers.get(self._name)

    @property
    def are_many(self) -> bool:
        """True if this node knows searches of several data nodes: refusal prices are announced."""
        return len(self._explorers) > 1

    @property
    def others_closed(self) -> bool:
        """True if another source's search ended at this node without a free path: that source refuses units.
        """
        others = (explorer for source, explorer in self._explorers.items() if source != self._name)
        return any(explorer.done and not explorer.open for explorer in others)

    def read(self, link: Link, searches: tuple[Search, ...], findings: tuple[Finding, ...]) -> None:
        """Handle each request and answer of the other end of `link` once; `bound` rises to theirs."""
        if (searches, findings) == link.read:
            return
        link.read = (searches, findings)
        for search in searches:
            self.bound = max(self.bound, search.bound)
            explorer = self._explorers.get(search.source)
            if explorer is None or explorer.search.number < search.number:
                if search.source == self._name:
                    continue  # an earlier search of this node
                explorer = Explorer(self._market, search, self._is_data)
                self._explorers[search.source] = explorer
            if explorer.search.number == search.number and link.heard.get(search.source) != search.number:
                link.heard[search.source] = search.number
                explorer.reached(link)
        for finding in findings:
            explorer = self._explorers.get(finding.source)
            if explorer is None or explorer.search.number != finding.number:
                continue
            if link.findings_read.get(finding.source) != finding:
                link.findings_read[finding.source] = finding
                explorer.found(link, finding.open)

    def forget(self, link: Link) -> None:
        for explorer in self._explorers.values():
            explorer.forget(link)

    def explore(self) -> None:
        """Continue all searches that found no free path yet, after units were received, placed or handed back
        at this node: capacity may have become free."""
        for explorer in self._explorers.values():
            explorer.explore()
