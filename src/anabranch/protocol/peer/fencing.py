"""Checks of each message before its handler runs (budget, fence, sender, by its row of the message table),
and bans of peers that exceed their budget or their allowance of refused messages.

A message about an iteration that is not open yet is kept until this peer opens the iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.protocol import messages as msg
from anabranch.protocol.context.rate_limits_and_bans import GARBLED, REFUSALS
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages.table import (
    ALLOWANCE_OF,
    PAST,
    PER_CONNECTION,
    PROBES,
    ROW_OF,
    ROWS,
    UNASKED,
    FenceCheck,
    Rate,
    Row,
    Sender,
)
from anabranch.protocol.peer.handlers import HANDLERS, MessageHandlers
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.link_events import LinkEvents
from anabranch.protocol.peer.log_sources import LogSources
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.routing.bandwidth_probes import trial_bytes

#: Handler of each message type.
HANDLER_OF = {row.type: HANDLERS[row.handler] for row in ROWS}

_ONLY_LEADER = "only the leader says that"


@dataclass(eq=False)
class MessageGate:
    """Gate between links and message handlers: checks each message by its row of the message table, then
    hands it to its handler, keeps it for a later iteration, drops it or refuses it."""

    shared: SharedParts
    iterations: Iterations
    links: LinkEvents
    sources: LogSources
    handlers: MessageHandlers

    def __post_init__(self) -> None:
        self._ctx, self._progress, self.early = self.shared.ctx, self.shared.progress, self.shared.early

    def receive(
        self,
        peer: str,
        message: msg.Message,
        payload: Payload | None,
        share: float = 0.0,
        size_bytes: int = 0,
    ) -> None:
        """Charge a message to its sender's budget; then handle it, keep it for later, or refuse it. A sender
        beyond its budget is banned, but for costly questions, which are refused. Messages of this peer to
        itself are not charged. share, size_bytes: of the payload (`Received`)."""
        ctx, kind = self._ctx, type(message)
        if peer == ctx.me:
            self._check(peer, message, payload, share)
        elif ctx.rate_limits.charge(peer, ALLOWANCE_OF[kind], ctx.clock.now):
            if self._may_send(peer, kind, payload, size_bytes):
                self._check(peer, message, payload, share)
            else:
                self._flooded(peer, message, "too many payloads that nobody asked for")
        elif ROW_OF[kind].rate is Rate.COSTLY:
            self._refuse(peer, message, "asked too often")
        else:
            self._flooded(peer, message, "too many messages of this kind")

    def _may_send(
        self, peer: str, kind: type[msg.Message], payload: Payload | None, size_bytes: int
    ) -> bool:
        """False if a message's payload of `size_bytes` bytes is beyond its sender's budget of probes, or of
        payloads that answer no request (the handler drops those within it). An answer without a payload
        counts as one."""
        ctx = self._ctx
        if (kind in msg.ASKED_FOR and ctx.rate_limits.answered(peer, kind)) or payload is None:
            return True
        if kind is msg.Burst:
            trials = size_bytes / max(1, trial_bytes(ctx.run.settings))
            return ctx.rate_limits.charge(peer, PROBES, ctx.clock.now, max(1.0, trials))
        return kind not in msg.ASKED_FOR or ctx.rate_limits.charge(peer, UNASKED, ctx.clock.now)

    def _check(self, peer: str, message: msg.Message, payload: Payload | None, share: float) -> None:
        """Pass a message that is within its budget to the handler of its type if its sender may send it and
        its fence is right; keep one about a later iteration, drop one about a past one, refuse any other."""
        kind = type(message)
        row = ROW_OF[kind]
        refusal: str | None
        if row.sender is not Sender.OBSERVER and self.links.observes(peer):
            refusal = "it may look on, and nothing else"
        elif row.fence is FenceCheck.ITERATION:
            assert isinstance(message, msg.FencedMessage)
            refusal = self.fenced(peer, message, payload, share)
        elif row.sender is Sender.LEADER and not self._from_leader(peer, message):
            refusal = _ONLY_LEADER
        elif row.to_leader and self.shared.coordination.coordinator is None:
            refusal = self.handlers.not_leading(peer, message, payload)
        elif row.fence is FenceCheck.INCARNATION and (former := self._former_process(peer, message)):
            refusal = former
        else:
            refusal = HANDLER_OF[kind](self.handlers, peer, message, payload)
        if refusal is not None:
            self._refuse(peer, message, refusal)

    def _from_leader(self, peer: str, message: msg.Message) -> bool:
        """True if the leader sent `message`. Log lines count as the leader's, too, if they come from a peer
        whose log lines this peer accepts (`LogSources.believes`)."""
        if peer == self._ctx.log.leader:
            return True
        return isinstance(message, msg.Announce) and self.sources.believes(peer)

    def _former_process(self, peer: str, message: msg.Message) -> str | None:
        """Reason to refuse a message of another process than the one that the log has as a member; None if it
        is that one's, or the sender is no member."""
        assert isinstance(message, msg.FencedMessage)
        member, incarnation = self._ctx.run.membership.members.get(peer), message.fence.incarnation
        if member is not None and incarnation != member.incarnation:
            return f"incarnation {incarnation}, not {member.incarnation}"
        return None

    # --- refusal -------------------------------------------------------------------------------

    def _refuse(self, peer: str, message: msg.Message, reason: str) -> None:
        """Count a refused message; ban a peer that exceeds its allowance."""
        ctx = self._ctx
        ctx.outbox.refuse(peer, type(message).__name__, reason)
        if peer != ctx.me and not ctx.rate_limits.charge(peer, REFUSALS, ctx.clock.now):
            self._ban(peer, f"too many messages that are refused (the last: {reason})")

    def _flooded(self, peer: str, message: msg.Message, reason: str) -> None:
        """Refuse a message beyond its sender's budget, which no honest peer exceeds, and ban the sender."""
        ctx, name = self._ctx, type(message).__name__
        ctx.rate_limits.over_budget[name] += 1
        ctx.outbox.refuse(peer, name, reason)
        self._ban(peer, f"{reason} (the last: {name})")

    def _ban(self, peer: str, reason: str) -> None:
        """Close the link to a peer, also to an observer, and accept none from it, or from strangers with its
        ticket or address block, for a while; nothing if it is not linked."""
        ctx, links = self._ctx, self.links
        if links.observes(peer) or peer in ctx.links.up:
            ctx.outbox.note("refused", subject=peer, reason=f"the connection: {reason}", count=1)
            ctx.rate_limits.ban(peer, ctx.clock.now)
            links.hang_up(peer, reason)

    def _past(self, peer: str, message: msg.Message) -> None:
        """Charge a dropped message about a past iteration to its sender's budget; ban a sender beyond it."""
        ctx = self._ctx
        if peer != ctx.me and not ctx.rate_limits.charge(peer, PAST, ctx.clock.now):
            self._flooded(peer, message, "too many messages about past iterations")

    def garbled(self, event: ev.Garbled) -> None:
        """Count undecodable bytes of a peer, whose link the driver closed, in its refused messages; ban a
        peer that repeats it. The link counts as lost."""
        ctx, peer = self._ctx, event.peer
        ctx.outbox.refuse(peer, "bytes", event.reason)
        if not ctx.rate_limits.charge(peer, REFUSALS, ctx.clock.now, GARBLED):
            ctx.rate_limits.ban(peer, ctx.clock.now)
        self.links.link_down(peer, event.reason)

    # --- fence ---------------------------------------------------------------------------------

    def fenced(
        self, peer: str, message: msg.FencedMessage, payload: Payload | None, share: float = 0.0
    ) -> str | None:
        """Check the fence of a message about an iteration; return the reason if it is refused, else None.

        The message is handled if it is about the open iteration and its sender serves there, kept if that may
        become so with log entries to come, and dropped if it is about a past iteration. One on an unknown
        base is kept, and counts as refused, or as one about a past iteration, all the same. share: as in
        `receive`.
        """
        ctx, fence, row = self._ctx, message.fence, ROW_OF[type(message)]
        member, current = ctx.run.membership.members.get(peer), self.iterations.current
        iteration = self.iterations.at(fence.t)
        if fence.epoch != ctx.run.settings.epoch:
            return f"epoch {fence.epoch}, not {ctx.run.settings.epoch}"
        if member is not None and fence.incarnation != member.incarnation:
            if member.incarnation < fence.incarnation == ctx.links.incarnations.get(peer):
                return self._keep(peer, message, payload, share)  # the log does not have the new process yet
            return f"incarnation {fence.incarnation}, not {member.incarnation}"
        if current is None or (iteration is None and fence.t > current.t):
            if fence.t > self.iterations.replica.t:
                return self._keep(peer, message, payload, share)
            self._past(peer, message)
            return None
        if fence.base not in self._progress.bases:
            # The message may follow a rollback whose record has not arrived yet: it is handled then. It
            # counts as refused all the same, as a guest may name bases that never come.
            self._keep(peer, message, payload, share)
        if iteration is None:
            self._past(peer, message)
            return None
        if fence.base != iteration.base:
            return f"iteration {fence.t} on another base"
        if member is None:  # a new member may send before its admission arrives here
            return self._keep(peer, message, payload, share) if peer in ctx.links.up else "not a member"
        if row.sender is not Sender.LEADER:
            if fence.stage != member.stage:
                if ctx.run.membership.gone.get(peer, (-1, ""))[0] == fence.stage:
                    self._past(peer, message)  # sent while `peer` served its former stage
                    return None
                return self._keep(peer, message, payload, share)  # the log does not have the move yet
            if not ctx.run.membership.is_live(peer, member.stage, iteration.t):
                return self._keep(peer, message, payload, share)  # the log may soon let `peer` serve
        if iteration is not current and _waits(message):
            return self._keep(peer, message, payload, share)
        refusal = self._wrong_sender(row, peer, member.stage, message)
        self.handlers.share = share
        return refusal or HANDLER_OF[row.type](self.handlers, peer, message, payload)

    def _wrong_sender(self, row: Row, peer: str, stage: int, message: msg.Message) -> str | None:
        """Reason why a member of `stage` is not the sender that the message table (`row`) asks for in
        messages about the open iteration, for example one of an adjacent stage; None if it is."""
        run, sender = self._ctx.run, row.sender
        if sender is Sender.NEXT_STAGE:
            return None if stage == run.next_stage() else f"stage {stage} does not follow mine"
        if sender is Sender.PREVIOUS_STAGE:
            return None if stage == run.previous_stage() else f"stage {stage} does not precede mine"
        beside = stage == run.previous_stage() or stage == run.next_stage()
        if sender is Sender.ADJACENT_STAGE:
            measured = stage == run.stage and run.settings.rebalance  # so are links within the stage
            return None if beside or measured else f"stage {stage} is not beside mine"
        if sender is Sender.REDUCE_GROUP:
            assert isinstance(message, msg.ReducePart | msg.ReducedPart)
            if stage == run.stage:
                reduced = stage
            else:  # a member asks its helper, or a helper answers
                reduced = stage if isinstance(message, msg.ReducePart) else run.stage
            leads = self._ctx.log.leader in (peer, self._ctx.me)  # it may sum the parts of any stage
            fits = (beside or leads or stage == run.stage) and message.stage == reduced
            return None if fits else f"stage {stage} is not mine"
        return None if peer == self._ctx.log.leader else _ONLY_LEADER

    # --- early messages ------------------------------------------------------------------------

    def _keep(
        self, peer: str, message: msg.FencedMessage, payload: Payload | None, share: float
    ) -> str | None:
        known = max(self.iterations.replica.t, self._progress.committed)
        member = peer == self._ctx.me or peer in self._ctx.run.membership.members
        return self.early.keep(peer, message, payload, max(0, message.fence.t - known), member, share)

    def take_early(self, iteration: Iteration) -> None:
        """Receive the kept messages about open iterations, the first of which is `iteration`; those about
        later ones, or of unknown base, stay; others are dropped."""
        ctx = self._ctx
        for peer, message, payload, share in self.early.take():
            fence = message.fence
            linked = peer in ctx.links.up or peer == ctx.me
            if not linked and type(message) in PER_CONNECTION:
                continue  # the link was closed because of an earlier message
            open_one = self.iterations.at(fence.t) or iteration
            if fence.t == open_one.t and fence.base == open_one.base:
                self._check(peer, message, payload, share)
            elif fence.t > iteration.t or fence.base not in self._progress.bases:
                self._keep(peer, message, payload, share)


def _waits(message: msg.FencedMessage) -> bool:
    """True for messages of a delayed iteration that wait for the step before: those of its reduce."""
    return isinstance(message, msg.Attempt | msg.ReducePart | msg.ReducedPart)
