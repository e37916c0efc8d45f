"""Search for and repair of microbatches that were sent: lost peers, missing claims, inquiries (R5, R6).

The peer that sent an activation stays responsible for it until the step is committed. If the receiver is
lost, the sender chooses a replacement, whatever the state of the microbatch. Before the gradient is back this
repairs the path; afterwards it redoes a claim that was lost with its holder. A replacement first asks the
next stage for the microbatch, so that only the broken stage is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import LOST_MAX
from anabranch.protocol.pipeline.claims import Claims
from anabranch.protocol.pipeline.outgoing import OutgoingMicrobatch, OutgoingState
from anabranch.protocol.pipeline.sender import Sender

#: Inquiries after which a microbatch that its receiver lacks may be taken for lost; it must also be overdue
#: by `costs.most_s`. A link that does not break delivers, and with large tensors on a slow link a second copy
#: would only delay the others. Plain choice.
PROBES_ON_THE_WAY = 3
#: Reports of the leader that it lacks the claim of a microbatch whose gradient is back, after which another
#: replica computes it. The leader reports after several times a step's usual duration, so the first report
#: may concern a claim that was lost; a peer that answers it and still claims nothing is not to be relied on.
UNCLAIMED_REPORTS = 2
#: The same where a later stage lacks the microbatch, for each stage beyond the next. Plain choice: who should
#: send it there again has time to, and each stage acts before the one before it.
FURTHER_REPORTS = 1


class Repairs:
    """Search and repair of the microbatches that a sender has sent: after a lost peer, a missing claim or
    long silence it sends them to another replica of the next stage.

    A search (`find`) first asks the peers of the next stage whether one has the microbatch, so that it is
    sent anew only if none does. Items are the sender's `OutgoingMicrobatch` records.
    """

    def __init__(self, ctx: PeerContext, sender: Sender) -> None:
        self.ctx = ctx
        self._sender = sender
        self._missed: set[int] = set()
        """Indices whose claim the leader misses."""

    # --- search --------------------------------------------------------------------------------

    def find(self, index: int, path: tuple[str, ...], train: bool, lost: Iterable[str] = ()) -> None:
        """Add a microbatch that a later stage may already have: ask the next stage for it before sending it.
        With nobody to ask it is sent as soon as it can be. One of this index that the sender has is replaced.

        path: peers that computed it, this one last. train: False in an evaluation. lost: former peers of this
        peer's own stage that may have sent it on; in a large swarm their neighbours at the next stage are
        dialled and asked, too.
        """
        number = self._sender.new_transmission()
        item = OutgoingMicrobatch(
            index, train, path, None, leg=OutgoingState.FINDING, repair=True, transmission=number
        )
        self._sender.changed()
        self._sender.items[index] = item
        hops = self._sender.hops
        item.finding = {p for p in hops.peers() if self.ctx.reachable(p) and p not in hops.doubted}
        following, own, near = self.ctx.run.next_stage(), self.ctx.run.stage, self.ctx.run.near
        membership, t = self.ctx.run.membership, self._sender.t
        had, gone = tuple(lost), membership.gone_from(following)
        beside = (
            peer
            for peer in gone
            if any(near.could_be_neighbours(one, own, peer, following, t) for one in had)
        )
        # A peer that joined during the iteration does not know which peers were removed before, nor from
        # where.
        item.further = not had or membership.is_reopened(t) or not all(map(membership.followed, had))
        self._unheard(item, *beside)
        far = {peer for one in had for peer in near.active_neighbours(following, own, t, one)}
        for peer in sorted(far):
            if near.crowded and peer not in self.ctx.links.suspects:
                item.finding.add(peer)
                self.ctx.dialer.reach(peer)
            elif peer not in item.finding:
                self._unheard(item, peer)
        item.probe_at = self.ctx.clock.now + self._sender.patience_s(item)
        for peer in sorted(item.finding):
            self._sender.ask_after(item, peer)
        self._found_nobody(item)

    def _unheard(self, item: OutgoingMicrobatch, *peers: str) -> None:
        """Add peers that may have had the microbatch and sent it on, but cannot be asked, to those that its
        next holder asks for it (`lost`, of which the newest LOST_MAX stay). Nothing without peers."""
        if peers:
            item.lost, item.further = (*peers, *item.lost)[:LOST_MAX], True

    def on_have(self, peer: str, index: int, transmission: int) -> None:
        """End the search numbered `transmission`: `peer` answered that it has the microbatch, and will send
        its gradient to this peer. Ignored if that search is over, or `peer` was neither sent the microbatch
        nor asked after it."""
        item = self._sender.items.get(index)
        if item is None or item.leg is not OutgoingState.FINDING or peer not in item.told:
            return
        if item.transmission == transmission:
            item.peer, item.leg, item.sent_at = peer, OutgoingState.SENT, self.ctx.clock.now
            self._sender.changed()
            item.probe_at = self.ctx.clock.now + self._sender.patience_s(item)

    def on_lack(self, peer: str, index: int, refused: bool, transmission: int) -> None:
        """Take the answer of `peer` that it does not have a microbatch. refused: True if it had it and gave
        it up; otherwise it did not arrive (yet).

        In a search the next peer's answer counts, and the last such answer ends the search. A microbatch that
        was sent is repaired if it was refused, if its gradient is back (so its claim is lost), or if it
        should have arrived long ago; one that did not arrive may count as a late payload of the link.
        transmission: number of the transmission or search that is answered; an answer to an earlier one is
        ignored.
        """
        item = self._sender.items.get(index)
        if item is None or item.transmission != transmission:
            return
        if item.leg is OutgoingState.FINDING:
            item.finding.discard(peer)
            self._found_nobody(item)
            return
        if item.leg is not OutgoingState.SENT or item.peer != peer:
            return
        late_s = self._late_s(item, peer)
        if not refused and not item.returned and peer in item.unacknowledged:
            self.ctx.links.payload_late(peer, ("activation", self._sender.t, index, transmission), late_s)
        lost = not refused and not item.returned and item.probes > PROBES_ON_THE_WAY and late_s >= 0.0
        if refused or item.returned or lost:
            if refused and transmission not in self._sender.recalled:
                item.refused_by[peer] += 1
            if lost:
                self._sender.lost_on_the_way(item, peer)
            self._repair(item, "it does not have the microbatch")

    def _late_s(self, item: OutgoingMicrobatch, peer: str) -> float:
        """Seconds since a microbatch should have arrived at `peer` even over a slow link; negative if it need
        not have arrived yet."""
        return self.ctx.clock.now - item.sent_at - self.ctx.costs.most_s(peer, item.ahead_bytes)

    def _found_nobody(self, item: OutgoingMicrobatch) -> None:
        """End a search once every asked peer lacks the microbatch, or cannot be asked: it is sent anew.
        Nothing for a microbatch that is not searched."""
        if item.leg is OutgoingState.FINDING and not item.finding:
            item.leg, item.probe_at = OutgoingState.WAITING, math.inf
            self._sender.pump()

    # --- lost peers and lost claims ------------------------------------------------------------

    def link_up(self, peer: str) -> None:
        """Ask `peer`, whose link is (back) up, for microbatches searched at it, and send what can be sent.
        Nothing in a large swarm for a member of another stage than the next."""
        if self._is_beyond(peer):
            return
        for item in self._sender.items.values():
            if item.leg is OutgoingState.FINDING and peer in item.finding:
                self._sender.ask_after(item, peer)
        self._sender.pump()

    def link_down(self, peer: str, reason: str) -> None:
        """Send the microbatches whose gradient `peer` owes, or whose claim the leader misses, to another
        replica, as the link to it broke. Searches do not wait for it any more; its credits are void until it
        reports them anew, and requests to it are forgotten. Other microbatches whose gradient is back stay.
        The routing policy is told, and what can be sent is sent. Nothing in a large swarm for a member of
        another stage than the next. reason: for the event log."""
        if self._is_beyond(peer):
            return
        self._sender.link_down(peer)
        self.peer_lost(peer, reason)

    def peer_lost(self, peer: str, reason: str) -> None:
        """Give up `peer`, whose link broke or which is suspected. Microbatches whose gradient it owes, or
        whose claim the leader misses, wait for another replica again, and go to it without a search of this
        peer; the new holder asks the next stage for them. Searches do not wait for its answer any more. The
        routing policy is told, and what can be sent is sent. Nothing in a large swarm for a member of another
        stage than the next. reason: for the event log."""
        if not self._is_beyond(peer):
            self._lost(peer, reason)

    def _lost(self, peer: str, reason: str) -> None:
        self.ctx.run.policy.lost(peer, self.ctx.clock.now)
        for item in list(self._sender.items.values()):
            if item.leg is OutgoingState.FINDING and peer in item.finding:
                item.finding.discard(peer)
                self._unheard(item, peer)
                self._found_nobody(item)
            elif item.peer == peer and (not item.returned or item.index in self._missed):
                self._repair(item, reason)
        self._sender.pump()

    def _is_beyond(self, peer: str) -> bool:
        """True if link events of `peer` do not matter to this sender: the swarm is large, and `peer` is a
        member of another stage than the next one. In a small swarm every link event is taken as an occasion
        to send."""
        ctx = self.ctx
        return ctx.run.near.crowded and ctx.run.membership.stage_of(peer) not in (None, ctx.run.next_stage())

    def peer_removed(self, peer: str, reason: str) -> None:
        """Send the microbatches of a removed peer again, also those whose gradient is back: its claims are
        void. Its credits and the requests to it are forgotten, and searches do not wait for it any more. In a
        large swarm this holds for a member of any stage. reason: for the event log."""
        self._sender.drop_peer(peer)
        self._lost(peer, reason)  # the same record may move it to another stage
        for item in list(self._sender.items.values()):
            if item.peer == peer and item.returned:
                self._repair(item, reason)
        self._sender.pump()

    def recheck(self, indices: list[int]) -> None:
        """Inquire after the microbatches `indices`, whose claims at the next stage the leader misses; called
        once for each of its reports. Those that this peer does not send are passed over.

        The peer that has one is asked; one that is searched is asked for again, one that waits asks for
        credits again. If its peer cannot be reached, now or later in this iteration, it goes to another
        replica; also if the peer gave the gradient back, this is the UNCLAIMED_REPORTSth call since, and
        there is another: that peer then gets none for a while.
        """
        self._missed.update(indices)
        for index in indices:
            item = self._sender.items.get(index)
            if item is None:
                continue
            asked = sorted(item.finding) if item.leg is OutgoingState.FINDING else []
            if item.leg is OutgoingState.SENT and item.peer is not None and not self.ctx.reachable(item.peer):
                self._repair(item, "the leader misses it, and its holder is not heard")
            elif item.leg is OutgoingState.SENT and item.peer is not None:
                asked = [] if self._withheld(item, item.peer) else [item.peer]
            elif item.leg is OutgoingState.WAITING:
                item.asked.clear()
            for peer in asked:
                self._sender.ask_after(item, peer)
        self._sender.pump()

    def recheck_further(self, beyond: Mapping[int, int]) -> None:
        """Count a report of the leader that later stages lack microbatches whose gradient is back. beyond:
        microbatch -> how many stages after the next one the first stage is that lacks it. The peer of the
        next stage that has one is to send it on again, as a later peer was lost with it. If it has not done
        so in UNCLAIMED_REPORTS such reports, and FURTHER_REPORTS more for each of these stages, another
        replica gets the microbatch. Microbatches that are being searched, or sent anew, are not counted."""
        for index, further in beyond.items():
            item = self._sender.items.get(index)
            if item is None or not item.train or not item.returned or item.redoing or item.peer is None:
                continue
            if item.leg is not OutgoingState.SENT:
                continue
            item.unsent += 1
            if item.unsent >= UNCLAIMED_REPORTS + FURTHER_REPORTS * further:
                item.unsent = 0
                self._pass_over(item, item.peer, "it does not send the microbatch on again")

    def _withheld(self, item: OutgoingMicrobatch, peer: str) -> bool:
        """Note that the leader misses the claim of a microbatch that `peer` has. If `peer` returned the
        gradient and this is the UNCLAIMED_REPORTSth time, and another replica is there, send it to that one,
        give `peer` none for a while, and return True; else False."""
        item.unclaimed += item.returned
        if item.unclaimed < UNCLAIMED_REPORTS:
            return False
        why = "it gave the gradient back and does not claim the microbatch"
        if passed_over := self._pass_over(item, peer, why):
            item.unclaimed = 0
        return passed_over

    def _pass_over(self, item: OutgoingMicrobatch, peer: str, reason: str) -> bool:
        """Send a microbatch to another replica than `peer`, which returned its gradient, and give that peer
        none for a while; False if no other could compute it."""
        if not self._sender.others_could(peer):
            return False
        self.ctx.costs.withheld(peer, self._sender.t)
        item.refused_by[peer] += 1
        self._repair(item, reason)
        return True

    def reject(self, index: int, reason: str) -> None:
        """Refuse a gradient of microbatch `index` that cannot be used, and send the microbatch to be computed
        again; the peer that gave it, which may be another one than has it now, counts as less preferred for
        it, and gives no further one unless it is asked anew. KeyError if this peer does not send it."""
        item, peer = self._sender.items[index], self._sender.items[index].giver
        self.ctx.outbox.refuse(peer, "Backward", reason)
        item.returned, item.given_by = False, ""
        item.refused_by[peer] += 1
        item.rejected.add(peer)
        self._repair(item, reason)

    def may_be_false(self, index: int, claims: Claims) -> bool:
        """True if the gradient with which microbatch `index` overflowed at this peer came from a relay, the
        overflow before it of this microbatch was not with one of that relay, and another peer could send one:
        it may be made up, and the caller has the microbatch computed again (`reject`). To be asked before the
        overflow is entered in `claims`."""
        item = self._sender.items.get(index)
        if item is None or not item.giver or not self.ctx.run.membership.stage_of(item.giver):
            return False
        return not claims.overflowed(index, item.giver) and self._sender.others_could(item.giver)

    def _repair(self, item: OutgoingMicrobatch, reason: str) -> None:
        self.ctx.outbox.note(
            "repair",
            t=self._sender.t,
            index=item.index,
            stage=self.ctx.run.next_stage(),
            lost=item.peer or "",
            phase="redo" if item.returned else item.leg.name.lower(),
            reason=reason,
        )
        if item.peer is not None:
            had = [peer for peer in item.lost if peer != item.peer]
            item.lost = (item.peer, *had)[:LOST_MAX]
        item.repair, item.further, item.leg, item.peer = True, True, OutgoingState.WAITING, None
        item.asked.clear()  # credits that it asked for went to other items
        item.sendable_since = item.waits_since = item.held_until = math.inf
        item.probe_at = math.inf
        self._sender.pump()

    def tick(self) -> None:
        """Inquire after microbatches that take much longer than usual, and repair those that are overdue
        where another replica could compute them: the peer that kept one too long gets none for some
        iterations (`PeerCosts.missed`). End searches at peers that do not answer."""
        sender, now = self._sender, self.ctx.clock.now
        sender.changed()
        for item in list(sender.items.values()):
            if now < item.probe_at:
                continue
            if item.leg is OutgoingState.SENT and not item.returned and item.peer:
                if sender.others_could(item.peer) and now >= sender.overdue_at(item):
                    self.ctx.costs.missed(item.peer, sender.t)
                    item.refused_by[item.peer] += 1
                    item.kept_since.setdefault(item.peer, item.sent_at)
                    item.overdue += 1
                    self._repair(item, "it has kept the microbatch for far longer than usual")
                    continue
                item.probes += 1
                item.probe_at = now + sender.patience_s(item)
                if now < sender.overdue_at(item) < item.probe_at:
                    item.probe_at = sender.overdue_at(item)
                sender.ask_after(item, item.peer)
            elif item.leg is OutgoingState.FINDING:
                # These may never be reachable, or do not work in this iteration: else they had answered.
                self._unheard(item, *sorted(item.finding))
                item.finding.clear()
                self._found_nobody(item)
