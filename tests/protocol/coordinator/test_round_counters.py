"""Counters of an open round at the leader, against a look through all claims."""

from __future__ import annotations

import random

import pytest

from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.log.records import Slot
from anabranch.protocol.rounds.plan import active, sets_of, units_of


@pytest.mark.parametrize("seed", range(20))
def test_complete_slots_are_those_whose_units_are_all_claimed(seed: int) -> None:
    """Whoever claims what in which order, and whoever is removed with its claims."""
    draw = random.Random(seed)
    plan = tuple(Slot(0, draw.randrange(3), f"r{slot}") for slot in range(12))
    current = Round(3, "base", 0.0, slots=plan)
    stages = draw.choice([1, 3])
    for _ in range(60):
        stage, peer = draw.randrange(stages + 1), draw.choice("abcd")
        if draw.random() < 0.1:
            for claims in current.claims.values():
                claims.pop(peer, None)
            current.recount(stages)
        else:
            cover = sorted(sets_of(plan).cover(stage))
            units = frozenset(draw.sample(cover, draw.randrange(min(6, len(cover)))))
            claims = current.claims.setdefault(stage, {})
            known = claims.get(peer, frozenset())
            others = frozenset().union(*(held for other, held in claims.items() if other != peer))
            assert current.took(stage, units - known, stages) == bool(others & (units - known))
            claims[peer] = known | units
        claimed = (current.claims.get(stage, {}).values() for stage in range(stages + 1))
        held = {stage: frozenset().union(*units) for stage, units in enumerate(claimed)}
        ready = {k for k in active(plan) if all(units_of(stage, (k,)) <= held[stage] for stage in held)}
        assert current.complete == ready
        current.dropped = frozenset(draw.sample(active(plan), draw.randrange(3)))
        for stage in range(stages + 1):
            assert current.counts(stage) == units_of(stage, set(active(plan)) - current.dropped)


def test_sets_follow_the_plan_and_not_its_place_in_memory() -> None:
    for first in range(50):
        plan = tuple(Slot(first, (first + slot) % 2, "r" * (slot % 2)) for slot in range(4))
        assert sets_of(plan).active == active(plan)
        assert sets_of(plan).bound == all(plan[slot].peer for slot in active(plan))
        assert sets_of(plan).cover(0) == units_of(0, active(plan))
    assert not sets_of(()).bound
