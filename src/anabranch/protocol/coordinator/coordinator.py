"""Coordinator, run by the log's leader: admits and removes members, orders reduces, proposes the step (R3,
R6–R9, R11, R14).

The coordinator decides from members' reports, logs its decisions and announces committed entries. A new
coordinator needs no state of the last one, since members repeat their reports. `consider` takes the next
decision that the present state allows; it is called after each change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from anabranch.protocol.consensus import voter_selection as electorate
from anabranch.protocol.consensus.broadcast import Broadcast
from anabranch.protocol.consensus.lead_offers import LeadOffers
from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.audit_cases import AuditCases
from anabranch.protocol.coordinator.checkpoints import WITHHELD_MOST, Checkpoints
from anabranch.protocol.coordinator.disputes import Disputes
from anabranch.protocol.coordinator.island_rounds import IslandRounds
from anabranch.protocol.coordinator.newcomers import STUCK_ALONE, Newcomers
from anabranch.protocol.coordinator.proposals import Proposals
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.reports import Reports
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.coordinator.state_agreement import StateAgreement
from anabranch.protocol.coordinator.step_receipts import UNLISTED_S, StepReceipts
from anabranch.protocol.failure_detection.indirect_probes import IndirectProbes
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.carrier_list import CarrierList
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.fleet.initial_assignment import InitialAssignment
from anabranch.protocol.fleet.lost_members import StepQueries
from anabranch.protocol.fleet.operator_control import RevocationRequests, control_record
from anabranch.protocol.fleet.rebalancing import Rebalancing
from anabranch.protocol.fleet.standbys import Standbys
from anabranch.protocol.log.overflow_streak import SKIPS_IN_A_ROW, OverflowStreak
from anabranch.protocol.log.records import (
    AnyRecord,
    Closing,
    Commit,
    Control,
    Genesis,
    Members,
    Rollback,
    Voters,
    Witness,
)
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.messages import Applied, Attempt, Release, Wish
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog
from anabranch.protocol.recovery.stage_recovery import StageRecovery
from anabranch.protocol.recovery.stranded_crews import StrandedCrews
from anabranch.protocol.reduce.coverage import not_returned
from anabranch.protocol.reduce.partial_sums import ReduceAccount
from anabranch.protocol.state.vouchers import Vouchers


class Coordinator:
    """Decisions of the peer that leads the log. admit: makes the part that admits and removes members, from
    what the coordinator knows of the step. has_directory: True if checkpoints can be written on this machine.
    account(attempt): who sent what, and the result, of a reduce whose parts this peer sums all; None if it
    does not. base_of(t): base of a delayed iteration t. log_length(): number of entries in this peer's log.
    opening: records that are logged first."""

    def __init__(
        self,
        ctx: PeerContext,
        indirect_probes: IndirectProbes,
        log: Voter,
        schedule: Schedule,
        admit: Callable[[StepQueries], Admission],
        has_directory: bool,
        account: Callable[[Attempt], ReduceAccount | None],
        base_of: Callable[[int], str],
        log_length: Callable[[], int],
        opening: Sequence[AnyRecord] = (),
    ) -> None:
        self.ctx = ctx
        self.opening = list(opening)
        self.log = log
        step = StepQueries(
            lambda peer: self.released.has_last(peer),
            self._waits_for,
            lambda peer: self.stage_recovery.moves.worth_s(peer, self.t, self.reducing.step_s),
            lambda: self.reducing.step_s,
            lambda stage: self.reducing.witnessing.take_up(stage),
            lambda stage: self.stage_recovery.witnesses.fetching(stage, self.t),
        )
        admission = self.admission = admit(step)
        self._lead_offers = LeadOffers(ctx, log, admission.lost.held_up_by, indirect_probes.hearers)
        self.has_directory, self._base_of = has_directory, base_of
        self.tip = LogTip(ctx)
        self.wish: Wish | None = None
        """Request of the operator that is not logged yet."""
        self.revocations = RevocationRequests(ctx)
        self.carriers = CarrierList(ctx, admission.credentials)
        self.telling = Broadcast(ctx)
        self.convictions = Convictions(ctx, self.revocations.revoke)
        self.receipts = StepReceipts(ctx, admission, self.convictions)
        self.audits = AuditCases(ctx, admission, self.convictions)
        self.catalog = SnapshotCatalog(ctx, self.audits.doubtful_from)
        self.stage_recovery = StageRecovery(ctx, self.admission, self.catalog)
        self.stranded = StrandedCrews(ctx, self.stage_recovery.moves.to)
        self.rebalancing = Rebalancing(ctx, admission.speeds)
        self.initial_assignment = InitialAssignment(ctx, admission)
        self.standby_policy = Standbys(ctx, admission.ways)
        self.reducing = ReduceAttempts(ctx, log, admission, self.receipts, account)
        self.newcomers = Newcomers(ctx, self.tip, admission, self.reducing)
        self.reports = Reports(ctx, self.tip, admission, self.receipts, self.reducing)
        self.released = StateAgreement(ctx, self.tip, admission, self.catalog, self.stage_recovery)
        self.vouchers = Vouchers(ctx, log_length)
        self.disputes = Disputes(ctx, self.tip, self.catalog)
        self.rounds = IslandRounds(ctx, admission, self.released.has_last)
        settle = self.released, self.audits.second, self.receipts, self.rounds
        self.proposing = Proposals(ctx, log, self.tip, schedule, self.reducing, *settle)
        self.checkpoints = Checkpoints(
            ctx, self.tip, self.released, self.catalog, has_directory, self._withholds_state
        )
        self.finished = self._stop_logged = self._closed = False
        self._overflows = OverflowStreak()
        self._voters_at = 0.0
        self._waiting_for = ""

    @property
    def t(self) -> int:
        return self.tip.t

    @property
    def base(self) -> str:
        return self.tip.base

    @property
    def round(self) -> Round | None:
        return self.tip.round

    def restore(self, t: int, base: str, adam_step: int, fingerprints: tuple[str, ...]) -> None:
        """Continue from step `t`, which counts as released and checkpointed and becomes a restore point: at
        the run's genesis, when the run is resumed from its directory, and after a rollback. base: hash of the
        log entry from which it goes on. adam_step: Adam's counter after `t` (skipped steps and rounds are not
        counted). fingerprints: hash of each stage's state after `t`."""
        self.tip.move(t, base, adam_step, fingerprints)
        self.vouchers.moved(t, base)
        self.released.begin(t, fingerprints)
        self.checkpoints.set_last(t)
        on_disk = self.has_directory and t not in self.catalog.points
        self.catalog.begin(RestorePoint(t, fingerprints, adam_step, on_disk=on_disk))

    def _roll_back(self, record: Rollback, base: str) -> None:
        """Follow the Rollback `record`: return to the state after iteration `record.t` and go on with the
        next one; the open round and the members' reports of applied steps and of readiness are dropped. base:
        hash of the record's log entry."""
        checkpointed = min(self.checkpoints.t, record.t)
        self.restore(record.t, base, record.adam_step, record.fingerprints)
        self.checkpoints.set_last(checkpointed)
        self.checkpoints.rolled_back(record.t)
        self.tip.round, self.released.applied, self._closed = None, {}, False
        self._overflows = self._overflows.after(record)
        self.audits.rolled_back(record.t)
        self.receipts.rolled_back()
        self.admission.ready.clear()
        self.stage_recovery.rolled_back()

    def take_over(
        self,
        t: int,
        base: str,
        adam_step: int,
        fingerprints: tuple[str, ...],
        overflows: OverflowStreak,
        closed: bool,
        begun_at: float,
        usual_s: float,
    ) -> None:
        """Set the last committed step, when this peer succeeds another leader, and open the round of the
        next. adam_step: Adam's counter after `t`. closed: True if the log has the last evaluation of the run
        (`Closing`). fingerprints: known if the log was rolled back to `t`; empty if step `t` was taken, which
        is released once enough replicas have reported it again (R9). overflows: steps that overflows skipped
        in a row; if they are SKIPS_IN_A_ROW or more, the run ends, unless they are the word of one relay, and
        another can look: then that relay is expelled. begun_at: time (s) since which this peer has the next
        iteration open, later by the time in which nobody led, and by long waits. usual_s: seconds that it
        took for the last iterations; 0: not known."""
        self.tip.move(t, base, adam_step, fingerprints)
        self.vouchers.moved(t, base)
        self.released.begin(t, fingerprints)
        self._overflows, self._closed = overflows, closed
        self._stop_for_skips("")  # the leader before may have died before it logged that
        self.admission.absent.take_over()
        self._open_round()
        if self.round is not None:
            self.round.begun_at = begun_at
            self.reducing.expected_s = max(self.reducing.expected_s, usual_s)

    def _waits_for(self, stage: int) -> bool:
        """True if the open step still waits for `stage`, as its reduce has not ended; for every stage while
        the last step is not released. False if no step is open."""
        current = self.round
        if current is None:
            return False
        return not self.released.last or self.reducing.prepared(current, stage) is None

    def removed(self, peer: str) -> None:
        """Drop what is known of a peer that was removed or left its stage, its claims of the open iteration
        included. If it took part in a reduce that is not PREPARED yet, that is ordered anew as soon as one
        without it can be, unless it ends before (`Round.torn`)."""
        self.catalog.forget(peer)
        self.receipts.removed(peer)
        self.audits.removed(peer)
        self.stage_recovery.forget(peer)
        self.admission.ready.pop(peer, None)  # if it was moved it has not got its new stage's state
        self.admission.parted.removed(peer)
        self.admission.absent.removed(peer)
        if peer not in self.ctx.run.membership.members:
            self.admission.ways.gone(peer)
            self.standby_policy.removed(peer)
        self.initial_assignment.removed(peer)
        self.released.removed(peer)
        self.rounds.removed(peer)
        self.vouchers.gone(peer)
        current = self.round
        if current is None:
            return
        current.losses.pop(peer, None)
        current.asked.discard(peer)
        for holders in current.holders.values():
            holders.pop(peer, None)
        for stage, claims in current.claims.items():
            if claims.pop(peer, None) and not stage:
                current.cut_off_at = self.ctx.clock.now  # other data nodes begin its slots again
            current.prepared.get(stage, {}).pop(peer, None)
            attempt = current.attempts.get(stage)
            taking_part = attempt is not None and (peer in attempt.members or peer in attempt.helpers)
            if taking_part and not self.reducing.prepared(current, stage):
                current.torn.add(stage)
            if not self.ctx.run.membership.count(stage, current.t):
                current.retries.pop(stage, None)  # its next replicas are not waited for longer for that
        current.recount(self.ctx.run.settings.stages)

    def on_applied(self, peer: str, message: Applied) -> None:
        """Take the report of `peer` that it applied a step. If that is the last step, its fingerprint counts
        for the release of the step, and after a round the relay's speed is measured by the times that it
        reports."""
        self.released.on_applied(peer, message)
        if message.stage and message.fence.base == self.tip.base:
            self.rounds.on_applied(peer, message.timing)

    def stop(self, reason: str) -> None:
        """End the run after the open iteration, or before it if no claim of it has come; begun by the next
        `consider`. reason: told to the user. Of several calls the first reason stays."""
        if self.tip.stop_reason is None:
            self.tip.stop_reason = reason

    # --- decisions -----------------------------------------------------------------------------

    def consider(self) -> None:
        """Take the next decisions that the present state allows; at most one record is appended to the log.
        Nothing while a record is being committed, and after the run's end."""
        if self.finished or self.log.busy:
            return
        first = self.opening.pop(0) if self.opening else self.revocations.record() or self.carriers.record()
        if first is not None:
            self.log.append(first)
            return
        # Two iterations in flight are never quiet; then the beginning of one has to do.
        current, delay = self.round, self.ctx.run.settings.delay
        quiet = current is None or not any(current.claims.values()) or delay.has(current.t)
        self._change_members(quiet)
        if self.log.busy:
            return  # a record is being committed, or the lead is being transferred
        stops, applied = self.tip.stop_reason is not None, self.released.applied
        moved = self.stage_recovery.decide(self.t, quiet, applied, self.reducing.step_s)
        if not stops:
            moved = moved or self.stranded.decide(self.t)
            moved = moved or self.rebalancing.decide(self.t, quiet and self.released.last, applied)
        if moved is not None:
            self.log.append(moved)
            return
        if stops and self.round is not None and not self.round.claims:
            self.tip.round = None
        self._open_round()
        if self.wish is not None and self.tip.stop_reason is None:
            wish, self.wish = self.wish, None
            if (record := control_record(self.ctx, wish, self.t, self.round is not None)) is not None:
                self.log.append(record)
                return
        self.released.release()
        returns = self._returns()
        if returns is not None:
            self.log.append(returns)
            return
        if self.round is not None and self._step(self.round):
            return
        self._await_reports()
        self.checkpoints.due()
        self._finish()

    def _returns(self) -> Rollback | None:
        """Record that returns the log to a snapshot: of an iteration before the false step, for what audits
        found (`Convictions.returns`); the newest, for a dispute of replicas about their state. None if
        nothing has to return, or the wait between two returns is not over (at the run's end it counts as
        over, so that the run ends with agreed states). None as well if no snapshot is left; then the false
        step stays, which is noted, and the audits are dropped."""
        found, ends = self.convictions, self.tip.stop_reason is not None
        if found.returns:
            if self.catalog.newest(found.returns_before) is None:
                lost = f"no state before iteration {found.returns_before} is left to go back to"
                self.ctx.outbox.note("note", text=f"{found.returns}; {lost}")
                self.audits.rolled_back(self.t)
                self.receipts.rolled_back()
                return None
            advice, before = "lend a third replica", found.returns_before
            return self.disputes.go_back(found.returns, advice, before, found.settled or ends)
        dispute = self.released.disputed()
        if dispute is not None and ends:
            reason = f"the run ends in a dispute about stage {dispute[0]} after iteration {self.t}"
            return self.disputes.go_back(reason, "resume the run with a third replica", settled=True)
        return self.disputes.decide(dispute)

    def _change_members(self, quiet: bool) -> None:
        """Log the next change of members, of serving replicas or of voters, if it may be logged now; first
        take note of who may leave now and who has to serve at once. quiet: True if little work is lost by a
        change now."""
        self.admission.let_go(quiet and self.released.last)
        self.newcomers.call_in()
        change: Members | Voters | None = None
        if self.telling.changes_at() <= self.ctx.clock.now:
            active_from = self.newcomers.active_from()
            if active_from is not None and not self.initial_assignment.done:
                change = self.admission.change() or self.initial_assignment.decide(self.t)
            if change is None and active_from is not None and self.initial_assignment.done:
                change = self.admission.change(partial(self.newcomers.begins, active_from))
            elif change is None:
                change = self.admission.change()
        change = change or self._voters()
        if change is not None:
            self.log.append(change)

    def _await_reports(self) -> None:
        """Plan the removal of replicas that keep back their report of the last step
        (`StateAgreement.withheld`) while no step is open that could stall for it: at the end of the run, in a
        pause, or while a stage has nobody alive. Stalls are counted for the release itself: one each time
        that `patience_s` has passed, also if reports came meanwhile, but none while this peer hears nobody.
        Nothing while a step is open, or once the last one is released."""
        now, current = self.ctx.clock.now, self.released.unopened
        if self.round is not None or self.released.last:
            return
        if current is None or current.base != self.base:
            current = self.released.unopened = Round(self.t + 1, self.base, now, progress_at=now)
        if now >= current.progress_at + self.reducing.patience_s(current):
            current.progress_at, current.stalls = now, current.stalls + (not self.ctx.hears_nobody())
        self._remove_withholding(current)

    def _remove_withholding(self, current: Round) -> None:
        for peer, reason in self.released.withheld(current).items():
            self.admission.remove_idle(peer, reason)

    def _withholds_state(self, peer: str) -> None:
        """Plan the removal of `peer`, the only replica of its stage, which gives its state to nobody, so that
        no checkpoint has it. Nothing unless another peer can take the stage up from an earlier state."""
        if self.stage_recovery.moves.replaceable([peer], self.t):
            reason = f"it did not give the state of its stage for the last {WITHHELD_MOST} checkpoints"
            self.admission.remove_idle(peer, reason)

    def _step(self, current: Round) -> bool:
        """Advance the open iteration: drop late slots, order reduces, remove who withholds reports, and
        propose the record of its step. True if that was proposed. If not, see if the step has stalled, and at
        which stages one peer may hold it up."""
        self.standby_policy.look(current.t, self.released.last)
        stages = range(self.ctx.run.settings.stages + 1)
        settled = bool(current.slots) and all(self.reducing.prepared(current, stage) for stage in stages)
        self.rounds.drop_late(current, settled)
        current.witness = current.witness or self.rounds.stranded(current)
        self.reducing.attempt(current)
        self.reports.take_unanswered(current)
        self._remove_withholding(current)
        if current.witness is not None and current.t > self.ctx.run.steps:
            self._end_unevaluated(current.witness)
            return False
        step = self.proposing.record(current)
        if step is not None:
            self.audits.second.proposed(current.t)
            self.log.append(step)
            return True
        self.reducing.stalled(current)
        relays = range(1, self.ctx.run.settings.stages + 1) if current.stalls else ()
        held_up = [stage for stage in relays if self.newcomers.held_up(current, stage)]
        if not self.released.last:  # till it is no newcomer can show that it got the last state
            held_up = [stage for stage in held_up if self.released.lacks(stage)]
        # The most likely first: gradients that are claimed and not given back, else the last stage that lacks
        # units, as the stages before lack their gradients then.
        held_up.sort(key=lambda stage: (not not_returned(stage, current.claims), -stage))
        self.stage_recovery.witnesses.stalled(held_up, current.stalls)
        return False

    def _end_unevaluated(self, witness: Witness) -> None:
        """End the run without the evaluation after its last step, the windows of which overflow: there is no
        step that could be skipped for that."""
        where = f"stage {witness.stage}, {witness.tensor}"
        self.stop(f"all steps are committed; the held-out windows after the last one overflow ({where})")
        self.tip.round = None

    def _voters(self) -> Voters | None:
        """Record with the next change of the log's voters, or None. May offer the lead to another voter
        instead. After a search in vain it looks again a quarter of a heartbeat later. The reduction to the
        founder alone, at the end of the run, is made elsewhere (`_finish`)."""
        if self.ctx.run.settings.voters == 1 or self.ctx.clock.now < self._voters_at:
            return None
        ends = self.tip.over or self.tip.stop_reason is not None  # then the founder has to lead
        if not ends and self._lead_offers.step_aside(self.t):
            return None
        if not self.has_directory and self._lead_offers.give_back(self.t, self.tip.over):
            return None
        ending = self.has_directory and self.tip.over
        record = None if ending else electorate.change(self.ctx, self.log, self.admission.leaving)
        if record is None and not self.log.raft.learners:
            self._voters_at = self.ctx.clock.now + self.ctx.run.settings.heartbeat_s / 4.0
        return record

    def _wait(self, reason: str) -> None:
        if reason != self._waiting_for:
            self._waiting_for = reason
            self.ctx.outbox.note("waiting", reason=reason)

    def _open_round(self) -> None:
        """Begin to collect reports about iteration t + 1 (t: last committed step). Nothing if a round is
        open, if the run pauses or ends, or if a stage has no live member. Each peer opens that iteration by
        itself (R1)."""
        t = self.t + 1
        if self.round is not None or self.tip.stop_reason is not None or not self.ctx.run.course.opens(t):
            return
        evaluates = self.ctx.run.settings.evaluates(self.t, self.ctx.run.steps)
        if t > self.ctx.run.steps and (self._closed or not evaluates):
            return
        stages = range(self.ctx.run.settings.stages + 1)
        if all(self.ctx.run.membership.count(stage, t) for stage in stages):
            base = self._base_of(t) if self.ctx.run.settings.delay.has(t) else self.base
            self.tip.round = opened = Round(t, base, self.ctx.clock.now, progress_at=self.ctx.clock.now)
            served = ((stage, peer) for stage in stages for peer in self.ctx.run.membership.live(stage, t))
            opened.served.update(served if self.ctx.run.settings.audits else ())
            opened.slots, opened.manifest = self.ctx.run.plan(t), self.ctx.run.manifest(t)
            self.reducing.expected_s = self.rounds.expected_s(opened)
            opened.planned_s = self.rounds.planned_s(opened)

    def repeat(self, peer: str) -> None:
        """Send `peer`, whose link came up, what it may have missed: who is a standby, reduce attempts and
        questions of the open round, orders of audits, the release of the last step, the latest complete
        restore point."""
        self.standby_policy.repeat(peer)
        self.audits.repeat(peer)
        if self.round is not None:
            self.reducing.doubles.repeat(self.round, peer)
            for attempt in self.round.attempts.values():
                if peer in attempt.members or peer in attempt.helpers:
                    self.ctx.outbox.send(peer, attempt)
        if self.released.last and self.t > 0:
            self.ctx.outbox.send(peer, Release(self.ctx.fence(self.t, self.base)))
        self.catalog.repeat(peer)

    # --- the log -------------------------------------------------------------------------------

    def chosen(self, record: AnyRecord, base: str) -> None:
        """Follow a committed record at the coordinator, after `ctx.run` has folded it; called in log order.
        base: hash of this record's entry, of whatever kind it is.

        What comes next is decided by `consider`, but for this. A commit, or the removal of a peer, may order
        audits and make a step void (`AuditCases`). A commit may also have peers removed for false or overdue
        statements. After SKIPS_IN_A_ROW steps in a row that overflows skipped the run is stopped, or the peer
        that alone found the overflows expelled.
        """
        if isinstance(record, Commit):
            self._committed(record, base)
        elif isinstance(record, Genesis):
            self.restore(0, base, 0, record.fingerprints)
        elif isinstance(record, Rollback):
            self._roll_back(record, base)
        elif isinstance(record, Closing):
            self._closed = True
            self.tip.round = None
        elif isinstance(record, Members):
            for peer in record.removed:
                self.removed(peer)
            for peer in record.active_from:
                self.vouchers.gone(peer)
            self.catalog.members_changed()
            if self.round is not None:
                self._serves(self.round, record.active_from)
        elif isinstance(record, Control) and record.action == "stop":
            self.finished = True

    def _serves(self, current: Round, active_from: Mapping[str, int]) -> None:
        """Note peers that begin to serve. active_from: peer -> iteration from which it serves. If a stage's
        reduce in the open iteration was ordered without a peer that serves in it, the reduce is to be ordered
        anew (`Round.torn`), as it needs that peer's word, too (one of the reduce's members may be the peer's
        former process). The time without progress begins anew (no stall so far) if the peer is the second
        replica of its stage, or this leader moved it there because the step stalled."""
        membership = self.ctx.run.membership
        self.rounds.begin_to_serve(current, active_from)
        for peer, t in active_from.items():
            stage = membership.stage_of(peer) or 0
            if self.ctx.run.settings.audits:
                current.served.add((stage, peer))
            if t <= current.t and stage in current.attempts:
                current.torn.add(stage)
            before = set(membership.live(stage, current.t)) - active_from.keys()
            if t <= current.t and stage and (len(before) == 1 or self.stage_recovery.witnesses.sent(peer)):
                current.progress_at, current.stalls = self.ctx.clock.now, 0
                if stage in current.retries:  # else it waits as long as all tries of the only replica took
                    current.retries[stage] = min(current.retries[stage], STUCK_ALONE)

    def _committed(self, record: Commit, base: str) -> None:
        if self.round is not None and record.verdict == "step":
            found = self.reports.false_witnesses(self.round) | self.reducing.doubles.false_claims(self.round)
            for peer, reason in found.items():
                self.admission.remove(peer, reason)
        if self.round is not None and self.round.attempts:  # else another coordinator led that step
            self.reducing.reported(self.round)
            # Without its waits: else a wait makes the next one longer.
            self.reducing.step_taken(self.round, self.ctx.clock.now - self.round.since)
            if not self.round.slots:
                waited_s = self.round.waited_s if self.round.late else 0.0
                silent = self.admission.absent.silent()
                self.standby_policy.withholders.committed(record, waited_s, silent)
                blocks = self.ctx.run.settings.counts
                self.admission.speeds.committed(record, self.round.worked_s, blocks)
        if record.stages:
            before = tuple(stage.fingerprint_before for stage in record.stages)
            self.catalog.logged(RestorePoint(record.t - 1, before, self.tip.adam_step))
        self.tip.t, self.tip.base, self.tip.adam_step = record.t, base, record.adam_step
        self.vouchers.moved(record.t, base)
        for peer, reason in self.vouchers.overdue().items():
            self.admission.remove(peer, reason)
        self.audits.committed(record, base, self.round)
        self.rounds.committed(record, self.round)
        self.stranded.committed(record)
        self.released.committed()
        self.tip.round = None
        self._overflows = self._overflows.after(record)
        if record.witness is not None:
            self.reports.skipped(record.t)
            self._stop_for_skips(f" (overflow at stage {record.witness.stage}, {record.witness.tensor})")

    def _stop_for_skips(self, where: str) -> None:
        last = range(self.t - SKIPS_IN_A_ROW + 1, self.t + 1)
        if self._overflows.skips < SKIPS_IN_A_ROW or self.reports.one_word(last):
            return
        if (peer := self._lone_finder()) is None:
            self.stop(f"{SKIPS_IN_A_ROW} skipped steps in a row{where}")
        else:
            why = f"it alone found the overflows of {SKIPS_IN_A_ROW} steps{where}, and another peer can look"
            self.admission.expel(peer, why)  # it could take its stage up again at once

    def _lone_finder(self) -> str | None:
        """Relay that alone reported the overflows of the last SKIPS_IN_A_ROW steps, as no other replica of
        its stage served in all of them. The caller checks that these steps were all skipped. None if several
        reported or the reporter is unknown, is this peer or a data node; if it is a member without whom the
        stage could not be restored (`RelayMoves.replaceable`); or if a relay of that stage was replaced for
        such overflows before: then the word of the next one is taken."""
        if len(self._overflows.finders) != 1:
            return None
        [(stage, peer)] = self._overflows.finders
        membership, first = self.ctx.run.membership, self.t - SKIPS_IN_A_ROW + 1
        others = (p for p in membership.serving(stage) if p != peer)
        confirmed = any(membership.active_from[p] <= first for p in others)
        if not stage or peer == self.ctx.me or confirmed or self._overflows.doubted[stage][0] != peer:
            return None
        replaceable = self.stage_recovery.moves.replaceable([peer], self.t)
        return peer if peer not in membership.members or replaceable else None

    def _finish(self) -> None:
        closing = self.t >= self.ctx.run.steps and self.tip.stop_reason is None and not self._closed
        if closing and self.ctx.run.settings.evaluates(self.t, self.ctx.run.steps):
            return
        if not self.tip.over or self._stop_logged or self.audits.awaited_until() > self.ctx.clock.now:
            return
        if self.audits.ended():
            return
        if not self.has_directory:
            self._wait(
                "all steps are committed, but the data node with the run's directory is away: it has to come "
                "back (`anabranch resume`) to write the last checkpoint"
            )
        elif self.checkpoints.done:
            last = electorate.fewer(self.ctx, self.log) if len(self.log.raft.log.voters) > 1 else None
            if last is not None:
                self.log.append(last)
            elif len(self.log.raft.log.voters) == 1:
                self._stop_logged = True
                self.log.append(Control("stop", self.t))

    @property
    def end_reason(self) -> str:
        return self.tip.stop_reason or f"all {self.ctx.run.steps} steps are committed"

    # --- time ----------------------------------------------------------------------------------

    def deadline(self) -> float:
        now, busy = self.ctx.clock.now, self.log.busy
        due = min(
            self.checkpoints.deadline(),
            self.admission.deadline(),
            self.catalog.deadline(),
            self.stage_recovery.deadline(),
            self.telling.deadline(),
            self.initial_assignment.deadline(),
            self.disputes.deadline(),
        )
        if not busy:
            due = min(due, self.carriers.deadline())
        if self.tip.over and (awaited_until := self.audits.awaited_until()) > now:
            due = min(due, awaited_until)
        if self.admission.waiting and (changes_at := self.telling.changes_at()) > now:
            due = min(due, changes_at)
        current = self.tip.round or (None if self.released.last else self.released.unopened)
        if current is None or busy:
            return due
        stalls_at = current.progress_at + self.reducing.patience_s(current)
        due = min(due, stalls_at, current.unlisted_since + UNLISTED_S, self.audits.second.held_until())
        # Past, it waits for another event: slots are not dropped from a result that is PREPARED.
        late_at = self.rounds.deadline(current)
        return late_at if now < late_at < due else due

    def tick(self) -> None:
        self.admission.lost.tick()
        self.catalog.tick()
        self.telling.tick()
        self.checkpoints.tick()
