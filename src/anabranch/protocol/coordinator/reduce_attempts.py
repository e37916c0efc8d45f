"""Orders for the reduces of a step by the log's leader: attempts, agreement of their results, retries
(R6–R8)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.double_claims import DoubleClaims
from anabranch.protocol.coordinator.reduce_schedule import EVEN, ReduceSchedule
from anabranch.protocol.coordinator.round import Look, Round
from anabranch.protocol.coordinator.step_receipts import StepReceipts
from anabranch.protocol.coordinator.witnessed_reduces import TRIES_LATE, WitnessedReduces
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.unreachable_pairs import TRIES
from anabranch.protocol.interface.tasks import head_unit
from anabranch.protocol.messages import Attempt, AttemptId, Missing, Prepared
from anabranch.protocol.recovery.late_data_nodes import TURNS, LateDataNodes
from anabranch.protocol.reduce.coverage import missing, settle, settle_slots
from anabranch.protocol.reduce.hierarchy import in_order
from anabranch.protocol.reduce.partial_sums import ReduceAccount, attempt_sets

#: Least time (s) without progress after which the leader asks for missing units, and factor on the last
#: step's duration.
STALL_FLOOR_S = 5.0
STALL_FACTOR = 4.0
#: Share of the last step's duration that a wait for a claim counts in the duration of its own step. So one
#: relay that claims just before it is missed makes later waits at most a third longer, three of them four
#: times. A plain choice.
WAIT_COUNTED = 0.25
#: Time (s) up to which a step's waits for reduces and reports always count in its duration: it changes no
#: later wait, because of STALL_FLOOR_S. Share of the usual ones that stays usual after a step without them,
#: so that one quick step does not make the next ones stall. Plain choices.
REPORTS_S, REPORTS_FADE = STALL_FLOOR_S / STALL_FACTOR, 0.75
#: Times the wait for a step without reports, or a reduce over usual links, up to which the reports of a step
#: count in its duration where a reduce was repeated. A choice: a repeated reduce gets twice the time.
TAUGHT = 2.0
#: Least time (s) without news after which a claim is late: above the repetition of lost reports' round trips.
LATE_S = 1.0
#: Steps with late claims after which units are missed STALL_FACTOR times earlier, the most of them that are
#: remembered, and how many of them one step without forgives: relays that take turns are found too.
LATE_STEPS, LATE_KEPT, FORGIVEN = 3, 8, 0.25
#: Iterations in which a replica reports another reduced gradient than most of its stage, after which it is
#: removed. Plain choice: one may be a fault of hardware.
DISSENTS = 2


def _comparable(digest: str, squares: Mapping[str, float]) -> tuple[object, ...]:
    """Result of a reduce, comparable between reports: the gradient's digest and sums of squares."""
    return (digest, *sorted(squares.items()))


def _result(message: Prepared) -> tuple[object, ...]:
    """Result of a reduce as a PREPARED report states it."""
    return _comparable(message.digest, message.squares)


def _alike(one: Prepared, other: Prepared) -> bool:
    """True if two PREPARED reports state the same result: as `_result`, without a sort for each report."""
    return one.digest == other.digest and one.squares == other.squares


