"""Crews of pipeline islands at the log's leader: their measured speeds, and the crews of the next round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import eq

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.log.records import Crew, Slot
from anabranch.protocol.placement.crew_search import CrewTimes, quicker
from anabranch.protocol.rounds.late_machines import RESTS, LateMachines
from anabranch.protocol.rounds.plan import Plan, active, crews_of

#: Least gain, as a share of all crews' speed, for which crews that were in time do not stay together, where
#: others are put together anyway. Plain choice: more than estimates of one round and the next differ by.
REGROUPED = 0.02
#: Shortest time (s) that a slot is believed to take; a plain choice.
SHORTEST_S = 1e-3


class CrewPlanning:
    """Speeds of crews, and crews for the slots of the next round. rate(peer): inner steps per second of a
    member by itself. machines: which machines were late with slots lately, and rest for that."""

    def __init__(
        self,
        ctx: PeerContext,
        admission: Admission,
        rate: Callable[[str], float],
        machines: LateMachines,
    ) -> None:
        self.ctx, self._admission, self._rate, self._machines = ctx, admission, rate, machines
        self._rates: dict[Crew, float] = {}
        """Crew of the last round -> inner steps per second, as measured there."""
        self._shares: dict[Crew, float] = {}
        """Crew of the last round -> its speed when it was last measured, as a share of the expected one."""
        self.late: frozenset[str] = frozenset()
        """Relays whose crew was late in the last round."""
        self._single: dict[str, int] = {}
        """Relay of two crews that was late with one of them, or left -> round up to which it is of one crew
        alone."""
        self._opened = 0
        """Iteration that this leader opened when it had committed the one before; 0: it took over since."""
        self._done_at: dict[int, float] = {}
        """Slot of the open round -> time (s) at which it was complete."""

    def opened(self, t: int) -> None:
        """Note that this leader opens iteration t now, so that it can measure crews in it; 0: it took over
        within one."""
        self._opened = t

    def complete(self, slots: Iterable[int]) -> None:
        """Note the present time for those of these slots of the open round that were not complete before."""
        for slot in slots:
            self._done_at.setdefault(slot, self.ctx.clock.now)

    def slot_rate(self, slot: Slot) -> float:
        """Inner steps per second of a slot that is bound to members: as its crew was measured in the last
        round, else as the slowest of its relays alone. Raises ValueError if none of its relays is a
        member."""
        members = self.ctx.run.membership.members
        slowest = min(self._rate(peer) for stage, peer in slot.seats() if stage and peer in members)
        return self._rates.get(slot.crew, slowest)

    def measure(
        self, t: int, plan: Plan, opened_at: float, accepted: Mapping[int, Crew], left: Collection[int]
    ) -> None:
        """Measure the speeds of the crews in round t: steps of each slot by the time from the round's opening
        (s) to when its units were all claimed, so with the time that sending takes. A crew that was too late
        counts as half as quick as if it had been done now, so that it gets fewer steps until it is in time,
        and its relays count as late; if no crew was in time, each counts as half as quick as it did. Of a
        late crew with relays of two crews these alone count as late, as they have most to do. They, and
        relays of two crews that left, are of one crew alone for RESTS rounds. Crews of former rounds are
        forgotten. A leader that took over within the round measures nothing. plan: of round t. accepted:
        slots that count. left: slots that lost a machine, whose crews are not measured."""
        done_at, self._done_at = self._done_at, {}
        if self._opened != t:
            return
        before, self._rates, late = self._rates, {}, set[str]()
        seats = Counter(seat for number in active(plan) for seat in plan[number].seats() if seat[0])
        doubles = {peer: stage for (stage, peer), count in seats.items() if count > 1}
        for number in active(plan):
            slot, at = plan[number], done_at.get(number, self.ctx.clock.now)
            rate = slot.steps / max(at - opened_at, SHORTEST_S)
            if number in accepted:
                self._rates[slot.crew] = rate
            elif slot.crew and number not in left:
                believed = before.get(slot.crew) or self.slot_rate(slot)
                self._rates[slot.crew] = (min(rate, believed) if accepted else believed) / 2.0
                late.update(doubles.keys() & set(slot.crew) or slot.crew[:-1])
        is_live = self.ctx.run.membership.is_live
        single = {peer for peer, at in doubles.items() if peer in late or not is_live(peer, at, t - 1)}
        self._single = {peer: until for peer, until in self._single.items() if until > t}
        self._single |= dict.fromkeys(single, t + RESTS)
        prompt = {peer for number in accepted for peer in plan[number].crew[:-1]}
        self.late = frozenset(late - prompt)
        self._machines.judged(t, self.late, prompt)

    def crews(
        self, plan: Plan, accepted: Collection[int], t: int, prompt: Callable[[str], bool]
    ) -> dict[Crew, float]:
        """Crews for the slots of round t -> their inner steps per second; at most as many as the run has
        slots. First come those whose slots counted, then new ones, then those of machines whose crew failed
        though nobody left. Where a stage has fewer machines than the run slots, as one is away, a quick one
        is of two crews, if it can hold two islands. A new crew is as quick as its machines and latencies let
        expect, times the ratio of measured to expected speed of the crew before with which it has most
        machines in common, half of the stages at least; else the usual ratio of those that were in time.
        plan, accepted: plan of the round before, and its slots that count. prompt(peer): True if the machine
        can begin in time; where none can, all count."""
        stages = self._stages(t, prompt)
        rates = [{peer: self._rate(peer) for peer in of} for of in stages[1:]]
        here = {peer for of in stages for peer in of}
        latency_s = self._latencies(here)
        doubles = [] if latency_s is None else [self._doubles(of, t) for of in rates]
        kept, new, failed = crews_of(plan, accepted, rates, stages[0], t, doubles)
        slots = self.ctx.run.settings.rounds.slots
        if latency_s is None:
            crews = [*kept, *new, *failed][:slots]
            slowest = (min(of[peer] for of, peer in zip(rates, crew, strict=False)) for crew in crews)
            estimated = before = dict(zip(crews, slowest, strict=True))
            former = crews
        else:
            times = self._times(rates, latency_s)
            former = [slot.crew for slot in plan if slot.crew and all(map(here.__contains__, slot.crew[:-1]))]
            crews = [*kept, *quicker(new, times), *failed][:slots]
            if not (failed or self.ctx.run.settings.rounds.keeps or set(crews).issubset(former)):
                crews = _regrouped(crews, crews_of((), (), rates, stages[0], t).new[:slots], times)
            estimated, before = _rates(times, crews), _rates(times, former)
        planned, known = {slot.crew for slot in plan}, self._rates
        self._shares = {crew: share for crew, share in self._shares.items() if crew in planned}
        self._shares |= {crew: known[crew] / before[crew] for crew in former if crew in known}
        in_time = sorted(self._shares[crew] for crew in kept if crew in self._shares)
        usual = in_time[len(in_time) // 2] if in_time else 1.0
        return {crew: self._share(crew, usual) * estimated[crew] for crew in crews}

    def _share(self, crew: Crew, usual: float) -> float:
        """Speed of a crew as a share of the expected one: as it was measured, or as that of the crew with
        which it has most machines in common; `usual` if these are less than half of its relays."""
        if crew in self._shares:
            return self._shares[crew]
        alike = {other: sum(map(eq, crew[:-1], other[:-1])) for other in self._shares}
        nearest = max(alike, key=alike.__getitem__, default=())
        return self._shares[nearest] if 2 * alike.get(nearest, 0) >= len(crew) - 1 else usual

    def _stages(self, t: int, prompt: Callable[[str], bool]) -> list[list[str]]:
        """Machines of each stage that may be of a crew in round t: of those that serve and are not to be
        removed, relays that do not rest, and of these those that can begin in time, if there are any."""
        membership, going = self.ctx.run.membership, set(self._admission.going())
        stages = []
        for stage in range(self.ctx.run.settings.stages + 1):
            live = [peer for peer in membership.live(stage, t) if peer not in going]
            live = self._machines.able(live, t) if stage else live
            stages.append(list(filter(prompt, live)) or live)
        return stages

    def _latencies(self, peers: Iterable[str]) -> Callable[[str, str], float] | None:
        """Function (sender, receiver) -> estimated latency (s); None while none between `peers` is known."""
        members = self.ctx.run.membership.members
        latency_s = self._admission.ways.latencies({peer: members[peer].region for peer in peers})
        return None if latency_s is None else cache(latency_s)

    def _doubles(self, rates: Mapping[str, float], t: int) -> list[str]:
        """Machines of one stage that can hold the islands of two crews in round t, the best first: the one
        that computes a microbatch, or sends what belongs to one on its line, in the shortest time, whichever
        takes longer. Not those that are to be of one crew alone. rates: machine -> its inner steps per
        second."""
        settings, members = self.ctx.run.settings, self.ctx.run.membership.members
        bits = 16.0 * settings.activation_bytes * self._of_inner_step

        def seconds(peer: str) -> float:
            sent = next(self._admission.ways.rates(peer), ())
            return max(1.0 / rates[peer], bits / max(sent) if sent else math.inf)

        able = (peer for peer in rates if members[peer].held(2) and t > self._single.get(peer, 0))
        return sorted(able, key=lambda peer: (seconds(peer), peer))

    def _times(
        self, rates: Sequence[Mapping[str, float]], latency_s: Callable[[str, str], float]
    ) -> CrewTimes:
        """Model of what crews take. rates: of each relay stage, machine -> its inner steps per second."""
        run, count = self.ctx.run, self._of_inner_step
        seconds = {peer: 1.0 / (rate * count) for of in rates for peer, rate in of.items()}
        held = {peer: run.settings.slots(1, run.membership.members[peer].capacity) for peer in seconds}
        return CrewTimes(count, seconds, held, latency_s)

    @property
    def _of_inner_step(self) -> int:
        """Number of microbatches of one inner step of a slot."""
        settings = self.ctx.run.settings
        return settings.microbatches // max(1, settings.rounds.slots)


def _regrouped(crews: list[Crew], anew: Sequence[Crew], times: CrewTimes) -> list[Crew]:
    """Crews that `anew` becomes by exchanges, if they are as many as `crews` and together quicker by
    REGROUPED. Else `crews`, also if a relay of these has two seats: they stay until another is there."""
    relays = [peer for crew in crews for peer in crew[:-1]]
    if len(set(relays)) < len(relays) or len(anew) < len(crews):
        return crews
    found = quicker(anew, times)
    speeds = [sum(1.0 / times.seconds(crew) for crew in of) for of in (found, crews)]
    return found if speeds[0] > (1.0 + REGROUPED) * speeds[1] else crews


def _rates(times: CrewTimes, crews: Sequence[Crew]) -> dict[Crew, float]:
    """Estimated inner steps per second of crews that work at one time."""
    return {crew: 1.0 / seconds for crew, seconds in times.together(crews).items()}
