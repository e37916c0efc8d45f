"""Plans of rounds as pure functions: the slots of a round, counters after it, the hash of its batch.

A slot that does not count in a round keeps its counter: its batches come again in a later round.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

from msgspec import structs

from anabranch.protocol.interface.rounds import MOST_RATE, Rounds
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.log.records import Commit, Crew, Slot, StageCommit

#: Members that copy their state before a round: as many as a download has sources at one time.
KEEPERS = 4

#: A machine that carries state of a slot keeps it unless another is so many times as quick. Plain choice:
#: more than measured speeds differ from round to round.
STAYS = 1.25
#: Most crews of a round that a relay is of. A choice: of more it would be by far the slowest machine.
SEATS = 2
#: Most seats of a crew that are second ones of their relays, as a share of its stages. Plain choice: a crew
#: of such relays alone would take from the others as much as it brings.
SECOND_SEATS = 0.5
#: Plans whose sets are kept: peers of a simulated swarm share the record of a plan. A choice.
PLANS_CACHED = 8

Plan = tuple[Slot, ...]
Slots = Mapping[int, Slot]
"""Number of a slot -> its plan in a round."""


def even_plan(rounds: Rounds) -> Plan:
    """Plan of a first round, before any speed is known: every slot has the same number of inner steps and may
    be filled by any peer."""
    return (Slot(0, rounds.length(rounds.start + 1)),) * rounds.slots


def active(plan: Sequence[Slot]) -> tuple[int, ...]:
    """Numbers of the slots that take part in a round."""
    return tuple(slot for slot, each in enumerate(plan) if each.steps)


class RoundSets:
    """Sets that follow from a plan; each is worked out once.

    active: slots that take part. peers: machines of stage 1 to which slots are bound, and "" if a slot is
    bound to none. bound: True if each slot that takes part is bound to a machine. of_crews: True if the plan
    names the crews of pipeline islands. carried: number of slots that take part for which their machine
    carries state of their inner steps.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.active = active(plan)
        self.peers = frozenset(slot.peer for slot in plan)
        self.bound = bool(plan) and all(plan[slot].peer for slot in self.active)
        self.of_crews = any(slot.others for slot in plan)
        self.carried = sum(plan[slot].carried > 0 for slot in self.active)
        self._problem: tuple[tuple[Rounds, int, int], str] | None = None
        """Inputs of the last `problem`, and its result."""

    def problem(self, rounds: Rounds, t: int, stages: int) -> str:
        """Reason why no honest leader would plan iteration t like this; "" if one might (`plan_problem`)."""
        of = (rounds, t, stages)
        if self._problem is None or self._problem[0] != of:
            self._problem = of, plan_problem(rounds, t, self.plan, stages)
        return self._problem[1]

    @cached_property
    def of_machine(self) -> Mapping[str, tuple[int, ...]]:
        """Machine -> slots that are bound to it, or to a crew with it."""
        found: dict[str, list[int]] = {}
        for slot in self.active:
            for _, peer in self.plan[slot].seats():
                found.setdefault(peer, []).append(slot)
        return {peer: tuple(slots) for peer, slots in found.items()}

    @cached_property
    def slots(self) -> frozenset[int]:
        """Units of the round at a relay stage: the slots that take part."""
        return frozenset(self.active)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Units of the round at stage 0."""
        return units_of(0, self.active)

    @cached_property
    def batch_hash(self) -> str:
        """Hash that stands for the batch of the round (`plan_hash`)."""
        return plan_hash(self.plan)

    def cover(self, stage: int) -> frozenset[int]:
        """Units of the round at a stage."""
        return self.slots if stage else self.ends


_sets: dict[int, RoundSets] = {}


def sets_of(plan: Plan) -> RoundSets:
    """Sets of a plan, worked out once for the object `plan`."""
    found = _sets.get(id(plan))
    if found is None or found.plan is not plan:
        if len(_sets) >= PLANS_CACHED:
            _sets.clear()
        found = _sets[id(plan)] = RoundSets(plan)
    return found


def units_of(stage: int, slots: Iterable[int]) -> frozenset[int]:
    """Units of these slots at a stage: the slots themselves, or at stage 0 their heads and embeddings."""
    if stage:
        return frozenset(slots)
    return frozenset(unit for slot in slots for unit in (head_unit(slot), embed_unit(slot)))


def counted(owners: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the slots that count in a round, from the owner of each unit at a relay stage (-1: it does
    not count)."""
    return tuple(slot for slot, owner in enumerate(owners) if owner >= 0)


