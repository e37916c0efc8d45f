"""Credit ledger of one iteration: microbatches that each upstream peer may send (R4), at receiver and sender.

The receiver grants cumulative totals per upstream peer, so a repeated message does no harm. When a link
breaks, activations on their way are lost, and both sides continue from what was received. The capacity is
granted in advance, by the planned flow or evenly; the remainder is a pool for peers that ask. Each receiver
has a single repair credit beyond the capacity, which serves repairs only, so that new microbatches cannot
starve them.

A peer that asks for credits and does not use them must not get them all. A microbatch may arrive long after a
later request, so recent arrivals say little about a peer. The number of credits that a peer may hold unused
therefore grows with the credits that it has used here. What it was asked to return and keeps unused is
withdrawn once the step lacks units.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from anabranch.protocol.messages import Fence, Slots

#: Decay of the use of credits per iteration, and number below which it is forgotten. Plain choices.
FADES, FADED = 0.75, 0.5


def fade(uses: dict[str, float]) -> None:
    """Multiply the recent use of credits (upstream peer -> number used) by FADES in place, at the beginning
    of an iteration; a peer whose number falls to FADED or below is dropped."""
    left = {peer: FADES * used for peer, used in uses.items() if FADES * used > FADED}
    uses.clear()
    uses.update(left)


@dataclass
class Grant:
    """Credits that the receiver granted to one upstream peer in this iteration. `total` falls when unused
    credits are withdrawn, or the link breaks; `received`, `released` and `returned` only rise.

    standing: credits that the upstream peer keeps without asking (guaranteed ones); it may fall. total,
    received, released, returned: credits granted, microbatches received, credits freed by finished
    microbatches, and credits handed back so far. own: number of unused credits below which a request of the
    upstream peer is granted without regard to its use of credits (`SlotLedger._bound`); they may be taken
    back all the same. calls: times that another peer was asked to return a credit for this one. linked: True
    while its link is up. at_work: its microbatches at this receiver whose gradient is not ready. told_others:
    microbatches of other upstream peers at this receiver, as the upstream peer was last told. withdrawn:
    unused credits that went to others, although the upstream peer may not know. is_new: True until the first
    request of an upstream peer that was granted nothing in advance.
    """

    standing: int
    total: int
    own: int = 1
    calls: int = 0
    received: int = 0
    released: int = 0
    returned: int = 0
    linked: bool = True
    at_work: int = 0
    told_others: int = 0
    withdrawn: int = 0
    is_new: bool = False

    @property
    def held(self) -> int:
        """Credits that the upstream peer holds, used or not."""
        return self.total - self.released - self.returned

    @property
    def granted(self) -> int:
        """Credits granted so far, with the withdrawn ones that the upstream peer may still count as its
        own."""
        return self.total + self.withdrawn

    @property
    def lacks(self) -> bool:
        """True if the upstream peer is linked and holds fewer credits than guaranteed, because the rest went
        to others meanwhile."""
        return self.linked and self.held < self.standing

    @property
    def called(self) -> int:
        """Credits beyond the guaranteed ones, which the upstream peer has to return unless it needs them."""
        return max(0, self.held - self.standing)

    @property
    def unused(self) -> int:
        """Granted credits that were not returned, and for which no microbatch has arrived."""
        return self.total - self.received - self.returned

    def add(self) -> None:
        """Grant one credit more; if one was withdrawn, that one, as the upstream peer counts it still."""
        self.total += 1
        self.withdrawn = max(0, self.withdrawn - 1)

    def told(self, fence: Fence, others: int = 0) -> Slots:
        """Make the report of this grant to its peer; the caller sends it. others: microbatches of other
        senders that this receiver computes now; stored, so that only great changes are reported again."""
        self.told_others = others
        return Slots(fence, self.total, self.received, self.released, self.returned, self.standing, others)


@dataclass
class SlotLedger:
    """Receiver's side of the credits of one iteration.

    capacity: credits in all. pool: free credits. repair_free: True if the repair credit (one beyond the
    capacity, for microbatches sent again after a loss) is free. uses: credits that each peer has used lately,
    in earlier iterations too (`fade`); counted up in place. grants: upstream peer -> its grant. asks: sorted
    requests that wait: (False for a repair, microbatch index, peer). once: True if a guaranteed credit serves
    one microbatch, and goes to the pool after it. _spare: credits of the pool that are guaranteed to no peer.

    Methods that return a list of peers: the peers to report their credits to.
    """

    capacity: int
    pool: int = 0
    repair_free: bool = True
    uses: dict[str, float] = field(default_factory=dict)
    grants: dict[str, Grant] = field(default_factory=dict)
    asks: list[tuple[bool, int, str]] = field(default_factory=list)
    once: bool = False
    _spare: int = 0

    def deal(self, upstream: list[str], plan: Mapping[str, int] | None = None) -> list[str]:
        """Grant the capacity in advance to the peers `upstream`, in place of all grants before; returns them
        all, to be told.

        plan: upstream peer -> planned microbatches; at most half of the capacity is granted by the plan. The
        rest is split evenly, less one credit if there is a plan. The remainder is the pool (all without
        `upstream`), so that a peer without a grant need not wait for others.
        """
        shares = {peer: (plan or {}).get(peer, 0) for peer in upstream}
        planned = sum(shares.values())
        while planned > self.capacity // 2:
            most = max(shares, key=lambda peer: (shares[peer], peer))
            shares[most] -= 1
            planned -= 1
        rest = self.capacity - planned - (1 if planned else 0)
        each = rest // len(upstream) if upstream else 0
        self.pool = self._spare = self.capacity - planned - each * len(upstream)
        dealt = {peer: share + each for peer, share in shares.items()}
        self.grants = {peer: Grant(most, most, max(1, most)) for peer, most in dealt.items()}
        return list(upstream)

    def expect(self, slots: Mapping[str, int]) -> list[str]:
        """Grant in advance one credit for each slot of a round that is to come to this receiver (upstream
        peer -> number), in place of `deal`. The rest of the capacity is the pool. If there are more slots,
        their number is the capacity, as a data node keeps but a byte of each. Returns the peers to be
        told."""
        self.once = True
        self.capacity = max(self.capacity, sum(slots.values()))
        self.pool = self._spare = max(0, self.capacity - sum(slots.values()))
        self.grants = {peer: Grant(count, count, count) for peer, count in slots.items()}
        return list(slots)

    def receive(self, peer: str) -> bool:
        """Count a microbatch received from `peer`, and use one of its credits; False if it had none, so that
        the microbatch is refused. That one counts as granted, used and freed, as `peer` counts it as used:
        its credit was withdrawn without its knowledge, or foreseen in vain."""
        grant = self.grants.setdefault(peer, Grant(0, 0, is_new=True))
        grant.received += 1
        if grant.unused >= 0:
            return True
        grant.add()
        grant.released += 1
        return False

    def use(self, peer: str) -> list[str]:
        """Count a microbatch of `peer` that was received and is new to this receiver; by that the peer may
        get another credit that it asked for; returns the peers to tell their credits."""
        self.uses[peer] = self.uses.get(peer, 0.0) + 1.0
        if not self.asks:
            return []
        notified = self._serve()
        if any(asker == peer for _, _, asker in self.asks):
            notified += self._call_in(peer)
        return notified

    def useless(self, peer: str) -> None:
        """Undo the count that `use` made for a microbatch of `peer` that turned out to be unusable. Its
        credit is not freed by that (`release`)."""
        self.uses[peer] = self.uses.get(peer, 0.0) - 1.0

    def _bound(self, peer: str) -> bool:
        """True if a peer with a grant may get no further credit now, as it holds too many unused ones, or one
        was withdrawn from it that it neither used nor returned since.

        Else a peer with fewer unused credits than its own (`Grant.own`) may always get one. With more it may
        while it has fewer unused ones, its own included, than one plus those that it has used, and all peers
        together hold less than a quarter of the capacity unused beyond their own. So a quarter of the
        capacity circulates even if peers with advance grants use none.
        """
        grant = self.grants[peer]
        if grant.withdrawn:
            return True
        if grant.unused < grant.own:
            return False
        if grant.unused >= 1 + self.uses.get(peer, 0.0):
            return True
        return sum(max(0, each.unused - each.own) for each in self.grants.values()) >= self.capacity // 4

    def _next(self) -> int | None:
        """Position in `asks` of the first request whose peer may get a further credit (`_bound`), or None;
        whether a credit is free is not looked at."""
        return next((at for at, (_, _, peer) in enumerate(self.asks) if not self._bound(peer)), None)

    def release(self, peer: str) -> list[str]:
        """Free the credit of a finished microbatch of `peer`, to be called once for each; returns the peers
        to tell their credits. Without a grant of `peer` (it was removed) the credit goes to the pool."""
        grant = self.grants.get(peer)
        if grant is None:
            self._put_back(1)
            return self._serve()
        grant.released += 1
        if self.once and grant.standing:
            grant.standing -= 1
            self._spare += 1
        return self._reuse(grant, peer)

    def give_back(self, peer: str, total: int) -> list[str]:
        """Take back credits that `peer` returns; returns the peers to tell their credits. total: credits that
        `peer` has returned so far; those counted before are ignored, and more than it holds unused count as
        granted and returned. A guaranteed one that it returns may be granted to it again at once; a withdrawn
        one that it returns is withdrawn no more. [] without a grant."""
        grant = self.grants.get(peer)
        notified: list[str] = []
        if grant is None:
            return notified
        # The range is fixed first, since a guaranteed credit that is returned is granted again at once.
        for _ in range(min(total - grant.returned, grant.unused)):
            grant.returned += 1
            notified += self._reuse(grant, peer)
        for _ in range(min(total - grant.returned, grant.withdrawn)):
            grant.withdrawn -= 1
            grant.total += 1
            grant.returned += 1
        # Those that `peer` had too many, as it counted a microbatch as lost that came after all.
        excess = max(0, min(total - grant.returned, self.capacity + 1))
        grant.total += excess
        grant.returned += excess
        return notified

    def ask(self, peer: str, index: int, repair: bool) -> list[str]:
        """Handle a request of `peer` for a credit for microbatch `index`; returns the peers to tell their
        credits. repair: True if the microbatch is sent again after a loss. A peer that repeats its request,
        or has sent nothing yet on its guaranteed credits, is told: it may not know its credits. A peer
        without a grant gets one without guaranteed credits, and another peer may lose a guaranteed credit for
        it."""
        notified: list[str] = []
        grant = self.grants.setdefault(peer, Grant(0, 0, is_new=True))
        if grant.is_new:
            grant.is_new = False
            # Not if the pool has a credit guaranteed to nobody: others belong to peers whose link is down.
            notified = self._take_back(self.grants) if self.pool <= 0 or self._spare <= 0 else []
        ask = (not repair, index, peer)
        at = bisect.bisect_left(self.asks, ask)
        again = self.asks[at : at + 1] == [ask]
        if not again:
            self.asks.insert(at, ask)
        notified += self._serve()
        if not again and ask in self.asks:
            notified += self._call_in(peer)
        # A peer that sent nothing may have missed the report of its credits.
        tell = again or (grant.standing > 0 and not grant.received)
        return notified if peer in notified or not tell else [*notified, peer]

    def _call_in(self, asker: str) -> list[str]:
        """Ask the peer with the most unused credits to return one for `asker`, if fewer are being returned
        than requests wait; returns a list of that peer, to be told, or []. Done once for each asker, plus
        once for each credit that the asker has used."""
        mine = self.grants[asker]
        if self._bound(asker) or mine.calls > self.uses.get(asker, 0.0):
            return []
        idle = {peer: grant for peer, grant in self.grants.items() if grant.unused > 0}
        wanted = sum(not self._bound(peer) for _, _, peer in self.asks)
        if sum(grant.called for grant in idle.values()) >= wanted:
            return []
        waiting = {peer for _, _, peer in self.asks}
        able = {p: g.unused for p, g in idle.items() if g.linked and g.unused > g.called and p not in waiting}
        richest = max(able, key=lambda peer: (able[peer], peer), default=None)
        if richest is None:
            return []
        mine.calls += 1
        return self._take_back([richest])

    def insist(self) -> list[str]:
        """Ask for credits again if a peer that waits for one holds none (`Grant.held`) and the pool is empty;
        returns the peers to tell, else [].

        Peers that have to return a credit get another report, since a peer that is an iteration behind may
        not know that it holds any. It may stay behind for long, so another peer has to return one too.
        """
        if self.pool > 0 or all(self.grants[peer].held > 0 for _, _, peer in self.asks):
            return []
        linked = {peer: grant for peer, grant in self.grants.items() if grant.linked}
        late = [peer for peer, grant in linked.items() if grant.held > grant.standing]
        return [*late, *self._take_back(linked.keys() - late)]

    def withdraw(self) -> list[str]:
        """Take unused credits from peers that were asked to return them, for requests that wait; to be called
        when a step lacks units. Who sends a microbatch on such a credit is refused. Returns the peers that
        got a credit, to be told; those that lost one are not."""
        notified = self._serve()
        idle = {p: min(g.called, g.unused) for p, g in self.grants.items() if g.called > 0 and g.unused > 0}
        while (at := self._next()) is not None:
            # A peer that was given one just now does not know it, and would never know that it lost it.
            left_out = {*notified, self.asks[at][2]}
            others = [peer for peer, count in idle.items() if count > 0 and peer not in left_out]
            if not others:
                break
            richest = max(others, key=lambda peer: (idle[peer], peer))
            idle[richest] -= 1
            grant = self.grants[richest]
            grant.total, grant.withdrawn = grant.total - 1, grant.withdrawn + 1
            self._put_back(1)
            notified += self._serve()
        return notified

    def _take_back(self, peers: Collection[str]) -> list[str]:
        """Lower the largest number of guaranteed credits among `peers` (which have grants) by one, so that
        its holder returns a credit; returns a list with that peer, to be told; [] if none has any."""
        richest = max(peers, key=lambda peer: (self.grants[peer].standing, peer), default=None)
        if richest is None or self.grants[richest].standing == 0:
            return []
        self.grants[richest].standing -= 1
        self._spare += 1
        return [richest]

    def unlink(self, peer: str) -> list[str]:
        """Free the unused credits of a peer whose link broke, and drop its requests; it gets the guaranteed
        ones again by `link`. Returns the peers to tell their credits."""
        self.asks = [ask for ask in self.asks if ask[2] != peer]
        grant = self.grants.get(peer)
        if grant is not None:
            grant.linked, grant.withdrawn = False, 0
            unused = grant.unused
            grant.total -= unused
            self._put_back(unused)
        return self._serve()

    def link(self, peer: str) -> None:
        """Grant a peer whose link is (back) up its guaranteed credits again, up to the size of the pool; the
        caller tells it. Nothing for one that has no grant, or whose link was up already."""
        grant = self.grants.get(peer)
        if grant is None or grant.linked:
            return
        grant.linked = True
        while grant.held < grant.standing and self.pool > 0:
            self.pool -= 1
            grant.total += 1

    def forget(self, peer: str) -> list[str]:
        """Free the unused credits of a removed peer, and drop its grant and requests; credits of its
        microbatches that this receiver has are freed by `release`. Returns the peers to tell their
        credits."""
        notified = self.unlink(peer)
        self.grants.pop(peer, None)
        return notified

    def _put_back(self, slots: int) -> None:
        """Return `slots` freed credits (0 or more) to the pool; the repair credit is restored first if it is
        in use."""
        if slots > 0 and not self.repair_free:
            self.repair_free = True
            slots -= 1
        self.pool += slots

    def _reuse(self, grant: Grant, peer: str) -> list[str]:
        """Give a freed credit of `peer` back to it if it lacks a guaranteed one, else to waiting requests; to
        these also if `peer` has unused credits. Returns the peers to tell their credits."""
        if grant.lacks and not (grant.unused and self._next() is not None):
            grant.add()
            return [peer]
        self._put_back(1)
        return self._serve()

    def _serve(self) -> list[str]:
        """Grant free credits: first to waiting requests in order, guaranteed or not, and the repair credit to
        repairs only; peers that hold too many unused ones are passed over (`_bound`). Then those beyond
        `_spare` to peers that lack guaranteed ones. Returns all these peers, to be told; one may be named
        twice."""
        notified: list[str] = []
        if self.pool <= 0 and not self.repair_free:
            return notified
        while (at := self._next()) is not None:
            not_repair, _, peer = self.asks[at]
            if self.pool > 0:
                self.pool -= 1
            elif not not_repair and self.repair_free:
                self.repair_free = False
            else:
                break
            self.asks.pop(at)
            self.grants[peer].add()
            notified.append(peer)
        while at is None and self.pool > self._spare:
            lender = next((peer for peer, grant in self.grants.items() if grant.lacks), None)
            if lender is None:
                break
            self.pool -= 1
            self.grants[lender].add()
            notified.append(lender)
        return notified


@dataclass
class Credit:
    """Sender's side of the credits of one iteration: the totals that one receiver reported.

    total, released: credits that the receiver has granted and freed (their microbatches are finished).
    standing: those that this sender keeps without asking. used, returned: credits that this sender has used
    and handed back. stale: True until the receiver has reported since the link broke. others: microbatches of
    other senders that the receiver has. granted_at: time (s) of the last report that granted a credit.
    foreseen: True if the receiver has reported nothing yet, and the total is what it is expected to grant.
    """

    total: int = 0
    used: int = 0
    returned: int = 0
    released: int = 0
    standing: int = 0
    stale: bool = True
    others: int = 0
    granted_at: float = -math.inf
    foreseen: bool = False

    @property
    def free(self) -> int:
        """Credits that can be used now; 0 until the receiver's first report, and after a broken link until
        its next one."""
        return 0 if self.stale else self.total - self.used - self.returned

    @property
    def beyond_standing(self) -> int:
        """Credits held, used or not, beyond the guaranteed ones, by the last report; negative if fewer are
        held."""
        return self.total - self.released - self.returned - self.standing

    def told(self, slots: Slots, now: float) -> None:
        """Take the totals that the receiver reports at time `now`; a report older than the last one changes
        no total. After a broken link its counts replace this sender's, since microbatches on their way were
        lost. A first report replaces the foreseen total, of which nothing may have been granted."""
        if slots.total > self.total:
            self.granted_at = now
        if self.foreseen:
            self.foreseen, self.total, self.standing = False, slots.total, slots.standing
        if self.stale:
            self.stale, self.total, self.standing = False, slots.total, slots.standing
            self.used, self.returned, self.released = slots.received, slots.returned, slots.released
        self.total = max(self.total, slots.total)
        self.used = max(self.used, slots.received)  # a microbatch that counted as lost may have come
        self.released = max(self.released, slots.released)
        self.standing = min(self.standing, slots.standing)  # it only falls; this report may be an old one
        self.others = slots.others
