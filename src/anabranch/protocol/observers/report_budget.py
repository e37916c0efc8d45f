"""Budget, in bytes, of lines that other peers may write into the event log: by peer, by ticket (keys are
free) and in all."""

from __future__ import annotations

from anabranch.protocol.context.rate_limits_and_bans import TokenBucket, charge_all

#: Bytes (at once, and per second) accepted from one peer: an honest one reports up to 3 KB a second.
PEER = (1 << 20, 16 << 10)
#: The same from all peers with one ticket, and in all: forty peers at that rate, and four such tickets.
TICKET, ALL = (8 << 20, 128 << 10), (32 << 20, 512 << 10)
#: The same from a voter that hands over what others reported while the founder was away, twice its own pace.
VOTER = (8 << 20, 256 << 10)
#: Buckets kept, the latest; it bounds memory against made-up peer ids.
BUCKETS_KEPT = 4096


class ReportBudget:
    """Budget of other peers' event-log lines: token buckets (bytes) named "peer ID", "ticket KEY", "voter ID"
    and "all"."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, peer: str, ticket: str, size_bytes: int, now: float, hands_over: bool = False) -> bool:
        """Charge lines of `peer` to every budget that they fall under; False, without a charge, if one of
        these is exhausted.

        ticket: key of the ticket with which the peer came, "" for none. hands_over: True if a voter delivers
        lines that other peers reported to it.
        """
        limits = {"all": ALL, f"voter {peer}": VOTER} if hands_over else {"all": ALL, f"peer {peer}": PEER}
        if ticket and not hands_over:
            limits[f"ticket {ticket}"] = TICKET
        buckets = [self._bucket(name, *limit, now) for name, limit in limits.items()]
        return charge_all(buckets, size_bytes)

    def _bucket(self, name: str, burst: float, per_s: float, now: float) -> TokenBucket:
        bucket = self._buckets.pop(name, None) or TokenBucket(burst, now)
        self._buckets[name] = bucket  # the latest is last
        if len(self._buckets) > BUCKETS_KEPT:
            del self._buckets[next(iter(self._buckets))]
        bucket.fill(burst, per_s, now)
        return bucket