def slots_of(plan: Plan, commit: Commit) -> dict[int, Slot]:
    """Slots that counted in the round that `commit` ended: number -> what `plan`, the plan of that round,
    says of it. If the round was skipped: all that took part. Empty if the iteration is no round (`plan` is
    ())."""
    slots = counted(commit.stages[1].owners) if plan and len(commit.stages) > 1 else active(plan)
    return {slot: plan[slot] for slot in slots if slot < len(plan)}


def with_owners(plan: Plan, commit: Commit) -> Plan:
    """Copy of `plan`, the plan of the round that `commit` ended, in which each slot that counted names the
    machine or crew that filled it. Other slots stay bound as they were."""
    crews = filled(plan, commit.stages)
    return tuple(
        structs.replace(slot, peer=crews[k][0], others=crews[k][1:]) if k in crews else slot
        for k, slot in enumerate(plan)
    )


def late_slots(plan: Plan, following: Plan) -> dict[int, Slot]:
    """Slots (number -> plan) of the round with plan `plan` whose contributions were late and are merged in
    the next one: those with `late` steps in its plan, `following`."""
    return {k: plan[k] for k, slot in enumerate(following) if slot.late and k < len(plan)}


def freed(plan: Plan) -> Plan:
    """Copy of `plan` for after a rollback: the same inner steps, but any machine may fill each slot and
    starts it afresh, as the machines with the state that they carried may be gone. Inner steps of late
    contributions are taken again."""
    return tuple(Slot(slot.done, slot.steps) for slot in plan)


class Crews(NamedTuple):
    """Crews of a round. kept: those that stay together. new: put together from other machines, the quickest
    first. failed: with a machine of a crew that failed though nobody left; it may be why."""

    kept: list[Crew]
    new: list[Crew]
    failed: list[Crew]


def crews_of(
    plan: Plan,
    accepted: Collection[int],
    rates: Sequence[Mapping[str, float]],
    data_nodes: Collection[str],
    t: int,
    doubles: Sequence[Sequence[str]] = (),
) -> Crews:
    """Crews of round t. Crews whose slots counted in the round before and of which every machine is left stay
    together; of two with the same relay one alone, if another machine of its stage has no seat. The other
    relays are put together by speed, the quickest of each stage first, each time with a data node that has
    the fewest crews. Relays of crews that failed though nobody left come last, those of stage s moved on by
    (s - 1) · t places. So there are as many crews as the smallest relay stage has machines, and with
    `doubles` more: where a stage lacks a machine, a relay of another crew takes a second seat
    (`_second_seats`), unless a crew of it failed.

    plan, accepted: of the round before, and its slots that count. rates: of each relay stage, machine -> its
    speed. data_nodes: those that are left; no crews without any. doubles: of each relay stage, those of its
    machines that can take a second seat, the best first (empty: none can).
    """
    left = [*rates, data_nodes]
    whole = [k for k, slot in enumerate(plan) if slot.steps and len(slot.crew) == len(left)]
    whole = [k for k in whole if all(p in there for p, there in zip(plan[k].crew, left, strict=True))]
    crews = Crews(_kept([plan[k].crew for k in whole if k in accepted], rates), [], [])
    taken = Counter(peer for crew in crews.kept for peer in crew[:-1])
    failed = {peer for k in whole if k not in accepted for peer in plan[k].crew[:-1]}
    able = [[peer for peer in of if peer not in failed and taken[peer] < SEATS] for of in doubles]
    failed.difference_update(taken)
    free, seated = [], failed | taken.keys()
    for place, of in enumerate(rates):
        by_speed = [peer for _, peer in sorted((-rate, peer) for peer, rate in of.items())]
        last = [peer for peer in by_speed if peer in failed]
        moved = place * t % max(1, len(last))
        first = [peer for peer in by_speed if peer not in seated]
        free.append([*first, *last[moved:], *last[:moved]])
    busy = Counter({peer: 0 for peer in sorted(data_nodes)})
    busy.update(crew[-1] for crew in crews.kept)
    for relays in _second_seats(free, able or [[]] * len(free)) if busy else ():
        source = min(busy, key=busy.__getitem__)
        busy[source] += 1
        (crews.new if failed.isdisjoint(relays) else crews.failed).append((*relays, source))
    return crews


def _kept(crews: Sequence[Crew], rates: Sequence[Mapping[str, float]]) -> list[Crew]:
    """Those of `crews` that stay together: each whose relays are of none before it, and then each of which
    the others are of one before it, if no machine of their stages is left for them. rates: as of
    `crews_of`."""
    kept, taken = list[Crew](), set[str]()
    for again in (False, True):
        for crew in crews:
            shared = [place for place, peer in enumerate(crew[:-1]) if peer in taken]
            if crew not in kept and all(again and taken.issuperset(rates[place]) for place in shared):
                kept.append(crew)
                taken.update(crew[:-1])
    return kept


