"""Budget, in bytes, of lines that other peers may write into the event log: by peer, by ticket (keys are
free) and in all."""

from __future__ import annotations

from anabranch.protocol.context.rate_limits_and_bans import RateLimits, charge_all
from anabranch.protocol.messages.table import Allowance

#: Bytes (at once, and per second) accepted from one peer: an honest one reports up to 3 KB a second.
PEER = Allowance(1 << 20, 16 << 10)
#: The same from all peers with one ticket, and in all: forty peers at that rate, and four such tickets.
TICKET, ALL = Allowance(8 << 20, 128 << 10), Allowance(32 << 20, 512 << 10)
#: The same from a voter that hands over what others reported while the founder was away, twice its own pace.
VOTER = Allowance(8 << 20, 256 << 10)


class ReportBudget:
    """Budget of other peers' event-log lines: token buckets (bytes) of each peer, ticket and voter, and one
    of all."""

    def __init__(self) -> None:
        self._limits = RateLimits()

    def take(self, peer: str, ticket: str, size_bytes: int, now: float, hands_over: bool = False) -> bool:
        """Charge lines of `peer` to every budget that they fall under; False, without a charge, if one of
        these is exhausted.

        ticket: key of the ticket with which the peer came, "" for none. hands_over: True if a voter delivers
        lines that other peers reported to it.
        """
        limits = [("", ALL), (peer, VOTER if hands_over else PEER)]
        if ticket and not hands_over:
            limits.append((ticket, TICKET))
        return charge_all([self._limits.bucket(*limit, now) for limit in limits], size_bytes)
