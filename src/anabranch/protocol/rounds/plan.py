"""Plans of rounds as pure functions: the slots of a round, counters after it, the hash of its batch.

A slot that does not count in a round keeps its counter: its batches come again in a later round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from anabranch.protocol.interface.rounds import MOST_RATE, Rounds
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.log.records import Commit, Slot

#: Members that copy their state before a round: as many as a download has sources at one time.
KEEPERS = 4

Plan = tuple[Slot, ...]
Slots = Mapping[int, tuple[int, int]]
"""Slot -> (its inner steps that counted in earlier rounds, its inner steps in this round)."""


def even_plan(rounds: Rounds) -> Plan:
    """Plan of a first round, before any speed is known: every slot takes `rounds.inner` steps and is bound to
    no peer."""
    return (Slot(0, rounds.length(rounds.start + 1)),) * rounds.slots


def active(plan: Sequence[Slot]) -> tuple[int, ...]:
    """Slots that take part in a round."""
    return tuple(slot for slot, each in enumerate(plan) if each.steps)


def units_of(stage: int, slots: Iterable[int]) -> frozenset[int]:
    """Units of these slots at a stage: the slots themselves, or at stage 0 their heads and embeddings."""
    if stage:
        return frozenset(slots)
    return frozenset(unit for slot in slots for unit in (head_unit(slot), embed_unit(slot)))


def counted(owners: Sequence[int]) -> tuple[int, ...]:
    """Slots that count in a round, from the owner of each unit at a relay stage (-1: it does not count)."""
    return tuple(slot for slot, owner in enumerate(owners) if owner >= 0)


def slots_of(plan: Plan, commit: Commit) -> dict[int, tuple[int, int]]:
    """Slots that count in a round with this plan, as slot -> (inner steps before the round, inner steps in
    it). If the round was skipped: all that took part. Empty if the iteration is no round."""
    slots = counted(commit.stages[1].owners) if plan and commit.stages else active(plan)
    return {slot: (plan[slot].first, plan[slot].steps) for slot in slots if slot < len(plan)}


def freed(plan: Plan) -> Plan:
    """Plan with the same inner steps, but bound to no peer: the machines may be gone."""
    return tuple(Slot(slot.first, slot.steps) for slot in plan)


def next_plan(
    plan: Plan, accepted: Collection[int], rounds: Rounds, rates: Mapping[str, float], inner: int = 0
) -> Plan:
    """Plan of the next round. accepted: slots whose steps of this round count. rates: peer -> inner steps per
    second. inner: steps of a slot on average (0: `rounds.inner`).

    Every peer gets one slot, the quickest first if there are more peers than slots; a peer keeps its slot.
    Steps are in proportion to the peer's speed, so that all end together.
    """
    inner = inner or rounds.inner
    firsts = [slot.first + slot.steps * (k in accepted) for k, slot in enumerate(plan)]
    if not rates:
        return tuple(Slot(first, inner) for first in firsts)
    usual = sorted(rates.values())[(len(rates) - 1) // 2]
    rates = {peer: min(rate, MOST_RATE * usual) for peer, rate in rates.items()}
    chosen = sorted(rates, key=lambda peer: (-rates[peer], peer))[: rounds.slots]
    places = {slot.peer: k for k, slot in enumerate(plan) if slot.peer in chosen}
    free = iter(k for k in range(rounds.slots) if k not in places.values())
    for peer in sorted(chosen):
        if peer not in places:
            places[peer] = next(free)
    total = sum(rates[peer] for peer in chosen)
    share = {peer: rates[peer] / total if total > 0.0 else 1.0 / len(chosen) for peer in chosen}
    steps = {peer: max(1, round(inner * len(chosen) * share[peer])) for peer in chosen}
    holder = {k: peer for peer, k in places.items()}
    return tuple(
        Slot(first, steps[holder[k]], holder[k]) if k in holder else Slot(first, 0)
        for k, first in enumerate(firsts)
    )


def plan_problem(rounds: Rounds, t: int, plan: Plan) -> str:
    """Reason why no honest leader plans iteration t so, "" if one might. A replay of the log checks each plan
    before it allocates memory for it."""
    if not rounds.has(t):
        return "it has a plan, but is no round" if plan else ""
    if len(plan) != rounds.slots or not active(plan):
        return f"its plan has {len(plan)} slots, {len(active(plan))} of them with steps"
    most = rounds.most_steps
    if any(not 0 <= slot.steps <= most or not 0 <= slot.first <= most * t for slot in plan):
        return f"a slot of its plan has more than {most} inner steps, or counts more than all rounds had"
    return ""


def keepers(members: Sequence[str], t: int) -> frozenset[str]:
    """Members of a stage that copy their state before round t, so that they can send it to joiners while
    inner steps change their own. Members take turns: a copy costs memory, and a joiner bandwidth."""
    first = KEEPERS * t
    return frozenset(members[(first + k) % len(members)] for k in range(min(KEEPERS, len(members))))


def plan_hash(plan: Sequence[Slot]) -> str:
    """Hash that stands for the batch of a round: the batch follows from the inner steps of each slot, and
    from corpus and seed."""
    text = "anabranch round 1 " + " ".join(f"{slot.first}+{slot.steps}" for slot in plan)
    return hashlib.sha256(text.encode()).hexdigest()[:64]
