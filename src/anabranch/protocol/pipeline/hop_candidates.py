"""Candidates for the next hop of a microbatch: eligible peers of the next stage, with the costs of each.

Not here: the policies that choose among them (`flow.dispatch`), and sending (`sender`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from anabranch.flow.dispatch.next_hop_policies import Candidate
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import Slot
from anabranch.protocol.pipeline.credits import Credit
from anabranch.protocol.pipeline.outgoing import OutgoingMicrobatch
from anabranch.protocol.placement.rates import pass_s
from anabranch.protocol.rounds.plan import sets_of
from anabranch.protocol.telemetry.estimators import plausible

#: Time (s) for which a microbatch waits for the peers that are preferred to those that refused it or kept
#: microbatches too long: the preferred ones may never grant a credit. Plain choice.
PREFERRED_S = 3.0
#: Time for which a slot whose machine left waits before machines with a slot of their own are eligible:
#: seconds, and a multiple of a slot's usual time. Plain choices: longer than a round waits for late slots.
SLOT_WAITS_S, SLOT_WAITS = 30.0, 2.0


class HopCandidates:
    """Peers of the next stage that this peer may send microbatches to in iteration t.

    planned: returns next hop -> units of the planned flow that go to it.
    """

    def __init__(self, ctx: PeerContext, t: int, planned: Callable[[], Mapping[str, int]]) -> None:
        self.ctx = ctx
        self.t = t
        self._planned = planned
        self._served_at = ctx.clock.now
        """Last time at which a microbatch was sent to a replica that is no standby."""
        self.doubted: set[str] = set()
        """Peers with whose gradients something overflowed here in this iteration; others are preferred."""
        self._pass: list[str] | None = None
        """Peers that may get any microbatch against which nothing speaks, during a pass; None: not known."""
        self._found: list[Candidate] = []
        """Candidates `_pass` as they were for the last microbatch."""
        self._in_pass = False

    def begin_pass(self) -> None:
        """Begin a pass over waiting microbatches, in which nothing changes but by sending them: what holds
        for all of them is worked out once."""
        self._in_pass, self._pass = True, None

    def end_pass(self) -> None:
        """End the pass, after which anything may change."""
        self._in_pass, self._pass, self._found = False, None, []

    def took(self, peer: str) -> None:
        """Note that a microbatch is sent to `peer`; nothing for a standby. Standbys become eligible once no
        microbatch was sent to any other replica for some time."""
        if peer not in self.ctx.standby_view.waits:
            self._served_at = self.ctx.clock.now

    def peers(self) -> list[str]:
        """Serving replicas of the next stage that are neighbours of this peer in the overlay
        (`membership.overlay`), reachable or not."""
        return self.ctx.run.near.active_neighbours(self.ctx.run.next_stage(), self.ctx.run.stage, self.t)

    def open_to(self, item: OutgoingMicrobatch) -> tuple[list[str], float]:
        """Peers that may get a microbatch now, and the time (s; infinite: none) at which further ones become
        eligible. May dial peers, and starts the wait of the microbatch (`_waits_since`).

        In a large swarm others are eligible, too, if no preferred neighbour is reachable. A standby is
        eligible if no other replica is reachable, or once no other replica was sent a microbatch for the time
        that the coordinator announced. A peer that refused the microbatch, kept microbatches too long, or is
        `doubted`, is eligible if there is no better one (`_fault`), or once the microbatch has waited for
        PREFERRED_S since the first call.

        A slot of a round goes to its planned peer, and to others if that one left or refused it, or the slot
        waited for long (`_of_slot`), but one with carried state to that peer alone; from the last stage to
        the data node that began it, to any other if that one cannot be reached or is not preferred. That of a
        pipeline island goes to its crew alone.
        """
        plan, stage = self.ctx.run.plan(self.t) if item.train else (), self.ctx.run.stage
        if plan and self.ctx.run.settings.rounds.pipeline:
            return self._of_crew(plan[item.index]), math.inf
        if plan and stage and self.ctx.run.next_stage() == 0:
            home = item.path[0]
            serves = self.ctx.run.membership.is_live(home, 0, self.t)  # not if it came back since
            if serves and self.ctx.reachable(home) and self._is_preferred(item, home):
                return [home], math.inf
        elif plan and stage == 0 and (holder := plan[item.index].peer):
            if plan[item.index].carried:
                return self._only(holder), math.inf
            return self._of_slot(item, holder, sets_of(plan).peers)
        if self._pass is not None and not item.refused_by:
            return self._pass, math.inf
        peers, own = [peer for peer in self.peers() if self.ctx.reachable(peer)], True
        if not any(self._is_preferred(item, peer) for peer in peers):
            own = False
            peers += [peer for peer in self.beyond_neighbours() if peer not in peers]
        peers, all_at = self._preferred(item, peers)
        working, waits = self.ctx.standby_view.working(peers), self.ctx.standby_view.waits
        if len(working) == len(peers):
            if self._in_pass and own and not item.refused_by and item.waits_since == math.inf:
                self._pass, self._found = peers, []
            return peers, all_at
        since = max(self._waits_since(item), self._served_at)
        until = {peer: since + waits[peer] for peer in peers if peer in waits}
        open_to = [peer for peer in peers if until.get(peer, 0.0) <= self.ctx.clock.now]
        return open_to, min((at for at in until.values() if at > self.ctx.clock.now), default=all_at)

    def keeps_slot(self, holder: str) -> bool:
        """True if `holder`, the machine of a slot, is reachable and serves the next stage in this round;
        where late slots are dropped, it must have served there in the round before, too."""
        run = self.ctx.run
        since = self.t - 1 if run.settings.rounds.drops else self.t
        return run.membership.is_live(holder, run.next_stage(), since) and self.ctx.reachable(holder)

    def _of_slot(
        self, item: OutgoingMicrobatch, holder: str, holders: Collection[str]
    ) -> tuple[list[str], float]:
        """Peers that may get a slot of a round planned for the peer `holder`, and the time at which further
        ones become eligible, as `open_to`. holders: planned peers of all slots.

        If `holder` left, peers without a slot of their own are eligible at once, and all others once the slot
        has waited for long, also if `holder` came back meanwhile and left again. In a round that drops late
        slots, peers that began to serve with this round count as such others: they would begin the next one
        late. In such a round a linked `holder` stays the only one. Peers that refused the slot, or did not
        answer in time, get it only where nobody else is left.
        """
        ctx, drops = self.ctx, self.ctx.run.settings.rounds.drops
        if drops and self.keeps_slot(holder) and holder not in item.refused_by:
            return [holder], math.inf  # the round ends without it if it takes too long
        since = self._waits_since(item)
        if item.repair:  # no new time for a machine that comes back and is lost again and again
            since = item.lost_since = min(item.lost_since, since)
        all_at = since + max(SLOT_WAITS_S, SLOT_WAITS * ctx.costs.usual_s)
        is_live, stage = ctx.run.membership.is_live, ctx.run.next_stage()
        serves = is_live(holder, stage, self.t) and (not drops or is_live(holder, stage, self.t - 1))
        if serves and holder not in item.refused_by and ctx.clock.now < all_at:
            ctx.dialer.reach(holder)  # nearly always: no look at all other machines
            return [holder] if ctx.reachable(holder) else [], all_at
        live = ctx.run.membership.live(ctx.run.next_stage(), self.t)
        there = [peer for peer in live if ctx.reachable(peer)]
        able = [peer for peer in there if peer not in item.refused_by]
        new = set(live) - set(ctx.run.membership.live(ctx.run.next_stage(), self.t - 1)) if drops else set()
        new = set() if new.issuperset(able) else new
        if holder in live and holder not in new and holder not in item.refused_by:
            ctx.dialer.reach(holder)
            if holder in able and drops:
                return [holder], math.inf  # the round ends without it if it takes too long
            first = [peer for peer in able if peer == holder]
        else:
            first = [peer for peer in able if peer not in holders and peer not in new]
        if ctx.clock.now < all_at:
            return first, all_at
        least = min((item.refused_by[peer] for peer in there), default=0)
        return able or [peer for peer in there if item.refused_by[peer] == least], math.inf

    def _of_crew(self, slot: Slot) -> list[str]:
        """Machine of the next stage in a slot's crew, as a list of it alone; [] if it is not reachable (it is
        dialled if it serves), left, or left and came back, and so lost what it had computed of the slot. []
        of a slot without a crew."""
        if not slot.crew:
            return []
        holder = slot.crew[self.ctx.run.next_stage() - 1]
        stays = self.ctx.run.membership.is_live(holder, self.ctx.run.next_stage(), self.t - 1)
        return self._only(holder) if stays else []

    def _only(self, holder: str) -> list[str]:
        """Peers that may get a slot which the peer `holder` alone can fill at the next stage: [holder], if it
        serves and is reachable; else [], and it is dialled if it serves."""
        ctx = self.ctx
        if holder in ctx.run.membership.live(ctx.run.next_stage(), self.t):
            ctx.dialer.reach(holder)
            return [holder] if ctx.reachable(holder) else []
        return []

    def _preferred(self, item: OutgoingMicrobatch, peers: list[str]) -> tuple[list[str], float]:
        """Those of `peers` that are preferred for a microbatch, and the time (s) from which all are eligible
        (infinite: all are now). Of none: ([], infinite)."""
        faults = {peer: self._fault(item, peer) for peer in peers}
        least = min(faults.values(), default=(0, 0))
        preferred = [peer for peer in peers if faults[peer] == least]
        if len(preferred) == len(peers):
            return peers, math.inf
        all_at = self._waits_since(item) + PREFERRED_S
        return (peers, math.inf) if self.ctx.clock.now >= all_at else (preferred, all_at)

    def _is_preferred(self, item: OutgoingMicrobatch, peer: str) -> bool:
        return self._fault(item, peer) == (0, 0)

    def _fault(self, item: OutgoingMicrobatch, peer: str) -> tuple[int, int]:
        """How little a peer is preferred for a microbatch, (0, 0) if nothing speaks against it: how often it
        failed with this one, then how badly with others. Where the next stage withholds, honest peers are
        late and avoided, too: a peer that withholds would else get the same microbatch again and again."""
        return item.refused_by[peer], (peer in self.doubted) + self.ctx.costs.avoided(peer, self.t)

    def _waits_since(self, item: OutgoingMicrobatch) -> float:
        """Time (s) since which a microbatch waits for better peers than those at hand: any that did not
        refuse it, any that are no standbys. The first call sets it to now, and the first one after a
        repair."""
        if item.waits_since == math.inf:
            item.waits_since = self.ctx.clock.now
        return item.waits_since

    def candidates(
        self,
        item: OutgoingMicrobatch,
        peers: list[str],
        outstanding: Mapping[str, int],
        credits: Mapping[str, Credit],
    ) -> list[Candidate]:
        """The eligible `peers`, in their order, with the costs by which the dispatch policy chooses; [] of
        none. In a pass (`begin_pass`) the same list may be returned again, brought up to date.

        outstanding: peer -> microbatches of this sender that it has (absent: 0). credits: peer -> credits
        that it granted; without any it is a candidate, too, that has to be asked. With `return = "own"` the
        last relay has the data node that began the microbatch as its only candidate, if eligible.
        """
        own = self.ctx.run.settings.returns == "own" and self.ctx.run.next_stage() == 0
        if own and item.path[0] in peers:
            peers = [item.path[0]]
        if peers is not self._pass or not self._found:
            planned = self._planned()
            found = [self._candidate(peer, outstanding, credits, planned) for peer in peers]
            if peers is self._pass:
                self._found = found
            return found
        for place, peer in enumerate(peers):  # in a pass only the load and the credits change
            credit, before = credits.get(peer), self._found[place]
            free = credit is not None and credit.free > 0
            if before.outstanding != outstanding.get(peer, 0) or before.free != free:
                self._found[place] = before._replace(outstanding=outstanding.get(peer, 0), free=free)
        return self._found

    def _candidate(
        self,
        peer: str,
        outstanding: Mapping[str, int],
        credits: Mapping[str, Credit],
        planned: Mapping[str, int],
    ) -> Candidate:
        there, credit = self.ctx.costs.of(peer), credits.get(peer)
        return Candidate(
            peer,
            there.hop_s,
            there.work_s or self._offered_s(peer),
            outstanding.get(peer, 0),
            credit is not None and credit.free > 0,
            credit.others if credit is not None else 0,
            there.price,
            planned.get(peer, 0),
            there.line_s,
        )

    def _offered_s(self, peer: str) -> float:
        """Compute seconds of one microbatch at a peer that has not reported any yet, from what was measured
        when it joined; 0: not known, or the peer is a data node. Without them the first peer to grant its
        credits would get all microbatches of the first iteration, as nothing would speak for waiting for
        another one's."""
        run, stage = self.ctx.run, self.ctx.run.next_stage()
        member = run.membership.members.get(peer)
        if not stage or member is None or not plausible(member.forward_s):
            return 0.0
        return pass_s(member, run.settings.counts[stage - 1])

    def beyond_neighbours(self) -> list[str]:
        """Reachable replicas of a large next stage, neighbours or not, for when no neighbour is reachable or
        all of them refused a microbatch or kept some too long; some unlinked ones are dialled for later.
        Empty in a small swarm."""
        ctx = self.ctx
        if not ctx.run.near.crowded:
            return []
        live = ctx.run.membership.live(ctx.run.next_stage(), self.t)
        ctx.dialer.reach_some(live)
        return [peer for peer in live if ctx.reachable(peer)]