class ReduceAttempts:
    """Reduces that the coordinator orders, with their retries. step_s: duration (s) of the last step, without
    most of its waits; 0 before the first that this leader saw."""

    def __init__(
        self,
        ctx: PeerContext,
        log: Voter,
        admission: Admission,
        receipts: StepReceipts,
        account: Callable[[Attempt], ReduceAccount | None],
    ) -> None:
        """account: function that returns who sent what, and the result, of an attempt whose parts this peer
        sums all."""
        self.ctx = ctx
        self._receipts = receipts
        self.log = log
        self.admission = admission
        self.doubles = DoubleClaims(ctx)
        self.sources = LateDataNodes(ctx, admission)
        self.step_s = 0.0
        self._late = 0.0
        """Steps with late claims, less those forgiven."""
        self._reports_s = 0.0
        """Usual seconds of the waits of a step for reduces and reports (`_counted_s`); 0 before the first."""
        self._work_s = 0.0
        """Duration (s) of the last step without waits for reduces and reports; 0 before the first."""
        self.expected_s = 0.0
        """Seconds that the open round should take, by its machines' speeds, or a new leader's first step, by
        those that it saw before; 0: neither, or not known."""
        self.spreading = ReduceSchedule(ctx, admission.ways)
        self.witnessing = WitnessedReduces(ctx, admission, account)
        self._attempt_number = 0
        self._dissents: set[tuple[str, int]] = set()
        """(peer, iteration) in which a peer reported another gradient than most of its stage."""

    def attempt(self, current: Round) -> None:
        """Order a reduce at each stage whose units are all claimed (in a round perhaps earlier:
        `_order_early`) and whose claims are not doubted (`DoubleClaims.awaits`), unless one is in progress
        there that can still end, and have the units of absent members computed again (`_redo`). Reduces that
        are in progress are given up first: those of the stages in `Round.repeat`, those whose slots do not
        all count any more, and those that name a false owner. Nothing after the run's last step, or in a
        round that is skipped. May be called at any time: a stage is looked at again only after news of it."""
        if current.t > self.ctx.run.steps or (current.slots and current.witness is not None):
            return
        while current.repeat:
            self.witnessing.failed(stage := current.repeat.pop(), current.t)
            current.give_up(stage)
        version, silent = self.ctx.run.membership.version, self.admission.absent.silent()
        for stage in range(self.ctx.run.settings.stages + 1):
            look = (current.reported.get(stage, 0), version, silent)
            if current.looked.get(stage) != look:
                self._decide(current, stage, look)

    def _decide(self, current: Round, stage: int, look: Look) -> None:
        """Order a stage's reduce, unless the reduce in progress can still end or some units are not claimed.
        Units of absent members are asked for again (`_redo`). look: inputs of the decision: reports of the
        stage, version of the membership, silent members.

        A reduce that lost a member stays valid until another can be ordered, for it ends if the lost member
        had sent everything.
        """
        members = self.admission.absent.present(stage, current.t)
        attempt = current.attempts.get(stage)
        if attempt is not None and stage in current.early and not self._goes_on(current, attempt):
            current.give_up(stage)
            attempt = None
        if attempt is not None:
            whole = set(attempt.members) <= set(members) and not self._silent_helpers(attempt, look)
            dropped = current.slots and current.covers[stage] != current.counts(stage)
            if dropped or self.doubles.wrong(current, attempt):
                current.give_up(stage)
                self._decide(current, stage, look)
                return
            if (whole and stage not in current.torn) or self.prepared(current, stage):
                current.looked[stage] = look
                return
            current.torn.add(stage)
        if not members:
            return
        cover = self._cover(current, stage)
        if current.slots and self._lacks(current, stage, cover, look):
            current.looked[stage] = look
            if attempt is None:
                self._order_early(current, stage, members, cover)
            return
        here = set(members)
        claims = {p: u for p, u in current.claims.get(stage, {}).items() if p in here}
        if sum(map(len, claims.values())) < len(cover) or missing(cover, claims):
            current.looked[stage] = look
            self._redo(current, stage, here, claims)
            return
        if self.doubles.awaits(current, stage, cover, claims, here):
            current.looked[stage] = look
            return
        if attempt is not None:
            if self._silent_helpers(attempt, look):  # a helper may be heard, and fall silent again
                current.even.add(stage)
            current.give_up(stage)
        members = in_order(members, self.ctx.run.membership.members, self.ctx.run.settings.neighbours)
        named = self.doubles.named(current, stage)
        if current.slots:
            owners = settle_slots(stage, len(current.slots), cover, claims, members, named)
        else:
            owners = settle(cover, claims, members, named)
        self._order(current, stage, members, owners)

    def _silent_helpers(self, attempt: Attempt, look: Look) -> frozenset[str]:
        """Helpers of a reduce that are silent, or about to leave, by the inputs `look` of the present
        decision. Never this peer, which may be about to leave and is there as long as it orders reduces."""
        return look[2].intersection(attempt.helpers) - {self.ctx.me}

    def _order_early(
        self, current: Round, stage: int, members: list[str], cover: frozenset[int]
    ) -> None:
        """Order a round's reduce once its first slot is done, as if the machines to which the other slots are
        bound had claimed them: each sends its contribution when it is ready. Nothing before the first slot is
        done, at stage 0, for pipeline islands, in runs with audits, after a reduce that was stuck, and where
        this peer sums the parts. members: those present. cover: slots that count."""
        claims, plan = current.claims.get(stage, {}), current.slots
        here, claimed = set(members), current.claimed.get(stage, set())
        if not stage or self.ctx.run.settings.rounds.pipeline or self._receipts.on:
            return
        computing = {slot: plan[slot].peer for slot in cover - claimed}
        if current.retries.get(stage) or not (claimed & cover and here.issuperset(computing.values())):
            return
        expected = {peer: units for peer, units in claims.items() if peer in here}
        for slot, peer in computing.items():
            expected[peer] = expected.get(peer, frozenset()) | {slot}
        if missing(cover, expected):
            return
        members = in_order(members, self.ctx.run.membership.members, self.ctx.run.settings.neighbours)
        owners = settle_slots(stage, len(plan), cover, expected, members)
        if self.witnessing.plan(stage, current.t, members, owners) is None:
            current.early.add(stage)
            self._order(current, stage, members, owners)

    def _goes_on(self, current: Round, attempt: Attempt) -> bool:
        """True if a reduce that was ordered early is still the one to wait for: some unit is not claimed yet,
        or each is claimed by its owner. Once all units are claimed, the reduce is no longer an early one, and
        its duration counts from now."""
        stage = attempt.stage
        claims, claimed = current.claims.get(stage, {}), current.claimed.get(stage, set())
        if not current.covers[stage] <= claimed:
            return True
        current.early.discard(stage)
        current.ordered_at[stage] = self.ctx.clock.now
        current.worked_s = current.worked_s or self.ctx.clock.now - current.since
        owners = ((unit, attempt.members[owner]) for unit, owner in enumerate(attempt.owners) if owner >= 0)
        return all(unit in claims.get(peer, ()) for unit, peer in owners)

    def _lacks(self, current: Round, stage: int, cover: frozenset[int], look: Look) -> bool:
        """True if a stage's reduce in a round can only wait: nobody claims some unit of `cover`, and every
        member of the iteration is heard, so no units of an absent one are to be computed again. cover: units
        that the reduce has to count. look: inputs of the decision."""
        all_here = not look[2] and not self.admission.absent.without(current.t)
        return all_here and not cover <= current.claimed.get(stage, set())

    def _cover(self, current: Round, stage: int) -> frozenset[int]:
        """Units that the iteration counts at a stage; in a round without those of dropped slots."""
        return current.counts(stage) if current.slots else self.ctx.run.settings.cover(stage)

    def _order(self, current: Round, stage: int, members: list[str], owners: tuple[int, ...]) -> None:
        self._attempt_number += 1
        plan = self.witnessing.plan(stage, current.t, members, owners)
        untried = not current.retries.get(stage) and stage not in current.even
        if plan is None and untried and not self._receipts.on:
            worked = {peer for claims in current.claims.values() for peer, units in claims.items() if units}
            if stage in current.early:  # those that have begun their slots have opened the round
                worked |= {*self.ctx.run.split(current.t).holder.values()}
                worked |= {members[owner] for owner in owners if owner >= 0}
            able = frozenset(worked - self.admission.absent.silent())
            plan = self.spreading.of(stage, current.t, members, able, owners)
        spread = plan or EVEN
        message = Attempt(
            self.ctx.fence(current.t, current.base),
            stage,
            AttemptId(self.log.raft.term, self._attempt_number),
            self.ctx.run.membership.number,
            tuple(members),
            owners,
            spread.helpers,
            spread.sums or self._receipts.summing(stage, current.t, owners),
        )
        current.attempts[stage] = message
        current.covers[stage] = self._cover(current, stage)
        current.receipts.pop(stage, None)
        current.ordered_at[stage] = self.ctx.clock.now
        if stage not in current.early:
            current.worked_s = current.worked_s or self.ctx.clock.now - current.since
        # Kept with the attempt: an owner may be removed after its report.
        classes = (self.ctx.run.membership.members[peer].numerics_class for peer in members)
        current.classes[stage] = tuple(classes)
        if stage == 0:
            current.counted_losses = self._losses(current, message)
        current.prepared[stage] = {}
        current.progress_at = self.ctx.clock.now
        for peer in (*members, *spread.helpers):
            self.ctx.outbox.send(peer, message)

    def _redo(
        self, current: Round, stage: int, members: set[str], claims: Mapping[str, frozenset[int]]
    ) -> None:
        """Have the units of absent members computed again by other replicas, once for each of these members:
        the peers of the stage before, which sent these units, are told which are missing (R6). Nothing if
        nobody new is absent, or if all that are absent are being removed and more is missing than they had.
        members: those present, with their `claims`."""
        membership, redone = self.ctx.run.membership, current.redone.setdefault(stage, set())
        away = self.admission.absent.without(current.t) - members
        away.intersection_update(membership.live(stage, current.t))
        if away <= redone:
            return
        lacking = missing(self._cover(current, stage), claims)
        if away <= set(self.admission.going()):  # the log will soon say so: urgent if nothing else is missing
            had = [current.claims.get(stage, {}).get(peer, frozenset()) for peer in away]
            if not lacking <= frozenset().union(*had):
                return
        redone |= away
        names = " and ".join(peer[:8] for peer in sorted(away))
        text = f"goes on without {names} of stage {stage}, not heard: {len(lacking)} units go to others"
        self.ctx.outbox.note("waiting", reason=f"iteration {current.t} {text}")
        for peer in membership.live(stage - 1, current.t):
            fence = self.ctx.fence(current.t, current.base)
            self.ctx.outbox.send(peer, Missing(fence, {stage: tuple(sorted(lacking))}))

    def prepared(self, current: Round, stage: int) -> Prepared | None:
        """A PREPARED report of the stage if its reduce has ended, else None. It has ended if min(2, live)
        replicas have reported, all reports state the same result (digest and sums of squares), they are
        enough (`_enough`), and in runs with audits all owners of units are among them. Where this peer summed
        all parts and found another result, one replica has to confirm that, or all have to contradict it.
        Differing reports are settled (`_contradicted`): that of more than half of all members counts; without
        one the result is None. Members may be removed for it, and the reduce given up.

        If a member of the reduce was removed meanwhile, all that are left must have reported: otherwise they
        would have to fetch the gradient from the few that have it.
        """
        attempt = current.attempts.get(stage)
        prepared = current.prepared.get(stage, {})
        if attempt is None or not prepared:
            return None
        torn, silent = stage in current.torn, self.admission.absent.silent()
        _, summed = self.witnessing.result(attempt)
        seen = len(prepared) + len(attempt.members) * (summed is not None)
        found = (attempt.attempt, seen, self.ctx.run.membership.version, torn, silent)
        known = current.agreed.get(stage)
        if known is not None and known[0] == found:
            return known[1]
        live = self.ctx.run.membership.live(stage, current.t)
        agreeing = [prepared[peer] for peer in live if peer in prepared]
        current.agreed[stage] = (found, None)
        left = set(attempt.members) & set(self.admission.absent.present(stage, current.t)) if torn else set()
        if len(agreeing) < min(2, len(live)) or not agreeing or not left <= prepared.keys():
            return None
        if not self._receipts.complete(attempt, prepared):
            return None
        if any(not _alike(message, agreeing[0]) for message in agreeing):
            return self._contradicted(current, attempt, prepared)
        there = attempt_sets(attempt).positions
        members = [peer for peer in live if peer in there]
        doubted = summed is not None and _result(agreeing[0]) != _comparable(*summed)
        if doubted and not self._all_reported(current, attempt, prepared):
            return None  # nobody has confirmed the sum that this peer made yet
        if not self._enough(members, prepared.keys() & set(members)):
            return None
        current.agreed[stage] = (found, agreeing[0])
        ordered_at = current.ordered_at.pop(stage, None)
        if ordered_at is not None and len(set(attempt.owners)) == len(attempt.members):
            seconds, spread = self.ctx.clock.now - ordered_at, bool(attempt.sums)
            self.spreading.took(stage, current.t, attempt.members, spread, seconds)
        return agreeing[0]

    def _enough(self, members: list[str], agreeing: set[str]) -> bool:
        """True if those of a reduce's `members` that agree on its result decide it, so that liars fewer than
        the others do not: more than half of those that are heard; or of those that work, where the others
        could not outvote them. So standbys, which get the gradient later, are waited for only where they are
        more than half, or one that works has not reported."""
        working, heard = self.admission.absent.jury(members), set(members) - self.admission.absent.silent()
        if 2 * len(agreeing & heard) > len(heard):
            return True
        most = 2 * len(agreeing & working) > len(working)
        return most and 2 * len(heard - agreeing) <= len(heard)

    def _all_reported(self, current: Round, attempt: Attempt, prepared: Collection[str]) -> bool:
        """True if all members of a reduce that are present are PREPARED; also if none is present. prepared:
        members that are."""
        present = self.admission.absent.present(attempt.stage, current.t)
        return set(present).intersection(attempt.members) <= set(prepared)

    def _contradicted(
        self, current: Round, attempt: Attempt, prepared: Mapping[str, Prepared]
    ) -> Prepared | None:
        """Settle differing PREPARED reports of a reduce: return the report that more than half of all its
        members agree on, and have the next reduces of the stage summed by this peer; where it cannot sum
        them, members that reported another gradient in DISSENTS iterations are removed. Without a majority
        return None: once all present members have reported, the reduce is given up, to be repeated with all
        parts summed by this peer. If this peer summed them already, members whose report differs from its
        result are expelled."""
        stage, t = attempt.stage, current.t
        here, found = self.witnessing.result(attempt)
        if here:
            self._judge(attempt, prepared, found)
            return None
        votes = Counter(_result(prepared[peer]) for peer in attempt.members if peer in prepared)
        [(result, count)] = votes.most_common(1)
        if 2 * count > len(attempt.members):
            # Whoever summed a part may have sent some another one: from the next reduce on it is done here.
            if attempt.sums:
                self.spreading.failed(stage, t)
            self.witnessing.failed(stage, t)
            judged_here = self.witnessing.plan(stage, t + 1, attempt.members, attempt.owners) is not None
            others = [p for p, message in prepared.items() if _result(message) != result]
            for peer in () if judged_here else others:
                self._dissents.add((peer, t))
                if sum(1 for other, _ in self._dissents if other == peer) >= DISSENTS:
                    reason = f"the gradients that it reduced in {DISSENTS} iterations were not its stage's"
                    self.admission.remove(peer, reason)
            known = current.agreed[stage]
            current.agreed[stage] = (known[0], next(m for m in prepared.values() if _result(m) == result))
            return current.agreed[stage][1]
        if not self._all_reported(current, attempt, prepared):
            return None
        who = " and ".join(peer[:8] for peer in sorted(attempt.members))
        text = f"stage {stage}: digests of {who} in iteration {t} differ; once more, summed here"
        self.ctx.outbox.note("note", text=text)
        if attempt.sums:  # reduced without helpers for a while
            self.spreading.failed(stage, t)
        self.witnessing.failed(stage, t)
        current.give_up(stage)
        return None

    def _judge(
        self,
        attempt: Attempt,
        prepared: Mapping[str, Prepared],
        result: tuple[str, Mapping[str, float]] | None,
    ) -> None:
        """Expel members of a witnessed reduce whose reported result differs from the one that this peer
        computed (`result`), except this peer itself; nobody if it has none (None)."""
        if result is None:
            return
        true = _comparable(*result)
        for peer, message in prepared.items():
            if _result(message) != true and peer != self.ctx.me:
                what = f"the gradient of iteration {attempt.fence.t} that it reported is not the sum"
                self.admission.expel(peer, f"{what} of its stage's parts")

    def _losses(self, current: Round, heads: Attempt) -> tuple[float, ...]:
        """Loss sum (nats) of each microbatch or slot, by index, from the owner of its head unit; 0.0 if it
        has none, in a dropped slot. heads: the attempt at stage 0, whose owners must have claimed their
        losses."""
        count = len(current.slots) or self.ctx.run.settings.microbatches
        owners = [heads.owners[head_unit(index)] for index in range(count)]
        return tuple(
            current.losses[heads.members[owner]][index] if owner >= 0 else 0.0
            for index, owner in enumerate(owners)
        )

    def patience_s(self, current: Round) -> float:
        """Seconds without any report after which the open step counts as stalled (`stalled`): several times
        the usual duration of a step, less while recent steps were late. The wait doubles with each stall or
        retry. If nothing is left but reduces that cannot end, as their members say, a share of the wait is
        enough; a member that is given more time after that gets no more than a repeated reduce does."""
        doubled = min(max(0, current.stalls - bool(current.hurried)), 5)
        if current.retries:
            witnessed = sum(min(tries, TRIES_LATE) for tries in current.witnessed.values())
            doubled += min(max(1, sum(current.retries.values()) - witnessed), 10)
        usual_s, least_s = STALL_FACTOR * max(self.step_s, self.expected_s), 0.0
        if not self.step_s and current.worked_s:
            least_s = self._first_reduce_s(current)
            usual_s = max(usual_s, least_s)
        reduces = len(current.attempts) > self.ctx.run.settings.stages or any(
            self.prepared(current, stage) is None for stage in current.attempts
        )
        hurry = STALL_FACTOR if self._late >= LATE_STEPS and not reduces else 1.0
        wait_s = max(STALL_FLOOR_S, usual_s) / hurry * 2.0**doubled * current.spread
        soon_s = max(least_s, wait_s / STALL_FACTOR)
        return min(wait_s, max(soon_s, self._parted_since(current) + soon_s - current.progress_at))

    def _first_reduce_s(self, current: Round) -> float:
        """Seconds that reduces may take in a first step: as long as the work before them, or as the largest
        stage's sums need over links like this peer's."""
        sizes = map(self.ctx.run.settings.reduced_bytes_of, range(self.ctx.run.settings.stages + 1))
        return max(current.worked_s, self.ctx.costs.reduce_s(max(sizes)))

    def _parted_since(self, current: Round) -> float:
        """Time (s) since which the open step waits for nothing but reduces that cannot end because members
        say that they cannot reach each other (`WitnessedReduces.parted_since`; of several stages the latest);
        infinite if it waits for anything else."""
        ordered = len(current.attempts) > self.ctx.run.settings.stages and not current.early
        if not (ordered and self.admission.parted.reported):
            return math.inf
        left = [stage for stage in list(current.attempts) if self.prepared(current, stage) is None]
        if not current.attempts.keys() >= set(left):
            return math.inf  # its reports differ: the reduce was given up just now, and is ordered again
        return max((self.witnessing.parted_since(current, stage) for stage in left), default=math.inf)

    def claimed(self, current: Round, stage: int, peer: str) -> bool:
        """Note that a claim with news came from `peer` at `stage`; to be called before the claim is entered.
        A long time without news before it counts only in part in the step's duration, on which later waits
        depend, and may make the step a late one. False if this peer's claims put off no stall any more: one
        of several relay replicas whose long waits are together longer than a usual step. Else True; also for
        data nodes, whose microbatches others get only once they are removed. Nothing is noted before the
        first claim, while no step's duration is known, and in a round of islands, where machines of other
        speeds claim long after each other."""
        usual_s, now = self.step_s, self.ctx.clock.now
        if not any(current.claims.values()) or current.slots or not usual_s:
            return True
        gap_s, counted_s = now - max(current.progress_at, current.counted_at), WAIT_COUNTED * usual_s
        held_s, long_s = current.held_s.get(peer, 0.0), max(usual_s, LATE_S)
        if gap_s > counted_s:
            current.waited_s += gap_s - (0.0 if held_s else counted_s)
            current.late |= held_s + gap_s > long_s
            current.counted_at = now
            if self.ctx.run.membership.count(stage, current.t) > 1:
                current.held_s[peer] = held_s + gap_s
        return not stage or held_s <= long_s

    def reported(self, current: Round) -> None:
        """Add the time without news up to now to the round's waits for reports (`Round.reports_s`), of which
        `_counted_s` counts a part in the step's duration. To be called before a report that is no claim is
        entered, and at the end of the step."""
        current.reports_s += self.ctx.clock.now - max(current.progress_at, current.counted_at)

    def step_taken(self, current: Round, took_s: float) -> None:
        """Update the durations of steps, on which the next waits depend, by a committed step. took_s: seconds
        from its opening to its record."""
        counted_s = self._counted_s(current)
        self._work_s = max(0.0, took_s - current.waited_s - current.reports_s)
        self.step_s = took_s - current.waited_s - (current.reports_s - counted_s)
        self._reports_s = max(counted_s, REPORTS_FADE * self._reports_s)
        self._late = min(self._late + 1.0, LATE_KEPT) if current.late else max(0.0, self._late - FORGIVEN)

    def _counted_s(self, current: Round) -> float:
        """Seconds of the waits of step `current` for reduces and reports that count in the step's duration:
        all, but at most the greater of the usual waits of a step and a quarter of the last step (never less
        than REPORTS_S; of a first step no more than the reduce, or the step, should take). Without that limit
        a peer that sends its parts, or reports, just before the step stalls would make each step several
        times as long as the one before.

        Where a reduce was repeated or given more time, as whoever held it up was looked for, the limit is the
        usual waits, or if that is more, TAUGHT times the longest of STALL_FLOOR_S, STALL_FACTOR times the
        last step's work, and the time that a first reduce may take. So a peer that has reduces repeated again
        and again does not make all steps ever longer.
        """
        if current.retries or current.witnessed:
            least_s = max(STALL_FLOOR_S, STALL_FACTOR * self._work_s, self._first_reduce_s(current))
            return min(current.reports_s, max(self._reports_s, TAUGHT * least_s))
        usual_s = max(self._reports_s, WAIT_COUNTED * self.step_s)
        usual_s = usual_s or max(self._first_reduce_s(current), self.expected_s)
        return min(current.reports_s, max(usual_s, REPORTS_S))

    def stalled(self, current: Round) -> None:
        """If no report came for too long (`patience_s`), order stuck reduces again, or count a stall, and
        tell all members which units are missing; without missing units that message has them repeat their
        reports. Then the wait begins anew. Members that block a reduce, and late data nodes, may be removed
        (`_reduce_again`, `LateDataNodes.stalled`). Nothing if it is not that long yet. While this peer hears
        nobody its own line may be down: the wait begins anew, and that is all."""
        if self.ctx.clock.now < current.progress_at + self.patience_s(current):
            return
        current.spread = self.ctx.rng.uniform(0.75, 1.0)
        current.waited_s += self.ctx.clock.now - max(current.progress_at, current.counted_at)
        news_at, current.progress_at = current.progress_at, self.ctx.clock.now
        if self.ctx.hears_nobody():
            return
        lacking: dict[int, tuple[int, ...]] = {}
        tried = len(current.attempts)
        if self._parted_since(current) < math.inf:
            left = [each for each in [*current.attempts.values()] if not self.prepared(current, each.stage)]
            current.hurried |= {each.stage: self.admission.parted.unconfirmed(each.members) for each in left}
        for stage in range(self.ctx.run.settings.stages + 1):
            claims = current.claims.get(stage, {})
            # Claims of a member that was PREPARED and then moved are dropped, and nothing lacks for that.
            trains = current.t <= self.ctx.run.steps and not self.prepared(current, stage)
            if trains and (units := missing(self._cover(current, stage), claims)):
                lacking[stage] = tuple(sorted(units))
            elif (attempt := current.attempts.get(stage)) and self.prepared(current, stage) is None:
                self._reduce_again(current, attempt)
            else:
                self.doubles.stalled(current, stage)
        if heads := self.sources.lacking_heads(current.t, current.evaluations):
            lacking[0] = (*lacking.get(0, ()), *heads)
        if len(current.attempts) == tried:
            current.stalls += 1
        late, usual_s = self._not_begun(current, lacking), max(self.step_s, self.expected_s)
        self.sources.stalled(current.t, current.since, late, news_at, usual_s, self.step_s > 0.0)
        current.late |= bool(lacking)  # claims that come now are late, too
        if lacking:
            where = ", ".join(f"{len(units)} of stage {stage}" for stage, units in lacking.items())
            reason = f"iteration {current.t} waits for units of work that nobody has done yet: {where}"
            self.ctx.outbox.note("waiting", reason=reason)
        for peer in list(self.ctx.run.membership.members):
            self.ctx.outbox.send(peer, Missing(self.ctx.fence(current.t, current.base), lacking))

    def _not_begun(
        self, current: Round, lacking: Mapping[int, Collection[int]]
    ) -> dict[int, Collection[int]]:
        """Those of the `lacking` units (stage -> units) with which the data nodes that begin them may be
        late. Not what came back to them from the first stage, as it was lost beyond since, until they have
        had their turn to send it anew (TURNS): they may never have sent it."""
        settings = self.ctx.run.settings
        if current.stalls > TURNS + settings.stages:
            return dict(lacking)
        back = frozenset().union(*current.claims.get(1, {}).values())
        heads = frozenset() if settings.returns == "own" else frozenset(map(head_unit, back))
        without = {0: heads, 1: frozenset[int]()}
        return {stage: set(units) - without.get(stage, back) for stage, units in lacking.items()}

    def _reduce_again(self, current: Round, attempt: Attempt) -> None:
        """Give a stuck reduce up, to be ordered again, and remove or expel the members that block it; or go
        on with it, if all that block it are given more time (noted)."""
        stage = attempt.stage
        prepared = current.prepared.get(stage, {})
        blocking = self.witnessing.at_fault(current, attempt, prepared)
        at_fault, late = blocking or ({}, [])
        if late and not at_fault:
            names = " and ".join(peer[:8] for peer in late)
            text = f"iteration {current.t} waits for {names} of stage {stage}"
            self.ctx.outbox.note("waiting", reason=text)
            return
        if attempt.sums:  # reduced without helpers for a while
            self.spreading.failed(stage, current.t)
        tries = current.retries[stage] = current.retries.get(stage, 0) + 1
        text = f"stage {stage}: the reduce of iteration {current.t} is stuck; once more"
        self.ctx.outbox.note("note", text=text)
        owners = {attempt.members[owner] for owner in attempt.owners if owner >= 0}
        for peer, reason in at_fault.items():
            if owners == {peer}:  # others that came since have nothing to send: its device may just hang
                self.admission.remove_idle(peer, reason)
            else:
                self.witnessing.take_out(peer, reason, current.t)
        current.give_up(stage)
        self.witnessing.failed(stage, current.t)
        take_out = self.admission.remove_idle
        if not at_fault and self.witnessing.plan(stage, current.t, attempt.members, attempt.owners) is None:
            held, take_out = current.claims.get(stage, {}), self.admission.remove  # by others' words
            known = self.step_s > 0.0
            out = self.admission.parted.take_out(attempt.members, tries, held, prepared, known)
        elif not at_fault and tries >= TRIES:
            out = self.admission.parted.unprepared(self.witnessing.blocking(attempt, prepared), tries)
        else:
            out = {}
        fetching = self.admission.fetching(stage) if out else ()
        alone = self.ctx.run.membership.count(stage, current.t) == 1
        for peer, reason in out.items():
            lost = alone and self.admission.worth_s(peer) == math.inf  # nobody could take its stage up
            if peer not in fetching and not lost:
                take_out(peer, reason)
