"""Reports of credits to upstream peers in one iteration, on top of the credit ledger (`credits`)."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Return
from anabranch.protocol.pipeline.credits import SlotLedger, fade

#: A change of other senders' load is reported if it exceeds 1/NEWS of the load last reported. Plain choice.
NEWS = 4


class CreditReports:
    """Ledger of the credits granted in iteration t, and the messages that report its changes. Making it
    lowers the recent use of credits (`fade`), grants credits in advance and reports them. capacity:
    microbatches that this peer can hold. plan: upstream peer -> units of the planned flow that come from it;
    None: there is no plan. expected: upstream peer -> slots that come from it, in a round whose slots are all
    bound to machines; else None."""

    def __init__(
        self,
        ctx: PeerContext,
        t: int,
        base: str,
        capacity: int,
        plan: Mapping[str, int] | None,
        expected: Mapping[str, int] | None = None,
    ) -> None:
        self.ctx = ctx
        self.t = t
        self.base = base
        fade(ctx.uses)
        self.ledger = SlotLedger(ctx.run.settings.slots(ctx.run.stage, capacity), uses=ctx.uses)
        if expected is not None:
            self.tell(self.ledger.expect(expected))
            return
        upstream = [
            *ctx.standby_view.working(
                ctx.run.near.active_neighbours(ctx.run.previous_stage(), ctx.run.stage, t)
            )
        ]
        self.tell(self.ledger.deal(upstream, plan))

    def tell(self, peers: list[str]) -> None:
        """Report to upstream peers, each of which must have a grant, the credits of each; one that is named
        twice is told once.

        A peer whose linked process is newer than its member in the log gets no report: it would take the
        credits of its former incarnation for its own.
        """
        at_work = sum(grant.at_work for grant in self.ledger.grants.values())
        for peer in dict.fromkeys(peers):
            if self._is_next(peer):
                continue
            grant = self.ledger.grants[peer]
            fence = self.ctx.fence(self.t, self.base)
            self.ctx.outbox.send(peer, grant.told(fence, at_work - grant.at_work))

    def load_changed(self, peer: str, more: int) -> None:
        """Count a microbatch of `peer` that arrived (+1) or whose gradient is ready (-1). The new load is
        reported to the other upstream peers, which use it to choose a next hop; small changes are not, and
        none where a round's plan chooses. `peer` without a grant is not counted."""
        grants = self.ledger.grants
        if peer in grants:
            grants[peer].at_work = max(0, grants[peer].at_work + more)
        if self.ledger.once:
            return
        at_work = sum(grant.at_work for grant in grants.values())
        news = [other for other, grant in grants.items() if grant.linked and other != peer
                and abs(at_work - grant.at_work - grant.told_others) > grant.told_others // NEWS]  # fmt: skip
        self.tell(news)

    def link_up(self, peer: str) -> None:
        """Grant `peer`, whose link is (back) up, its guaranteed credits again as far as they are free, and
        report them to it. Nothing for a peer without a grant, or whose process is newer than its member in
        the log."""
        if not self._is_next(peer):
            self.ledger.link(peer)
            if peer in self.ledger.grants:
                self.tell([peer])

    def on_return(self, peer: str, message: Return) -> None:
        """Take back the credits that `peer` returns (its total so far), and report those that others get by
        it. Nothing for a total that is not new, or a peer without a grant."""
        self.tell(self.ledger.give_back(peer, message.total))

    def repeat(self) -> None:
        """If a peer that waits for a credit holds none, and none is free, ask peers again to return one."""
        self.tell(self.ledger.insist())

    def lacking(self) -> None:
        """Withdraw unused credits that peers were asked to return, for peers that wait for one, and report to
        the peers that get one; those that lose one are not told. Called when the leader says that the step
        lacks units."""
        self.tell(self.ledger.withdraw())

    def use(self, peer: str) -> None:
        """Count a new microbatch of `peer`, whose credit `SlotLedger.receive` has used, and report the
        credits and the load that changed by it."""
        self.tell(self.ledger.use(peer))
        self.load_changed(peer, 1)

    def release(self, peer: str) -> None:
        """Free the credit of a finished microbatch of `peer`, once for each, and report whose credits
        changed. peer: "" for one that was removed."""
        self.tell(self.ledger.release(peer))

    def _is_next(self, peer: str) -> bool:
        """True if the linked process of `peer` is a later incarnation than the member in the log: the credits
        are still those of the earlier one."""
        member = self.ctx.run.membership.members.get(peer)
        return member is not None and self.ctx.links.incarnations.get(peer, 0) > member.incarnation
