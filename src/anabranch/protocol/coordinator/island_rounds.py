"""Rounds of islands at the log's leader: speeds of machines, plan of the next round, slots that are late.

What is decided here is written to the log: the plan in the record before the round, the slots that count in
the round's own record. A new leader knows speeds again after one round; until then it uses those that
machines measured when they joined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.crew_planning import CrewPlanning
from anabranch.protocol.interface.rounds import MOST_RATE
from anabranch.protocol.log.records import GIVEN_UP, STRANDED, Commit, Crew, Slot, Witness
from anabranch.protocol.rounds.late_machines import LateMachines
from anabranch.protocol.rounds.plan import Plan, active, counted, even_plan, next_plan, sets_of
from anabranch.protocol.telemetry.estimators import plausible

#: Share of the slots after which the others have `round.grace` times the time so far, of those whose machine
#: has not left. Plain choice: a median machine may still be among those before it. After fewer the others
#: have the more time.
READY = 0.75
#: Times the expected duration of the longest slot, and the time after which the last other slot was ready,
#: after which a run that waits for late slots removes the machine of one. Plain choice: a machine that became
#: half as fast since it was measured, and computes, stays.
OVERDUE = 6.0
#: Share of the slots after which the last other slot counts with at most OVERDUE times the time so far. Of
#: several machines that are ready just before they are overdue each would have OVERDUE times as long as the
#: one before. Plain choice: fewer than half of the machines delay a round by no more than two of them do.
HALF = 0.5
#: Rounds for which a machine that was overdue is remembered. Plain choice: a machine that is overdue again
#: and again then costs one wait in so many rounds; a second accident weeks later is no misconduct.
REMEMBERED = 50
#: Peers whose measured speeds are remembered, those that reported last: former ones may come back. Plain
#: choice.
RATES_KEPT = 1024
#: Shortest time (s) that a round is expected to take if none of its slots is ready and no other machine can
#: fill them: before the first round nobody knows what the lines of crews take. Plain choice.
LEAST_ROUND_S = 20.0
#: Rounds running in which a slot overflows, after which the leader says so, and again after as many. Plain
#: choice.
OVERFLOWS = 3
#: Tasks whose seconds are the work of a microbatch or slot.
_WORK = (
    *("Forward", "InputGradient", "WeightGradient", "Recount"),
    *("InnerForward", "InnerBackward", "InnerStep", "StepAhead"),
)


class IslandRounds:
    """Leader's part of rounds. Without rounds in the settings nothing is measured, planned or dropped."""

    def __init__(self, ctx: PeerContext, admission: Admission, has_last: Callable[[str], bool]) -> None:
        """has_last(peer): True if the member certainly has the state before the open round, so that it can
        begin a slot of the next one in time."""
        self.ctx = ctx
        self._admission = admission
        self._has_last = has_last
        self._late = LateMachines()
        self._crews = CrewPlanning(ctx, admission, self._rate, self._late)
        self._rates: dict[str, float] = {}
        """Peer, former members included -> microbatches per second, as measured in its last iteration with
        counted work, within its limit; lowered if a slot of it was late or overflowed since."""
        self._limits: dict[str, float] = {}
        """Machine that was late with a slot, or measured quicker than was believed -> rate (microbatches per
        second) up to twice which the next measured one counts."""
        self._measured = 0
        """Number of changes of `_rates` so far."""
        self._longest_known: tuple[tuple[int, int, int], float] = (-1, -1, -1), 0.0
        """Inputs of the last `_longest_s`, and its result."""
        self._reached_known: tuple[tuple[int, int], float] = (-1, -1), 1.0
        """Inputs of the last `_reached`, and its result."""
        self._usual_known: tuple[tuple[int, int], float] = (-1, -1), math.inf
        """Inputs of the last `_usual`, and its result."""
        self._overflows: dict[int, int] = {}
        """Slot -> rounds running in which it overflowed and did not count."""
        self._units: dict[str, int] = {}
        """Peer -> microbatches of its work in the last step, until it reports the seconds of that."""
        self._overdue: dict[str, tuple[int, str]] = {}
        """Peer that was removed since it was overdue with a slot -> round up to which it is expelled for the
        same, and data node that begins that slot."""
        self._excused: set[str] = set()
        """Those of them whose data node lost its seat since."""

    @property
    def _of_inner_step(self) -> int:
        """Number of microbatches of one inner step of a slot: an equal share of the iteration's."""
        settings = self.ctx.run.settings
        return settings.microbatches // max(1, settings.rounds.slots)

    def committed(self, record: Commit, current: Round | None) -> None:
        """Note whose work counted in a step, and how much, so that `on_applied` can measure speeds. After a
        round that this leader led, machines with late slots also count as slower (`_slow_down`), and slots
        that overflow are noted (`_warn`). current: this leader's round of the step, or None."""
        if not self.ctx.run.settings.rounds.inner:
            return
        self._crews.opened(record.t + 1 if current is not None else 0)
        self._units = {}
        if len(record.stages) > 1:
            plan, units = self.ctx.run.plan(record.t), Counter[str]()
            for part in record.stages[1:]:
                for unit, owner in enumerate(part.owners):
                    if owner >= 0:
                        units[part.members[owner]] += plan[unit].weight * self._of_inner_step if plan else 1
            self._units = units
            if plan and current is not None and current.t == record.t:
                accepted = counted(record.stages[1].owners)
                self._warn(current, accepted)
                self._slow_down(current, accepted)

    def _warn(self, current: Round, accepted: tuple[int, ...]) -> None:
        """Count for each slot the rounds running in which it overflowed, and note in the event log those with
        OVERFLOWS of them: such a slot's batches wait for ever. accepted: slots that counted in this round."""
        reported = {index for stage, index in current.witnesses if stage}
        for slot in active(current.slots):
            over = slot in reported and slot not in accepted
            rounds = self._overflows[slot] = self._overflows.get(slot, 0) + 1 if over else 0
            if rounds and rounds % OVERFLOWS == 0:
                text = f"slot {slot} overflowed in {rounds} rounds running, and is left out with its batches"
                advice = "lower the learning rate, or take fewer round.steps"
                self.ctx.outbox.note("note", text=f"{text}: {advice}")

    def _slow_down(self, current: Round, accepted: tuple[int, ...]) -> None:
        """Halve the known speed of the machines whose slots were late, so that they get fewer steps until
        they are in time: a speed is measured only where work counted. The speed that is halved is at most the
        one that `next_plan` believed (MOST_RATE times the median). A machine whose slot overflowed is not
        slow, but may have made that up: its speed becomes at most the median, and it rests like a late one
        (`LateMachines`), as a batch that overflows does so in each round. Speeds of machines that left are
        forgotten. accepted: slots that counted. Nothing for crews, which `CrewPlanning.measure` slows
        down."""
        settings, members = self.ctx.run.settings, self.ctx.run.membership.members
        if settings.rounds.pipeline:
            return
        rates = sorted(self._rate(slot.peer) for slot in current.slots if slot.steps and slot.peer in members)
        left = self._left(current)
        for slot in left:  # if it comes back it is a newcomer
            if self._rates.pop(current.slots[slot].peer, None) is not None:
                self._measured += 1
        missed = current.dropped - left
        overflowed = missed & {slot for (stage, slot), of in current.witnesses.items() if stage and of}
        peers = [{current.slots[slot].peer for slot in of} - {""} for of in (missed, accepted)]
        self._late.judged(current.t, *peers)
        self._late.kept(members)
        for slot in missed:
            if (peer := current.slots[slot].peer) not in members:
                continue
            usual, rate = rates[(len(rates) - 1) // 2], self._rate(peer)
            if slot in overflowed and rate <= usual:
                continue
            rate = usual if slot in overflowed else min(rate, MOST_RATE * usual) / 2.0
            self._keep(self._limits, peer, rate * self._of_inner_step)
            self._keep(self._rates, peer, self._limits[peer])
            self._measured += 1

    @staticmethod
    def _keep(rates: dict[str, float], peer: str, rate: float) -> None:
        """Enter a rate as the newest, and drop the oldest beyond RATES_KEPT."""
        rates.pop(peer, None)
        rates[peer] = rate
        if len(rates) > RATES_KEPT:
            del rates[next(iter(rates))]

    def on_applied(self, peer: str, timing: Mapping[str, float]) -> None:
        """Measure the speed of a peer from its report of the last step: microbatches of its work that
        counted, by the compute seconds in `timing` (kind of task -> s). Nothing if none of its work counted,
        the seconds are no plausible time, or it reported before. A machine that was late is believed to have
        become at most twice as quick since, and a newcomer to be at most twice as quick as it was believed to
        be: its seconds are its own word, and the steps that it gets for them are lost if it is late again, or
        leaves."""
        seconds = sum(timing.get(kind, 0.0) for kind in _WORK)
        if plausible(seconds) and (units := self._units.pop(peer, 0)):
            most = self._limits.pop(peer, math.inf)
            if peer not in self._rates and self._is_newcomer(peer):
                most = min(most, self._rate(peer) * self._of_inner_step)
            rate, most = units / seconds, 2.0 * most
            if rate > most:
                self._keep(self._limits, peer, most)
            self._keep(self._rates, peer, min(rate, most))
            self._measured += 1

    def _rate(self, peer: str) -> float:
        """Inner steps per second of a machine: by its known rate (`_rates`), else by the times that it
        measured when it joined and what others reach of theirs (`_reached`), else as of one microbatch per
        second. A newcomer without known rate is no quicker than the median of measured members: it could take
        most steps of its first round, leave, and come back. KeyError for one that is no member and has no
        known rate."""
        rate = self._rates.get(peer)
        if not rate:
            joined = self._joined_rate(peer)
            rate = joined * self._reached() if joined else 1.0
            if self._is_newcomer(peer):
                rate = min(rate, self._usual())
        return rate / self._of_inner_step

    def _usual(self) -> float:
        """Median of the measured speeds of members (microbatches per second); infinite before the first."""
        membership = self.ctx.run.membership
        of = (membership.version, self._measured)
        if self._usual_known[0] != of:
            rates = sorted(rate for peer, rate in self._rates.items() if peer in membership.members)
            self._usual_known = of, rates[(len(rates) - 1) // 2] if rates else math.inf
        return self._usual_known[1]

    def _is_newcomer(self, peer: str) -> bool:
        """True for a member that came, or came back, when the rounds had begun. False with pipeline islands,
        whose crews are measured themselves."""
        rounds, membership = self.ctx.run.settings.rounds, self.ctx.run.membership
        return not rounds.pipeline and membership.active_from.get(peer, 0) > rounds.start + 1

    def _joined_rate(self, peer: str) -> float:
        """Microbatches per second of a member (KeyError for others) by the times that it measured when it
        joined; 0 if these are no plausible ones."""
        member, counts = self.ctx.run.membership.members[peer], self.ctx.run.settings.counts
        measured_s = (member.forward_s + member.backward_s) * counts[max(0, member.stage - 1)]
        return 1.0 / measured_s if plausible(measured_s) else 0.0

    def _reached(self) -> float:
        """Speed that members with counted work reach, as a share of the one by their times at joining: the
        median; 1 before the first. Optimizer steps, and what else a machine does, are in none of those times.
        A joiner believed too quick would be late with its first slot. Always 1 with pipeline islands, whose
        crews have such a share of their own (`CrewPlanning`)."""
        if self.ctx.run.settings.rounds.pipeline:
            return 1.0
        membership = self.ctx.run.membership
        of = (membership.version, self._measured)
        if self._reached_known[0] != of:
            known = ((rate, peer) for peer, rate in self._rates.items() if peer in membership.members)
            shares = sorted(rate / joined for rate, peer in known if (joined := self._joined_rate(peer)))
            self._reached_known = of, shares[(len(shares) - 1) // 2] if shares else 1.0
        return self._reached_known[1]

    def next(self, current: Round, accepted: Mapping[int, Crew]) -> Plan:
        """Plan of the iteration after `current`; () if that is no round. accepted: slot that counts in
        `current` -> crew that filled it. Slots go to members that get the result of `current` with its
        reduce. A member that still lacks an earlier state would begin late, and its slot would hold up the
        others; only if all lack one, all get slots. Members that are to be removed get none, nor machines
        that rest for being late (`LateMachines`). With pipeline islands the crews' speeds in `current` are
        measured first: to be called once a round."""
        rounds, t = self.ctx.run.settings.rounds, current.t + 1
        if not rounds.has(t):
            return ()
        before, lost = current.slots or even_plan(rounds), self._lost(current)
        if rounds.pipeline:
            opened_at, left = current.opened_at, self._left(current)
            self._crews.measure(current.t, current.slots, opened_at, accepted, left)

            def prompt(peer: str) -> bool:
                """True if a machine may be of a crew: any after a synchronous step, since those without work
                in it did not report, and after a skip, which has no result; else those that have it soon."""
                return not accepted or self._is_prompt(peer, current.t)

            crews = self._crews.crews(before, accepted, t, prompt)
            return next_plan(before, accepted, rounds, crews, current.t, lost)
        going = set(self._admission.going())
        live = [peer for peer in self.ctx.run.membership.live(1, t) if peer not in going]
        live = self._late.able(live, t)
        here = [peer for peer in live if self._is_prompt(peer, current.t)]
        rates: dict[Crew, float] = {(peer,): self._rate(peer) for peer in here or live}
        sends_s: dict[Crew, float] = {(peer,): self._sends_s(peer) for peer in here or live}
        return next_plan(before, accepted, rounds, rates, current.t, lost, sends_s)

    def _sends_s(self, peer: str) -> float:
        """Seconds that a machine needs to send its contribution, by the fastest of its measured links; 0 if
        none is measured."""
        sent = next(self._admission.ways.rates(peer), ())
        contribution_bytes, _ = self.ctx.run.settings.round_bytes_of(1)
        return 8.0 * contribution_bytes / max(sent) if sent else 0.0

    def _is_prompt(self, peer: str, t: int) -> bool:
        """True if a member (KeyError for others) will have the result of iteration t as soon as that is
        reduced: it serves in t, and has the state before it."""
        membership = self.ctx.run.membership
        return membership.is_live(peer, membership.members[peer].stage, t) and self._has_last(peer)

    # --- late slots ----------------------------------------------------------------------------

    def expected_s(self, current: Round) -> float:
        """Expected seconds of the round's longest slot, at the known speed of the machine to which it is
        bound; 0 in a synchronous iteration, and if no slot is bound to a machine. Slots with the fewest steps
        do not count, nor do slots of machines that were late with their last one, unless there are no others:
        such a machine counts as half as quick after each time that it is late, so its slot would hold up all
        rounds."""
        rounds, members = self.ctx.run.settings.rounds, self.ctx.run.membership.members
        bound = [slot for slot in current.slots if slot.steps and slot.peer in members]
        prompt = [slot for slot in bound if not self._was_late(slot)] or bound
        usual = [slot for slot in prompt if slot.steps > rounds.least] or prompt
        return self._longest(slot.steps / self._crews.slot_rate(slot) for slot in usual)

    def _was_late(self, slot: Slot) -> bool:
        """True if a machine to which a slot is bound was late with its last one."""
        return not (self._limits.keys().isdisjoint(slot.crew) and self._crews.late.isdisjoint(slot.crew))

    def _longest_s(self, current: Round) -> float:
        """Seconds that the longest slot of a round should take. If no slot is bound to a machine, as in a
        first round, the slowest machine is counted with a whole slot; 0 if nobody serves."""
        membership = self.ctx.run.membership
        of = (current.t, membership.version, self._measured)
        if self._longest_known[0] != of:
            inner = self.ctx.run.settings.rounds.length(current.t)
            of_any = (inner / self._rate(peer) for peer in membership.live(1, current.t))
            self._longest_known = of, self.expected_s(current) or self._longest(of_any)
        return self._longest_known[1]

    def planned_s(self, current: Round) -> dict[int, float]:
        """Slot of the round `current`, which was just opened -> seconds that it should take at the known
        speed of the machine to which it is bound; slots bound to no machine are left out. Empty for pipeline
        islands."""
        members = self.ctx.run.membership.members
        if self.ctx.run.settings.rounds.pipeline:
            return {}
        bound = ((k, slot) for k, slot in enumerate(current.slots) if slot.steps and slot.peer in members)
        return {k: slot.steps / rate for k, slot in bound if (rate := self._crews.slot_rate(slot))}

    def _stretch(self, current: Round, ready: Set[int]) -> float:
        """Planned time of the round's longest slot, as a multiple of the planned time of the longest slot in
        `ready`; at least 1, and 1 if no time is known. Machines with slow links get fewer steps, so their
        slots are ready long before the others, and say little about when these will be. Slots with the fewest
        steps count only in `ready`, as their machines may be far too slow."""
        planned, least = current.planned_s, self.ctx.run.settings.rounds.least
        done_s = max((planned[k] for k in ready if k in planned), default=0.0)
        if current.longest_s is None:
            current.longest_s = self._longest(s for k, s in planned.items() if current.slots[k].steps > least)
        return max(1.0, current.longest_s / done_s) if done_s else 1.0

    @staticmethod
    def _longest(seconds: Iterable[float]) -> float:
        """Longest of the times (s) that machines' slots take; 0 if there is none. One time counts with at
        most MOST_RATE times the median, so that one machine that reports itself far too slow does not hold up
        the round."""
        times = sorted(seconds)
        return min(times[-1], MOST_RATE * times[(len(times) - 1) // 2]) if times else 0.0

    def drop_late(self, current: Round, settled: bool) -> None:
        """Leave late slots out of the round (they are added to `Round.dropped`), once it has waited long
        enough. In a run that waits for late slots only those are left out that nobody can fill any more; a
        machine that is overdue with its slot is removed from the run there. settled: True if the round's
        result is PREPARED; then nothing happens, as in a synchronous iteration."""
        if not current.slots or settled:
            return
        if self.ctx.run.settings.rounds.pipeline:
            self._crews.complete(current.complete)
        slots, ready = sets_of(current.slots).slots, self._ready(current)
        if not self.ctx.run.settings.rounds.drops:
            self._drop(current, self._hopeless(current, ready) if ready else frozenset())
            self._remove_overdue(current)
            return
        ready = ready - self._unheard(current)
        there = len(slots) - len(self._left(current) - ready)
        share = min(1.0, len(ready) / (READY * there)) if there else 0.0
        if share > current.ready_share:
            current.ready_at, current.ready_share = self.ctx.clock.now, share
            current.stretch = self._stretch(current, ready)
        if len(ready) + len(current.dropped) == len(slots):
            return
        if not ready:
            unclaimed = current.of_crews or not self._ready(current)
            if unclaimed and self.ctx.clock.now >= self.deadline(current):
                self._drop(current, slots - current.dropped)
            return
        version, over = self.ctx.run.membership.version, self.ctx.clock.now >= self.deadline(current)
        look = (len(ready), len(current.dropped), version, self._admission.absent.silent(), over)
        if look == current.late_look:
            return
        current.late_look = look
        late = slots - ready - current.dropped
        if over or self._away(current, late):
            self._drop(current, late)

    def _remove_overdue(self, current: Round) -> None:
        """Remove machines that are overdue with their slots, in a run that waits for late slots: they may
        answer, and never compute. Their slots are then filled by others, or hopeless. A machine that comes
        back and is overdue again within REMEMBERED rounds is expelled. Nothing before the deadline. It begins
        anew after a time in which this leader heard nobody, as its own line may be down, and machines that
        are done could not say so. If the late slots are all slots of one data node, that may not have begun
        them: once two machines were late with them, the data node is removed instead (`_is_late_source`)."""
        ready, took_s = self._ready(current), self.ctx.clock.now - max(current.since, current.cut_off_at)
        if (share := len(ready) / len(current.slots)) > current.ready_share:
            current.ready_at, current.ready_s, current.ready_share = self.ctx.clock.now, took_s, share
            if share >= HALF:
                current.half_at = min(current.half_at, self.ctx.clock.now)
        if self.ctx.hears_nobody():
            current.cut_off_at = self.ctx.clock.now
        if self.ctx.clock.now < self.deadline(current):
            return
        self._overdue = {peer: was for peer, was in self._overdue.items() if was[0] >= current.t}
        late = self._waited_for(current)
        holder = self.ctx.run.split(current.t).holder
        for source in {holder.get(slot, "") for slot in late.values()} - {""}:
            if self._is_late_source(current, source, late, holder):
                reason = f"the slots of round {current.t} of this data node are overdue, and no others"
                self._admission.remove(source, reason)
                current.ready_at = current.half_at = self.ctx.clock.now  # the machines get the time anew
                current.ready_s = took_s
                return
        for peer, slot in sorted(late.items()):
            over = f"{OVERDUE:g} times what a slot takes are over"
            reason = f"it is overdue with its slot of round {current.t}: {over}"
            again = peer in self._overdue and peer not in self._excused
            (self._admission.expel if again else self._admission.remove)(peer, reason)
            self._overdue[peer] = current.t + REMEMBERED, holder.get(slot, "")
            self._excused.discard(peer)

    def removed(self, peer: str) -> None:
        """Excuse the machines that were overdue with slots of the data node `peer`, which lost its seat
        since: it may not have begun them."""
        excused = {machine for machine, (_, source) in self._overdue.items() if source == peer}
        self._excused = self._excused & self._overdue.keys() | excused

    def begin_to_serve(self, current: Round, peers: Collection[str]) -> None:
        """Note that `peers` begin to serve. Where one has a slot of the open round, as the run was taken up
        again before it was back, all machines have the time of a slot anew."""
        if current.slots and not self._waited_for(current).keys().isdisjoint(peers):
            current.cut_off_at = self.ctx.clock.now

    def _is_late_source(
        self, current: Round, source: str, late: Mapping[str, int], holder: Mapping[int, str]
    ) -> bool:
        """True if a data node is the likely reason why machines are late: no slot that it begins is ready,
        all others are, and two machines or more were late with its slots, those removed before included.
        Never for this peer or one that is leaving. late: machine -> its late slot. holder: slot -> data node
        that begins it."""
        own = {slot for slot, peer in holder.items() if peer == source}
        machines = {peer for peer, (_, was) in self._overdue.items() if was == source} | late.keys()
        others, ready = holder.keys() - own, self._ready(current)
        alone = others and others <= ready and own.isdisjoint(ready)
        excused = {self.ctx.me, *self._admission.going()}  # a tuple with a star cannot be compiled here
        return bool(alone) and len(machines) > 1 and source not in excused

    def _waited_for(self, current: Round) -> dict[str, int]:
        """Machines other than this one whose bound slots are not ready -> slot (the last, if it has several).
        Machines that left, also if they came back, or that are being removed are left out, as others redo
        their slots."""
        membership = self.ctx.run.membership
        waiting = sets_of(current.slots).slots - self._ready(current) - current.dropped
        gone = {*self._admission.going(), *membership.gone, self.ctx.me}
        there = set(membership.live(1, current.t)) - gone
        return {p: slot for slot in sorted(waiting) if (p := current.slots[slot].peer) in there}

    def _drop(self, current: Round, late: frozenset[int]) -> None:
        if not late:
            return
        current.dropped |= late
        current.looked.clear()
        current.progress_at = self.ctx.clock.now
        names = ", ".join(str(slot) for slot in sorted(late))
        self.ctx.outbox.note("waiting", reason=f"round {current.t} goes on without late slots {names}")

    def _hopeless(self, current: Round, ready: Iterable[int]) -> frozenset[int]:
        """Slots that nobody can fill any more, without those that are `ready` or dropped: in a round of
        pipeline islands those of a crew of which a machine left, else those whose machine left with the state
        that the slot needs. Empty in a round whose slots others may fill."""
        crews = self.ctx.run.settings.rounds.pipeline
        if not (crews or sets_of(current.slots).carried):
            return frozenset()
        left = self._left(current) - frozenset(ready) - current.dropped
        return frozenset(k for k in left if crews or current.slots[k].carried)

    def stranded(self, current: Round) -> Witness | None:
        """Witness of a round that can never end, with which it is skipped; else None. No slot is ready then,
        and nobody can fill any that is not dropped. A reason that no member reported is noted in the event
        log, at each call."""
        slots, ready = sets_of(current.slots).active, self._ready(current)
        if not slots or ready or len(self._hopeless(current, ready) | current.dropped) < len(slots):
            return None
        for (stage, slot), found in current.witnesses.items():
            for peer, tensor in found.items():
                if tensor != GIVEN_UP and current.has_seat(peer, stage, slot) and current.of_crews:
                    return Witness(peer, stage, slot, tensor)
        what = "left with what they carried, or were too late"
        text = f"the machines of all slots of round {current.t} {what}: it is skipped"
        if current.of_crews:
            text = f"all crews of round {current.t} lost a machine, gave up or were too late: it is skipped"
        self.ctx.outbox.note("note", text=text)
        return Witness(self.ctx.me, 1, slots[0], STRANDED)

    @staticmethod
    def _ready(current: Round) -> Set[int]:
        """Slots whose contribution and loss are claimed, and that were not dropped. The caller must not
        change the set, which may be the round's own."""
        return current.complete - current.dropped if current.dropped else current.complete

    def _unheard(self, current: Round) -> frozenset[int]:
        """Complete slots that the reduce cannot count: at some stage all members that claim them fell silent
        since, and the reduce goes on without these members (`Stragglers`)."""
        absent = self._admission.absent
        if not (silent := absent.silent()):
            return frozenset()
        of = (self.ctx.run.membership.version, sum(current.reported.values()), silent)
        if current.unheard[0] != of:
            unheard = set[int]()
            for stage in range(1, 1 + self.ctx.run.settings.stages):
                claims, present = current.claims.get(stage, {}), absent.present(stage, current.t)
                unheard |= current.complete.difference(*(claims.get(peer, ()) for peer in present))
            current.unheard = of, frozenset(unheard)
        return current.unheard[1]

    def _away(self, current: Round, late: frozenset[int]) -> bool:
        """True if for each of the slots `late` a machine to which it is bound is gone or silent: then the
        round does not wait for its deadline. Another machine that fills such a slot began later than all
        others, and would need about a whole slot's time more."""
        left, absent = self._left(current), self._admission.absent
        stages = range(1 + self.ctx.run.settings.stages)
        present = {stage: set(absent.present(stage, current.t)) for stage in stages}
        seats = (current.slots[slot].seats() for slot in late - left)
        return all(any(peer not in present[stage] for stage, peer in of) for of in seats)

    def _lost(self, current: Round) -> frozenset[int]:
        """Slots without any contribution, so that none can be merged later: those of `_left`, and those of
        which a machine of the crew reported an overflow."""
        reported = current.witnesses.items()
        spoilt = (k for (stage, k), of in reported if any(current.has_seat(peer, stage, k) for peer in of))
        return self._left(current).union(spoilt)

    def _left(self, current: Round) -> frozenset[int]:
        """Slots of whose crew a machine does not serve from before this round on: it left, or left and came
        back. It lost what it had computed of the slot. Of pipeline islands also slots without a crew, and
        those of which a machine of the crew reported an overflow: the crew does not go on."""
        membership, plan = self.ctx.run.membership, current.slots
        of = membership.version, sum(map(len, current.witnesses.values()))
        if current.left[0] != of:
            crews, left = self.ctx.run.settings.rounds.pipeline, set[int]()
            for slot in active(plan):
                seats = plan[slot].seats()
                there = all(membership.is_live(peer, stage, current.t - 1) for stage, peer in seats)
                spoilt = any(peer in current.witnesses.get((stage, slot), ()) for stage, peer in seats)
                if not there or (crews and (spoilt or not seats)):
                    left.add(slot)
            current.left = of, frozenset(left)
        return current.left[1]

    @staticmethod
    def _is_theirs_alone(current: Round) -> bool:
        """True if each slot of the round that was not dropped can be filled by one machine or crew only: that
        of its pipeline island, or the machine that carries the slot's state (even if that machine lost the
        state). False if all slots were dropped."""
        sets = sets_of(current.slots)
        if not (sets.of_crews or sets.carried):
            return False
        left = sets.slots - current.dropped
        return bool(left) and (sets.of_crews or all(current.slots[slot].carried for slot in left))

    def deadline(self, current: Round) -> float:
        """Time (s) from which slots that are not ready are late, or in a run that waits for late slots their
        machines are overdue. Infinite outside rounds, while nobody waits for a slot, and as long as no slot
        is ready, unless only its own machine or crew can fill each."""
        rounds = self.ctx.run.settings.rounds
        if rounds.drops and not self._ready(current) and self._is_theirs_alone(current):
            return current.opened_at + OVERDUE * max(self._longest_s(current), LEAST_ROUND_S)
        if not current.slots or current.ready_at == math.inf:
            return math.inf
        if not rounds.drops:
            begun_at = max(current.since, current.cut_off_at)
            most_s = OVERDUE * (current.half_at - current.since)
            longest_s = max(self._longest_s(current), min(current.ready_s, most_s))
            return begun_at + OVERDUE * longest_s if self._waited_for(current) else math.inf
        ready = self._ready(current)
        if not ready or len(ready) + len(current.dropped) >= len(sets_of(current.slots).slots):
            return math.inf
        seconds = (current.ready_at - current.since) / current.ready_share * current.stretch
        if current.ready_share < 1.0:
            seconds = max(seconds, self._longest_s(current))
        return current.since + (1.0 + rounds.grace) * seconds