def _second_seats(free: Sequence[Sequence[str]], doubles: Sequence[Sequence[str]]) -> list[Crew]:
    """Relays of the crews that `free` makes, machines of each relay stage without a seat, the first of each
    stage first. Where a stage has no more, one of `doubles` takes the place as its second seat, of each stage
    the first that has not; not in more than the share SECOND_SEATS of a crew's seats."""
    found, spare = list[Crew](), [list(of) for of in doubles]
    for row in zip_longest(*free):
        lacking = [place for place, relay in enumerate(row) if relay is None]
        if len(lacking) > SECOND_SEATS * len(row) or not all(spare[place] for place in lacking):
            break
        found.append(tuple(relay or spare[place].pop(0) for place, relay in enumerate(row)))
    return found


def next_plan(
    plan: Plan,
    accepted: Mapping[int, Crew],
    rounds: Rounds,
    rates: Mapping[Crew, float],
    t: int = 0,
    lost: Collection[int] = (),
    sends_s: Mapping[Crew, float] = MappingProxyType({}),
) -> Plan:
    """Plan of the round after round t. accepted: slot that counts in t -> crew that filled it. rates: crew ->
    inner steps per second (empty: any peer may fill each slot, which begins anew). lost: slots of t whose
    crew has no contribution to it, not even a late one. sends_s: crew -> seconds that it needs to send a
    contribution (absent: 0).

    Every crew gets one slot, the quickest first if there are more crews than slots; a crew keeps its slot. A
    slot without a crew takes no part (0 steps). On average a slot takes `rounds.length(t + 1)` steps, by its
    crew's speed, so that all have computed and sent their contributions at the same time. What a crew carries
    of its slot is dropped if the slot goes to another crew, or did not count and is not merged, as one that
    is lost.
    """
    inner = rounds.length(t + 1)
    firsts = [slot.first + slot.steps if k in accepted else slot.done for k, slot in enumerate(plan)]
    if not rates:
        return tuple(Slot(first, inner) for first in firsts)
    usual = sorted(rates.values())[(len(rates) - 1) // 2]
    rates = {crew: min(rate, MOST_RATE * usual) for crew, rate in rates.items()}
    former = {slot.crew for slot in plan} if rounds.keeps else set()
    preferred = {crew: rate * (STAYS if crew in former else 1.0) for crew, rate in rates.items()}
    chosen = sorted(rates, key=lambda crew: (-preferred[crew], crew))[: rounds.slots]
    places = {slot.crew: k for k, slot in enumerate(plan) if slot.crew in chosen}
    free = iter(k for k in range(rounds.slots) if k not in places.values())
    for crew in sorted(chosen):
        if crew not in places:
            places[crew] = next(free)
    lengths = _lengths(inner * len(chosen), {crew: (rates[crew], sends_s.get(crew, 0.0)) for crew in chosen})
    steps = {
        crew: min(rounds.most_steps, max(rounds.least, round(lengths[crew]))) for crew in chosen
    }
    holder = {k: crew for crew, k in places.items()}

    def slot(k: int, first: int) -> Slot:
        if k not in holder:
            return Slot(first, 0)
        crew, before = holder[k], plan[k]
        peer, others = crew[0], crew[1:]
        going_on = max(steps[crew], 1 + rounds.ahead(before.steps))  # some of them are taken already
        if k in accepted:
            carried = t if rounds.carries and accepted[k] == crew else 0
            return Slot(first, going_on if carried else steps[crew], peer, carried, others=others)
        if rounds.merges and before.crew == crew and before.steps and not before.late and k not in lost:
            return Slot(before.first + before.steps, going_on, peer, t, before.steps, others)
        return Slot(first, steps[crew], peer, others=others)

    return tuple(slot(k, first) for k, first in enumerate(firsts))


def _lengths(total: float, crews: Mapping[Crew, tuple[float, float]]) -> dict[Crew, float]:
    """Inner steps of crews, `total` in all, with which they have computed and sent at the same time. crews:
    crew -> its steps per second, and the seconds that it sends. A crew that would send for longer than
    others compute and send takes no steps."""
    speed, sent = 0.0, 0.0
    for rate, send_s in sorted(crews.values(), key=lambda each: each[1]):
        if speed and send_s * speed >= total + sent:
            break
        speed, sent = speed + rate, sent + rate * send_s
    if speed <= 0.0:
        return dict.fromkeys(crews, total / max(1, len(crews)))
    return {
        crew: max(0.0, (total + sent) * (rate / speed) - rate * send_s)
        for crew, (rate, send_s) in crews.items()
    }


def next_plan_problem(plan: Plan, following: Plan, commit: Commit) -> str:
    """Reason why `following` cannot be the plan after `commit`, the record of a round with plan `plan` (or of
    the iteration before the first round); "" if it can. A slot's counter must rise by the steps that counted,
    and what it carries must be its machine's."""
    before = plan or (Slot(0, 0),) * len(following)
    if not following:
        return ""
    if len(before) != len(following):
        return "the next round has another number of slots"
    accepted = filled(plan, commit.stages)
    for k, (was, slot) in enumerate(zip(before, following, strict=True)):
        done = was.done + was.weight * (k in accepted)
        if slot.done != done:
            return f"slot {k} stands at {slot.done} inner steps, not at {done}"
        if slot.late and (k in accepted or was.late or (slot.late, slot.crew) != (was.steps, was.crew)):
            return f"slot {k} merges a contribution that was not late"
        of_owner = slot.late or accepted.get(k) == slot.crew
        if slot.carried and not (slot.carried == commit.t and slot.steps and slot.peer and of_owner):
            return f"slot {k} carries state that its machine does not have"
        if slot.late and not slot.carried:
            return f"slot {k} merges a contribution of no round"
    return ""


def filled(plan: Plan, stages: Sequence[StageCommit]) -> dict[int, Crew]:
    """Slot that counts in a round with plan `plan` -> crew whose contributions counted. stages: of the
    round's commit; () if it was skipped. Empty if it was skipped, or is no round."""
    if not plan or len(stages) < 2:
        return {}
    crews = any(slot.others for slot in plan)
    around = [(part.members, part.owners) for part in stages[1 : None if crews else 2]]
    if crews:
        around.append((stages[0].members, stages[0].owners[::2]))
    return {slot: crew for slot in counted(around[0][1]) if len(crew := _owners(around, slot)) == len(around)}


def _owners(around: Sequence[tuple[Crew, Sequence[int]]], slot: int) -> Crew:
    """Owner of a slot at each stage in turn, stages left out at which it has none. around: for each stage its
    members, and the owner of each slot as a position in them (-1: none)."""
    owners = ((members, of_slots[slot]) for members, of_slots in around if slot < len(of_slots))
    return tuple(members[owner] for members, owner in owners if 0 <= owner < len(members))


def plan_problem(rounds: Rounds, t: int, plan: Plan, stages: int) -> str:
    """Reason why no honest leader would plan iteration t like this; "" if one might. A replay of the log
    checks each plan before it allocates memory for it. stages: number of relay stages."""
    if not rounds.has(t):
        return "it has a plan, but is no round" if plan else ""
    if len(plan) != rounds.slots or not active(plan):
        return f"its plan has {len(plan)} slots, {len(active(plan))} of them with steps"
    most = rounds.most_steps
    if any(not 0 <= slot.steps <= most or not 0 <= slot.first <= most * t for slot in plan):
        return f"a slot of its plan has more than {most} inner steps, or counts more than all rounds had"
    if any(not 0 <= slot.late <= min(slot.first, most) for slot in plan):
        return f"a slot of its plan merges more than {most} late inner steps"
    crews = [slot.crew for slot in plan if slot.crew]
    if any(len(crew) != (stages + 1 if rounds.pipeline else 1) for crew in crews):
        return "a slot of its plan has a crew of another number of machines than stages"
    seats = Counter(seat for slot in plan for seat in slot.seats() if seat[0])
    several = len({peer for _, peer in seats}) < len(seats)
    if rounds.pipeline and (several or any(count > SEATS for count in seats.values())):
        return f"a relay has more than {SEATS} seats in the crews of its plan, or seats at several stages"
    if any((slot.carried and not rounds.keeps) or not 0 <= slot.carried < t for slot in plan):
        return "a slot of its plan carries what no slot of this run carries"
    return ""


def keepers(members: Sequence[str], t: int) -> frozenset[str]:
    """Those of `members`, replicas of one stage, that copy their state before round t, so that they can send
    it to joiners while inner steps change their own. At most KEEPERS; members take turns from round to round,
    as a copy costs memory, and a joiner bandwidth."""
    first = KEEPERS * t
    return frozenset(members[(first + k) % len(members)] for k in range(min(KEEPERS, len(members))))


def plan_hash(plan: Sequence[Slot]) -> str:
    """Hash that stands for the batch of a round: of the inner steps of each slot (`first`, `steps`, `late`),
    from which the batch follows with corpus and seed. The machines that fill the slots, and what they carry,
    are not in it."""
    texts = (f"{slot.first}+{slot.steps}" + f"&{slot.late}" * (slot.late > 0) for slot in plan)
    text = "anabranch round 1 " + " ".join(texts)
    return hashlib.sha256(text.encode()).hexdigest()[:64]
