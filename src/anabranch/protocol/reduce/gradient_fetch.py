"""Fetch of the reduced gradient of a committed step that this replica did not sum itself (R10).

The other replicas of the stage are asked one after the other, the next one when the answer of the one before
is overdue. If none has the gradient any more, the whole state is fetched instead (`peer.catch_up`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Assemble, Payload, Result
from anabranch.protocol.log.records import Commit
from anabranch.protocol.messages import FetchGradient, Gradient
from anabranch.protocol.telemetry.peer_costs import SLOWER

#: Wait for a late gradient before it is fetched, in seconds; first and longest back-off between two fetches,
#: in seconds. Plain choices.
FETCH_AFTER_S = 1.0
FETCH_AGAIN = (1.0, 4.0)


class GradientFetch:
    """Fetch of the gradient of the next step, from one replica after the other.

    wanted: returns the next step to apply, or None while it is not known or being applied. comes: returns
    True if the missing parts of step t are on their way, so that nothing need be fetched. fetched: called
    with the step whose gradient arrived with the digest of the log. give_up: called with t if no replica has
    it.
    """

    def __init__(
        self,
        ctx: PeerContext,
        wanted: Callable[[], Commit | None],
        comes: Callable[[int], bool],
        fetched: Callable[[Commit], None],
        give_up: Callable[[int], None],
    ) -> None:
        self.ctx = ctx
        self._wanted, self._comes, self._fetched, self._give_up = wanted, comes, fetched, give_up
        self._at = math.inf
        self._fetches = Backoff(ctx.rng, *FETCH_AGAIN)
        self._without: set[str] = set()
        """Replicas that do not have the gradient of the next step (any more), or sent a false one."""
        self._false: set[str] = set()
        """Replicas that sent a false gradient of any step; they are asked last."""
        self._awaited: dict[str, float] = {}
        """Replica asked for the gradient -> time until which it may still be sending the gradient."""
        self._expected_at = -math.inf
        """Time at which the gradient should arrive from the replica asked last."""

    @property
    def sought(self) -> bool:
        """True while a missing gradient is being fetched."""
        return self._at < math.inf

    def seek(self, soon: bool) -> None:
        """Begin to fetch the gradient of the next step, or begin anew with the wait; `tick` sends the
        requests. soon: True if this replica takes part in a reduce of the step now, so that the first request
        waits for FETCH_AFTER_S."""
        self._at = self.ctx.clock.now + (FETCH_AFTER_S if soon else 0.0)

    def end(self) -> None:
        """Stop the fetch, if there is one, as no gradient is missing or useful any more; answers under way
        are ignored. Which replicas lack the gradient is forgotten, which sent a false one is not."""
        self._at = math.inf
        self._without.clear()
        self._awaited.clear()
        self._fetches.reset()

    def deadline(self) -> float:
        """Time of the next request, infinity if none is due."""
        return self._at if self._at < math.inf and self._wanted() is not None else math.inf

    def tick(self) -> None:
        """Ask the next replica, or give up, once the wait is over: if none that can be reached has the
        gradient, or several rounds of requests brought nothing. Nothing before that, while no step is wanted,
        or while the gradient's parts (`comes`) or an answer may be on their way."""
        record = self._wanted()
        if record is None or self.ctx.clock.now < self._at:
            return
        t = record.t
        if self._comes(t):
            self._at = self.ctx.clock.now + FETCH_AFTER_S
            return
        run, me = self.ctx.run, self.ctx.me
        alone = run.membership.count(run.stage, t) <= run.membership.is_live(me, run.stage, t)
        linked = [p for p in sorted(self.ctx.links.up) if run.membership.is_live(p, run.stage, t)]
        peers = [peer for peer in linked if self.ctx.reachable(peer)]
        tries = 1 if alone else 4 * (len(peers) + 2)
        awaited = {peer for peer in peers if self.ctx.clock.now < self._awaited.get(peer, 0.0)}
        free = [peer for peer in peers if peer not in awaited]
        if awaited and (self.ctx.clock.now < self._expected_at or self._without.issuperset(free)):
            # The answer is not overdue yet, or every peer that may have the gradient is sending it.
            self._at = self.ctx.clock.now + FETCH_AGAIN[1]
            return
        self._at = self.ctx.clock.now + (self._fetches.next() or FETCH_AFTER_S)
        if self._fetches.tries > tries or (peers and self._without.issuperset(peers)):
            self._give_up(t)
        elif free:
            self._ask(t, free)
        elif self.ctx.run.near.crowded:  # none that may have the gradient is linked
            self._at = min(self._at, self.ctx.clock.now + FETCH_AFTER_S)
            self.ctx.dialer.reach_some(p for p in run.membership.live(run.stage, t) if p != me)

    def _ask(self, t: int, free: list[str]) -> None:
        """Ask one of the replicas `free` (at least one), which are not sending the gradient yet: the one that
        should deliver first, by the measured links; where the gradient's size is not known, the next in
        turn. Who sent a false one is asked only if no other may have it."""
        others = [peer for peer in free if peer not in self._false]
        free = free if self._without.issuperset(others) else others
        ctx, size_bytes = self.ctx, self.ctx.run.settings.gradient_bytes_of(self.ctx.run.stage, t)
        peer = free[self._fetches.tries % len(free)]
        if size_bytes:
            able = [peer for peer in free if peer not in self._without] or free
            peer = ctx.costs.soonest(able, size_bytes)
        most_s = ctx.costs.coming_s(peer, size_bytes)
        self._awaited[peer], self._expected_at = ctx.clock.now + most_s, ctx.clock.now + most_s / SLOWER
        ctx.outbox.send(peer, FetchGradient(t, ctx.run.stage))

    def link_down(self, peer: str) -> None:
        """Forget that `peer`, whose link broke, may be sending the gradient: it may be asked again."""
        self._awaited.pop(peer, None)

    def received(self, peer: str, message: Gradient, payload: Payload | None) -> None:
        """Take the answer of `peer`. payload: the gradient, whose digest is checked; None if `peer` does not
        have it. Without the right gradient the next replica is asked, and this one no more; who sent a false
        one is asked last for later steps, too. An answer about another step, or of a peer that was not asked,
        is ignored."""
        record = self._wanted()
        if record is None or (record.t, self.ctx.run.stage) != (message.t, message.stage):
            return
        if self._awaited.pop(peer, None) is None:
            return
        if payload is None:
            self._without.add(peer)
            self._ask_next()
            return
        wanted = record.stages[self.ctx.run.stage].digest

        def checked(result: Result) -> None:
            if result.digest == wanted:
                self._fetched(record)
            else:
                self.ctx.outbox.refuse(peer, "Gradient", "not that of the step")
                self._false.add(peer)
                if self._wanted() is record:
                    self._without.add(peer)
                    self._ask_next()

        self.ctx.tasks.submit(TaskPriority.STEP, Assemble(record.t), (payload,), checked)

    def _ask_next(self) -> None:
        """Have the next `tick` ask another replica. Replicas keep only the last gradients: a peer that is
        further behind soon has asked them all, and fetches the state."""
        self._at = min(self._at, self.ctx.clock.now)
