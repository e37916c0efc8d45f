"""Reports of members about the open iteration: claims, PREPARED, overflows (R6, R8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.coordinator.step_receipts import StepReceipts
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.log.records import STRANDED, Witness
from anabranch.protocol.messages import Claim, ContributionDigests, Overflow, Prepared
from anabranch.protocol.reduce.coverage import plausible, squares_bytes
from anabranch.protocol.rounds.plan import active

#: Stalls of a step after which one replica's word for an overflow is enough, if no other replica computed the
#: microbatch. Plain choice: a replica that could has had several times a step's usual duration.
UNANSWERED_STALLS = 2
#: The same if all who report the overflow had their input from one relay, and others could have sent it. A
#: choice: within this the microbatch was overdue at the peer before that relay, and came another way.
ONE_SOURCE_STALLS = 4
#: Largest loss sum (nats) of a microbatch or window. What float32 values add up to is far below (an honest
#: replica reports a loss that is not finite as an overflow), and as many of these as a log line holds have a
#: finite sum. A plain choice.
MOST_LOSS = 1e200
#: Holders that a claim may name beyond the members and those removed in the iteration, as far as the leader
#: knows: its sender may have heard of others. A plain choice.
MORE_HOLDERS = 64
#: Overflows reported by one peer and found by no other after which it is removed. Plain choice: one may be a
#: fault of its hardware.
FALSE_WITNESSES = 3
#: Steps skipped on the word of one peer that others did not answer, of the last REMEMBERED iterations, after
#: which it is removed in place of the next, and the second time expelled. Plain choices: where they are true,
#: another one finds them then.
LONE_WORDS, REMEMBERED = 2, 50


@dataclass(eq=False)
class Reports:
    """Check of members' reports, and their entry into the open round."""

    ctx: PeerContext
    tip: LogTip
    admission: Admission
    receipts: StepReceipts
    reducing: ReduceAttempts
    _false: dict[str, int] = field(default_factory=dict)
    """Peer -> overflows that it reported and others did not find."""
    _blamed: dict[str, set[str]] = field(default_factory=dict)
    """Peer that reported false overflows -> peers whose inputs it said to have had."""
    _alone: dict[int, str] = field(default_factory=dict)
    """Iteration skipped on one peer's word, which others of its stage did not answer -> the peer."""
    _doubted: dict[str, int] = field(default_factory=dict)
    """Peer that was removed in place of such a skip -> the iteration."""

    def on_claim(self, peer: str, message: Claim) -> str | None:
        """Enter a replica's cumulative claim (units in its sum); units once claimed stay claimed. New units
        count as progress of the step, unless this peer's claims put off no stall any more
        (`ReduceAttempts.claimed`); so do new losses of held-out windows. Returns why the claim is refused;
        None if it is entered, or ignored: it is not about the open round, `peer` does not serve the stage, or
        it says no more than the batch's hash (which is kept). A peer that claims an impossible loss is
        expelled."""
        current = self.tip.current(peer, message.stage, message.fence.t, message.fence.base)
        if current is None:
            return None
        if self._is_too_long(current, message):
            return "more units or holders than the iteration has"
        units = frozenset(message.units) & self.ctx.run.cover(message.stage, current.t)
        slots = {unit if message.stage else unit // 2 for unit in units}
        if current.of_crews and not all(current.has_seat(peer, message.stage, slot) for slot in slots):
            return "units of slots that another crew fills"
        wrong = self._contradiction(current, message, units)
        if wrong is not None:
            return wrong
        losses = *message.losses.values(), *message.evaluations.values()
        if not all(abs(loss) < MOST_LOSS for loss in losses):
            self.admission.expel(peer, f"it claimed a loss in iteration {current.t} that no microbatch has")
            return "a loss that no microbatch has"
        if message.stage == 0:
            current.manifest = current.manifest or message.manifest
        if not (units or message.evaluations or message.apart):
            return None  # it says no more than the hash of the batch
        claims = current.claims.setdefault(message.stage, {})
        known, doubled = claims.get(peer, frozenset()), False
        if units - known:
            if self.reducing.claimed(current, message.stage, peer):
                current.progress_at, current.stalls = self.ctx.clock.now, 0
            current.reported[message.stage] = current.reported.get(message.stage, 0) + 1
            doubled = current.took(message.stage, units - known, self.ctx.run.settings.stages)
        claims[peer] = units | known
        self.reducing.doubles.entered(current, peer, message, bool(units - known), doubled)
        self.admission.absent.back(peer)
        self.admission.parted.told(peer, message.apart)
        if message.stage == 0:
            current.losses.setdefault(peer, {}).update(message.losses)
            for index, loss in message.evaluations.items():
                if index not in current.evaluations:
                    current.evaluations[index] = loss
                    self.reducing.reported(current)
                    current.progress_at = self.ctx.clock.now
        return None

    def on_digests(self, peer: str, message: ContributionDigests) -> str | None:
        """Enter digests and losses of a machine's contributions to the open round, for the log; returns why
        they are refused, None if they are entered or ignored as in `on_claim`. A machine with an impossible
        loss is expelled."""
        current = self.tip.current(peer, message.stage, message.fence.t, message.fence.base)
        if current is None:
            return None
        slots, digests, losses = set(active(current.slots)), message.digests, message.losses
        if not (current.slots and self.ctx.run.settings.rounds.private):
            return "digests of contributions to a step that is no round on private data"
        if message.stage != 1 or not digests.keys() <= slots or losses.keys() != digests.keys():
            return "digests of contributions that no slot has"
        if not all(abs(loss) < MOST_LOSS for loss in losses.values()):
            self.admission.expel(peer, f"it claimed a loss in iteration {current.t} that no slot has")
            return "a loss that no slot has"
        made = current.own.setdefault(peer, {})
        made.update({slot: (digest, losses[slot]) for slot, digest in digests.items()})
        return None

    def _is_too_long(self, current: Round, message: Claim) -> bool:
        """True if a claim lists more than it could: units repeatedly, microbatches of a holder repeatedly, or
        holders that the run does not have. Each such megabyte would cost more than its decoding."""
        membership, most = self.ctx.run.membership, self.ctx.run.settings.microbatches
        return (
            len(message.units) > len(self.ctx.run.cover(message.stage, current.t))
            or len(message.holders) > len(membership.members) + len(membership.gone) + MORE_HOLDERS
            or any(len(part) > most for each in message.holders.values() for part in each)
        )

    def _contradiction(self, current: Round, message: Claim, units: frozenset[int]) -> str | None:
        """Reason why no honest replica would send this claim, or None. units: those of the claim that are in
        the batch."""
        if len(units) < len(set(message.units)):
            return "units that are not in the batch"
        given = [index for each, _ in message.holders.values() for index in each]
        named = [index for each in message.holders.values() for part in each for index in part]
        if len(given) > len(set(given)) or max(named, default=0) >= self.ctx.run.settings.microbatches:
            return "holders of microbatches that are not in the batch, or that several gave back first"
        losses, evaluations = message.losses, message.evaluations
        if message.stage != 0:
            return "losses from a relay" if losses or evaluations else None
        heads = {unit // 2 for unit in units if unit % 2 == 0}
        if losses.keys() != heads:
            return "losses that are not those of the microbatches claimed"
        if not evaluations.keys() <= set(self.tip.windows(current)):
            return "windows that are not evaluated"
        return None

    def on_prepared(self, peer: str, message: Prepared) -> str | None:
        """Enter the report of `peer` that it is PREPARED (it has the reduced gradient). Returns why it is
        refused; None if it is entered, or ignored because it is not about the reduce in progress or `peer` is
        no member of that. Of a second one of the same attempt only the receipt is taken."""
        current = self.tip.current(peer, message.stage, message.fence.t, message.fence.base)
        attempt = current.attempts.get(message.stage) if current else None
        if current is None or attempt is None or attempt.attempt != message.attempt:
            return None
        most_bytes = squares_bytes(message.stage, self.ctx.run.settings.counts)
        if not message.digest or not plausible(message.squares, most_bytes):
            return "a digest or sums of squares that no gradient has"
        prepared = current.prepared.setdefault(message.stage, {})
        if peer in prepared:
            return self.receipts.later_receipt(peer, message, attempt, current)
        if peer in attempt.members:
            if wrong := self.receipts.refused(peer, message, attempt, current):
                return wrong
            prepared[peer] = message
            self.reducing.reported(current)
            current.progress_at, current.stalls = self.ctx.clock.now, 0
        return None

    def on_overflow(self, peer: str, message: Overflow) -> str | None:
        """Enter the report of `peer` that a tensor is not finite or out of range, and have the step skipped
        (`Round.witness`) if enough replicas of its stage report that, or this peer itself does; not if all of
        them computed with inputs of one relay (`_one_source`). In a round of pipeline islands the overflow of
        a slot only loses that slot. Returns why the report is refused; None if it is entered or ignored (not
        about the open round, or a skip is decided)."""
        settings = self.ctx.run.settings
        if message.tensor == STRANDED:
            return "an overflow with the name by which the leader skips a round: it would count as none"
        stage, index = message.stage, message.index
        current = self.tip.current(peer, stage, message.fence.t, message.fence.base)
        if current is None or current.witness is not None:
            return None
        units = active(current.slots) if current.slots else range(settings.microbatches)
        if index not in units and index not in self.tip.windows(current):
            return f"no microbatch {index}, slot or window, in iteration {current.t}"
        of_crew = current.of_crews and index < settings.microbatches
        if of_crew and not current.has_seat(peer, stage, index):
            return f"no slot {index} that it fills"
        found = current.witnesses.setdefault((stage, index), {})
        if peer not in found:
            # The first report is news; one microbatch after the other could put a stall off for hours.
            if not any(peer in reports for reports in current.witnesses.values()):
                current.progress_at = self.ctx.clock.now
            found[peer] = message.tensor
        sources = current.sources.setdefault((stage, index), {}).setdefault(peer, [])
        source = message.sender if self._beside(stage, message.sender) else ""
        if source not in sources:
            sources.append(source)
        serving = self.ctx.run.membership.live(stage, current.t)
        heard = [other for other in found if other in serving]
        enough = peer == self.ctx.me or len(heard) >= self._needed(serving)
        if of_crew:
            return None  # the slot is lost, and the round goes on without it (`island_rounds`)
        if enough and not self._one_source(current, stage, index):
            current.witness = Witness(peer=heard[0], stage=stage, index=index, tensor=found[heard[0]])
        return None

    def _needed(self, serving: Sequence[str]) -> int:
        """Number of replicas that must find an overflow before the step is skipped: more than half of those
        that serve the stage (`serving`), so that a few liars that agree skip nothing. (No other replica
        embeds a data node's part of the batch: `take_unanswered`.)"""
        return len(serving) // 2 + 1

    def _one_source(self, current: Round, stage: int, index: int) -> bool:
        """True if one relay alone, or half of its stage, may have made up the inputs with which a microbatch
        overflowed, so that the step is not skipped yet: all that report the overflow had their inputs from
        that relay, or all but so few replicas that they may lie together, and another relay could send
        inputs. False if this peer is that relay, or itself found the overflow with inputs of more than half
        of the relays."""
        membership, me = self.ctx.run.membership, self.ctx.me
        sources, serving = current.sources.get((stage, index), {}), membership.live(stage, current.t)
        suppliers = {source for each in sources.values() for source in each}
        if suppliers and not suppliers & {"", me}:
            beside = {self._beside(stage, each) for each in suppliers}
            could = {peer for each in beside for peer in membership.live(each, current.t)}
            if 2 * len(suppliers & could) <= len(could) and could - suppliers:
                return True
        for source in {source for each in sources.values() for source in each if source}:
            others = [peer for peer in serving if sources.get(peer, [source]) != [source]]
            if me == source or me in others or 2 * len(others) >= len(serving):
                continue
            its = self._beside(stage, source)
            if its and any(peer != source for peer in membership.live(its, current.t)):
                return True
        return False

    def take_unanswered(self, current: Round) -> None:
        """Have the step skipped (`Round.witness`) on one replica's report of an overflow, if the step has
        stalled and no other replica computed that microbatch: the others could block the step by taking the
        microbatch and never giving it back, or by granting no credit for it. But the reporter may have held
        the step up itself, and made the overflow up: after LONE_WORDS such steps it is removed instead, and
        others find the next overflow, if there is one. Nobody is removed if enough replicas report it, with
        inputs of too few relays (`_one_source`)."""
        if current.witness is not None or current.stalls < UNANSWERED_STALLS:
            return
        for (stage, index), found in current.witnesses.items():
            if current.of_crews and index < self.ctx.run.settings.microbatches:
                continue
            serving = self.ctx.run.membership.live(stage, current.t)
            first = next((peer for peer in found if peer in serving), None)
            units = {index} if stage else {head_unit(index), embed_unit(index)}
            claimed = units <= frozenset().union(*current.claims.get(stage, {}).values())
            long = current.stalls >= ONE_SOURCE_STALLS or not self._one_source(current, stage, index)
            if first is None or not long or claimed or index in current.evaluations:
                continue
            others = set(serving) - {first, *self.admission.going()}
            several = sum(peer in serving for peer in found) >= self._needed(serving)
            certain = not others or several or first == self.ctx.me
            if certain or not self._is_doubted(first, current.t):
                current.witness = Witness(peer=first, stage=stage, index=index, tensor=found[first])
                return

    def _is_doubted(self, peer: str, t: int) -> bool:
        """True if iteration t is not to be skipped on the word of `peer` alone, as LONE_WORDS of the last
        REMEMBERED iterations were before: then `peer` is removed, the second time expelled. Else False, and t
        counts as skipped on its word. Not called if the stage has no other replica. (An honest data node may
        be the only one that has its microbatches.)"""
        self._alone = {k: of for k, of in self._alone.items() if t - REMEMBERED < k < t}
        self._doubted = {of: k for of, k in self._doubted.items() if t - REMEMBERED < k <= t}
        if sum(of == peer for of in self._alone.values()) < LONE_WORDS:
            self._alone[t] = peer
            return False
        again = self._doubted.setdefault(peer, t) < t
        reason = f"on its word alone {LONE_WORDS} steps were skipped before iteration {t}"
        (self.admission.expel if again else self.admission.remove)(peer, reason)
        return True

    def skipped(self, t: int) -> None:
        """Forgive those that were removed instead of a skip of iteration t on their word, now that t was
        skipped on the words of several: what they said was true."""
        found = {peer for peer, doubted in self._doubted.items() if doubted == t and t not in self._alone}
        self._doubted = {peer: k for peer, k in self._doubted.items() if peer not in found}
        self._alone = {k: peer for k, peer in self._alone.items() if peer not in found}

    def one_word(self, iterations: Iterable[int]) -> bool:
        """True if one of these iterations was skipped on one peer's word, as far as this leader knows."""
        return not self._alone.keys().isdisjoint(iterations)

    def false_witnesses(self, current: Round) -> dict[str, str]:
        """Peers other than this one that reported FALSE_WITNESSES false overflows -> reason to remove them.
        To be called once for each step that was taken (not skipped), as it counts, and notes, the overflows
        in `current` that the owner of the unit, of the reporter's numerics class, did not find; at most one
        for each peer.

        The inputs may have been false, not the report. So the first report about inputs of one supplier does
        not count: an honest replica takes no more inputs of a forger. At most FALSE_WITNESSES suppliers
        excuse a peer.
        """
        found: dict[str, str] = {}
        for peer, supplier in self._unconfirmed(current).items():
            blamed = self._blamed.setdefault(peer, set())
            excused = bool(supplier) and supplier not in blamed and len(blamed) < FALSE_WITNESSES
            blamed.add(supplier)
            self._false[peer] = count = self._false.get(peer, 0) + (not excused)
            inputs = f" with inputs of {supplier[:8]}" if supplier else ""
            said = f"{peer[:8]} reported an overflow in iteration {current.t}{inputs}"
            self.ctx.outbox.note("note", text=f"{said} that others did not find")
            if count >= FALSE_WITNESSES and peer != self.ctx.me:
                found[peer] = f"it reported {count} overflows that others did not find"
        return found

    def _unconfirmed(self, current: Round) -> dict[str, str]:
        """Reporters of overflows that the commit disproves: the microbatch counts in the step, computed
        without overflow by another replica of the same numerics class (in another class it may well stay in
        range). Returns reporter -> peer whose input it computed with, "" if that is no relay of an adjacent
        stage."""
        members = self.ctx.run.membership.members
        false: dict[str, str] = {}
        for (stage, index), found in current.witnesses.items():
            attempt, classes = current.attempts.get(stage), set(current.classes.get(stage, ()))
            if attempt is not None and stage and index < len(attempt.owners):
                if attempt.owners[index] < 0:
                    continue  # a slot that was dropped: nobody found that it does not overflow
                classes = {current.classes[stage][attempt.owners[index]]}
            for peer in found:
                if peer in members and classes == {members[peer].numerics_class}:
                    false.setdefault(peer, current.sources[stage, index][peer][0])
        return false

    def _beside(self, stage: int, peer: str) -> int:
        """Stage adjacent to `stage` of which `peer` is a relay, or was one when the iteration was opened: who
        sends false inputs may leave before they are reported. 0: there is none."""
        membership, stages = self.ctx.run.membership, self.ctx.run.settings.stages
        found = {membership.stage_of(peer), membership.gone.get(peer, (0, ""))[0]}
        return next((s for s in (stage - 1 if stage else stages, stage + 1) if s and s in found), 0)
