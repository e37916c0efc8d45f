"""Deferred delivery of reduced parts to standbys, off the critical path of the step.

A standby is a replica that gets no microbatch while others of its stage can take it; no step waits for it. If
a reduce has two or more other members, standbys get the reduced parts after the commit, so that this traffic
does not compete with the traffic that the step waits for.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.reduce.attempt import ReduceAttempt
from anabranch.protocol.reduce.partial_sums import attempt_sets

#: Longest wait for the commit before the delivery to standbys: DELAY_S seconds plus DELAY_FACTOR times the
#: expected transfer time. Plain choices.
DELAY_S, DELAY_FACTOR = 1.0, 2.0
#: Longest wait of a standby for its parts, as a multiple of the duration of the reduce. Plain choice.
PARTS_FACTOR = 3.0


class DeferredDelivery:
    """Timing of one replica's delivery of its reduced parts to standbys. at: latest time (s), also without
    the commit; infinity while this replica lacks a part of the reduced gradient, and if nothing is to be
    delivered."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self.at = math.inf
        self._tried = False
        """True if an attempt of the open iteration has begun."""
        self._announced_at = self._committed_at = ctx.clock.now

    def opened(self) -> None:
        """Begin an iteration: no reduce attempt was made yet, and nothing is to be delivered."""
        self._tried, self.at = False, math.inf

    def announced(self) -> None:
        """Start to measure the duration of a reduce, from a new attempt on; it bounds how long a standby
        waits for its parts."""
        self._announced_at = self.ctx.clock.now

    def committed(self) -> None:
        """Note that the step of the open iteration was committed now: with that the duration of its reduce
        ends."""
        self._committed_at = self.ctx.clock.now

    def first(self, reduce: ReduceAttempt, committed: bool) -> Collection[int]:
        """Positions of the members that get this replica's reduced parts at once: all but standbys that own
        no unit. If these standbys outnumber the others, as many of them as bring the number to half of all
        members get the parts at once, too, since half have to agree on the result. The positions are those of
        this replica's cell (`fellows`), without exception, in a reduce by cells; in a reduce of one cell they
        are those of all members if fewer than two would get the parts at once, in a later attempt of the
        iteration, and if the step is `committed` already. To be called once for each attempt, as it notes
        that the iteration had one."""
        spared, again = self.ctx.standby_view.waits, self._tried or committed
        self._tried = True
        if again or len(reduce.cells.bounds) > 1:
            return reduce.fellows
        owners = attempt_sets(reduce.message).units
        first = {at for at, peer in enumerate(reduce.members) if at in owners or peer not in spared}
        if len(first) < 2:
            return reduce.fellows
        later = sorted(set(reduce.fellows) - first, key=lambda at: (spared[reduce.members[at]], at))
        if len(later) > len(first):
            first.update(later[: (len(reduce.members) + 1) // 2 - len(first)])
        return first

    def assembled(self, reduce: ReduceAttempt) -> None:
        """Set the latest time at which the standbys get the reduced parts, as this replica holds the whole
        reduced gradient now; nothing if all members get them at once. A commit that takes long may need the
        `Prepared` of a standby."""
        if len(reduce.first) < len(reduce.fellows):
            size_bytes = self.ctx.run.settings.gradient_bytes_of(self.ctx.run.stage) * (len(reduce.first) - 1)
            needs_s = self.ctx.costs.reduce_s(size_bytes / len(reduce.senders))
            self.at = self.ctx.clock.now + DELAY_S + DELAY_FACTOR * needs_s

    def take(self, reduce: ReduceAttempt | None) -> Collection[int]:
        """Positions, in order, of the standbys to deliver to now, which the caller does; from now on they get
        parts together with the other members, so that a second call returns none. Empty without an attempt,
        or if nobody waits."""
        self.at = math.inf
        if reduce is None:
            return ()
        later, reduce.first = set(reduce.fellows).difference(reduce.first), reduce.fellows
        return sorted(later)

    def arriving(self, reduce: ReduceAttempt | None, t: int) -> bool:
        """True if this replica is a standby and the reduced parts of step t that it lacks may be on their
        way: their collectors are linked, and PARTS_FACTOR times the duration of the reduce is not over."""
        if reduce is None or reduce.message.fence.t != t or not reduce.told_late:
            return False
        if self.ctx.clock.now - self._committed_at > PARTS_FACTOR * (self._committed_at - self._announced_at):
            return False
        lacking = [peer for part, peer in enumerate(reduce.collectors) if part not in reduce.reduced]
        return all(peer in self.ctx.links.up for peer in lacking)
