"""Leadership of the log: winning and losing it, building the coordinator, the founder's return to its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from anabranch.protocol.consensus.raft_node import SavedVoterState, Voter
from anabranch.protocol.coordinator.coordinator import Coordinator
from anabranch.protocol.coordinator.reduce_attempts import STALL_FACTOR
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.events import VerifiedCredential
from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.log.records import AnyRecord, Commit, Member, Rollback, decode_entry, entry_hash
from anabranch.protocol.messages import Welcome
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.join import JoinProcess
from anabranch.protocol.peer.link_events import LinkEvents
from anabranch.protocol.peer.log_apply import note_record
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.raft.types import Role, RoleChanged, peer_of
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint
from anabranch.protocol.rounds.plan import Plan

#: Time (s) within which members must connect to a new leader before they count as lost.
ARRIVAL_S = 5.0


#: Certificate that lets a member connect to others, by the member and the credential that it showed.
Certify = Callable[[Member, VerifiedCredential | None], bytes]


class Leadership:
    """Role of this peer in leading the log, and its voter.

    founder: True if this peer has the run's directory (its log, corpus, checkpoints and events).
    """

    def __init__(
        self,
        shared: SharedParts,
        iterations: Iterations,
        links: LinkEvents,
        joining: JoinProcess,
        kept: SavedVoterState,
        founder: bool,
        certify: Certify,
        on_chosen: Callable[[bytes], None],
    ) -> None:
        """certify: issues the certificate that lets a member connect to others. on_chosen: called with each
        committed log line."""
        self._ctx, self._progress, self._summary = shared.ctx, shared.progress, shared.summary
        self._exit, self._entry, self._coordination = shared.exit, shared.entry, shared.coordination
        self._following, self._snapshots = shared.following, shared.snapshots
        self._iterations, self._links, self._joining = iterations, links, joining
        self._certify, self.founder = certify, founder
        self._take_up: Callable[[Sequence[bytes]], None] | None = None
        """Resumes the run from the directory; None but for a founder that returned to other voters."""
        self._on_disk, self._caught_up = 0, False
        self._before: list[bytes] = []
        self._plan: Plan = ()
        """Plan of the round after the last line that was missed; () if that is no round."""
        self._stop_wanted: str | None = None
        self.voter = Voter(self._ctx, kept, on_chosen, self._became, self._may_lead, self._yields)

    # --- the lead ------------------------------------------------------------------------------

    @property
    def _returns(self) -> bool:
        """True while this is the founder's next process and has not joined its run again."""
        return self._take_up is not None and not self._entry.done

    def _may_lead(self) -> bool:
        """True if this peer can lead: it has the schedule of step parameters, and is the returning founder or
        a member with the whole log since its admission."""
        ctx = self._ctx
        if ctx.run.schedule is None:
            return False
        if self._returns:
            return True
        return ctx.me in ctx.run.membership.members and self.voter.has(*self._joining.begins_at)

    def _yields(self) -> bool:
        """True if another voter should rather lead.

        A returning founder that leads first removes all members. If another voter leads, the run goes on and
        the founder joins as any peer does. Without snapshots the only state of a lost stage is in the
        founder's directory: then the founder leads.
        """
        return self._returns and self._ctx.run.settings.snapshot_every > 0

    def _became(self, became: RoleChanged) -> None:
        """Follow a change of this voter's Raft role, or of the leader: take the lead, give it up, or believe
        the new leader. A founder that began to resume its run, and loses the lead before it was admitted, is
        a stranger again."""
        ctx = self._ctx
        if became.role is Role.LEADER:
            self._won(became.term)
            return
        if ctx.log.leads:
            ctx.outbox.note("note", text=f"no longer leads the log (term {became.term})")
            self._coordination.resign()
            if self._take_up is not None and not ctx.admitted():
                self._joining.lost_lead()
                self._progress.start(Position(), "", 0)
                ctx.run.forget_members()
                ctx.log.elect(())
        if not became.leader:
            return
        if self.voter.raft.me in ctx.log.voters:
            self._following.elected(peer_of(became.leader), became.term)
        else:
            self._following.claims(peer_of(became.leader), became.term)

    def _won(self, term: int) -> None:
        ctx, coordination = self._ctx, self._coordination
        if coordination.coordinator is None and not self.voter.leads_well():
            ctx.outbox.note("note", text=f"keeps the log for whoever can lead (term {term})")
            return
        coordination.elected(term)
        if coordination.coordinator is None and self._entry.done:
            self._take_over()
        self._following.elected(ctx.me, term)

    def coordinate(self, opening: Sequence[AnyRecord] = ()) -> Coordinator:
        """Build the coordinator and make it this peer's, which must not lead already. opening: records that
        the coordinator logs first. The run's genesis and schedule must be known."""
        ctx, genesis, links = self._ctx, self._entry.genesis, self._links
        assert ctx.run.schedule is not None
        required = genesis.numerics_class, genesis.corpus_fingerprint, self._joining.model_hash
        admit = partial(
            Admission, ctx, links.connections, *required, self.welcome, links.credentials, links.hang_up
        )
        indirect_probes, schedule = links.connections.indirect_probes, ctx.run.schedule
        account = self._iterations.reduce_account
        coordinator = Coordinator(
            ctx, indirect_probes, self.voter, schedule, admit, self.founder, account,
            lambda t: self._progress.base_of(t, True), lambda: self._progress.position.index, opening,
        )  # fmt: skip
        self._coordination.install(coordinator)
        return coordinator

    def _take_over(self) -> None:
        """Build the coordinator from the state in the log; members repeat their reports to the new leader,
        and those that do not connect within ARRIVAL_S count as lost."""
        ctx, progress, summary, joining = self._ctx, self._progress, self._summary, self._joining
        lead, genesis, connections = self.coordinate(), self._entry.genesis, self._links.connections
        fingerprints = summary.fingerprints if progress.committed else genesis.fingerprints
        initial = joining.fetching.initial == genesis.fingerprints[ctx.run.stage]
        points = summary.points(progress.committed)
        lead.catalog.inherit(points, RestorePoint(0, genesis.fingerprints, 0, initial=initial))
        t, adam_step = progress.committed, summary.adam_step
        usual_s = self._iterations.usual_s(t + 1)
        begun_at = self._begun_at(t + 1, usual_s)
        skips, closed = summary.overflows, progress.closed
        lead.take_over(t, progress.base, adam_step, fingerprints, skips, closed, begun_at, usual_s)
        lead.audits.inherit(self._iterations.auditor.recent.values())
        if self._stop_wanted is not None:
            lead.stop(self._stop_wanted)
        ctx.outbox.note("note", text=f"leads the log from term {ctx.log.leads} on")
        for member in list(ctx.run.membership.members):
            if member in ctx.links.up:
                lead.admission.link_up(member)
            elif member != ctx.me:
                lead.admission.link_down(member, "no link to the new leader", False, ARRIVAL_S)
        connections.hurry()

    def _begun_at(self, t: int, usual_s: float) -> float:
        """Time (s) since which iteration t is open, as far as this peer knows that from its own work:
        without the time in which nobody led, and for no more than STALL_FACTOR times what one takes (usual_s;
        0: not known), as the leader before may have waited for long."""
        now, current, since = self._ctx.clock.now, self._iterations.current, self._iterations.since
        if current is None or current.t != t:
            return now
        led_s = max(0.0, self.voter.raft.election.heard_at - since)
        return now - min(led_s, STALL_FACTOR * usual_s or led_s)

    def leader_changed(self) -> None:
        """React to a new leader or term: drop reduce attempts of terms above the log's, repeat all reports
        and requests (R9), and dial who is wanted now."""
        ctx, iterations = self._ctx, self._iterations
        iterations.replica.all_reduce.forget_attempts(ctx.log.term)
        iterations.helping.forget_attempts(ctx.log.term)
        iterations.report_again()
        self._snapshots.report()
        if ctx.log.leader in ctx.links.up:
            self._joining.leader_up()
        self._links.connections.connect()

    def end_run(self, reason: str) -> bool:
        """End the run after the open step (at once, if nothing has begun) if this peer leads it as its
        founder; returns True then. Else False, and nothing ends now; `reason` is remembered, and the run ends
        so if this process, founder or not, comes to lead it."""
        self._stop_wanted = reason
        lead = self._coordination.coordinator
        if lead is None or not self.founder:
            return False
        lead.stop(reason)
        if lead.round is None and self._iterations.replica.t < 0:
            self._exit.stop(reason, ok=True)
        return True

    def welcome(self, member: Member) -> None:
        """Send an admitted peer the run's members, log position and state, and its certificate; nothing
        unless this peer leads, or for itself. A second one does no harm."""
        lead, ctx, run = self._coordination.coordinator, self._ctx, self._ctx.run
        if lead is None or member.id == ctx.me:
            return
        position, delayed = self._progress.position, run.settings.delay.has(lead.t + 1)
        former = self._progress.base_of(lead.t + 1, True) if delayed else ""
        welcome = Welcome(
            member.stage,
            tuple(run.membership.members.values()),
            dict(run.membership.active_from),
            run.membership.number,
            position.index,
            position.previous,
            f"{lead.base} {former}" if former else lead.base,
            lead.t,
            lead.tip.adam_step,
            lead.log.raft.term,
            lead.released.fingerprint_at(lead.t, member.stage) or "",
            self._certify(member, self._links.credentials.get(member.id)),
            ctx.log.voters,
            self._summary.overflows.skips,
            run.course.steps,
            run.course.held,
            dict(run.revoked.reasons),
            dict(run.carriers),
            run.plan(lead.t + 1),
        )
        ctx.outbox.send(member.id, welcome)

    # --- the founder's return ------------------------------------------------------------------

    def comes_back(self, take_up: Callable[[Sequence[bytes]], None], on_disk: int) -> None:
        """Act as the founder's next process in a run with other voters.

        take_up: resumes the run from the committed lines if this process is elected. on_disk: number of log
        lines that the last process had; it noted all of them in the event log but perhaps the last.
        """
        self._take_up = take_up
        self._on_disk = max(0, on_disk - 1)

    def missed(self, line: bytes) -> None:
        """Write a committed line to the event log that the returning founder has missed, up to its own
        admission; nothing at any other peer. If this process is elected instead, the first line of its own
        term proves that it has the whole committed log: it resumes the run."""
        if self._take_up is None or self._caught_up:
            return
        ctx, joining, done = self._ctx, self._joining, self._entry.done
        entry = decode_entry(line)
        follows = done and entry.index >= joining.begins_at[0]
        if follows and ctx.admitted():
            self._caught_up, self._before = True, []
            return
        if follows or not done:
            self._before.append(line)
        if follows:
            return  # the founder has not admitted itself yet, and may have to begin again
        if entry.index >= self._on_disk:
            note_record(ctx.outbox, ctx.run, entry.record, entry_hash(line), self._plan)
        if isinstance(entry.record, Commit | Rollback):
            self._plan = entry.record.slots or ()
        if ctx.log.leads and entry.term == ctx.log.leads and not done:
            self._take_up(self._before)
            joining.admit_self()
            ctx.outbox.note("note", text=f"takes the run up again, and leads it from term {ctx.log.leads} on")
