"""Sender of one iteration at one peer: waiting for credits, choice of the next hop, transmission (R4).

Not here: eligible peers (`hop_candidates`); search for and repair of microbatches that were sent (`repair`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low

from anabranch.flow.dispatch.next_hop_policies import Candidate
from anabranch.protocol.audit.seals import ACTIVATION, Seals
from anabranch.protocol.context.early_buffer import EARLY_PAYLOADS_MAX
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import Ask, CallBack, Fence, Forward, Return, SentOn, Slots, Want
from anabranch.protocol.pipeline.credits import Credit
from anabranch.protocol.pipeline.hop_candidates import SLOT_WAITS, SLOT_WAITS_S, HopCandidates
from anabranch.protocol.pipeline.outgoing import OutgoingMicrobatch, OutgoingState
from anabranch.protocol.pipeline.recall import units_to_recall
from anabranch.protocol.rounds.plan import sets_of
from anabranch.protocol.telemetry.peer_costs import averaged

#: A microbatch that did not come back after this multiple of the usual time, and after so many seconds, is
#: sent to another replica. Plain choices: twice the time to the first inquiry; a heartbeat's usual patience
#: (with two seconds a carrier that swallows payloads is not found out: its microbatches go elsewhere first).
OVERDUE_FACTOR, OVERDUE_FLOOR_S = 12.0, 3.0
#: Greatest ratio of the usual time to that of the middle peer of the next stage. Plain choice.
MOST_USUAL = 4.0
#: Reports of the leader that it lacks something of the iteration, after which a microbatch is overdue if its
#: sender knows no usual time yet. Plain choice: the first comes after four steps, the next in twice as long.
LATE_REPORTS = 2
#: The same in the first step of a run, when the leader knows no usual time either; all of them lack the same.
#: Plain choice: they come after four minutes, and one gradient that comes back tells a usual time.
FIRST_REPORTS = 6
#: Time until a sent microbatch is asked after: this multiple of the usual time to its gradient, and at least
#: PROBE_FLOOR_S seconds. Plain choices.
PROBE_FACTOR = 6.0
PROBE_FLOOR_S = 5.0


class Sender:
    """Outgoing microbatches of one iteration at one peer.

    prepare(index): computes the activation; data nodes embed only once there is a credit. None on relays,
    where `provide` brings the activation when its forward pass is done. planned: returns next hop -> units of
    the planned flow that go to it. seals: signer of sent activations; None: they are not sealed.
    """

    def __init__(
        self,
        ctx: PeerContext,
        t: int,
        base: str,
        prepare: Callable[[int], None] | None,
        planned: Callable[[], Mapping[str, int]] = dict,
        seals: Seals | None = None,
    ) -> None:
        self.ctx = ctx
        self.t = t
        self.base = base
        self.items: dict[int, OutgoingMicrobatch] = {}
        self.credits: dict[str, Credit] = {}
        self.hops = HopCandidates(ctx, t, planned)
        self._plan = ctx.run.plan(t)
        self._bound = ctx.run.stage == 0 and sets_of(self._plan).bound
        self._prepare = prepare
        self._seals = seals
        self._usual_s = 0.0
        self._most_s = self._most_usual_s()
        self._last_transmission = 0
        self._due_at: float | None = None
        self._reported_at: list[float] = []
        """Times (s) at which the leader reported that it lacks something of this iteration."""
        self._lacking: Mapping[int, Sequence[int]] = {}
        """Units by stage that lacked at the last of these reports."""
        self._initial_peers = set(self.hops.peers())
        """Peers that served the next stage when this peer began the iteration."""
        self.called_back: set[int] = set()
        """Indices of microbatches that this peer had and that were called back."""
        self.recalled: set[int] = set()
        """Transmissions that this peer asked back: their refusal is no sign against the receiver."""
        ctx.run.policy.opened(self.hops.peers())
        ctx.outbox.report_backlog(0)

    # --- microbatches and their gradients ------------------------------------------------------

    def submit(self, index: int, payload: Payload | None, path: tuple[str, ...], train: bool) -> None:
        """Add a microbatch to send on, unless its index is known, and send what can be sent. payload: its
        activation; None: `provide` brings it. path: peers that computed it, this one last. train: False in an
        evaluation."""
        if index not in self.items:
            self.items[index] = OutgoingMicrobatch(index, train, path, payload)
            self.pump()

    def admit(self, indices: Iterable[int], trains: Callable[[int], bool]) -> None:
        """Add microbatches that this data node begins, and send those that get a credit; one that is known is
        begun anew. trains(index): False in an evaluation."""
        for index in indices:
            self.items[index] = OutgoingMicrobatch(index, trains(index), (self.ctx.me,), None)
        self.pump()

    def provide(self, index: int, payload: Payload) -> None:
        """Take the computed activation of microbatch `index`, which must be one to send (else KeyError), and
        send what can be sent. Before that nothing of it is sent."""
        item = self.items[index]
        item.payload = payload
        if item.leg is OutgoingState.PREPARING and item.peer is not None:
            self._transmit(item, item.peer)
            if self._bound:
                self._due_at = None
                return
        self.pump()

    def on_backward(self, peer: str, index: int, payload: Payload | None) -> tuple[bool, str | None]:
        """Enter the gradient of microbatch `index` that `peer` sent back, and learn the usual time until
        gradients. payload: the caller keeps it; None only in an evaluation. Returns True if it is the first
        one for this microbatch, and the reason if it is refused, else None. A further one is not refused, and
        ends a redo."""
        item = self.items.get(index)
        if item is None and index in self.called_back:
            return False, None
        if item is None:
            return False, f"gradient of microbatch {index}, which was never sent"
        if peer not in item.told or peer in item.rejected:
            return False, f"gradient of microbatch {index}, which it was neither sent nor asked for"
        if item.returned:
            item.redoing = False
            return False, None
        if item.train and payload is None:
            return False, f"backward of microbatch {index} without its gradient"
        item.returned, item.given_by = True, peer
        item.probe_at = math.inf
        self._due_at = None
        self.ctx.run.policy.returned(index)
        if item.peer is None or item.leg is not OutgoingState.SENT:
            item.peer, item.leg = peer, OutgoingState.SENT
        else:
            # The gradient of an overdue microbatch may come from a peer that had it before: its time counts
            # from there, or the usual time would never be learned after all peers became slower.
            took_s = self.ctx.clock.now - item.kept_since.get(peer, item.sent_at)
            # The first gradient of an iteration may be late: it is averaged, too (seed 12000145).
            self._usual_s = averaged(self._usual_s or self.ctx.costs.usual_s, took_s)
            self.ctx.costs.returned(peer, took_s, self._usual_s)
            self._most_s = self._most_usual_s()
        return True, None

    def holders(self) -> SentOn:
        """Peer of the next stage -> microbatches of the batch, evaluations left out, that it gave back first,
        and others that it was sent or asked after; both in order of index."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for index, item in sorted(self.items.items()):
            for peer in sorted(item.told | {item.given_by} - {""}) if item.train else ():
                found.setdefault(peer, ([], []))[item.given_by != peer].append(index)
        return {peer: (tuple(given), tuple(sent)) for peer, (given, sent) in found.items()}

    def forget(self, index: int) -> None:
        """Forget a microbatch that this peer gave up, because its input or its own result cannot be used.
        Nobody is told; nothing if it is not known."""
        self.items.pop(index, None)
        self._due_at = None

    def let_go(self, index: int) -> None:
        """Forget a microbatch that was called back: another peer of this stage computes it. A gradient of it
        that still comes is ignored instead of refused."""
        self.forget(index)
        self.called_back.add(index)

    def on_got(self, peer: str, index: int) -> None:
        """Measure the link to `peer` by its acknowledgement of the activation of microbatch `index`; nothing
        if none is awaited.

        If the activation was sent twice over one link, the first one arrives first, however much later than
        expected: the acknowledgement says nothing about the second (Karn, Partridge, SIGCOMM 1987).
        """
        item = self.items.get(index)
        began = item.unacknowledged.pop(peer, None) if item is not None else None
        if began is not None:
            self.ctx.costs.delivered(peer, self.ctx.clock.now - began, self.ctx.clock.now)
            self.ctx.links.payloads_come(peer)

    # --- credits -------------------------------------------------------------------------------

    def foresee(self, slots: Mapping[str, int]) -> None:
        """Count the credits as granted that machines will grant for the slots which the log binds to them, so
        that a slot is sent without a round trip; a machine that has not opened the round keeps it until then.
        Only of machines that served in the round before, and never more than such a machine keeps; reports of
        credits are taken as ever. slots: machine -> number of slots that this data node sends it."""
        membership, stage = self.ctx.run.membership, self.ctx.run.next_stage()
        for peer, count in slots.items():
            served = membership.is_live(peer, stage, self.t - 1) and membership.is_live(peer, stage, self.t)
            if served and self.ctx.links.incarnations.get(peer, 0) <= membership.members[peer].incarnation:
                sure = min(count, EARLY_PAYLOADS_MAX)
                now = self.ctx.clock.now
                self.credits[peer] = Credit(sure, standing=sure, stale=False, granted_at=now, foreseen=True)

    def on_slots(self, peer: str, slots: Slots) -> None:
        """Store the credits that `peer`, of the next stage, reports, send what can be sent, and return those
        that are neither guaranteed nor used. If it began to serve during this iteration, call microbatches
        back from other peers for it, unless it is a standby or the swarm is large."""
        comes = peer not in self.credits and peer not in self._initial_peers
        if peer not in self.credits:
            self.credits[peer] = Credit()
        self.credits[peer].told(slots, self.ctx.clock.now)
        if comes:
            self._look_at_overdue()
        self.pump(peer if self._bound else None)
        if comes and not self.ctx.run.near.crowded and peer not in self.ctx.standby_view.waits:
            self._call_back(peer)

    def link_down(self, peer: str) -> None:
        """Distrust the credits of a peer whose link broke until it reports them anew; forget the requests to
        it, and which activations it has not acknowledged. What it has is not sent again by that
        (`Repairs.link_down`)."""
        if peer in self.credits:
            self.credits[peer].stale = True
        for item in self.items.values():
            item.unacknowledged.pop(peer, None)
        self.forget_asks(peer)

    def lost_on_the_way(self, item: OutgoingMicrobatch, peer: str) -> None:
        """Count the credit with which an item was sent to `peer`, where it never arrived though the link
        holds, as unused again: `peer` counts it so, and grants no other for it. It may have refused the item,
        which came before it had opened the iteration, for what this peer had sent there before."""
        if item.unacknowledged.pop(peer, None) is not None and peer in self.credits:
            self.credits[peer].used -= 1

    def drop_peer(self, peer: str) -> None:
        """Forget the credits that a removed peer granted to this sender, and the requests for more; if it
        serves again, it counts as new (`_call_back`). What was sent to it is not sent again by that
        (`Repairs.peer_removed`)."""
        self.credits.pop(peer, None)
        self._initial_peers.discard(peer)
        self.forget_asks(peer)

    def forget_asks(self, peer: str) -> None:
        """Forget all requests for credits to a peer, so that waiting microbatches may ask it again."""
        for item in self.items.values():
            item.asked -= {(peer, False), (peer, True)}

    def _give_back(self, to: str | None) -> None:
        """Return to each receiver, or only to `to` (which reported credits), the free credits beyond those it
        guarantees.

        They were requested for a microbatch that went to another receiver, and would stay idle at this sender
        while other senders wait. Called after every pass over the waiting microbatches, which may have used
        them.
        """
        for peer, credit in self.credits.items() if to is None else [(to, self.credits[to])]:
            spare = min(credit.free, credit.beyond_standing)
            if spare > 0:
                credit.returned += spare
                self.ctx.outbox.send(peer, Return(self._fence(), credit.returned))
                self.forget_asks(peer)

    def _call_back(self, newcomer: str) -> None:
        """Call microbatches back for a peer that began to serve the next stage during the iteration: the
        other peers may have all the work. `units_to_recall` says how many of which peer."""
        sent: dict[str, list[OutgoingMicrobatch]] = {}
        for item in self.items.values():
            away = item.leg is OutgoingState.SENT and item.train and (item.redoing or not item.returned)
            if away and item.peer is not None and self.ctx.reachable(item.peer):
                sent.setdefault(item.peer, []).append(item)
        units = {p: len(items) for p, items in sent.items() if p != newcomer and p in self.credits}
        recalled = units_to_recall(self.ctx.costs, self.credits, units, newcomer)
        for peer, count in recalled.items():
            transmissions = {item.index: item.transmission for item in sent[peer]}
            self.recalled.update(transmissions.values())
            self.ctx.outbox.send(peer, CallBack(self._fence(), transmissions, count))

    # --- sending -------------------------------------------------------------------------------

    def _concerns(self, item: OutgoingMicrobatch, peer: str) -> bool:
        """True if news of `peer` may matter to an item of a data node in a round whose slots are bound to
        machines: it is that of its slot, or the slot may go to others. (Evaluations go to any.)"""
        if not item.train or item.repair or item.refused_by or item.waits_since < math.inf:
            return True
        holder = self._plan[item.index].peer
        return holder == peer or not self.hops.keeps_slot(holder)

    def pump(self, to: str | None = None) -> None:
        """Send the waiting microbatches whose next hop has a credit for them, repairs first, then in index
        order (last those whose gradient is back already, and which are computed again for a lost claim); ask
        for credits for the others. The policy may hold one back for a better peer. Then free credits that are
        not guaranteed are returned. to: peer whose credits alone have changed, at a data node in a round
        whose slots are bound to machines: only microbatches that this may concern are looked at
        (`_concerns`), and only credits of that peer returned."""
        self._due_at = None
        waiting = sorted(
            (
                item
                for item in self.items.values()
                if item.leg is OutgoingState.WAITING and (to is None or self._concerns(item, to))
            ),
            key=lambda item: (item.returned, not item.repair, item.index),
        )
        outstanding: dict[str, int] = {}
        for item in self.items.values() if waiting else ():
            item.count(outstanding, 1)
        self.hops.begin_pass()
        for item in waiting:
            if item.payload is None and self._prepare is None:
                continue
            item.count(outstanding, -1)
            self._dispatch(item, outstanding)
            item.count(outstanding, 1)
        self.hops.end_pass()
        left = sum(item.leg is OutgoingState.WAITING for item in self.items.values())
        self.ctx.outbox.report_backlog(left)
        self._give_back(to)

    def _dispatch(self, item: OutgoingMicrobatch, outstanding: Mapping[str, int]) -> None:
        """Send a waiting microbatch, hold it back for a better peer, or ask for a credit, as the dispatch
        policy says. outstanding: peer -> microbatches of this sender that it has."""
        peers, waits_until = self.hops.open_to(item)
        candidates = self.hops.candidates(item, peers, outstanding, self.credits)
        waited_s = self._waited_s(item, candidates)
        choice = self.ctx.run.policy.choose(item.index, candidates, waited_s, self.ctx.clock.now)
        item.held_for, item.held_until = None, waits_until
        if choice is None:
            asked = self.ctx.run.policy.prefer(item.index, candidates)
            if asked is not None:
                self._ask(item, asked)
        elif choice.hold_s:
            item.held_for = choice.peer
            item.held_until = min(waits_until, self.ctx.clock.now + choice.hold_s)
            self._ask(item, choice.peer)
        else:
            self._use_slot(item, choice.peer)
            item.peer = choice.peer
            if item.payload is None and self._prepare is not None:
                item.leg = OutgoingState.PREPARING
                self._prepare(item.index)
            else:
                self._transmit(item, choice.peer)

    def _use_slot(self, item: OutgoingMicrobatch, peer: str) -> None:
        """Use a credit of `peer`, which must be free, for `item`. If another microbatch requested it, that
        one asks again."""
        self.credits[peer].used += 1
        self.hops.took(peer)
        ask = (peer, item.repair)
        if ask not in item.asked:
            askers = [
                other
                for other in self.items.values()
                if other.leg is OutgoingState.WAITING and ask in other.asked
            ]
            if askers:
                min(askers, key=lambda other: other.index).asked.discard(ask)

    def _ask(self, item: OutgoingMicrobatch, peer: str) -> None:
        stale = peer in self.credits and self.credits[peer].stale
        planned = self._bound and item.train and peer == self._plan[item.index].peer
        if planned and not (item.repair or self._reported_at or peer in self.credits):
            return  # the machine of a slot reports a credit for it as soon as it opens the round
        if (peer, item.repair) not in item.asked and not stale:
            item.asked_at = item.asked_at if item.asked else self.ctx.clock.now
            item.asked.add((peer, item.repair))
            self.ctx.outbox.send(peer, Ask(self._fence(), item.index, item.repair))

    def _waited_s(self, item: OutgoingMicrobatch, candidates: list[Candidate]) -> float:
        """Seconds for which the microbatch has waited although a candidate had a free credit; 0: none had."""
        if item.sendable_since == math.inf and any(candidate.free for candidate in candidates):
            item.sendable_since = self.ctx.clock.now
        return max(0.0, self.ctx.clock.now - item.sendable_since)

    def _transmit(self, item: OutgoingMicrobatch, peer: str) -> None:
        item.leg, item.sent_at = OutgoingState.SENT, self.ctx.clock.now
        item.told.add(peer)
        item.rejected.discard(peer)
        item.unacknowledged.setdefault(peer, self.ctx.clock.now)
        item.transmission, item.redoing = self.new_transmission(), item.returned
        if not item.returned:
            item.probe_at = min(self.ctx.clock.now + self.patience_s(item), self.overdue_at(item))
        message = Forward(
            self._fence(),
            item.index,
            item.path,
            item.train,
            item.further,
            not item.returned,
            item.transmission,
            item.lost,
            self._seals.seal(ACTIVATION, item.index) if self._seals is not None else b"",
        )
        item.ahead_bytes = self.ctx.costs.hand(peer, self.ctx.clock.now)
        self.ctx.outbox.send(peer, message, item.payload)

    def new_transmission(self) -> int:
        """Next number for a transmission of a microbatch or a search for one, each used once in the
        iteration; answers repeat it."""
        self._last_transmission += 1
        return self._last_transmission

    def patience_s(self, item: OutgoingMicrobatch) -> float:
        """Seconds from sending a microbatch, or from the last inquiry after it, to the next inquiry: the wait
        doubles with each inquiry, up to 64-fold."""
        return max(PROBE_FLOOR_S, PROBE_FACTOR * self._usual_s) * 2.0 ** min(item.probes, 6)

    def ask_after(self, item: OutgoingMicrobatch, peer: str) -> None:
        """Ask `peer` if it has a microbatch; if so, it will send the gradient to this peer."""
        item.told.add(peer)
        item.rejected.discard(peer)
        self.ctx.outbox.send(peer, Want(self._fence(), item.index, not item.returned, item.transmission))

    def overdue_at(self, item: OutgoingMicrobatch) -> float:
        """Time (s) from which a microbatch that was sent, or waits, is overdue: its peer has kept it for far
        longer than usual, or the peers that it asked have granted this sender no credit for as long (infinite
        if it asked nobody). Infinite for a slot of a round, unless the round waits for late slots and another
        machine than the planned one has it, or that one has not opened the round (`_unopened_at`). Without
        meaning once its gradient is back.

        The wait doubles, up to 64-fold, each time that the microbatch was overdue. While this sender knows no
        usual time: the time of the LATE_REPORTS-th report of the leader since then (in the first step of a
        run of the FIRST_REPORTS-th) that it lacks something of the iteration (`reported`); infinite before
        that report.
        """
        if self._plan and item.train and not self._is_redone(item):
            return self._unopened_at(item)  # else the leader says which slots are late
        since = item.sent_at
        if item.leg is OutgoingState.WAITING:
            granted = [self.credits[peer].granted_at for peer, _ in item.asked if peer in self.credits]
            since = max([item.asked_at, *granted]) if item.asked else math.inf
        usual_s = min(max(self._usual_s, self.ctx.costs.usual_s), self._most_s)
        if usual_s:
            return since + max(OVERDUE_FLOOR_S, OVERDUE_FACTOR * usual_s) * 2.0 ** min(item.overdue, 6)
        reported_at = [at for at in self._reported_at if at > since]
        needed = FIRST_REPORTS if self._is_first else LATE_REPORTS
        return reported_at[needed - 1] if len(reported_at) >= needed else math.inf

    def _unopened_at(self, item: OutgoingMicrobatch) -> float:
        """Time (s) from which a slot that was sent to its machine on a foreseen credit is overdue, as a slot
        that waits for a credit is (`HopCandidates.open_to`): the machine has reported none, so it has not
        opened the round. Infinite once it has, in a round that drops late slots, and for a slot that only its
        machine can fill."""
        drops, credit = self.ctx.run.settings.rounds.drops, self.credits.get(item.peer or "")
        if drops or credit is None or not credit.foreseen:
            return math.inf
        if item.leg is not OutgoingState.SENT or self._plan[item.index].carried:
            return math.inf
        return item.sent_at + max(SLOT_WAITS_S, SLOT_WAITS * self.ctx.costs.usual_s)

    @property
    def _is_first(self) -> bool:
        """True in the first step of a run."""
        return min(self.ctx.run.membership.active_from.values(), default=self.t) >= self.t

    def _is_redone(self, item: OutgoingMicrobatch) -> bool:
        """True if a slot that a round waits for was sent to another machine than the planned one, or waits
        for credits of others, or of the planned one that left and came back: the leader does not know who has
        it then, and leaves slots of machines that came back to others."""
        planned, waits = self._plan[item.index].peer, item.leg is OutgoingState.WAITING
        others = {peer for peer, _ in item.asked} if waits else {item.peer}
        left = planned in self.ctx.run.membership.gone
        return not self.ctx.run.settings.rounds.drops and planned != "" and (left or not others <= {planned})

    def _most_usual_s(self) -> float:
        """Greatest usual time (s) that is believed: MOST_USUAL times that of the middle peer of the next
        stage, of an even number the faster of the two; infinite if fewer than two are known. Without it a
        peer that gives each microbatch back just in time would be given more time by each."""
        costs, peers = self.ctx.costs.neighbours, {*self.hops.peers(), *self.credits}
        known = [costs[peer].gradient_s for peer in peers if peer in costs and costs[peer].gradient_s]
        return MOST_USUAL * median_low(known) if len(known) > 1 else math.inf

    def reported(self, lacking: Mapping[int, Sequence[int]]) -> None:
        """Note that the leader reported that it lacks something of this iteration (units by stage): where no
        usual time is known, LATE_REPORTS of them make a microbatch overdue; FIRST_REPORTS in the first step
        of a run, when the leader does not know either how long a step takes. In that step a report that
        others lack than before begins the count anew: slow lines are no reason to compute twice (I6). Nothing
        if the first step is a round."""
        if self._is_first and self._plan:
            return
        if self._is_first and lacking != self._lacking:
            self._reported_at.clear()
        self._lacking = lacking
        self._due_at = None
        self._reported_at.append(self.ctx.clock.now)  # from now on slots of rounds ask for credits, too
        self._look_at_overdue()

    def _look_at_overdue(self) -> None:
        """Have `Repairs.tick` look at each microbatch that was sent once it is overdue, however long the wait
        for the next inquiry is."""
        self._due_at = None
        for item in self.items.values():
            if item.leg is OutgoingState.SENT and not item.returned and self.overdue_at(item) < math.inf:
                item.probe_at = min(item.probe_at, self.overdue_at(item))

    def others_could(self, than: str) -> bool:
        """True if another peer of the next stage than `than` is reachable. Where no other neighbour is in a
        large swarm, replicas that are none count, and some are dialled."""
        if any(self.ctx.reachable(peer) for peer in self.hops.peers() if peer != than):
            return True
        return any(peer != than for peer in self.hops.beyond_neighbours())

    # --- time ----------------------------------------------------------------------------------

    def changed(self) -> None:
        """Note that the due time of a microbatch may have changed, so that `deadline` is computed anew."""
        self._due_at = None

    def tick(self) -> None:
        """Send the microbatches that were held back for a better peer long enough; prefer other peers for
        those that wait for credits too long (`overdue_at`)."""
        now = self.ctx.clock.now
        waiting = [item for item in self.items.values() if item.leg is OutgoingState.WAITING]
        unheeded = [item for item in waiting if now >= self.overdue_at(item)]
        for item in unheeded:
            self._ask_others(item)
        if unheeded or any(now >= item.held_until for item in waiting):
            self.pump()

    def _ask_others(self, item: OutgoingMicrobatch) -> None:
        """Forget the requests of a waiting microbatch, and prefer other peers for it than those that it asked
        in vain; one of these that has not even reported its credits in this iteration gets no microbatches
        for a while."""
        asked = {peer for peer, _ in item.asked}
        for peer in sorted(asked - self.credits.keys()):
            self.ctx.costs.missed(peer, self.t)
        item.refused_by.update(asked)
        item.asked.clear()
        item.waits_since = math.inf
        item.overdue += 1

    def deadline(self) -> float:
        """Earliest time (s) at which a microbatch was held back long enough, or is overdue, or is to be
        inquired after; infinite if there is none."""
        if self._due_at is None:
            due = math.inf
            for item in self.items.values():
                due = min(due, self._due(item))
            self._due_at = due
        return self._due_at

    def _due(self, item: OutgoingMicrobatch) -> float:
        if item.leg is OutgoingState.WAITING:
            return min(item.held_until, self.overdue_at(item))
        return math.inf if item.returned or item.leg is OutgoingState.PREPARING else item.probe_at

    def _fence(self) -> Fence:
        return self.ctx.fence(self.t, self.base)
