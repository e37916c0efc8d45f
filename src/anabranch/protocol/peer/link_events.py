"""Link events of one peer: links that come up or go down, links closed on purpose, silent members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.links import LostLink
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.failure_detection.verdict import Overdue, Verdict
from anabranch.protocol.fleet.walk_ins import shared_ticket
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Refused
from anabranch.protocol.messages.table import Allowance
from anabranch.protocol.observers.event_log_server import ROLE, EventLogServer
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.shared_state import SharedParts

#: Silence (s) taken as normal for a lost link without a history of its gaps: a few heartbeats.
UNKNOWN_PATIENCE_S = 2.0
#: Allowance of lines of the event log about the ways of a peer's links: an honest peer's change a few times.
WAYS = Allowance(16.0, 0.05)
#: Peers whose credentials are remembered, the latest: it bounds memory against made-up peer ids.
CREDENTIALS_KEPT = 4096


class LinkEvents(Timer):
    """Reactions of one peer to link events.

    credentials: peer -> credential that it showed last, in dialling this peer. On a link that this side
    dialled no credential is shown, and the one known before stays.
    """

    def __init__(self, shared: SharedParts, iterations: Iterations, observers: EventLogServer) -> None:
        self._ctx, self._progress, self._coordination = shared.ctx, shared.progress, shared.coordination
        self._router, self._iterations, self._event_log_server = shared.router, iterations, observers
        self.credentials: dict[str, ev.VerifiedCredential] = {}
        self.connections = Connections(
            shared.ctx, hung_up=lambda peer: self.link_down(peer, "not a neighbour")
        )
        self._on_up: Sequence[Callable[[str], object]] = ()
        self._on_down: Sequence[Callable[[LostLink], object]] = ()

    def observe(
        self, up: Sequence[Callable[[str], object]], down: Sequence[Callable[[LostLink], object]]
    ) -> None:
        """Set the functions that are called when a peer's link comes up (`up`) or goes down (`down`), each
        list in its order. They replace those set before."""
        self._on_up, self._on_down = up, down

    def observes(self, peer: str) -> bool:
        """True if `peer` is an observer, which only reads the run's event log: it has asked this peer for the
        log and is still connected, or it showed a ticket to watch last and is no member."""
        if peer in self._ctx.run.membership.members:  # nearly all senders
            return peer in self._event_log_server.asked_at
        return self._only_watches(peer) or peer in self._event_log_server.asked_at

    def _only_watches(self, peer: str) -> bool:
        """True if `peer` showed a ticket to watch last, and is no member: a member's owner may look on with
        the member's key."""
        if peer in self._ctx.run.membership.members:
            return False
        known = self.credentials.get(peer)
        return known is not None and known.role == ROLE

    # --- up and down ---------------------------------------------------------------------------

    def link_up(self, event: ev.LinkUp) -> None:
        ctx, peer = self._ctx, event.peer
        ctx.links.opened(peer, event.incarnation, event.via)
        if event.credential is not None:
            ctx.rate_limits.came_with(peer, shared_ticket(event.credential), event.credential.block)
        if ctx.rate_limits.banned(peer, ctx.clock.now):
            ctx.outbox.emit(ev.HangUp(peer, "too many of its messages were refused; not for a while"))
            self.connections.forget_stranger(peer)
            return
        if self.connections.outdated(peer):
            ctx.outbox.emit(ev.HangUp(peer, "another process of this peer has been admitted since"))
            self.connections.redial(peer)
            return
        if event.credential is not None:
            self.credentials.pop(peer, None)
            self.credentials[peer] = event.credential
            if len(self.credentials) > CREDENTIALS_KEPT:
                del self.credentials[next(iter(self.credentials))]
        if (reason := self.revoked(peer)) is not None:
            self._turn_away(peer, reason)
            self.connections.forget_stranger(peer)
            return
        if self._only_watches(peer):
            self.connections.forget_stranger(peer)
            return
        self.connections.link_up(peer)
        if event.via:
            how = "iroh" if event.via == "iroh" else f"carrier {event.via[:8]}"
            self._note_path(peer, f"is linked through {how}")
        elif self.connections.was_carried(peer):
            self._note_path(peer, "is linked directly")
        for observer in self._on_up:
            observer(peer)

    def path_changed(self, event: ev.PathChanged) -> None:
        """Write to the event log by which path (a relay, or an address) iroh reaches a linked peer. Nothing
        for a peer without a link: it may be a stranger, who needs no ticket for a path."""
        if event.peer in self._ctx.links.up:
            how = "by its relay" if event.path == "relay" else f"directly, at {event.path}"
            self._note_path(event.peer, f"is reached through iroh {how}")

    def _note_path(self, peer: str, text: str) -> None:
        """Write to the event log how `peer` is linked from now on (`text`); nothing beyond the peer's
        allowance (`WAYS`)."""
        if self._ctx.rate_limits.charge(peer, WAYS, self._ctx.clock.now):
            self._ctx.outbox.note("note", text=f"{peer[:8]} {text}")

    def link_down(self, peer: str, reason: str, refused: bool = False) -> None:
        """React to a lost link or a failed dial, and plan to dial `peer` again if it is to be linked.
        refused: True if nothing listens at the address of `peer`. Ignored: a refused dial to a peer that has
        connected meanwhile, and the link of an observer."""
        if refused and peer in self._ctx.links.up:
            return  # `peer` has connected to this peer in the meantime
        if self._event_log_server.gone(peer) or self._only_watches(peer):
            return
        silence = self.connections.link_down(peer)
        patience_s = silence.patience_s if silence else UNKNOWN_PATIENCE_S
        lost = LostLink(peer, reason, refused, patience_s)
        for observer in self._on_down:
            observer(lost)
        self.connections.redial(peer)

    def hang_up(self, peer: str, reason: str) -> None:
        self._ctx.outbox.emit(ev.HangUp(peer, reason))
        self.link_down(peer, reason)

    # --- revocations ---------------------------------------------------------------------------

    def revoked(self, peer: str) -> str | None:
        """Reason why `peer`, or the ticket that it came with (shown, else by the log), is revoked; None: it
        is not."""
        run, shown = self._ctx.run, self.credentials.get(peer)
        member = run.membership.members.get(peer)
        by_log = member.ticket if member is not None else ""
        return run.revoked.refusal(peer, shown.ticket if shown is not None else by_log)

    def close_revoked(self) -> None:
        """Close the links to revoked peers that showed this peer a credential and are no members, and send
        each the reason (`Refused`); members are removed by the log."""
        members = self._ctx.run.membership.members
        for peer in list(self.credentials):
            if peer not in members and (reason := self.revoked(peer)) is not None:
                self._turn_away(peer, reason)
                self.link_down(peer, reason)

    def _turn_away(self, peer: str, reason: str) -> None:
        self._ctx.outbox.emit(ev.Send(peer, Refused(reason)))
        self._ctx.outbox.emit(ev.HangUp(peer, reason))

    # --- links to keep -------------------------------------------------------------------------

    def neighbours_changed(self) -> None:
        """Adapt the routing of microbatches and the links to a change of the serving members."""
        self._router.members_changed()
        if self._ctx.run.near.crowded:
            self.connections.connect()  # links to former processes were closed at once
        else:
            self.connect()

    def connect(self) -> None:
        """Close the links to former processes of members, and dial the neighbours."""
        self.leave_former(list(self._ctx.links.up))
        self.connections.connect()

    def leave_former(self, peers: Iterable[str]) -> None:
        """Close the links to those of `peers` that are former processes of members."""
        linked = self._ctx.links.up
        for peer in [peer for peer in peers if peer in linked and self.connections.outdated(peer)]:
            self.hang_up(peer, "another process of this peer has been admitted")

    # --- time ----------------------------------------------------------------------------------

    def silence_due(self) -> bool:
        """True if a link may have been silent for so long, or loses payloads, that `tick` has to look before
        its deadline."""
        return self.connections.silence_due(self._progress.position.index)

    def deadline(self) -> float:
        return self.connections.deadline()

    def tick(self) -> None:
        for overdue in self.connections.tick(self._progress.position.index):
            self._suspect(overdue)
        for peer, reason in self.connections.leave_lossy():
            self.hang_up(peer, reason)

    def _suspect(self, overdue: Overdue) -> None:
        lead = self._coordination.coordinator
        if self.connections.suspect(overdue):
            for iteration in self._iterations.in_flight:
                iteration.repairs.peer_lost(overdue.peer, str(overdue))
        if overdue.verdict is Verdict.BAD_LINK:
            self.link_down(overdue.peer, self.connections.renew(overdue))
            return
        if lead is not None:
            lead.admission.lost.silent(overdue)
        for peer, reason in self.connections.stranded(overdue.peer):
            self.hang_up(peer, reason)
