"""Offers of the lead to another voter: to one that hears more members, and to the founder that is back.

Not here: the transfer itself (`raft`), the choice of voters (`voter_selection`), and a leader that leaves
(`peer.leave`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.raft.types import peer_of

#: Time (s) between two offers of the lead, to the founder or to a peer that hears more members. An offer that
#: is not taken stops the leader for one timeout, so offers must be rare.
OFFER_AGAIN_S = 30.0
#: Time (s) after which a founder that gave the lead away is offered it again: it had a reason.
GIVEN_AWAY_S = 60.0


class LeadOffers:
    """Offers of the lead by the peer that has it. held_up_by(): members that this peer cannot reach, and for
    which the run waits. hearers(peer): members that say that they hear `peer`."""

    def __init__(
        self,
        ctx: PeerContext,
        log: Voter,
        held_up_by: Callable[[], Iterable[str]],
        hearers: Callable[[str], Iterable[str]],
    ) -> None:
        self._ctx, self._log, self._held_up_by, self._hearers = ctx, log, held_up_by, hearers
        self._since = ctx.clock.now
        self._offer_at = 0.0
        """Time (s) from which the lead may be offered again."""

    def step_aside(self, t: int) -> bool:
        """Begin to transfer leadership to a voter that hears a member for which the run waits and which this
        leader cannot reach. True if a transfer was begun; False if there is no such voter, if the last one
        was offered less than OFFER_AGAIN_S ago, or if no step was committed since this leader last stepped
        aside. t: last committed step."""
        if self._ctx.clock.now < self._offer_at or self._log.aside_at == t:
            return False
        for peer in self._held_up_by():
            for witness in self._hearers(peer):
                if self._log.transfer_leadership_to(witness):
                    self._offer_at, self._log.aside_at = self._ctx.clock.now + OFFER_AGAIN_S, t
                    text = f"{witness[:8]} hears {peer[:8]}, which the run waits for: it is to lead"
                    self._ctx.outbox.note("note", text=text)
                    return True
        return False

    def give_back(self, t: int, over: bool) -> bool:
        """Begin to transfer leadership to the founder, which has the run's directory, once it serves and
        votes again; at most once in OFFER_AGAIN_S, and not soon after the founder itself gave the lead to
        this peer, unless the run is over. True if a transfer was begun. t: last committed step. over: True if
        no further step follows it (`LogTip.over`)."""
        ctx, founder = self._ctx, self._ctx.run.founder
        begins = ctx.run.membership.active_from.get(founder)
        if begins is None or ctx.clock.now < self._offer_at:
            return False
        transferred_by = peer_of(self._log.raft.transferred_by)
        gave = transferred_by == founder and ctx.clock.now < self._since + GIVEN_AWAY_S
        if gave and not over:
            return False
        if (begins > t + 1 and not over) or not self._log.transfer_leadership_to(founder):
            return False
        self._offer_at = ctx.clock.now + OFFER_AGAIN_S
        return True
