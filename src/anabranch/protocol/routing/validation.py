"""Validation of letters (messages between flow agents): a letter that no honest agent would write is
refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from anabranch.flow.agents.interface import Message, Side
from anabranch.flow.auction.messages import Answer, Offer
from anabranch.flow.gwtf import messages as gwtf
from anabranch.protocol.membership.view import Membership

#: Greatest count, greatest price (s), most names in a list, and longest name in a letter: far above any
#: honest value, and small enough for arithmetic and memory.
COUNT_MAX = 1 << 62
PRICE_MAX_S = 1e12
NAMES_MAX = 1 << 12
NAME_MAX = 128
#: Most by which a letter may raise the count of changes heard of. All peers adopt the greatest, and at
#: COUNT_MAX every letter would be refused.
STIR_MAX = 1 << 32
#: Most names of data nodes that are accepted before the log here has them. Every name costs memory, here and
#: at all peers that hear of it.
STRANGERS_MAX = 16

_GWTF_FROM = {Side.NEXT: gwtf.FROM_NEXT, Side.PREVIOUS: gwtf.FROM_PREVIOUS, Side.SAME: gwtf.FROM_SAME}


@dataclass(slots=True)
class LinkHistory:
    """Counts of units sent and received over one flow link, by which letters are checked. cost: the link's
    cost as last given to the agent (s). pushed: units that this peer handed over to the next hop so far.
    heard: units that the peer at the other end handed over, or as the next hop handed back, by its newest
    letter. seq: number of that letter."""

    cost: float
    pushed: int = 0
    heard: int = 0
    seq: int = -1

    def note(self, letter: Offer | Answer) -> None:
        """Store the count of units in a letter from the other end as `heard`, unless a newer letter has
        arrived already."""
        if letter.seq >= self.seq:
            self.seq = letter.seq
            self.heard = letter.pushed if isinstance(letter, Offer) else letter.returned


def contradiction(history: LinkHistory, letter: Offer | Answer, stir: int) -> str | None:
    """Reason why a letter contradicts the earlier letters on this link, or None. stir: greatest number of
    changes (of members, costs, places) that any letter to this peer counted."""
    count = letter.pushed if isinstance(letter, Offer) else letter.returned
    if letter.seq >= history.seq and count < history.heard:
        return f"a count of {history.heard} that falls to {count}"
    if isinstance(letter, Offer) and letter.recalled > letter.pushed:
        return f"{letter.recalled} units recalled of {letter.pushed}"
    if isinstance(letter, Answer) and letter.returned > history.pushed:
        return f"{letter.returned} units handed back of {history.pushed}"
    if letter.stir > stir + STIR_MAX:
        return f"{letter.stir} changes, after {stir}"
    return None


def implausible(letter: Offer | Answer, ahead: bool) -> str | None:
    """Reason why no honest neighbour writes this letter, or None: it is of the wrong kind for its direction,
    has values out of range, or too many names. ahead: True if it came from the previous stage."""
    if isinstance(letter, Offer) is not ahead:
        return f"{type(letter).__name__} in the wrong direction"
    if isinstance(letter, Answer) and letter.price < 0.0:
        return f"a price of {letter.price}"
    # A bid of -inf: there is none yet. A price of inf: none is known.
    endless = -math.inf if isinstance(letter, Offer) else math.inf
    level = letter.bid if isinstance(letter, Offer) else letter.price
    if level == endless:
        letter = msgspec.structs.replace(letter, **{"bid" if ahead else "price": 0.0})
    return _implausible(msgspec.structs.astuple(letter))


def unfit(letter: Message, side: Side) -> str | None:
    """Reason to refuse a routing message (`letter`) of the policy `gwtf`, which no honest neighbour sends;
    None: it may be honest. side: stage of the sender, seen from this peer (previous, same or next)."""
    if not isinstance(letter, _GWTF_FROM[side]):
        return f"{type(letter).__name__} from the {side.value} stage"
    if isinstance(letter, gwtf.Answer) and letter.taken and side is Side.SAME and letter.link is None:
        return "an Answer that gives nothing"
    return _implausible(msgspec.structs.astuple(letter))


def _implausible(value: object) -> str | None:
    if isinstance(value, int):
        return None if 0 <= value <= COUNT_MAX else f"a count of {value}"
    if isinstance(value, float):
        if abs(value) <= PRICE_MAX_S:
            return None
        return "a price that is no number" if math.isnan(value) else f"a price of {value}"
    if isinstance(value, str):
        return None if len(value) <= NAME_MAX else f"a name of {len(value)} letters"
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple):
        if len(value) > NAMES_MAX:
            return f"more than {NAMES_MAX} names"
        for part in value:
            wrong = _implausible(part)
            if wrong is not None:
                return wrong
    return None


class DataNodes:
    """Filter of data nodes' names in letters (`only_known`). The first STRANGERS_MAX names that the log never
    had pass, too, since a letter may come before the log entry; names of former members do not."""

    def __init__(self) -> None:
        self._strangers: set[str] = set()

    def only_known(self, letter: Offer | Answer, membership: Membership) -> Offer | Answer:
        """Copy of the letter without the searches for flow, and the findings of paths, whose source is no
        data node of the log, nor one of a few names that the log may still add (`_known`)."""
        return msgspec.structs.replace(
            letter,
            searches=tuple(search for search in letter.searches if self._known(search.source, membership)),
            findings=tuple(found for found in letter.findings if self._known(found.source, membership)),
        )

    def _known(self, name: str, membership: Membership) -> bool:
        """True if `name` is a data node of the log. A name that the log never had is remembered and passes
        too, for the first STRANGERS_MAX such names, because a letter may come before the log entry."""
        if membership.knew(name):  # a former member's stage is none
            return membership.stage_of(name) == 0
        if len(self._strangers) < STRANGERS_MAX:
            self._strangers.add(name)
        return name in self._strangers
