"""Unreachable pairs: two replicas of a stage that have no working link, though the leader hears both.

They cannot reduce together, unless the leader sums the parts (`coordinator.witnessed_reduces`). Each replica
reports with its claims which others of its stage it cannot reach (no link, or silent for longer than the
timeout). In a stage that is too large for the leader, when a reduce was tried several times and is still
stuck, the leader removes as few members as it can so that all that remain reach each other. A removed one may
join again once it reaches every replica of its stage that the leader reaches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from anabranch.protocol.context.peer_context import PeerContext

#: Attempts of a stuck reduce before a member is removed: if some replicas report that they cannot reach each
#: other, and if none does (a link may just be slow).
TRIES_APART, TRIES = 2, 6
#: Attempts of a reduce by a stage's only replica, which needs no links, before that is removed. A plain
#: choice: as many as stalls after which it is doubted otherwise (`witnesses`), sixty usual steps.
TRIES_ALONE = 4


class UnreachablePairs:
    """Reports of replicas about other replicas of their stage that they cannot reach."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._apart: dict[str, frozenset[str]] = {}
        """Replica -> others of its stage that it cannot reach, if there are any."""
        self._since: dict[str, float] = {}
        """Such a replica -> time (s) since which it has said so of some."""

    def told(self, peer: str, apart: Collection[str]) -> None:
        """Enter the report of `peer` in place of its last one. apart: replicas of its stage that it cannot
        reach; empty: it reaches all."""
        if others := frozenset(apart) - {peer}:
            self._apart[peer] = others
            self._since.setdefault(peer, self.ctx.clock.now)
        else:
            self.removed(peer)

    def removed(self, peer: str) -> None:
        self._apart.pop(peer, None)
        self._since.pop(peer, None)

    @property
    def reported(self) -> bool:
        """True if any member reports that it cannot reach another."""
        return bool(self._apart)

    def among(self, members: Collection[str]) -> bool:
        """True if one of `members` reports that it cannot reach another of them."""
        return self.since(members) < math.inf

    def since(self, members: Collection[str]) -> float:
        """Earliest time (s) since which one of `members` reports without a break that it cannot reach another
        of them; infinite if none does."""
        here = set(members) if self._apart else set()
        reporters = [peer for peer, others in self._apart.items() if peer in here and others & here]
        return min((self._since[peer] for peer in reporters), default=math.inf)

    def unconfirmed(self, members: Collection[str]) -> frozenset[str]:
        """Those of `members` that report others of them as unreachable, while none of these others says so of
        them. Two that have lost each other both say so, sooner or later; so those that say it alone get no
        more time in a repeated reduce (`WitnessedReduces.at_fault`)."""
        told = {peer: self._apart.get(peer, frozenset()).intersection(members) for peer in members}
        alone = (p for p, others in told.items() if others and not any(p in told[other] for other in others))
        return frozenset(alone)

    def take_out(
        self,
        members: Sequence[str],
        tries: int,
        held: Mapping[str, Collection[int]],
        prepared: Collection[str],
        known: bool = True,
    ) -> dict[str, str]:
        """Members to remove -> reason, when the reduce of `members` is stuck after `tries` attempts: one
        after the other, until all that remain reach each other by their reports; empty before TRIES_APART
        attempts. First goes the member for which most service (iterations served) of others that it is apart
        from stands against its own, so that newcomers that claim not to reach an old replica go before it; of
        equals the one with fewest microbatches. Never this peer. If no member reports another, `unprepared`
        decides after TRIES attempts (TRIES_ALONE of a single member, where the usual duration of a step is
        `known`). held: member -> its microbatches. prepared: members that reported PREPARED."""
        gone: dict[str, str] = {}
        while tries >= TRIES_APART:
            apart = {peer: self._apart_from(peer, members, gone) for peer in members}
            able = [peer for peer in members if apart[peer] and peer != self.ctx.me]
            if not able:
                break
            weight = {p: sum(map(self._service, others)) - self._service(p) for p, others in apart.items()}
            peer = max(able, key=lambda peer: (weight[peer], -len(held.get(peer, ())), peer))
            others = " and ".join(other[:8] for other in sorted(apart[peer]))
            gone[peer] = f"it and {others} of its stage cannot reach each other, and cannot reduce together"
        slow = [peer for peer in members if peer not in prepared]
        most = TRIES if len(members) > 1 or not known else TRIES_ALONE
        return gone or (self.unprepared(slow, tries) if tries >= most else {})

    def unprepared(self, slow: Collection[str], tries: int) -> dict[str, str]:
        """Member to remove -> reason, if a reduce is stuck after `tries` attempts and nobody reports an
        unreachable pair: of those that have not done their part (`slow`) the one that has served for the
        fewest iterations. Empty if there is none but this peer."""
        slow = [peer for peer in slow if peer != self.ctx.me]
        why = f"its stage's reduce was tried {tries} times, and it was PREPARED in none"
        return dict.fromkeys(sorted(slow, key=lambda peer: (-self._service(peer), peer))[-1:], why)

    def _service(self, peer: str) -> int:
        """Number of iterations that a replica has served, the open one included."""
        membership = self.ctx.run.membership
        return max(1, membership.opening.t - membership.active_from.get(peer, membership.opening.t) + 1)

    def _apart_from(self, peer: str, members: Sequence[str], gone: Collection[str]) -> list[str]:
        """Those of `members` that `peer` reports as unreachable, or that report `peer` so, without those in
        `gone`; [] if `peer` is in `gone`."""
        if peer in gone:
            return []
        apart = self._apart
        others = (other for other in members if other != peer and other not in gone)
        return [o for o in others if o in apart.get(peer, ()) or peer in apart.get(o, ())]
