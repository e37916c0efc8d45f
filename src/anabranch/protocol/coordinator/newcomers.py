"""Iteration from which a newcomer serves: the next that is not open, a later one, or the open one, if much of
its work is left or the present replicas may hold it up. Who is admitted is in `fleet.admission`.
"""

from __future__ import annotations

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.recovery.late_data_nodes import LATE_STALLS
from anabranch.protocol.recovery.witnesses import HELD_STALLS
from anabranch.protocol.reduce.coverage import missing, not_returned, not_sent_on

#: Least share of a stage's units that must be unclaimed for a new relay to serve in the open iteration.
LEAST_LEFT = 0.25
#: Repeats of the reduce of a stage's only replica after which others that are to serve there take part in the
#: open iteration. A plain choice: an honest one that is slow has 28 usual steps before, and 32 for that.
STUCK_ALONE = 3


class Newcomers:
    """Decision from which iteration a peer that is ready serves its stage, and whether the open step may be
    held up by the stage's present replicas."""

    def __init__(
        self, ctx: PeerContext, tip: LogTip, admission: Admission, reducing: ReduceAttempts
    ) -> None:
        self.ctx = ctx
        self.tip = tip
        self.admission = admission
        self.reducing = reducing
        self._waiting_for = ""
        self._staffed = (-1, -1)
        """Membership version and iteration in which every stage was last found to have an active member."""

    def active_from(self) -> int | None:
        """Iteration from which joiners that are ready may serve; None while stages lack peers for the run to
        begin or to go on, which is noted as the reason why it waits. If a stage has lost its last member,
        joiners of it that were to serve later are to serve at once.

        While every stage has a live member, iteration t + 1 is already open (t: last committed step), so
        joiners serve from t + 2, which no peer opens before the step of t + 1 is proposed. If t + 2 is
        delayed it is open, too: they serve from t + 3. If a stage has no live member, they serve from t + 1,
        which nobody can open.
        """
        t, delay = self.tip.t + 1, self.ctx.run.settings.delay
        membership, stages = self.ctx.run.membership, range(self.ctx.run.settings.stages + 1)
        look = membership.version, t
        if look == self._staffed or all(membership.count(stage, t) for stage in stages):
            self._staffed = look
            return t + 1 + delay.has(t + 1)
        ready = self.admission.ready
        begun = membership.begun
        short = []
        for stage in stages:
            needed = 1 if begun or not stage else self.ctx.run.settings.min_replicas
            live = membership.count(stage, t)
            if not live and begun:
                self.admission.serve_at_once(stage, t)
            count = live + sum(1 for member in ready.values() if member.stage == stage)
            if count < needed:
                short.append(f"stage {stage} ({count} of {needed})")
        if not short:
            self._waiting_for = ""
            return t
        reason = "waiting for peers of " + ", ".join(short)
        if reason != self._waiting_for:
            self._waiting_for = reason
            self.ctx.outbox.note("waiting", reason=reason)
        return None

    def begins(self, active_from: int, stage: int, ready_t: int) -> int | None:
        """Iteration from which a ready peer is to serve `stage`, or None: not decided yet, as it could serve
        in the open iteration but must first apply the last step. active_from: the iteration that
        `active_from` gives; ready_t: iteration after which the peer has the stage's state.

        The result is `active_from`, with these exceptions. One later: for a data node that comes after the
        indices of that iteration were split, and for a lost stage's new replica whose reduce is ordered
        already. The open iteration, for a relay: if much of its stage's work is left (a stalled step counts
        as long as it took so far) and the swarm is small, as in a large one neighbours would change; in any
        swarm if the stage's replicas may hold up a stalled step (`held_up`), or its only one a reduce
        (STUCK_ALONE); in a round of islands if the peer has the last step's state.
        """
        current, settings, membership = self.tip.round, self.ctx.run.settings, self.ctx.run.membership
        if not stage and membership.is_split(active_from) and membership.count(0, active_from):
            return active_from + 1  # its microbatches are split already; a newcomer does not know how
        if current is None:
            return active_from
        held_up = self.held_up(current, stage)
        if current.t > self.ctx.run.steps and not held_up:
            return active_from
        reduces = stage in current.attempts and stage not in current.torn
        if current.t == active_from:  # a lost stage gets new replicas
            return active_from + reduces
        if membership.count(stage, current.t) == 1 and current.retries.get(stage, 0) >= STUCK_ALONE:
            held_up = True
        if not stage or (not held_up and (reduces or self.ctx.run.near.crowded)):
            return active_from
        if current.slots:  # its slots are given away, but with its result a newcomer begins the next in time
            if ready_t == self.tip.t:
                return current.t
            # In the midst of inner steps a crew sends the last result that lacks; a lone machine cannot.
            return None if current.of_crews else active_from
        cover = settings.cover(stage)
        left = len(missing(cover, current.claims.get(stage, {}))) / len(cover)
        if settings.delay.has(current.t + 1):
            left += 1.0  # the newcomer serves in the next iteration, in flight, too
        step_s = self.reducing.step_s
        if current.stalls:
            step_s = max(step_s, self.ctx.clock.now - current.opened_at)
        if not held_up and (left < LEAST_LEFT or left * step_s < settings.newcomer_s):
            return active_from
        return current.t if ready_t == self.tip.t else None

    def call_in(self) -> None:
        """Have ready joiners serve in the open iteration instead of a later one, at the stages where
        `begins` says so: much of the work is left, or the present replicas hold the step, or a reduce, up.
        This happens at most once after each stall of the step and each repeated reduce, as the later
        iteration may never come. In a round of islands only where the replicas hold up its windows."""
        current = self.tip.round
        if current is None or current.waits == current.called_in:
            return
        called_in, current.called_in = current.called_in, current.waits
        if current.waits < called_in:  # there was news since
            return
        for stage in range(1, self.ctx.run.settings.stages + 1):
            if current.slots and not self.held_up(current, stage):
                continue
            if self.begins(current.t + 1, stage, self.tip.t) == current.t:
                self.admission.serve_at_once(stage, current.t)

    def held_up(self, current: Round, stage: int) -> bool:
        """True if the open step has stalled, and the replicas of `stage` may be the reason: units lack there,
        or they claim some whose gradients the stage before lacks (they may have sent these, and be honest),
        or held-out windows alone lack (which stage keeps them nobody claims). One stall is enough for a relay
        stage with a single replica; HELD_STALLS are needed for one with several. In a round only for its
        windows, as slots that are late are dropped. Never for stage 0 or a stage without replicas."""
        replicas = self.ctx.run.membership.count(stage, current.t)
        least = 1 if replicas == 1 else HELD_STALLS
        if not stage or not replicas or current.stalls < least:
            return False
        if current.slots or self._lacks_windows_alone(current):
            return self._lacks_windows_alone(current)
        lacks = missing(self.ctx.run.cover(stage, current.t), current.claims.get(stage, {}))
        if lacks or not_returned(stage, current.claims):
            return True
        # Late data nodes, whose heads lack, have their turn first (`late_data_nodes`), if there are others.
        waits = current.stalls <= LATE_STALLS and self.ctx.run.membership.count(0, current.t) > 1
        looked_at = range(waits, self.ctx.run.settings.stages + 1)
        covers = {other: self.ctx.run.cover(other, current.t) for other in looked_at}
        return bool(not_sent_on(stage, covers, current.claims))

    def _lacks_windows_alone(self, current: Round) -> bool:
        """True if some held-out window of the open iteration is not evaluated, and all work to train is
        claimed, or there is none as the last step is taken. A stage whose reduce is PREPARED counts as
        claimed: a member of it may have left since, or been moved."""
        if all(index in current.evaluations for index in self.tip.windows(current)):
            return False
        last = self.ctx.run.settings.stages if current.t <= self.ctx.run.steps else -1
        stages = [s for s in range(last + 1) if not self.reducing.prepared(current, s)]
        covers = {s: current.counts(s) if current.slots else self.ctx.run.settings.cover(s) for s in stages}
        return not any(missing(cover, current.claims.get(s, {})) for s, cover in covers.items())
