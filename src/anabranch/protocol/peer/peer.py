"""Composer of one peer: builds its parts in layer order and passes events, link changes and time to them.

`handle(event, now) -> effects` and `deadline()`, the time of the next wake-up, are the whole interface (the
style of h11 and aioquic). The peer does no I/O and owns no clock. `node/` and `sim/` drive the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from anabranch.protocol import messages as msg
from anabranch.protocol.consensus.leader_view import LeaderView
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.context.clock import OwnTime, Timer
from anabranch.protocol.context.early_buffer import EarlyBuffer
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.coordinator import Coordinator
from anabranch.protocol.fleet.operator_control import FounderRequests
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.events import Received, Wake
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.signatures import Signer
from anabranch.protocol.log.records import Member
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.messages.table import HEARTBEATS
from anabranch.protocol.observers.event_log_server import EventLogServer
from anabranch.protocol.observers.report_buffer import ReportBuffer
from anabranch.protocol.peer.catch_up import Downloads
from anabranch.protocol.peer.fencing import MessageGate
from anabranch.protocol.peer.handlers import MessageHandlers
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.join import JoinProcess
from anabranch.protocol.peer.leave import LeaveProcess
from anabranch.protocol.peer.link_events import LinkEvents
from anabranch.protocol.peer.log_sources import LogSources
from anabranch.protocol.peer.reactions import LogReactions
from anabranch.protocol.peer.shared_state import (
    Coordination,
    Entry,
    Exit,
    LogSummary,
    Progress,
    SharedParts,
)
from anabranch.protocol.peer.takeover import Certify, Leadership
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.routing.flow_agent import FlowAgentDriver
from anabranch.protocol.state.download import State
from anabranch.protocol.state.server import StateServer
from anabranch.protocol.state.snapshots import Snapshots

#: Deadline (s) of a peer that plans nothing.
_NEVER: Final = float("inf")
#: Turns in which the consequences of one event are carried out. A choice: three at most were seen in 60 seeds
#: of all profiles and with 100 islands.
MOST_TURNS: Final = 1000


def no_certificate(member: Member, credential: ev.VerifiedCredential | None) -> bytes:
    """Empty certificate, for drivers without connections, which need none."""
    return b""


class Peer:
    """Protocol state machine of one data node or relay."""

    def __init__(
        self,
        me: str,
        incarnation: int,
        leader: str,
        settings: Settings,
        stage_wanted: int = -1,
        kept: SavedVoterState | None = None,
        *,
        founder: bool = False,
        doors: Mapping[str, str] | None = None,
        certify: Certify = no_certificate,
        unheard: Collection[str] = (),
        memberships: Callable[[], Membership] = Membership,
        signer: Signer | None = None,
        address: str = "",
    ) -> None:
        """leader: peer that is taken for the log's leader at first. stage_wanted: -1 for any. kept: the
        voter's state and log on this peer's disk. founder: True if this machine has the run's directory.
        doors: addresses by peer at which to ask for the run. certify: issues a member's certificate. unheard:
        kinds of notes that the driver does not use. memberships: makes an empty membership (simulated peers
        share their data). signer: signatures of this peer, for runs that are audited. address: addresses at
        which it can be dialled, which the leader is to try when it joins ("": it tries none)."""
        self.ctx = make_context(
            me, incarnation, max(0, stage_wanted), settings, leader, unheard, memberships, signer
        )
        self._time = OwnTime(settings.heartbeat_s)
        self._due: float | None = None
        """Time (s) of the next wake-up unless an event comes before it; None: to be worked out."""
        self._build_state_and_work()
        saved = kept or SavedVoterState()
        self._build_run_membership(stage_wanted, doors or {}, saved, founder, certify, address)
        self._register_timers_and_observers()

    # --- composition, lowest layer first -------------------------------------------------------
    # A function of a part that is built later is passed as a lambda.

    def _build_state_and_work(self) -> None:
        ctx, coordination = self.ctx, Coordination(self.ctx)
        states = StateServer(ctx, lambda: self.replica.t, coordination.read_checkpoint)
        following = LeaderView(ctx, lambda: self.leadership.leader_changed())
        shared = self.shared = SharedParts(
            ctx, Progress(), LogSummary(), Exit(ctx), Entry(ctx), coordination, following, EarlyBuffer(),
            FounderRequests(ctx), FlowAgentDriver(ctx), states, Snapshots(ctx, states),
        )  # fmt: skip
        self.progress, self.exit, self.router = shared.progress, shared.exit, shared.router
        self.states, self.snapshots = states, shared.snapshots
        self.event_log_server, self.report_buffer = EventLogServer(ctx), ReportBuffer(ctx)
        self.iterations = Iterations(
            shared,
            on_opened=self._iteration_opened,
            on_applied=lambda: self.joining.report(),
            on_behind=lambda step: self.joining.fetching.fell_behind(step),
            repeat_others=self._repeat_others,
        )
        self.replica, self.helping = self.iterations.replica, self.iterations.helping
        self.links = LinkEvents(shared, self.iterations, self.event_log_server)
        self.connections, self.credentials = self.links.connections, self.links.credentials

    def _build_run_membership(
        self,
        stage_wanted: int,
        doors: Mapping[str, str],
        kept: SavedVoterState,
        founder: bool,
        certify: Certify,
        address: str,
    ) -> None:
        shared, work = self.shared, (self.iterations, self.links)
        self.joining = JoinProcess(shared, self.iterations, stage_wanted, doors, self.links.connect, address)
        self.leadership = Leadership(
            shared, *work, self.joining, kept, founder, certify, on_chosen=lambda line: reactions.chosen(line)
        )
        self.voter = self.leadership.voter
        self.leaving, self.sources = LeaveProcess(shared, self.voter), LogSources(shared, self.voter)
        members = self.joining, self.leadership
        reactions = LogReactions(
            shared, *work, *members, self.leaving, self.sources,
            take_early=lambda iteration: self.reception.take_early(iteration),
        )  # fmt: skip
        self._downloads = Downloads(
            self.ctx,
            self.joining.fetching.downloads,
            shared.snapshots.downloads.values,
            shared.coordination.downloads,
        )
        handlers = MessageHandlers(
            shared, *work, *members, self.sources, reactions, self._downloads, self.event_log_server,
            self.report_buffer,
        )  # fmt: skip
        self.reception = MessageGate(shared, *work, self.sources, handlers)

    def _register_timers_and_observers(self) -> None:
        """Fix the order in which timers and link observers are called; runs are reproducible only with it."""
        self._timers: tuple[Timer, ...] = (
            self.links,
            self.iterations,
            self.router,
            self.replica,
            self.joining,
            self.iterations.auditor,
            self.snapshots,
            self.voter,
            self.leaving,
            self.report_buffer,
            self.shared.coordination,
        )
        self.links.observe(
            up=(
                self.router.link_down,  # its flow link begins anew
                self.shared.coordination.link_up,
                self.joining.link_up,
                self.replica.all_reduce.repeat_parts,
                self.helping.link_up,
                self._downloads.link_up,
                self.iterations.link_up,
            ),
            down=(
                lambda lost: self.router.link_down(lost.peer),
                lambda lost: self.replica.lacking.link_down(lost.peer),
                lambda lost: self.shared.early.link_down(lost.peer),
                self.iterations.link_down,
                self.shared.coordination.link_down,
                lambda lost: self.voter.lost(lost.peer),
                self.joining.link_down,
                self._downloads.link_down,
            ),
        )

    def _iteration_opened(self, iteration: Iteration) -> None:
        self.connections.trim()
        self.connections.seek_direct()
        first = self.iterations.in_flight[0]
        self.shared.early.forget(lambda message: message.fence.t < first.t)
        self.reception.take_early(first)

    def _repeat_others(self) -> bool:
        """Repeat requests of the operator and of a leaving peer to the leader; True if there are any."""
        founder_requests, leaves = self.shared.founder_requests.open, self.leaving.reason is not None
        if founder_requests:
            self.shared.founder_requests.repeat()
        if leaves:
            self.leaving.repeat()
        return founder_requests or leaves

    # --- views for drivers ---------------------------------------------------------------------

    @property
    def lead(self) -> Coordinator | None:
        """Coordinator while this peer leads the log; else None."""
        return self.shared.coordination.coordinator

    @property
    def iteration(self) -> Iteration | None:
        """Open iteration whose step is next; None between two."""
        return self.iterations.current

    @property
    def committed(self) -> int:
        """Last committed iteration."""
        return self.progress.committed

    # --- the interface -------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Handle one event at the driver's time `now` (s); return the effects that the driver has to carry
        out, in order; none once this peer has stopped. Raises RuntimeError for the end of a task that was not
        running, and for a defect (`_settle`)."""
        self.ctx.clock.advance(self._time.take(now))
        if self.exit.stopped:
            return []
        heartbeat, letters = self._is_heartbeat(event), self.router.told
        self._dispatch(event)
        if not (heartbeat and self._only_answered(letters)):
            self._go_on(isinstance(event, Wake))
        return self.ctx.outbox.take_effects()

    def deadline(self) -> float:
        """Earliest time, on the driver's clock (s), at which a timer of this peer is due: the driver sends
        `Wake` then; infinite if none is. To be asked after each event."""
        if self._due is None:
            self._due = self._deadline()
        return self._time.awaits(self._due)

    def _deadline(self) -> float:
        due = _NEVER
        for timer in self._timers:
            at = timer.deadline()
            if at < due:
                due = at
        return due

    def _is_heartbeat(self, event: ev.Event) -> bool:
        """True for a heartbeat or its answer that arrives before any timer of this peer is due. Most of them
        change nothing, so that `handle` can save itself the rest of its work (`_only_answered`)."""
        early = self._due is not None and self.ctx.clock.now < self._due
        return early and isinstance(event, Received) and type(event.message) in HEARTBEATS

    def _only_answered(self, letters: int) -> bool:
        """True if handling an event changed nothing but to send at most one message. letters: count of the
        flow agent's events (`router.told`) before it; if the count grew, the agent may have something to
        do."""
        outbox = self.ctx.outbox
        effects = outbox.effects
        answered = not effects or (len(effects) == 1 and isinstance(effects[0], ev.Send))
        return answered and not outbox.to_self and self.router.told == letters

    def _go_on(self, woken: bool) -> None:
        """Call the timers if one is due, and carry out the consequences. After most events there is neither,
        and the deadline is worked out only once. woken: True after a Wake."""
        self._due = None if woken or self._busy() else self._deadline()
        if self._due is None or self.ctx.clock.now >= self._due:
            self._due = None
            for timer in self._timers:
                timer.tick()
        if self._settle():
            self._due = None

    def _busy(self) -> bool:
        """True if a timer of this peer may have to act before the time that its `deadline` says."""
        always = self.exit.stopped or self.lead is not None or self.leaving.reason is not None
        return always or self.links.silence_due()

    def _settle(self) -> bool:
        """Carry out the consequences of an event: messages to this peer itself, the coordinator's decisions,
        the next task. Return True if there were any, and always while this peer leads. Raises RuntimeError
        for a defect by which there is no end to them: a process that ends is started again, one that goes
        round in a circle is not."""
        ctx, any_at_all = self.ctx, self.lead is not None
        for _ in range(MOST_TURNS):
            while ctx.outbox.to_self:
                any_at_all = True
                message, payload = ctx.outbox.to_self.pop(0)
                self.reception.receive(ctx.me, message, payload)
            any_at_all = ctx.start_next() or any_at_all
            any_at_all = self.iterations.send_changed_claim() or any_at_all
            lead = self.lead
            if lead is not None and not self.exit.stopped:
                lead.released.check_parity()
                lead.consider()
            if not ctx.outbox.to_self:
                return any_at_all
        raise RuntimeError(f"the consequences of one event have no end ({MOST_TURNS} turns)")

    def _dispatch(self, event: ev.Event) -> None:
        if isinstance(event, Received):  # nearly all events
            if self.connections.heard(event.peer):
                self.iterations.pump()
            self.reception.receive(event.peer, event.message, event.payload, event.share, event.size_bytes)
            return
        if isinstance(event, Wake):
            return
        match event:
            case ev.Finished(task, result):
                then = self.ctx.tasks.finish(task)
                if then is not None:
                    then(result)
                self.replica.all_reduce.resume()
                self.ctx.costs.computed(type(task).__name__, result.seconds, self.ctx.clock.now)
            case ev.LinkUp():
                self.links.link_up(event)
            case ev.PathChanged():
                self.links.path_changed(event)
            case ev.Garbled():
                self.reception.garbled(event)
            case ev.LinkDown(peer, reason, refused):
                self.links.link_down(peer, reason, refused)
            case ev.Persisted(number):
                self.voter.persisted(number)
            case ev.CheckpointRead(asked_t, t, stage, fingerprint, pieces, hashes):
                state = State(stage, t, fingerprint, pieces, hashes) if pieces else None
                self.states.checkpoint_read(asked_t, state, stage)
            case ev.CheckpointFailed(t, reason):
                if self.lead is not None:
                    self.lead.checkpoints.failed(t, reason)
            case ev.CheckpointWritten(t, base):
                sound = self.progress.reached(t, base)
                if self.lead is not None:
                    sound = self.lead.checkpoints.written(t, base, sound)
                if sound:
                    self.states.checkpoint_written(t)
            case ev.DialledBack():
                if self.lead is not None:
                    self.lead.admission.dial_backs.answered(event)
            case ev.Described():
                self.joining.described(event)
            case ev.StageBuilt():
                self.joining.built(event)
            case ev.Observed(lines):
                self.ctx.outbox.send(self.ctx.log.leader, msg.Report(lines))
            case ev.Stopping(reason):
                if not self.leadership.end_run(reason):
                    self.leaving.begin(reason)
            case ev.Wished(action, steps, target, reason):
                self.shared.founder_requests.wish(action, steps, target, reason)
                self.iterations.repeat()
            case ev.EventsRead():
                self.event_log_server.read(event)
            case ev.Started():
                self.joining.start()
                self.voter.begin()
                self.joining.doors.update(self.ctx.dialer.fellows)
