"""Orderly departure of a peer whose user ends it (R9, R14), and the return of one that did not want to go.

A leaving peer stays until others have its state and its vote; a leader hands the lead over first.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from anabranch.counter_rng import CounterRng
from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.consensus.voter_selection import target
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.interface.events import Stop
from anabranch.protocol.messages import REMARK_MAX, Leave
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.raft.types import majority

#: Longest time (s) that a leaving peer waits for others to take over: a user who waits gives up later.
LEAVE_S = 45.0
#: Time (s) after which a peer leaves if no leader or voter is linked.
ALONE_S = 3.0
#: Time (s) that a leaving leader waits for a link that has just broken to come back.
BROKEN_S = 1.5
#: Time (s) that a leaving leader leads on after an offer of the lead that was not taken.
LEAD_ON_S = 2.0
#: First and longest wait (s) before a peer joins again, plain choices: a machine that woke up is back
#: at once, and one that fails each time costs the run one admission in five minutes.
RETURN_FIRST_S, RETURN_LAST_S = 1.0, 300.0
#: Time (s) as a member after which the waits begin anew: then the last cause is over.
RETURNED_S = 60.0


class LeaveProcess(Timer):
    """Departure of this peer. reason: why it leaves; None while it stays."""

    def __init__(self, shared: SharedParts, voter: Voter) -> None:
        self._ctx, self._exit, self._coordination = shared.ctx, shared.exit, shared.coordination
        self._voter = voter
        self.reason: str | None = None
        self._until = math.inf
        self._offer_at = 0.0
        self._linked_at = 0.0
        """Last time (s) at which a peer that could take over was linked."""

    def begin(self, reason: str) -> None:
        """Leave the run for `reason`: a leader hands the lead over; any other peer asks the leader for its
        removal, or ends at once if it does not serve, or reaches neither the leader nor (as a voter) any
        voter. A second call asks again, with the new reason, and leaves the time limit as it is."""
        ctx = self._ctx
        if self.reason is None:
            self._until, self._linked_at = ctx.clock.now + LEAVE_S, ctx.clock.now
        self.reason = reason[:REMARK_MAX]
        self._voter.leaving = True
        if ctx.log.leads:
            self._hand_over()
            return
        self.repeat()
        elected = ctx.log.keeps_log(ctx.me) and self._linked()  # a linked voter soon leads
        serves = ctx.me in ctx.run.membership.active_from
        if not serves or (ctx.log.leader not in ctx.links.up and not elected):
            self._exit.stop(reason, ok=True)

    def _linked(self) -> bool:
        """True if the leader or a voter is linked, which could release this peer."""
        ctx = self._ctx
        return ctx.log.leader in ctx.links.up or any(map(ctx.log.keeps_log, ctx.links.up))

    def repeat(self) -> None:
        """Repeat the request to leave to the present leader; nothing if this peer stays or leads itself."""
        log = self._ctx.log
        if self.reason is not None and not log.leads:
            self._ctx.outbox.send(log.leader, Leave(self.reason))

    def tick(self) -> None:
        if self.reason is None or self._exit.stopped:
            return
        now = self._ctx.clock.now
        if now >= self._until:
            self._exit.stop(f"{self.reason}; nobody took over in {LEAVE_S:.0f} s", ok=True)
        elif self._ctx.log.leads:
            self._hand_over()
        elif self._linked():
            self._linked_at = now
        elif now >= self._linked_at + ALONE_S:
            self._exit.stop(f"{self.reason}; nobody who keeps the log is in reach", ok=True)

    def _hand_over(self) -> None:
        """Offer the lead to a voter that stays, again LEAD_ON_S after an offer that was not taken. Until one
        takes it this peer leads on: it admits returning voters and has other members made voters. This peer
        ends if for BROKEN_S nobody who could take over is in reach."""
        voter, lead, now = self._voter, self._coordination.coordinator, self._ctx.clock.now
        leaving = lead.admission.leaving if lead is not None else ()
        if voter.heirs(leaving) or self._has_successors(leaving):
            self._linked_at = now
        elif now < self._linked_at + BROKEN_S:
            return  # the broken link is dialled again
        else:
            self._exit.stop(f"{self.reason}; nobody who keeps the log is in reach to take over", ok=True)
            return
        if voter.raft.transferring:
            self._offer_at = now + LEAD_ON_S
        elif now >= self._offer_at:
            voter.give_away(leaving)

    def _has_successors(self, leaving: Collection[str]) -> bool:
        """True if a peer that does not leave can be made a voter: the run has several voters, and a majority
        of them is heard."""
        ctx, voter = self._ctx, self._voter
        if ctx.run.settings.voters == 1 or not majority(voter.raft.log.voters, voter.heard()):
            return False
        return any(name != voter.raft.me for name in target(ctx, voter, leaving))

    def deadline(self) -> float:
        if self.reason is None:
            return math.inf
        if self._ctx.log.leads:
            return min(self._until, self._linked_at + BROKEN_S)
        return self._until if self._linked() else min(self._until, self._linked_at + ALONE_S)


class Return:
    """Rejoining of a machine whose part in the run ended against its owner's will (`Stop.again`), with the
    same ticket.

    until_s: time (Unix, s) at which the ticket expires.
    """

    def __init__(self, rng: CounterRng, until_s: float) -> None:
        self._waits = Backoff(rng, RETURN_FIRST_S, RETURN_LAST_S)
        self._until_s = until_s

    def wait_s(self, end: Stop, member_s: float, now_s: float) -> float | None:
        """Seconds to wait before this machine joins again, longer each time; None: its part is over. end: how
        the last part in the run ended. member_s: seconds for which this machine was a member; RETURNED_S or
        more make the waits begin anew. now_s: Unix time."""
        if not end.again or self.expired(now_s):
            return None
        if member_s >= RETURNED_S:
            self._waits.reset()
        return self._waits.next()

    def expired(self, now_s: float) -> bool:
        """True if the ticket lets nobody in any more."""
        return now_s >= self._until_s
