"""Reactions of a peer to its log: each committed line is applied, and the parts react to its change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.hash_chain import AlreadyApplied, Diverged, LogError
from anabranch.protocol.log.records import Carriers, Closing, Commit, Control, Epoch, Members, Revoke, Voters
from anabranch.protocol.messages import Refused
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.join import JoinProcess
from anabranch.protocol.peer.leave import LeaveProcess
from anabranch.protocol.peer.link_events import LinkEvents
from anabranch.protocol.peer.log_apply import (
    AppliedEntry,
    LogApplication,
    MembersChanged,
    Removal,
    RolledBack,
    note_record,
)
from anabranch.protocol.peer.log_sources import LogSources
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.peer.takeover import Leadership
from anabranch.protocol.pipeline.microbatches import Iteration


@dataclass(eq=False)
class LogReactions:
    """Reactions of a peer's parts to each log entry, in a fixed order: the coordinator last, before the next
    iteration opens.

    take_early(iteration): receives the kept messages of an iteration.
    """

    shared: SharedParts
    iterations: Iterations
    links: LinkEvents
    joining: JoinProcess
    leadership: Leadership
    leaving: LeaveProcess
    sources: LogSources
    take_early: Callable[[Iteration], None]

    def __post_init__(self) -> None:
        self._ctx, self._log = self.shared.ctx, LogApplication(self.shared)

    # --- lines ---------------------------------------------------------------------------------

    def chosen(self, line: bytes) -> None:
        """Handle a line that the voters committed: apply it, if this peer follows the log. A line that comes
        before that is not kept, as the log that this peer will follow begins after it; only a returning
        founder looks at it (`Leadership.missed`). A leader announces a line before it is applied, since
        applying it may end this peer."""
        self.leadership.missed(line)
        if not self.shared.entry.done:
            return
        if self.shared.coordination.coordinator is not None:
            self.shared.coordination.coordinator.telling.chosen(line)
        self.follow(line)

    def follow(self, line: bytes, source: str = "") -> None:
        """Apply the next committed line, and have the parts react to it; ignore a line that was applied;
        request lines from the leader if this one does not follow; stop this peer if it is the leader's and
        contradicts a line that was applied (`LogSources.lost_by`). source: peer that sent the line, "" if
        this peer's own Raft node chose it."""
        try:
            applied = self._log.apply(line)
        except AlreadyApplied:
            return
        except Diverged:
            if self.shared.entry.done and not self.sources.lost_by(source):
                self.sources.ask_for_log(self._ctx.log.leader)
            return
        except LogError:
            if self.shared.entry.done:
                self.sources.ask_for_log(self._ctx.log.leader)
            return
        self.shared.following.line(applied.term)
        self.shared.founder_requests.folded(applied.record)
        self._hand_on(applied)

    def _hand_on(self, applied: AppliedEntry) -> None:
        stop_reason, again = "", False
        if isinstance(applied.change, MembersChanged):  # most lines of a large swarm's log
            self._members_changed(applied.change)
        else:
            stop_reason, again = self._react(applied)
        self._log.split_next_batch()
        for iteration in self.iterations.in_flight:
            iteration.source.split_again()
        if self.shared.coordination.coordinator is not None:
            self.shared.coordination.coordinator.chosen(applied.record, applied.base)
        if applied.wrong:
            stop_reason = f"the log's leader planned the next round as no honest one does: {applied.wrong}"
        if stop_reason:
            ok = not applied.wrong and not isinstance(applied.change, Revoke)
            over = ok and isinstance(applied.change, Control) and not again
            self.shared.exit.stop(stop_reason, ok=ok, again=again, over=over)
        self.iterations.open()

    def _react(self, applied: AppliedEntry) -> tuple[str, bool]:
        """React to an entry other than a Members record. Returns why this peer is to stop ("": it is not),
        and True if it may join the run again."""
        lead = self.shared.coordination.coordinator
        if not isinstance(applied.change, Control):
            run, record = self._ctx.run, applied.record
            plan = run.plan(record.t) if isinstance(record, Commit) else ()
            note_record(self._ctx.outbox, run, record, applied.base, plan)
        match applied.change:
            case Voters() | Epoch() | Carriers():
                self.links.connections.connect()
            case Commit() as step:
                self.shared.router.stop_before_round()
                self.iterations.committed(step, applied.base)
            case RolledBack() as rollback:
                self._rolled_back(rollback)
            case Closing():
                self.iterations.close()
            case Revoke() as revoked:
                return self._revoked(revoked), False
            case Control():
                return lead.end_reason if lead is not None else self._stopped(), self._goes_on
        return "", False

    # --- end of the run ------------------------------------------------------------------------

    @property
    def _goes_on(self) -> bool:
        """True if the run has uncommitted steps left, which are taken once its owner resumes it."""
        return self.shared.progress.committed < self._ctx.run.steps

    def _stopped(self) -> str:
        """Sentence on a run that its leader has stopped: that it stopped until its owner resumes it or, if
        all steps are committed, that it is over."""
        t, steps = self.shared.progress.committed, self._ctx.run.steps
        if self._goes_on:
            return f"the run's data node stopped after step {t} of {steps}, until its owner resumes the run"
        return f"the run is over: all {steps} steps are committed"

    # --- rollback ------------------------------------------------------------------------------

    def _rolled_back(self, change: RolledBack) -> None:
        """Return to the state after an earlier iteration, and drop the work of later ones."""
        record, t = change.record, change.record.t
        self.shared.early.forget(lambda message: message.fence.base in change.void_bases)
        self.iterations.forget(t)
        self.shared.router.stop_before_round()
        self.shared.states.rolled_back(t)
        self.shared.snapshots.rolled_back(t)
        self.joining.fetching.roll_back(record, change.base)

    # --- members -------------------------------------------------------------------------------

    def _revoked(self, record: Revoke) -> str:
        """Close the links to strangers and observers that are revoked; the coordinator removes members.
        Return why this peer is to stop, "" if it is not revoked itself."""
        ctx = self._ctx
        if self.shared.coordination.coordinator is not None:
            ctx.outbox.note("note", text=f"{record.id[:8]} is revoked by the run's owner: {record.reason}")
        self.links.close_revoked()
        me = ctx.run.membership.members.get(ctx.me)
        return (ctx.run.revoked.refusal(me.id, me.ticket) or "") if me is not None else ""

    def _members_changed(self, change: MembersChanged) -> None:
        ctx, record, lead = self._ctx, change.record, self.shared.coordination.coordinator
        for removal in change.removals:
            peer, reason = removal.peer, removal.reason
            ctx.outbox.note("peer_removed", subject=peer, stage=removal.stage, reason=reason)
            if peer != ctx.me:
                self._removed(removal)
            elif change.own_stage is not None:
                self._move(change.own_stage)
            elif lead is None or not lead.opening:
                left = self.leaving.reason is not None
                words = reason if left else f"removed from the run: {reason}"
                self.shared.exit.stop(words, ok=left, again=not left)
                return
            # Else a founder that resumes its run removes its own former process.
        for member in record.joined:
            ctx.outbox.note("peer_joined", member=member)
            self.leadership.welcome(member)
        for peer, t in record.active_from.items():
            ctx.outbox.note("peer_active", subject=peer, from_iteration=t)
        if any(removal.stage == ctx.run.stage for removal in change.removals):
            self.iterations.replica.all_reduce.look_ahead()
        self.joining.members_changed(record)
        self.shared.states.members_changed()
        self.iterations.vouch()
        self._update_links(record)
        self._serve_newcomers(record)

    def _removed(self, removal: Removal) -> None:
        """Repair the work of another member that was removed, and end its flow links; unless the same record
        admits its new process, tell it why (`Refused`) and close its link, too."""
        ctx, peer = self._ctx, removal.peer
        for iteration in self.iterations.in_flight if removal.stage >= 0 else ():
            iteration.peer_removed(peer, removal.stage, removal.reason)
        self.shared.router.link_down(peer)
        if removal.joins_again:
            return
        self.links.connections.forget(peer)
        if peer in ctx.links.up and ctx.links.incarnations.get(peer, 0) <= removal.incarnation:
            again = self.links.revoked(peer) is None
            ctx.outbox.send(peer, Refused(f"removed from the run: {removal.reason}", again))
            ctx.links.close(peer)
            ctx.outbox.emit(ev.HangUp(peer, removal.reason))

    def _move(self, stage: int) -> None:
        """Move this peer to another stage: drop its work and its state of the former one, and the copies that
        it was to download, then build the new one. Snapshots that it holds stay."""
        ctx = self._ctx
        ctx.outbox.note("note", text=f"going over from stage {ctx.run.stage} to stage {stage}")
        self.iterations.forget(-1)
        self.shared.states.abandon(-1)
        self.shared.snapshots.moved()
        ctx.run.assign_stage(stage)
        self.shared.router.restart()
        self.joining.fetching.move()

    def _update_links(self, record: Members) -> None:
        ctx, links = self._ctx, self.links
        joined = [member.id for member in record.joined]
        if ctx.me in record.active_from or ctx.me in joined or not ctx.run.near.crowded:
            links.neighbours_changed()
        else:  # in a large swarm members come and go all the time
            links.leave_former(joined)
            links.connections.at_next_beat(links.neighbours_changed)

    def _serve_newcomers(self, record: Members) -> None:
        """Take in the kept messages of members that serve now by `record`, and send those of the next stage
        the waiting microbatches; nothing while no iteration is in flight."""
        run, in_flight = self._ctx.run, self.iterations.in_flight
        if not record.active_from or not in_flight:
            return
        self.take_early(in_flight[0])
        following = run.next_stage()
        if any(run.membership.stage_of(peer) == following for peer in record.active_from):
            for iteration in in_flight:
                iteration.sender.pump()
