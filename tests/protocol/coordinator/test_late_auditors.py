"""Auditors that the leader asks in place of late ones."""

from __future__ import annotations

from typing import cast

import pytest

from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.audit_cases import LATE_STEPS, AuditCases
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Commit, Member, Members, StageCommit
from anabranch.protocol.messages import Audit, Audited
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.sim.kernel.simulated_signer import SimulatedSigner

RELAYS = ("a", "b", "c", "d", "e")


def commit(t: int) -> Commit:
    """Commit of step t. Of the first alone a contribution has a receipt, that of the relay a."""
    receipts = ("r", "", "", "", "") if t == 1 else ("",) * 5
    stage = StageCommit("", "digest", {}, RELAYS, ("c",) * 5, (0, 1, 2, 3, 4), receipts)
    none = StageCommit("", "digest", {}, ("d0",), ("c",), (0,))
    return Commit("run", 1, 1, t, "", "", "step", 8, (), (none, stage), 1.0, 1.0, 0.1, 0.1, 0.05, t)


def leader() -> tuple[AuditCases, Drawn]:
    """Leader that committed step 1, and the audit drawn from it, whose jury are all other relays."""
    settings = Settings("run", 1, 1, 5, 10, audit_share=1.0)
    ctx = make_context("d0", 1, 0, settings, "d0", signer=SimulatedSigner("d0"))
    members = (Member("d0", 0, 1, "c", 4), *(Member(name, 1, 1, "c", 4) for name in RELAYS))
    ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    ctx.links.up = {name: AdaptiveTimeout(0.0, 1.0) for name in RELAYS}
    cases = AuditCases(ctx, cast(Admission, None), Convictions(ctx, lambda peer, reason: None))
    cases.committed(commit(1), "hash", None)
    [case] = drawn(commit(1), "hash", 1.0)
    assert len(case.jury) == 4
    return cases, case


def asked(cases: AuditCases) -> list[str]:
    """Relays that the leader ordered to audit since this was called last."""
    effects = cases.ctx.outbox.effects
    found = [each.peer for each in effects if isinstance(each, Send) and isinstance(each.message, Audit)]
    effects.clear()
    return found


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_the_next_auditor_within_reach_is_asked(silent: int) -> None:
    """If the second was silent, too, nobody was, and the audit expired although others had kept weights."""
    cases, case = leader()
    cases.ctx.links.suspects.update(case.jury[1 : 1 + silent])
    cases.committed(commit(1 + LATE_STEPS), "later", None)
    assert asked(cases) == [case.jury[1 + silent]]
    cases.committed(commit(2 + LATE_STEPS), "later still", None)
    assert asked(cases) == []


def test_another_one_is_asked_once_that_one_falls_silent() -> None:
    cases, case = leader()
    cases.committed(commit(1 + LATE_STEPS), "later", None)
    cases.ctx.links.suspects.add(case.jury[1])
    asked(cases)
    cases.committed(commit(2 + LATE_STEPS), "later still", None)
    assert asked(cases) == [case.jury[2]]
    cases.on_audited(case.jury[2], Audited(1, "hash", 1, case.subject, "different"))
    assert asked(cases) == [case.jury[0], case.jury[3]]


def test_who_could_not_tell_is_not_asked_again() -> None:
    cases, case = leader()
    cases.committed(commit(1 + LATE_STEPS), "later", None)
    cases.on_audited(case.jury[1], Audited(1, "hash", 1, case.subject, "unable"))
    asked(cases)
    cases.committed(commit(2 + LATE_STEPS), "later still", None)
    assert asked(cases) == [case.jury[2]]
