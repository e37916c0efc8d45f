"""Dial-backs of joiners: the leader tries the addresses that a joiner names before it is admitted."""

from __future__ import annotations

from anabranch.addresses import direct_addresses, parse_addresses
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.events import DialBack, DialledBack
from anabranch.protocol.messages import REMARK_MAX, Reached

#: Dial-backs under way at one time, and results that are kept, the latest. Choices: they bound the
#: connections and the memory that strangers with a ticket can cause.
UNDER_WAY, KEPT = 16, 256


class DialBacks:
    """Dial-backs by one coordinator. Its driver dials the direct addresses that a joiner names before it is
    admitted, to see which of them answer. This object has the dial-backs under way, and the last result for
    each peer, KEPT results at most."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._under_way: set[str] = set()
        self._results: dict[str, tuple[str, str]] = {}
        """Peer -> (addresses that were tried, those that answered)."""

    def ask(self, peer: str, address: str) -> None:
        """Have the driver try a peer's direct addresses; `answered` gets the result. Nothing if a dial-back
        of this peer or UNDER_WAY of others are under way, or if `address` names no direct one or cannot be
        parsed."""
        direct = direct_addresses(address)
        try:
            parse_addresses(direct)
        except ValueError:
            return
        if direct and peer not in self._under_way and len(self._under_way) < UNDER_WAY:
            self._under_way.add(peer)
            self._ctx.outbox.emit(DialBack(peer, direct))

    def answered(self, event: DialledBack) -> None:
        """Keep the result of a dial-back in place of an earlier one, and send it to the joiner if it is
        linked."""
        peer = event.peer
        self._under_way.discard(peer)
        self._results.pop(peer, None)
        self._results[peer] = event.addresses, event.reached
        if len(self._results) > KEPT:
            del self._results[next(iter(self._results))]
        self._ctx.outbox.send(peer, Reached(event.reached, event.reason[:REMARK_MAX]))

    def confirmed(self, peer: str, address: str) -> str:
        """Those of a joiner's addresses that answered the last dial-back, and its addresses at carriers;
        `address` as it is if that dial-back tried other addresses, or none has ended."""
        tried, reached = self._results.get(peer, ("", ""))
        if tried != direct_addresses(address) or not tried:
            return address
        carried = [way for way in address.split(",") if "/" in way]
        return ",".join([*filter(None, reached.split(",")), *carried])
