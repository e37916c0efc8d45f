"""Messages of the auction ("letters"). Each holds the whole state of one end of a link, never a difference.

Counts are cumulative over a link's life. So a letter that is lost, doubled or late does no harm: the one with
the greatest sequence number includes the content of all others.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.flow.agents.interface import Message, UnitId


class Search(NamedTuple):
    """Request to search, for data node `source`, for a path with free capacity (`residual_search.py`).
    number: ascends with each search of the source. bound: the greatest of the source's price and of all
    bounds that it knew when the search began."""

    source: str
    number: int
    bound: float


class Finding(NamedTuple):
    """Answer to a `Search`. open: the sender knows a free path; False: all paths from it are full, or it
    still searches for a node that asked before."""

    source: str
    number: int
    open: bool


class Letter(Message, frozen=True):
    """State of a link at one end. seq: version of this state. ack: newest version received from the other
    end. ask: True if the sender repeats this version until it is acknowledged. searches, findings: the newest
    of each source that the sender passes on, and answers. stir: number of external changes (nodes, costs,
    capacities, demands anywhere in the swarm) that the sender knows of."""

    seq: int
    ack: int
    ask: bool
    searches: tuple[Search, ...]
    findings: tuple[Finding, ...]
    stir: int


class Offer(Letter, frozen=True):
    """State of a link, sent to the next stage. pushed: units handed over so far. recalled: number of units
    that must be handed back in all, at least. bid: highest price of the receiver at which these units stay.
    wants: standing units whose path goes or shall go through the receiver. The fields after it are always
    empty, kept for the wire format of version 4."""

    pushed: int
    recalled: int
    bid: float
    wants: tuple[UnitId, ...]
    mix: tuple[()] = ()
    share: None = None
    ceded: tuple[()] = ()
    extra: int = 0


class Answer(Letter, frozen=True):
    """State of a link, sent to the previous stage. returned: units handed back so far (refused, outbid or
    recalled). price: cost of one more unit from the sender to the end of its path. whole: wanted units with
    places reserved from the sender to the end of their path. stale: wanted units for which the sender cannot
    keep a place. The fields after it are reserved: always empty, kept for the wire format of version 4."""

    returned: int
    price: float
    whole: tuple[UnitId, ...]
    stale: tuple[UnitId, ...]
    exchanges: tuple[()] = ()
    granted: int = 0
    shares: tuple[()] = ()
    homes: tuple[()] = ()
    room: int = 0
    extra: int = 0
