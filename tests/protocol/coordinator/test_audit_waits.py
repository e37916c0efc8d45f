"""Waits of the run's end for an auditor's report on a round of islands (I4)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol.coordinator.audit_cases import MOST_SLOTS, PATIENCE_S, AuditCases
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from anabranch.protocol.log.records import Members
from swarm.byzantine.test_auditors import AUDITOR
from swarm.byzantine.test_review_audits import committed, leader

NIGHT_S, ROUND_S = 8 * 3600.0, 60.0


def after_rounds(*took_s: float, slot_s: float = 0.0, first: int = 0) -> AuditCases:
    """Leader that led as many rounds as there are times, each audited by an auditor that is silent. slot_s:
    seconds that a slot should take; 0: not known. first: as in `Rounds`."""
    cases, _ = leader()
    ctx = cases.ctx
    ctx.use_settings(replace(ctx.run.settings, rounds=Rounds(inner=4, slots=3, first=first)))
    ctx.run.membership.apply(Members(2, joined=(AUDITOR,)))
    for t, round_s in enumerate(took_s, 1):
        led = Round(t, "base", ctx.clock.now, planned_s={0: slot_s, 1: slot_s / 2.0} if slot_s else {})
        ctx.clock.advance(ctx.clock.now + round_s)
        cases.committed(msgspec.structs.replace(committed(), t=t), f"hash {t}", led)
    return cases


def waits_s(cases: AuditCases) -> float:
    return cases.awaited_until() - cases.ctx.clock.now


@pytest.mark.parametrize("night", range(4))
def test_the_end_does_not_wait_for_hours_after_a_round_that_stood_all_night(night: int) -> None:
    """A silent auditor got four times the duration of the last round, however long that stood."""
    took_s = [ROUND_S] * 4
    took_s[night] = NIGHT_S
    most_s = PATIENCE_S + AUDIT_STEPS * ROUND_S
    assert waits_s(after_rounds(*took_s)) <= most_s
    assert waits_s(after_rounds(*took_s, slot_s=ROUND_S)) <= most_s


def test_an_only_round_that_stood_counts_as_its_slots_should_have_taken() -> None:
    assert waits_s(after_rounds(NIGHT_S, slot_s=ROUND_S)) == PATIENCE_S + AUDIT_STEPS * MOST_SLOTS * ROUND_S


def test_rounds_that_grow_leave_an_auditor_the_time_of_the_last() -> None:
    """They have 1, 2 and 4 steps."""
    grown = after_rounds(ROUND_S, 2 * ROUND_S, 4 * ROUND_S, first=1)
    assert waits_s(grown) == PATIENCE_S + AUDIT_STEPS * 4 * ROUND_S
