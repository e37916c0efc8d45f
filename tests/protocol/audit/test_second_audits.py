"""Waits of commits for second auditors, where one found a difference (R8)."""

from __future__ import annotations

import msgspec

from anabranch.protocol.audit.draw import drawn
from anabranch.protocol.audit.second_audits import HOLD_S
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from swarm.byzantine.test_review_audits import committed, leader
from swarm.byzantine.test_unconfirmed_accusations import accused, says


def test_the_step_that_ends_the_audit_waits_for_the_second_auditor() -> None:
    cases, removals, each = accused()
    last = 1 + AUDIT_STEPS
    assert not cases.second.holds(last - 1) and cases.second.holds(last) and cases.second.holds(last)
    notes = [effect for effect in cases.ctx.outbox.effects if isinstance(effect, ev.Note)]
    assert [note.kind for note in notes].count("waiting") == 1
    assert cases.second.held_until() == cases.ctx.clock.now + HOLD_S
    says(cases, each, each.auditors[1], "same")
    assert not cases.second.holds(last) and list(removals.removed) == [each.auditors[0]]
    assert not cases.convictions.returns


def test_the_wait_for_a_second_auditor_ends_and_happens_once_for_an_accuser() -> None:
    """An accuser whose accomplice is drawn second would else have each such step wait."""
    cases, _, each = accused()
    assert cases.second.holds(1 + AUDIT_STEPS)
    cases.ctx.clock.advance(cases.second.held_until())
    assert not cases.second.holds(1 + AUDIT_STEPS) and cases.second.held_until() > cases.ctx.clock.now
    cases.committed(msgspec.structs.replace(committed(), t=1 + AUDIT_STEPS), "later", None)
    assert cases.convictions.returns
    cases.rolled_back(0)
    cases.committed(committed(), "hash", None)
    says(cases, each, each.auditors[0], "different")
    assert not cases.second.holds(1 + AUDIT_STEPS)
    says(cases, each, each.auditors[1], "different")  # so it was right
    cases.rolled_back(0)
    cases.committed(committed(), "hash", None)
    says(cases, each, each.auditors[0], "different")
    assert cases.second.holds(1 + AUDIT_STEPS)


def test_an_accusation_that_comes_with_the_last_step_is_too_late() -> None:
    """Nobody could check it any more."""
    for t, void in ((AUDIT_STEPS, True), (1 + AUDIT_STEPS, False)):
        cases, _ = leader()
        cases.committed(committed(), "hash", None)
        [each, *_] = drawn(committed(), "hash", 1.0)
        cases.second.proposed(t)
        says(cases, each, each.auditors[0], "different")
        cases.committed(msgspec.structs.replace(committed(), t=1 + AUDIT_STEPS), "later", None)
        assert bool(cases.convictions.returns) == void
