"""Iterations of one peer in sequence: opening one, taking its step, cumulative reports to the leader."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from anabranch.protocol import messages as msg
from anabranch.protocol.audit.auditor import Auditor
from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.audit.kept_work import KeptWork
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.links import LostLink
from anabranch.protocol.log.records import Commit, StageCommit
from anabranch.protocol.membership.overlay import ALL_TIMES
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.pipeline.upstream_replies import no_units
from anabranch.protocol.reduce.helper import ReduceHelper
from anabranch.protocol.reduce.partial_sums import ReduceAccount
from anabranch.protocol.reduce.step_apply import StepApply
from anabranch.protocol.rounds.plan import keepers
from anabranch.protocol.state.possession import PossessionProof

#: Time (s) between repetitions of cumulative reports while an iteration is open: far above a round trip. It
#: holds for up to REPEATING members and grows in proportion beyond, so that the leader receives a bounded
#: number of reports a second.
REPEAT_S, REPEATING = 2.0, 64
#: Last iterations of which the durations are kept, for the case that this peer comes to lead. A plain choice:
#: a single one may have waited for long.
LAST = 2


class Iterations(Timer):
    """Open iteration (`current`, None between two), replica of the stage, and reduces of adjacent stages.

    ahead: delayed iteration after `current` that is open, too; None if there is none. It is claimed and
    reduced once it is the current one.

    since: time (s) since which `current` is the current one.

    retained: the closed iteration alone, whose activations and gradients at the stage's ends are kept until
    its release; [] after that. applied: report of the last step, repeated until that step is released.
    """

    def __init__(
        self,
        shared: SharedParts,
        on_opened: Callable[[Iteration], None],
        on_applied: Callable[[], None],
        on_behind: Callable[[int], None],
        repeat_others: Callable[[], bool],
    ) -> None:
        """on_opened: called with each iteration that was opened. on_applied: called after each applied step
        and each proof of a state. on_behind: called with a step whose gradient no peer has any more.
        repeat_others: repeats requests to the leader that other parts of this peer have open; True if there
        are any."""
        ctx = self._ctx = shared.ctx
        self._progress, self._exit, self._router = shared.progress, shared.exit, shared.router
        self._states, self._snapshots = shared.states, shared.snapshots
        self._on_opened, self._on_applied, self._on_behind = on_opened, on_applied, on_behind
        self._repeat_others = repeat_others
        self.current: Iteration | None = None
        self.ahead: Iteration | None = None
        self.since = -math.inf
        self._took: deque[tuple[bool, float]] = deque(maxlen=LAST)
        """The last iterations that were applied: True for a round, seconds as the current one."""
        self.in_flight: tuple[Iteration, ...] = ()
        """Open iterations, the current one first."""
        self.retained: list[Iteration] = []
        self.applied: msg.Applied | None = None
        self._repeat_at = math.inf
        self._before: StageCommit | None = None
        """Part of the last step that was taken about the stage before; None: none was taken."""
        self.replica = StepApply(ctx, self._step_applied, self._fell_behind)
        self.helping = ReduceHelper(ctx)
        self.kept_work = KeptWork(ctx)
        self.auditor = Auditor(ctx, self.kept_work)
        self.possession = PossessionProof(ctx, self._state, self._proved)
        self._vouched: tuple[tuple[int, str, int], str, int] | None = None
        """State for which this peer vouched last, leader and term that it told; None: nothing is told."""
        ctx.links.register_user(self._partners, self._waits_for)

    def reduce_account(self, attempt: msg.Attempt) -> ReduceAccount | None:
        """First-hand account (who sent what, and the result) of an attempt whose parts are all summed by this
        peer; None if this peer has not begun the attempt."""
        if attempt.stage == self._ctx.run.stage:
            return self.replica.all_reduce.account(attempt)
        return self.helping.account(attempt)

    # --- opening and closing -------------------------------------------------------------------

    def _fly(self, current: Iteration | None, ahead: Iteration | None) -> None:
        if current is not self.current:
            self.since = self._ctx.clock.now
        self.current, self.ahead = current, ahead
        self.in_flight = tuple([iteration for iteration in (current, ahead) if iteration is not None])

    def usual_s(self, t: int) -> float:
        """Seconds that an iteration like t takes (a round, or not), as this peer saw that: the least of the
        last ones, as one may have waited for long; 0 if it saw none."""
        is_round = self._ctx.run.settings.rounds.has(t)
        return min((took_s for kind, took_s in self._took if kind == is_round), default=0.0)

    def at(self, t: int) -> Iteration | None:
        """Open iteration t, or None."""
        for iteration in self.in_flight:
            if iteration.t == t:
                return iteration
        return None

    def open(self) -> None:
        """Open the iteration after the applied one, and the one after that if it is delayed, unless they are
        open or must not be (R1, `_opens`)."""
        t, delay = self.replica.t + 1, self._ctx.run.settings.delay
        if self.current is None and self._opens(t):
            iteration = self._opened(t, delayed=False)
            self._fly(iteration, self.ahead)
            self.replica.all_reduce.open(iteration)
            self.helping.forget()
            self._on_opened(iteration)
        if self.current is None or self.ahead is not None or not delay.has(t + 1):
            return
        if t + 1 <= self._ctx.run.steps and self._opens(t + 1):
            iteration = self._opened(t + 1, delayed=True)
            self._fly(self.current, iteration)
            self._on_opened(iteration)

    def _opens(self, t: int) -> bool:
        """True if iteration t may be opened once its turn comes: no committed step waits to be applied, the
        run is neither over nor paused, this peer serves in it, and every stage has a replica. After the last
        step only the closing evaluation may be opened, if there is one."""
        ctx, run = self._ctx, self._ctx.run
        if t < 1 or self._exit.stopped or self.replica.pending:
            return False
        if not run.course.opens(t) or not run.membership.is_live(ctx.me, run.stage, t):
            return False
        if not all(run.membership.count(stage, t) for stage in range(run.settings.stages + 1)):
            return False
        windows = self._windows(t)
        return t <= run.steps or (not self._progress.closed and windows > 0 and t == run.steps + 1)

    def _windows(self, t: int) -> int:
        """Number of held-out windows that are evaluated in iteration t, by all data nodes together."""
        run = self._ctx.run
        return run.settings.windows if run.settings.evaluates(t - 1, run.steps) else 0

    def _opened(self, t: int, delayed: bool) -> Iteration:
        """Make iteration t, which begins now. delayed: True if the step before it is not applied."""
        ctx, run, settings = self._ctx, self._ctx.run, self._ctx.run.settings
        capacity = settings.share(t, run.membership.members[ctx.me].capacity)
        plan = self._router.shares(run.near.active_neighbours(run.previous_stage(), run.stage, t))
        base = self._progress.base_of(t, True) if settings.delay.has(t) else self.replica.base
        self._repeat_at = ctx.clock.now + self._repeat_s()
        windows, trains, planned = self._windows(t), t <= run.steps, self._router.onward
        computed = no_units if self._before is None else self._before.units_of
        return Iteration(ctx, t, base, capacity, windows, trains, plan, planned, delayed, computed)

    def _follow(self) -> None:
        """Make the delayed iteration the current one, whose step is next: it is claimed and reduced now. If
        there is none, no iteration is current."""
        self._fly(self.ahead, None)
        if self.current is None:
            return
        self.replica.all_reduce.open(self.current)
        self.helping.forget()
        self._on_opened(self.current)
        self.current.settle()

    def close(self) -> None:
        """Drop the open iterations without taking their steps; their tasks stay in the queue."""
        self._fly(None, None)

    def committed(self, record: Commit, base: str) -> None:
        """Handle a committed step: draw its audits, keep what they need, stop sharing work with relays that
        it shows false, and have the replica apply it. base: hash of its log entry."""
        settings = self._ctx.run.settings
        if settings.audits and record.verdict == "step":
            membership = self._ctx.run.membership
            asked = membership.walk_ins, membership.auditors, settings.rounds.has(record.t)
            audited = drawn(record, base, settings.audit_share, *asked)
            self._keep_work(record, audited)
            self.kept_work.committed(record.t)
            if self.auditor.committed(record.t, audited):
                self.replica.keeps.add(record.t)
        if record.verdict == "step":
            self._before = record.stages[self._ctx.run.previous_stage()]
        self._separate(record)
        self.replica.commit(record, base)

    def _separate(self, record: Commit) -> None:
        """Exchange no more work with relays whose inputs overflowed at this peer, if the committed owner, of
        this peer's numerics class, computed the same microbatch in range: these inputs were false."""
        ctx, iteration = self._ctx, self.current
        if iteration is None or iteration.t != record.t or record.verdict != "step" or not ctx.run.stage:
            return
        part, me = record.stages[ctx.run.stage], ctx.run.membership.members.get(ctx.me)
        for index, overflow in iteration.claims.overflows.items():
            owner = part.owners[index] if index < len(part.owners) else -1
            membership, sender = ctx.run.membership, overflow.sender
            if not (membership.stage_of(sender) or membership.gone.get(sender, (0, ""))[0]):
                continue  # nobody, or a data node
            if owner >= 0 and me is not None and part.classes[owner] == me.numerics_class:
                ctx.links.forged(sender)

    def _keep_work(self, record: Commit, audited: list[Drawn]) -> None:
        """Keep what audited contributions were computed from: this replica's own, and what it sent others;
        nothing unless the committed iteration is this peer's current one."""
        ctx, iteration, prepared = self._ctx, self.current, self.replica.all_reduce.prepared
        if iteration is None or iteration.t != record.t:
            return
        for each in audited:
            owners = record.stages[each.stage].owners
            units = [unit for unit, owner in enumerate(owners) if owner == each.position]
            units += [result.unit for result in each.disputed if result.unit not in units]
            own = each.subject == ctx.me and each.stage == ctx.run.stage
            items = iteration.audited_items(each.stage, units, own)
            if each.stage == ctx.run.stage:
                items |= self.replica.all_reduce.audited_items(each.subject)
            receipt = prepared.receipt if own and prepared is not None else b""
            if items or receipt:
                self.kept_work.keep(record.t, each.subject, receipt, items)

    def forget(self, t: int) -> None:
        """Drop the open iterations, tasks of iterations after `t`, audits, and the replica's state: before a
        rollback or a move to another stage (t = -1). What it kept for audits is void after a rollback only:
        who moved still hands over what it sent before."""
        self.auditor.clear()
        if t >= 0:
            self.kept_work.clear()
        self.close()
        self.applied, self.retained = None, []
        self._ctx.tasks.drop_after(t)
        self.replica.roll_back()
        self.helping.forget()

    def _step_applied(self, t: int, base: str, fingerprint: str) -> None:
        ctx = self._ctx
        if self.current is not None and self.current.t <= t:
            is_round = self._ctx.run.settings.rounds.has(self.current.t)
            self._took.append((is_round, self._ctx.clock.now - self.since))
            self.retained = [self.current]  # C_t was proposed when t - 1 had been released (R11)
            self._follow()
        ctx.tasks.drop(t)
        self.auditor.applied(t)
        self._states.applied(t)
        self._snapshots.applied(t)
        timing = ctx.tasks.take_seconds()
        if ctx.me in ctx.run.membership.active_from:
            self.report_applied(timing)
            ctx.outbox.note("timing", t=t, stage=ctx.run.stage, seconds=timing)
            self.vouch()
        self._on_applied()
        self._keep_ahead(t + 1)
        self.open()

    def _keep_ahead(self, t: int) -> None:
        """Copy the present state for joiners, with its proof, if this peer is a keeper for round t, which
        begins now: inner steps change the state. Replicas take turns as keepers (`rounds.plan.keepers`)."""
        run = self._ctx.run
        is_round = run.stage and run.settings.rounds.has(t) and t <= run.steps
        if is_round and self._ctx.me in keepers(run.membership.live(run.stage, t), t):
            self._states.keep_ahead()
            self.possession.get()

    def _fell_behind(self, step: int) -> None:
        """Stop applying steps one by one, as no peer has the gradient of `step` any more, and fetch a later
        state. The open iterations are dropped with their tasks: no claim would state what these add to the
        gradient sum from now on."""
        begun = [iteration.t for iteration in self.in_flight]
        self.close()
        self._ctx.tasks.drop(max(self._progress.committed, *begun, 0))
        self._on_behind(step)

    def released(self, fence: msg.Fence) -> None:
        """Stop keeping what was kept for the step in `fence` and earlier ones: enough replicas of every stage
        have applied it, so nobody needs these activations and gradients again (R11). Stop repeating the
        report that it is applied."""
        self.retained = [kept for kept in self.retained if kept.t > fence.t]
        if self.applied is not None and self.applied.fence.base == fence.base:
            self.applied = None

    # --- reports -------------------------------------------------------------------------------

    def report_applied(self, timing: dict[str, float]) -> None:
        """Report the last applied step, and the fingerprint of the state after it, to the leader, which
        releases the step when enough replicas agree (R11); repeated until then (`released`). timing: compute
        seconds by task kind since the step before; {} if not known."""
        self.applied = self._applied_report(timing)
        self._repeat_at = self._ctx.clock.now + self._repeat_s()
        self._ctx.outbox.send(self._ctx.log.leader, self.applied)

    def vouch(self) -> None:
        """Send the leader the proof of this replica's state while its stage has a joiner, whose own proof is
        compared with it (R14). Nothing if this replica does not serve the next iteration, or until its proof
        is computed. In a run of more than REPEATING members, which come and go all the time, the same proof
        is sent once to a leader and then only with the repeated reports: sent after each Members record, it
        was a sixth of all messages."""
        ctx, run, serving = self._ctx, self._ctx.run, self._ctx.run.membership.active_from
        to = self._state(), ctx.log.leader, ctx.log.term
        if self._vouched == to and len(run.membership.members) > REPEATING:
            return
        joiners = len(run.membership.replicas(run.stage)) - run.membership.count(run.stage, ALL_TIMES)
        if serving.get(ctx.me, math.inf) > self.replica.t + 1 or not joiners:
            return
        if proof := self.possession.get():
            self._vouched = to if ctx.reachable(ctx.log.leader) else None
            fence = ctx.fence(self.replica.t, self.replica.base)
            ctx.outbox.send(ctx.log.leader, msg.Vouch(fence, run.stage, proof))

    def _state(self) -> tuple[int, str, int]:
        return self.replica.t, self.replica.base, self._ctx.run.stage

    def _proved(self) -> None:
        self.vouch()
        self._on_applied()

    def report_again(self) -> None:
        """Make the report of the last step anew if this peer has applied it, and repeat all reports, to a new
        leader."""
        ctx, t = self._ctx, self.replica.t
        if t > 0 and t == self._progress.committed and ctx.me in ctx.run.membership.members:
            self.applied = self._applied_report({})
        self.repeat()
        self.auditor.repeat()

    def _applied_report(self, timing: dict[str, float]) -> msg.Applied:
        ctx, replica = self._ctx, self.replica
        fence = ctx.fence(replica.t, replica.base)
        links = ctx.costs.links(ctx.run.membership.members)
        return msg.Applied(fence, ctx.run.stage, replica.fingerprint, timing, links)

    def repeat(self) -> None:
        """Repeat all reports that the leader may have missed (claim, PREPARED, last step, proof of the state,
        what `repeat_others` repeats), and ask again for credits to be returned. All are cumulative."""
        now = self._ctx.clock.now
        self._repeat_at = math.inf
        if self.current is not None:
            self._repeat_at = now + self._repeat_s()
            self.current.claims.send()
            for iteration in self.in_flight:
                iteration.credits.repeat()
            self.replica.all_reduce.repeat_prepared()
        if self.applied is not None:
            self._repeat_at = now + self._repeat_s()
            self._ctx.outbox.send(self._ctx.log.leader, self.applied)
        self._vouched = None
        self.vouch()
        if self._repeat_others():
            self._repeat_at = now + REPEAT_S

    def _repeat_s(self) -> float:
        """Seconds between repeated reports, more in a large swarm; with islands at least a heartbeat
        interval: rounds are long."""
        run = self._ctx.run
        least_s = run.settings.heartbeat_s if run.settings.rounds.inner else 0.0
        return max(least_s, REPEAT_S * max(1.0, len(run.membership.members) / REPEATING))

    # --- microbatches --------------------------------------------------------------------------

    def pump(self) -> None:
        """Send waiting microbatches: a next hop may have become available."""
        for iteration in self.in_flight:
            iteration.sender.pump()

    def send_changed_claim(self) -> bool:
        """Send the claim (`Claims.send`) if it changed and no weight gradient is being added; True then."""
        if self.current is None or not self.current.claims.changed or self._ctx.tasks.adding:
            return False
        self.current.claims.send()
        return True

    def _partners(self) -> set[str]:
        """Peers that this peer exchanges microbatches or reduce parts with."""
        reduce, prepared = self.replica.all_reduce.reduce, self.replica.all_reduce.prepared
        return self._exchanging().union(reduce.partners if reduce is not None and prepared is None else ())

    def _waits_for(self) -> set[str]:
        """Peers that this peer exchanges microbatches with, or that a reduce may wait for."""
        return self._exchanging().union(self.replica.all_reduce.late)

    def _exchanging(self) -> set[str]:
        found = {peer for iteration in self.in_flight for peer in iteration.partners}
        return found | self.helping.partners

    # --- timer and link observer ---------------------------------------------------------------

    def deadline(self) -> float:
        due = self._repeat_at
        for iteration in self.in_flight:
            due = min(due, iteration.deadline())
        return due

    def tick(self) -> None:
        now = self._ctx.clock.now
        if now >= self._repeat_at:
            self.repeat()
        for iteration in self.in_flight:
            if now >= iteration.deadline():
                iteration.tick()

    def link_up(self, peer: str) -> None:
        for iteration in self.in_flight:
            iteration.link_up(peer)

    def link_down(self, lost: LostLink) -> None:
        for iteration in self.in_flight:
            iteration.link_down(lost.peer, lost.reason)
