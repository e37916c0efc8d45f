"""Handlers of messages, one for each handler name in the message table (`HANDLERS`, at the end).

A handler gets a message that passed the checks of `fencing`, and may still return a reason to refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.protocol import messages as msg
from anabranch.protocol.audit.kept_work import RECEIPT
from anabranch.protocol.context.rate_limits_and_bans import LINES, LOG_BYTES
from anabranch.protocol.coordinator.coordinator import Coordinator
from anabranch.protocol.fleet.operator_control import REVOKE
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.observers.event_log_server import EventLogServer
from anabranch.protocol.observers.report_budget import ReportBudget
from anabranch.protocol.observers.report_buffer import ReportBuffer
from anabranch.protocol.peer.catch_up import Downloads
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.join import JoinProcess
from anabranch.protocol.peer.link_events import LinkEvents
from anabranch.protocol.peer.log_sources import LogSources
from anabranch.protocol.peer.reactions import LogReactions
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.peer.takeover import Leadership
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.placement.rates import first_passes
from anabranch.protocol.reduce.all_reduce import AllReduce
from anabranch.protocol.reduce.helper import ReduceHelper


@dataclass(eq=False)
class MessageHandlers:
    """Parts of one peer that messages are handed to, and the handlers that do so.

    `not_leading` handles messages to the leader while this peer does not lead.
    """

    shared: SharedParts
    iterations: Iterations
    links: LinkEvents
    joining: JoinProcess
    leadership: Leadership
    sources: LogSources
    reactions: LogReactions
    downloads: Downloads
    event_log_server: EventLogServer
    report_buffer: ReportBuffer
    report_budget: ReportBudget = field(default_factory=ReportBudget)
    share: float = 0.0
    """Memory of the payload of the message being handled, if it is fenced by iteration, as in `Received`; the
    message gate sets it."""

    def __post_init__(self) -> None:
        self._ctx = self.shared.ctx

    # --- open iteration: microbatches and reduces ------------------------------------------------

    def _open(self, message: msg.FencedMessage) -> Iteration:
        """Open iteration that a message is about. The message gate lets no other message pass, so there is
        one."""
        iteration = self.iterations.at(message.fence.t)
        assert iteration is not None
        return iteration

    def _reduce(self, stage: int) -> AllReduce | ReduceHelper:
        """Part of this peer that takes part in the reduce of `stage`: as a replica, or as a helper."""
        iterations = self.iterations
        return iterations.replica.all_reduce if stage == self._ctx.run.stage else iterations.helping

    def _forward(self, peer: str, message: msg.Forward, payload: Payload | None) -> str | None:
        iteration = self._open(message)
        refusal = iteration.on_forward(peer, message, payload)
        if refusal is not None:
            iteration.replies.lack(peer, message.index, message.way, refused=True)
        return refusal

    def _got(self, peer: str, message: msg.Got, payload: Payload | None) -> None:
        run = self._ctx.run
        if run.membership.stage_of(peer) == run.stage and run.settings.rebalance:
            self.iterations.replica.all_reduce.on_got(peer)
        else:
            self._open(message).on_got(peer, message)

    def _missing(self, peer: str, message: msg.Missing, payload: Payload | None) -> None:
        """Help to find units whose claims the leader lacks; `message.units` has them by stage. This peer asks
        the peers to which it sent those microbatches whether they have them, and sends the microbatches again
        if not (R6); credits that this peer granted, and that others were asked to return and keep unused, go
        to peers that wait for some. From now on claims name who has the microbatches that were sent on. If no
        units are lacking, this peer repeats its own reports, as the leader may lack one."""
        iteration, following = self._open(message), self._ctx.run.next_stage()
        iteration.claims.names_holders = True
        repairs = iteration.repairs
        there = list(message.units.get(following, ()))
        if following == 0:
            there = [unit // 2 for unit in there if unit % 2 == 0]
        iteration.sender.reported(message.units)
        repairs.recheck(there)
        if following and not iteration.source.slots:
            repairs.recheck_further(self._beyond(following, message.units))
        if self._ctx.run.stage == 0:
            repairs.recheck([unit // 2 for unit in message.units.get(0, ()) if unit % 2 == 1])
        if message.units:
            iteration.credits.lacking()
        else:
            self.iterations.repeat()

    def _beyond(self, following: int, lacking: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Microbatches that lack at stages beyond the next one, `following`, and not there (microbatch ->
        number of stages between). lacking: units by stage; heads are at the end."""
        stages, found = self._ctx.run.settings.stages, dict[int, int]()
        for stage in range(following + 1, stages + 1):
            for index in lacking.get(stage, ()):
                found.setdefault(index, stage - following)
        for unit in lacking.get(0, ()):
            if unit % 2 == 0:
                found.setdefault(unit // 2, stages + 1 - following)
        return {index: n for index, n in found.items() if index not in lacking.get(following, ())}

    # --- messages from the log's leader ----------------------------------------------------------

    def _announce(self, peer: str, message: msg.Announce, payload: Payload | None) -> None:
        for line in message.entries:
            self.reactions.follow(line, peer)
            if self.reactions.sources.lost:
                return

    def _keep(self, peer: str, message: msg.Keep, payload: Payload | None) -> str | None:
        if not self.shared.entry.done:
            return None  # meant for this peer's former process
        return self.shared.snapshots.on_keep(message)

    def _complete(self, peer: str, message: msg.Complete, payload: Payload | None) -> None:
        if message.t <= self.shared.progress.committed:  # a later one may have been rolled back
            self.shared.snapshots.complete(message.t)

    def _spared(self, peer: str, message: msg.Spared, payload: Payload | None) -> str | None:
        """Handle the leader's list of standbys: store it, update the flow's places, and send what can be sent
        now. Returns why it is refused, or None."""
        refusal = self._ctx.standby_view.announced(self._ctx.log.term, message)
        if refusal is None:
            self.shared.router.members_changed()
            self.iterations.pump()
        return refusal

    # --- messages to the log's leader ------------------------------------------------------------

    @property
    def _lead(self) -> Coordinator:
        lead = self.shared.coordination.coordinator
        assert lead is not None
        return lead

    def not_leading(self, peer: str, message: msg.Message, payload: Payload | None) -> str | None:
        """Handle a message to the leader while this peer has no coordinator; return the reason if it is
        refused.

        A joiner or carrier is told who leads, and asks there. A founder that is back takes reports from
        voters, and the leader's answers to its requests. Other messages are ignored if this peer was elected
        or is one of several voters, else refused.
        """
        log = self._ctx.log
        if isinstance(message, msg.Report) and self.leadership.founder and log.keeps_log(peer):
            return self._report(peer, message, payload)
        if isinstance(message, msg.Enquire | msg.JoinRequest | msg.Carry):
            self.sources.redirect(peer)
            return None
        if isinstance(message, msg.Wish) and message.done:
            if peer != log.leader:
                return "I am not the leader"
            self.shared.founder_requests.answered(message)
            return None
        if self.leadership.voter.minds or (log.keeps_log(self._ctx.me) and len(log.voters) > 1):
            return None
        return "I am not the leader"

    def _measured(self, peer: str, message: msg.Measured, payload: Payload | None) -> None:
        if peer in self._ctx.run.membership.members:
            self._lead.admission.ways.told(peer, message.links)
            self._lead.standby_policy.told(peer)

    def _enquire(self, peer: str, message: msg.Enquire, payload: Payload | None) -> None:
        self._ctx.outbox.send(peer, msg.About(self.shared.entry.genesis, self.sources.doors()))
        self._lead.admission.dial_backs.ask(peer, message.address)

    def _ready(self, peer: str, message: msg.Ready, payload: Payload | None) -> str | None:
        lead = self._lead
        if peer not in self._ctx.run.membership.members:
            if lead.log.knows_all:  # else it may be a member; it repeats the message
                reason = "removed from the run while it was not heard"
                self._ctx.outbox.send(peer, msg.Refused(reason, again=True))
            return None
        lead.initial_assignment.told(peer, message.links)
        if peer in self._ctx.run.membership.active_from:
            if message.t and not message.proof:  # else it is a joiner's, from before the log let it serve
                self._confirm(peer, message)
            return None
        lead.vouchers.on_ready(peer)
        if lead.vouchers.too_old(peer, message.t):
            what = f"the state it fetched (after iteration {message.t})"
            lead.admission.remove(peer, f"{what} is older than any from which it could follow the run")
            return None
        return self._judge_ready(peer, message)

    def _confirm(self, peer: str, message: msg.Ready) -> None:
        """Tell a replica that serves, and fetched a state as it had been away, the agreed fingerprint of that
        state; "" if none is agreed yet. Nothing to a peer of another stage."""
        if self._ctx.run.membership.stage_of(peer) == message.stage:
            agreed = self._lead.released.fingerprint_at(message.t, message.stage) or ""
            self._ctx.outbox.send(peer, msg.Holders(message.stage, message.t, agreed, ()))

    def _judge_ready(self, peer: str, message: msg.Ready) -> str | None:
        """Compare a joiner's state and proof with those of the run, and hand both answers to the admission,
        which may let it serve, tell it or remove it; returns why the report is refused, or None. Where the
        only replica that could vouch may hold the step up, the fingerprint is enough. A difference says
        nothing if the joiner may not have followed the log so far when it reported."""
        lead = self._lead
        fingerprint = lead.released.fingerprint_at(message.t, message.stage)
        proven = lead.vouchers.proves(message.t, message.stage, message.proof)
        if lead.stage_recovery.witnesses.doubts(message.stage):
            proven = True
        if proven:
            lead.vouchers.shown(peer)
        reported = lead.released.applied.get(message.stage, {}).values()
        own = self._ctx.run.membership.stage_of(peer) == message.stage
        if own and message.t == lead.t and message.fingerprint in reported:
            lead.stage_recovery.states.on_ready(peer, message.t)
        if lead.vouchers.outdated(peer, message.t):
            fingerprint = fingerprint if message.fingerprint == fingerprint else None
            proven = proven or None
        return lead.admission.on_ready(peer, message, fingerprint, proven)

    def _vouch(self, peer: str, message: msg.Vouch, payload: Payload | None) -> str | None:
        refusal = self._lead.vouchers.on_vouch(peer, message)
        for joiner, ready in self._lead.admission.unproven(message.fence.t, message.stage):
            self._judge_ready(joiner, ready)
        return refusal

    def _report(self, peer: str, message: msg.Report, payload: Payload | None) -> str | None:
        """Take lines for the run's event log: the founder has them written, any other peer keeps them in
        memory for it (`ReportBuffer`). Returns the reason if they are refused: too many lines, or lines of a
        third peer. Too many bytes are dropped, and their sender is not charged.

        Only members and voters may report; lines of other peers are dropped. From voters the founder also
        accepts lines that other peers reported to them meanwhile.
        """
        ctx, founder = self._ctx, self.leadership.founder
        if not ctx.rate_limits.charge(peer, LINES, ctx.clock.now, len(message.events)):
            return "too many lines for the event log"
        if message.origin and not (founder and ctx.log.keeps_log(peer)):
            return "lines of another peer"
        if peer not in ctx.run.membership.members and not ctx.log.keeps_log(peer):
            return None
        size_bytes, ticket = sum(map(len, message.events)), self._ticket_of(peer)
        if not self.report_budget.take(peer, ticket, size_bytes, ctx.clock.now, bool(message.origin)):
            # Others with its ticket may have used these budgets up: it is not charged.
            ctx.outbox.refuse(peer, "Report", "too many bytes for the event log")
            return None
        if founder:
            ctx.outbox.emit(ev.Reported(message.origin or peer, message.events))
        else:
            self.report_buffer.keep(peer, message.events)
        return None

    def _ticket_of(self, peer: str) -> str:
        """Key of the ticket with which a peer came; "" if it is unknown, or the owner's own peer."""
        shown = self.links.credentials.get(peer)
        return shown.ticket if shown is not None else ""

    def _wish(self, peer: str, message: msg.Wish, payload: Payload | None) -> str | None:
        if message.done and peer == self._ctx.me:
            self.shared.founder_requests.answered(message)
        elif peer != self._ctx.run.founder:
            return "only the run's owner decides that"
        elif message.action == REVOKE:
            self._lead.revocations.ask(message)
        else:
            self._lead.wish = message
        return None

    # --- heartbeats ----------------------------------------------------------------------------

    def _ping(self, peer: str, message: msg.Ping, payload: Payload | None) -> str | None:
        costs = self._ctx.costs
        measured_bps = costs.of(peer).link.out_bps(costs.activation_bytes) or 0.0
        pong = msg.Pong(message.number, *self._pass_times(), measured_bps, self.shared.router.price())
        self._ctx.outbox.send(peer, pong)
        if (lead := self.shared.coordination.coordinator) is not None:
            lead.vouchers.followed(peer, message.next_index)
        return self.sources.heard(peer, message)

    def _pass_times(self) -> tuple[float, float]:
        """Forward and backward seconds of a microbatch at this peer: measured in this run, or, before both
        are known, estimated from the block that was measured when this machine joined."""
        costs, run = self._ctx.costs, self._ctx.run
        measured, member = (costs.forward_s, costs.backward_s), run.membership.members.get(self._ctx.me)
        if all(measured) or member is None:
            return measured
        if run.stage == 0:
            return measured[0] or member.forward_s, measured[1]
        blocks = run.settings.blocks
        return first_passes(member, blocks[run.stage - 1] if blocks else 1)

    def _pong(self, peer: str, message: msg.Pong, payload: Payload | None) -> None:
        costs, trip_s = self._ctx.costs, self.links.connections.pong(message)
        costs.told(peer, message.forward_s, message.backward_s, message.bandwidth_bps, message.price)
        if trip_s is not None:
            costs.answered(peer, trip_s, self._ctx.clock.now)
            if reason := self.links.connections.slow_carrier(peer, trip_s):
                self.links.hang_up(peer, reason)
        self.shared.router.measured(peer)

    # --- log and state -------------------------------------------------------------------------

    def _fetch_log(self, peer: str, message: msg.FetchLog, payload: Payload | None) -> None:
        """Send log lines, within the asker's budget of their bytes; beyond it no answer, as it asks again."""
        ctx, lines = self._ctx, self.leadership.voter.entries_from(message.start)
        if lines and ctx.rate_limits.charge(peer, LOG_BYTES, ctx.clock.now, sum(map(len, lines))):
            ctx.outbox.send(peer, msg.Announce(lines))

    def _elsewhere(self, peer: str, message: msg.Elsewhere, payload: Payload | None) -> str | None:
        if peer != self._ctx.log.leader:
            return "I am not the leader"
        self.joining.on_elsewhere(message)
        return None

    def _fetch_work(self, peer: str, message: msg.FetchWork, payload: Payload | None) -> str | None:
        lead, known = self.shared.coordination.coordinator, b""
        if message.item == RECEIPT and lead is not None:
            known = lead.audits.receipt_of(message.t, message.subject)
        return self.iterations.kept_work.on_fetch(peer, message, known)

    def _fetch_gradient(self, peer: str, message: msg.FetchGradient, payload: Payload | None) -> str | None:
        replica = self.iterations.replica
        if self._ctx.run.membership.stage_of(peer) != message.stage:
            return "the gradient of another stage"
        if replica.t < 0:
            self._ctx.outbox.send(peer, msg.Gradient(message.t, message.stage))
        elif message.stage == self._ctx.run.stage:
            replica.on_fetch_gradient(peer, message)
        else:
            return f"stage {message.stage} is not mine"
        return None

    def _gradient(self, peer: str, message: msg.Gradient, payload: Payload | None) -> None:
        self.iterations.replica.lacking.received(peer, message, payload)

    # --- observers -----------------------------------------------------------------------------

    def _watch(self, peer: str, message: msg.Watch, payload: Payload | None) -> str | None:
        """Handle an observer's request for one piece of the event log, from the position that it names: the
        driver reads the piece, and it is sent later. Returns the reason if the request is refused: this peer
        is not the founder, the observer is a member, or its last request is not answered yet. None also if
        there is no seat for it, and it is disconnected, or if the allowance of bytes is used up, and the
        answer is empty (`EventLogServer.asked`). A peer with any ticket may read the log: one that was taken
        for a joiner until then counts as linked no more."""
        if not self.leadership.founder:
            return "the run's events are with the data node that founded it"
        refusal = self.event_log_server.asked(peer, message, self._ticket_of(peer))
        if peer in self.event_log_server and peer in self._ctx.links.up:
            self.links.connections.link_down(peer)
        return refusal


#: Handler of a message: (parts of the receiving peer, sender, message, payload) to the reason why it is
#: refused, or None.
Handler = Callable[[MessageHandlers, str, Any, Payload | None], str | None]
#: Handlers by their names in the message table; one table for all peers of a process.
HANDLERS: dict[str, Handler] = {
    # open iteration: microbatches and reduces
    "slots": lambda on, peer, message, _: on._open(message).sender.on_slots(peer, message),
    "ask": lambda on, peer, message, _: on._open(message).on_ask(peer, message),
    "return_slots": lambda on, peer, message, _: on._open(message).credits.on_return(peer, message),
    "forward": MessageHandlers._forward,
    "backward": lambda on, peer, message, payload: on._open(message).on_backward(peer, message, payload),
    "inner": lambda on, peer, message, payload: on._open(message).islands.on_tensor(peer, message, payload),
    "want": lambda on, peer, message, _: on._open(message).on_want(peer, message),
    "have": lambda on, peer, message, _: on._open(message).repairs.on_have(peer, message.index, message.way),
    "lack": lambda on, peer, message, _: on._open(message).repairs.on_lack(
        peer, message.index, message.refused, message.way
    ),
    "call_back": lambda on, peer, message, _: on._open(message).on_call_back(peer, message),
    "got": MessageHandlers._got,
    "attempt": lambda on, peer, message, _: on._reduce(message.stage).on_attempt(message),
    "reduce_part": lambda on, peer, message, payload: on._reduce(message.stage).on_part(
        peer, message, payload, on.share
    ),
    "missing": MessageHandlers._missing,
    # messages from the log's leader
    "announce": MessageHandlers._announce,
    "release": lambda on, _, message, __: on.iterations.released(message.fence),
    "welcome": lambda on, _, message, __: on.joining.on_welcome(message),
    "reached": lambda on, _, message, __: on.joining.on_reached(message),
    "about": lambda on, _, message, __: on.joining.on_about(message),
    "refused": lambda on, _, message, __: on.shared.exit.stop(message.reason, ok=False, again=message.again),
    "keep": MessageHandlers._keep,
    "complete": MessageHandlers._complete,
    "holders": lambda on, _, message, __: on.joining.fetching.on_holders(message),
    "spared": MessageHandlers._spared,
    "audit": lambda on, _, message, __: on.iterations.auditor.on_audit(message),
    # messages to the log's leader
    "claim": lambda on, peer, message, _: on._lead.reports.on_claim(peer, message),
    "digests": lambda on, peer, message, _: on._lead.reports.on_digests(peer, message),
    "prepared": lambda on, peer, message, _: on._lead.reports.on_prepared(peer, message),
    "applied": lambda on, peer, message, _: on._lead.on_applied(peer, message),
    "measured": MessageHandlers._measured,
    "overflow": lambda on, peer, message, _: on._lead.reports.on_overflow(peer, message),
    "enquire": MessageHandlers._enquire,
    "carry": lambda on, peer, message, _: on._lead.carriers.offered(peer, message.address),
    "join_request": lambda on, peer, message, _: on._lead.admission.on_join(peer, message),
    "ready": MessageHandlers._ready,
    "vouch": MessageHandlers._vouch,
    "leave": lambda on, peer, message, _: on._lead.admission.leave(peer, message.reason),
    "report": MessageHandlers._report,
    "wish": MessageHandlers._wish,
    "audited": lambda on, peer, message, _: on._lead.audits.on_audited(peer, message),
    "holds": lambda on, peer, message, _: on._lead.catalog.on_holds(peer, message),
    "spoilt": lambda on, peer, message, _: on._lead.catalog.on_spoilt(peer, message),
    "who_has": lambda on, peer, message, _: on._lead.catalog.on_who_has(peer, message, on._lead.t),
    "behind": lambda on, peer, message, _: on._lead.stage_recovery.states.on_behind(peer, message),
    # messages that any peer may send
    "ping": MessageHandlers._ping,
    "pong": MessageHandlers._pong,
    "indirect_probe": lambda on, peer, message, _: on.links.connections.indirect_probes.received(
        peer, message
    ),
    "route": lambda on, peer, message, _: on.shared.router.received(peer, message),
    "raft": lambda on, peer, message, _: on.leadership.voter.receive(peer, message),
    "fetch_log": MessageHandlers._fetch_log,
    "elsewhere": MessageHandlers._elsewhere,
    "fetch_gradient": MessageHandlers._fetch_gradient,
    "gradient": MessageHandlers._gradient,
    "fetch_state": lambda on, peer, message, _: on.shared.states.on_fetch_state(peer, message),
    "fetch_piece": lambda on, peer, message, _: on.shared.states.on_fetch_piece(peer, message),
    "state_offer": lambda on, peer, message, payload: on.downloads.on_offer(peer, message, payload),
    "piece": lambda on, peer, message, payload: on.downloads.on_piece(peer, message, payload),
    "fetch_work": MessageHandlers._fetch_work,
    "work": lambda on, peer, message, payload: on.iterations.auditor.on_work(peer, message, payload),
    "watch": MessageHandlers._watch,
    "shown": lambda on, peer, message, _: "I am not the leader",
}
