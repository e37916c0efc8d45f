"""Rate limits and bans of peers (I7): token buckets for all messages by their rate, for refused messages and
for event-log lines.

An honest peer has a few messages refused while the log changes. A peer that exceeds its allowance of refused
messages, or the budget of a message (`messages.table`), is disconnected and banned for BAN_S seconds, longer
each time. Keys are free, so strangers (peers that are no members) are also charged to, and banned with, the
ticket that they showed and the address block that they came from. A member's seat is its own: others with its
ticket cost it nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.protocol.messages import Message
from anabranch.protocol.messages.table import Allowance

#: Duration (s) of a first ban: long against a reconnect, short against a run. Each further ban of the same
#: peer, ticket or block is twice as long, up to LONGEST_BAN_S (a plain choice), until it had none for
#: FORGIVEN_S seconds.
BAN_S = 30.0
LONGEST_BAN_S = 960.0
FORGIVEN_S = 3600.0
#: Allowance of all strangers of one ticket, or of one address block, in those of one peer: a plain choice,
#: above the number of volunteers that join at the same moment.
SHARED = 16.0
#: Number of peers whose counts, and whose buckets for one allowance, are remembered; it bounds memory against
#: made-up peer ids.
PEERS_KEPT = 4096
#: Payloads that a request permits: networks may repeat it and its answer (simulated ones do).
COPIES = 4
#: Payloads of one kind that one peer is permitted at a time; further ones count as unasked for. A choice: two
#: pieces of each of 16 states, with copies.
MOST_OWED = 128
#: Weight of undecodable bytes, in refused messages: no honest peer sends any.
GARBLED = 64.0
#: Number of refusals of one kind of message of one peer that are all noted; later ones are noted at powers of
#: two only.
ALL_NOTED = 32
#: Allowances of refused messages and of event-log lines, far above the need of honest peers in the fuzzed
#: runs.
REFUSALS, LINES = Allowance(256.0, 2.0), Allowance(8192.0, 256.0)
#: Allowance of bytes of the commit log that a peer asks for. A question of 30 bytes has up to half a megabyte
#: for an answer. Plain choice: a peer that was away for long gets thousands of lines at once, the others at
#: the rate of a slow line.
LOG_BYTES = Allowance(4.0 * (1 << 20), 64.0 * (1 << 10))
#: Allowance of bytes of receipts that an auditor asks for; beyond it the answer is that there is none. Plain
#: choice: eight receipts of 32 KiB, of sixty units each, in a second; most steps take longer.
RECEIPT_BYTES = Allowance(4.0 * (1 << 20), 256.0 * (1 << 10))


@dataclass(slots=True)
class TokenBucket:
    """Token bucket with `left` tokens at time `at` (s)."""

    left: float
    at: float

    def fill(self, burst: float, per_s: float, now: float) -> None:
        """Add the tokens accrued until `now`, at `per_s` a second, up to `burst`; nothing for a time that has
        passed already."""
        if now > self.at:
            left = self.left + per_s * (now - self.at)
            self.left, self.at = left if left < burst else burst, now


def charge_all(buckets: Sequence[TokenBucket], amount: float) -> bool:
    """Take `amount` tokens from each bucket; False, and nothing is taken, if one of them has fewer."""
    for bucket in buckets:
        if bucket.left < amount:
            return False
    for bucket in buckets:
        bucket.left -= amount
    return True


@dataclass
class _Ban:
    """Ban until time `until` (s), the `count`th of the same peer, ticket or address block."""

    until: float
    count: int


class RateLimits:
    """Token buckets and bans by peer, ticket and address block; counts of refused messages by peer alone.
    seated(peer): True if the peer is a member; members are charged alone, strangers together with their
    ticket and block."""

    def __init__(self, seated: Callable[[str], bool] = lambda peer: False) -> None:
        self._seated = seated
        self._buckets: dict[Allowance, dict[str, TokenBucket]] = {}
        #: Messages beyond a budget, by type.
        self.over_budget: Counter[str] = Counter()
        self.counts: dict[str, dict[str, int]] = {}
        """Numbers of refused messages, by peer and kind of message."""
        self._bans: dict[str, _Ban] = {}
        self._owed: dict[str, Counter[type[Message]]] = {}
        """Peer -> numbers of payloads that it may send, as it was asked for them, by type of message."""
        self._came_with: dict[str, tuple[str, ...]] = {}
        """Peer -> ticket and address block with which it came."""

    def came_with(self, peer: str, *shared: str) -> None:
        """Note the ticket that `peer` showed and the address block that it came from ("": none), in place of
        those noted before; as a stranger it is charged and banned together with them."""
        self._came_with.pop(peer, None)
        if names := tuple([name for name in shared if name]):
            self._came_with[peer] = names
        if len(self._came_with) > PEERS_KEPT:
            self._came_with.pop(next(iter(self._came_with)))

    def asked(self, peer: str, answer: type[Message]) -> None:
        """Note that `peer` was asked for a payload with a message of type `answer`, and may send it, however
        late, also over another link."""
        if peer not in self._owed and len(self._owed) >= PEERS_KEPT:
            del self._owed[next(iter(self._owed))]
        owed = self._owed.setdefault(peer, Counter())
        owed[answer] = min(owed[answer] + COPIES, MOST_OWED)

    def answered(self, peer: str, answer: type[Message]) -> bool:
        """Note that `peer` sent a message of type `answer`; False if it had sent all that it was permitted:
        nobody asked for this one."""
        owed = self._owed.get(peer)
        if owed is None or not owed[answer]:
            return False
        owed[answer] -= 1
        return True

    def _shared(self, peer: str) -> tuple[str, ...]:
        """Names of ticket and address block to which a stranger is charged, too; none for a member."""
        found = self._came_with.get(peer, ())
        return () if not found or self._seated(peer) else found

    def charge(self, peer: str, allowance: Allowance, now: float, amount: float = 1.0) -> bool:
        """Charge `amount` of `allowance` to `peer`, and to its ticket and address block if it is a stranger;
        False, without a charge, if one of these is exhausted."""
        buckets = self._buckets.get(allowance)
        bucket = None if buckets is None else buckets.get(peer)
        if bucket is None:
            bucket = self.bucket(peer, allowance, now)
        else:
            bucket.fill(allowance.burst, allowance.per_s, now)
        if peer in self._came_with and (names := self._shared(peer)):
            shared = [self.bucket(name, allowance, now, SHARED) for name in names]
            return charge_all([bucket, *shared], amount)
        if bucket.left < amount:
            return False
        bucket.left -= amount
        return True

    def bucket(self, name: str, allowance: Allowance, now: float, share: float = 1.0) -> TokenBucket:
        """Token bucket of a peer, ticket or address block for `allowance`, filled up to `now`; a new one is
        full.

        name: of the peer, ticket or block. share: size and rate of the bucket as a multiple of one peer's. At
        PEERS_KEPT buckets for an allowance the oldest is dropped for a new one.
        """
        buckets = self._buckets.get(allowance)
        if buckets is None:
            buckets = self._buckets[allowance] = {}
        bucket = buckets.get(name)
        if bucket is None:
            if len(buckets) >= PEERS_KEPT:
                buckets.pop(next(iter(buckets)))
            bucket = buckets[name] = TokenBucket(share * allowance.burst, now)
        bucket.fill(share * allowance.burst, share * allowance.per_s, now)
        return bucket

    def count(self, peer: str, message: str) -> int:
        """Count a refused message of kind `message`; returns how many of that kind `peer` has sent with this
        one."""
        if peer not in self.counts and len(self.counts) >= PEERS_KEPT:
            self.counts.pop(next(iter(self.counts)))
        mine = self.counts.setdefault(peer, {})
        mine[message] = mine.get(message, 0) + 1
        return mine[message]

    @staticmethod
    def is_noted(count: int) -> bool:
        """True if the refusal number `count` goes to the event log, which a flood must not fill."""
        return count <= ALL_NOTED or count & (count - 1) == 0

    def ban(self, peer: str, now: float) -> None:
        """Ban a peer, and strangers that come with its ticket or from its address block: for BAN_S, and each
        time for twice as long, up to LONGEST_BAN_S; after FORGIVEN_S without a ban it begins with BAN_S
        again. The caller closes the links."""
        self._bans = {name: ban for name, ban in self._bans.items() if ban.until + FORGIVEN_S > now}
        for name in (peer, *self._came_with.get(peer, ())):
            former = self._bans.pop(name, None)
            count = former.count + 1 if former is not None else 1
            lasts_s = min(LONGEST_BAN_S, math.ldexp(BAN_S, min(count - 1, 16)))
            self._bans[name] = _Ban(now + lasts_s, count)
        while len(self._bans) > PEERS_KEPT:
            self._bans.pop(next(iter(self._bans)))

    def banned(self, peer: str, now: float) -> bool:
        """True if `peer` is banned, or is a stranger whose ticket or address block is banned."""
        names = (peer, *self._shared(peer))
        return any(name in self._bans and self._bans[name].until > now for name in names)
