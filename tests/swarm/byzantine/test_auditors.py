"""Auditors, which came with the owner's ticket for it: they only compute others' work again, and are
believed."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from anabranch.protocol.audit.auditor import WAIT_S, Auditor
from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.audit.kept_work import KeptWork
from anabranch.protocol.coordinator.audit_cases import LATE_STEPS, AuditCases
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from anabranch.protocol.log.records import Commit, Member, Members, Revoke, Rollback, StageCommit
from anabranch.protocol.messages import AnyMessage, Audit, Audited, FetchWork, Work
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import IntegerWorker
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from swarm.byzantine.test_audit import (
    STEPS,
    audited_world,
    audits_of,
    give_lying_worker,
    others_are_right,
    records_of,
)
from swarm.byzantine.test_review_audits import Removals, committed, context, expired, leader, revoked

#: Auditor of the stage of the relays in `test_review_audits`.
AUDITOR = Member("x", 1, 1, "c", 0)
TICKET = ev.VerifiedCredential("auditor", ev.NEVER_EXPIRES_S, "auditors")


def joins(world: World, name: str, stage: int = -1, at: float = 0.3) -> None:
    world.tickets[name] = TICKET
    world.add(member_of(Machine(name, stage)), "d0", at=at)


def admitted(world: World) -> list[Member]:
    records = [record for record in records_of(world) if isinstance(record, Members)]
    return [member for record in records for member in record.joined if member.ticket == "auditors"]


def verdicts(world: World, auditor: str) -> list[object]:
    return [audit["verdict"] for audit in audits_of(world) if audit["auditor"] == auditor]


def test_an_auditor_computes_again_and_takes_no_part() -> None:
    world = audited_world(share=1.0, replicas=2)
    joins(world, "a1", 1)
    world.run(until_s=600.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    [member] = admitted(world)
    assert member.is_auditor and member.disk == "" and member.stage == 1
    records = records_of(world)
    commits = [record for record in records if isinstance(record, Commit)]
    assert not [commit for commit in commits if "a1" in commit.stages[1].members]
    assert not [record for record in records if isinstance(record, Members) and "a1" in record.active_from]
    first = {audit["t"]: audit["auditor"] for audit in audits_of(world) if audit["stage"] == 1}
    assert {first[t] for t in range(3, STEPS + 1)} == {"a1"}  # no replica was asked
    assert set(verdicts(world, "a1")) == {"same"} and len(verdicts(world, "a1")) > STEPS
    assert not [record for record in records if isinstance(record, Revoke | Rollback)]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kind", [tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart])
def test_its_word_alone_convicts_a_liar_whose_fellow_colludes(kind: type[tasks.Task]) -> None:
    """The other replica of the stage finds all of the liar's work right, so that without the auditor nothing
    would be found."""
    world = audited_world(share=1.0, replicas=2)
    joins(world, "a1", 1)
    worker = give_lying_worker(world, "r1.1", kind, also_audits=False)
    world.mouths["r1.0"] = lambda message: None if isinstance(message, Audited) else message
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r1.1")
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.1"]
    assert "different" in verdicts(world, "a1")


def test_a_stage_of_one_replica_is_audited() -> None:
    world = audited_world(share=1.0, replicas=1)
    joins(world, "a1", 1)
    world.run(until_s=600.0)
    assert world.history().t == STEPS and set(verdicts(world, "a1")) == {"same"}


def test_a_stage_of_one_replica_without_an_auditor_is_told_to_be_audited_by_nobody() -> None:
    """Whatever it computes is taken: no other machine has the weights. The owner is told once, and each drawn
    contribution is noted as expired, so that the ledger counts it."""
    world = audited_world(share=1.0, replicas=1)
    worker = give_lying_worker(world, "r1.0", tasks.Freeze, also_audits=False)
    world.run(until_s=600.0)
    assert world.history().t == STEPS and worker.lies > 0 and "r1.0" in wrong_states(world)
    found = [(audit["stage"], audit["auditor"], audit["verdict"]) for audit in audits_of(world)]
    assert found == [(stage, "", "expired") for _ in range(STEPS) for stage in (1, 2)]
    told = [str(fields["text"]) for _, _, kind, fields in world.notes if kind == "note"]
    assert sum("stage 1 has one replica and no auditor" in text for text in told) == 1


@pytest.mark.parametrize("kind", [tasks.Forward, tasks.Freeze])
def test_a_liar_that_is_alone_in_its_stage_is_convicted_by_an_auditor(kind: type[tasks.Task]) -> None:
    """The log goes back, and the next machine that is lent for the stage takes it up where it was right."""
    world = audited_world(share=1.0, replicas=1)
    joins(world, "a1", 1)
    world.add(member_of(Machine("r1.9", 1)), "d0", at=20.0)
    worker = give_lying_worker(world, "r1.0", kind, also_audits=False)
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r1.0")
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.0"]
    assert "r1.9" in world.history().membership.active_from


def test_who_withholds_its_work_from_the_auditor_loses_its_seat() -> None:
    """Liar and fellow hand nothing over, and the fellow would find all of it right."""
    world = audited_world(share=1.0, replicas=2)
    joins(world, "a1", 1)
    worker = give_lying_worker(world, "r1.1", tasks.SumPart, also_audits=False)

    def mouth(message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Work) and message.subject == "r1.1" and message.t >= worker.first:
            return msgspec.structs.replace(message, held=False, receipt=b"")
        return None if isinstance(message, Audited) else message

    world.mouths |= {"r1.0": mouth, "r1.1": mouth}
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r1.1") and "withheld" in verdicts(world, "a1")
    reasons = [r.removed.get("r1.1", "") for r in records_of(world) if isinstance(r, Members)]
    assert any("did not hand over to the auditor" in reason for reason in reasons)


def test_replicas_audit_in_the_place_of_an_auditor_that_died() -> None:
    """It dies while it fetches what it needs to compute the false step again."""
    world = audited_world(share=1.0)
    joins(world, "a1", 1)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze, also_audits=False)
    worker.first = 5
    died: list[int] = []

    def mouth(message: AnyMessage) -> AnyMessage:
        if isinstance(message, FetchWork) and message.t >= 5 and not died:
            died.append(message.t)
            world.clock.after(0.0, lambda: world.crash("a1"))
        return message

    world.mouths["a1"] = mouth
    world.run(until_s=900.0)
    assert worker.lies > 0 and died == [5]
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"r1.1"}
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.1"]


def test_replicas_audit_in_the_place_of_an_auditor_that_says_nothing() -> None:
    world = audited_world(share=1.0)
    joins(world, "a1", 1)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze, also_audits=False)
    world.mouths["a1"] = lambda message: None if isinstance(message, Audited) else message
    world.run(until_s=900.0)
    assert worker.lies > 0 and others_are_right(world, "r1.1")
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.1"]


def test_a_run_without_audits_takes_no_auditor() -> None:
    world = audited_world(share=0.0)
    joins(world, "a1")
    world.run(until_s=600.0)
    assert world.history().t == STEPS and admitted(world) == []


def test_auditors_spread_over_the_stages() -> None:
    world = audited_world(share=1.0)
    for number in range(3):
        joins(world, f"a{number}", at=0.3 + number)
    world.run(until_s=600.0)
    assert sorted(member.stage for member in admitted(world)) == [1, 1, 2]
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_false_state_convicts_nobody() -> None:
    """A replica lied to the auditor about the stage's state, so that it would find all honest work different.
    It compares the state with the log before it applies the next step, and fetches another."""
    world = audited_world(share=1.0, replicas=2)
    joins(world, "a1", 1)

    def falsify() -> None:
        node = world.nodes["a1"]
        if node.peer.replica.t < 3 or not isinstance(node.computer, IntegerWorker):
            world.clock.after(0.1, falsify)
            return
        node.computer.state += 1
        node.peer.replica.fingerprint = "false"

    world.clock.after(1.0, falsify)
    world.run(until_s=600.0)
    assert any("is not the run's" in str(fields) for _, name, _, fields in world.notes if name == "a1")
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert not [record for record in records_of(world) if isinstance(record, Revoke | Rollback)]
    assert verdicts(world, "a1")[-1] == "same"


def test_a_stage_that_lost_its_replicas_gets_another_though_an_auditor_follows_it() -> None:
    settings = Settings("lost", 1, 2, 6, STEPS, min_replicas=1, audit_share=1.0, snapshot_every=2)
    machines = [Machine("d0", 0), Machine("r1.0", 1), *(Machine(f"r2.{n}", 2) for n in range(3))]
    world = counting_world(settings, machines, 1)
    joins(world, "a1", 1)

    def crash() -> None:
        world.crash("r1.0") if world.history().t >= 5 else world.clock.after(0.1, crash)

    world.clock.after(1.0, crash)
    world.run(until_s=900.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    members = world.history().membership.members
    assert any(member.stage == 1 and not member.is_auditor for member in members.values())


def test_only_an_auditor_of_the_same_numerics_class_is_named() -> None:
    members = ("r1", "r2")
    part = StageCommit("", "", {}, members, ("x", "y"), (0, 1), ("receipt", "receipt"))
    record = Commit("run", 1, 1, 3, "", "", "step", 1, (), (part, part), 0.0, 1.0, 1e-3, 1.0, 1.0, 0)
    here = {"a": Member("a", 1, 1, "x", 0), "b": Member("b", 2, 1, "y", 0)}
    found = {each.subject: each.trusted for each in drawn(record, "base", 1.0, {}, here)}
    assert found == {"r1": "a", "r2": ""}


# --- verdicts -----------------------------------------------------------------------------------------


def led() -> tuple[AuditCases, Removals, Drawn]:
    """Leader of a stage with an auditor, after a step; the first contribution that was drawn."""
    cases, removals = leader()
    membership = cases.ctx.run.membership
    membership.apply(Members(2, joined=(AUDITOR,)))
    cases.committed(committed(), "hash", None)
    [first, *_] = drawn(committed(), "hash", 1.0, {}, membership.auditors)
    assert first.trusted == first.first == "x"
    return cases, removals, first


def says(cases: AuditCases, each: Drawn, peer: str, verdict: str) -> None:
    assert cases.on_audited(peer, Audited(1, "hash", 1, each.subject, verdict)) is None


def later(cases: AuditCases, steps: int) -> None:
    cases.committed(msgspec.structs.replace(committed(), t=1 + steps), f"hash {steps}", None)


def ordered(cases: AuditCases, each: Drawn) -> list[str]:
    """Replicas that the leader ordered to audit a contribution."""
    sent = [effect for effect in cases.ctx.outbox.effects if isinstance(effect, ev.Send)]
    orders = [(effect.peer, effect.message) for effect in sent if isinstance(effect.message, Audit)]
    return [peer for peer, order in orders if (order.t, order.subject) == (1, each.subject)]


def test_the_auditor_decides_alone() -> None:
    cases, removals, each = led()
    says(cases, each, each.auditors[0], "different")  # nobody asked it
    says(cases, each, "x", "different")
    assert revoked(cases) == [each.subject] and removals.removed == {}
    assert cases.convictions.returns_before == 1
    assert ordered(cases, each) == []
    cases, removals, each = led()
    says(cases, each, "x", "same")
    later(cases, AUDIT_STEPS)
    assert each.subject not in expired(cases) and revoked(cases) == [] and not cases.convictions.returns


def test_replicas_are_asked_when_the_auditor_cannot_tell_leaves_or_is_late() -> None:
    cases, removals, each = led()
    says(cases, each, "x", "unable")
    assert ordered(cases, each) == [each.auditors[0]]
    says(cases, each, each.auditors[0], "different")
    assert ordered(cases, each) == [*each.auditors] and revoked(cases) == []
    says(cases, each, each.auditors[1], "different")
    assert revoked(cases) == [each.subject] and removals.removed == {}
    cases, _, each = led()
    cases.removed("x")
    assert ordered(cases, each) == [each.auditors[0]]
    cases, _, each = led()
    later(cases, LATE_STEPS)
    assert ordered(cases, each) == [each.auditors[0]]


def test_a_late_difference_counts_though_replicas_found_none() -> None:
    """They may lie together, and wait until the auditor is late."""
    cases, removals, each = led()
    later(cases, LATE_STEPS)
    says(cases, each, each.auditors[0], "same")
    assert revoked(cases) == []
    says(cases, each, "x", "different")
    assert revoked(cases) == [each.subject] and removals.removed == {}


def test_a_replica_that_accuses_falsely_loses_its_seat() -> None:
    cases, removals, each = led()
    later(cases, LATE_STEPS)
    says(cases, each, each.auditors[0], "different")
    says(cases, each, "x", "same")
    assert list(removals.removed) == [each.auditors[0]]
    assert revoked(cases) == [] and not cases.convictions.returns


def test_the_word_of_an_auditor_that_left_does_not_count() -> None:
    cases, _, each = led()
    cases.ctx.run.membership.apply(Members(3, removed={"x": "its ticket is revoked"}))
    cases.removed("x")
    says(cases, each, "x", "different")
    assert revoked(cases) == []


def test_an_auditor_takes_silence_for_no_proof() -> None:
    """Its own line may be slow. A replica reports the work as withheld then, which alone convicts nobody."""
    for me, verdict in (("x", "unable"), (led()[2].auditors[0], "withheld")):
        ctx = context(me, 1)
        ctx.run.membership.apply(Members(2, joined=(AUDITOR,)))
        auditor = Auditor(ctx, KeptWork(ctx))
        auditors = ctx.run.membership.auditors if me == "x" else {}
        assert auditor.committed(1, drawn(committed(), "hash", 1.0, {}, auditors)[:1])
        assert me != "x" or auditor.deadline() == math.inf  # the step is not applied
        auditor.applied(1)
        for _ in range(4):
            auditor.tick()
            ctx.clock.advance(ctx.clock.now + WAIT_S)
        sent = [effect.message for effect in ctx.outbox.effects if isinstance(effect, ev.Send)]
        assert [message.verdict for message in sent if isinstance(message, Audited)] == [verdict]


@pytest.mark.parametrize("trusted", [True, False])
def test_a_slow_auditor_drops_the_audits_that_nobody_waits_for_any_more(trusted: bool) -> None:
    """A subject that answers slowly would keep a replica from all later audits, and its queue would grow."""
    [first, *_] = drawn(committed(), "hash", 1.0)
    me = AUDITOR.id if trusted else first.auditors[0]
    ctx = context(me, 1)
    ctx.run.membership.apply(Members(2, joined=(AUDITOR,)))
    auditor = Auditor(ctx, KeptWork(ctx))
    for t in range(1, 6 * AUDIT_STEPS):
        each = dataclasses.replace(first, t=t, base=f"hash {t}", trusted=me if trusted else "")
        assert auditor.committed(t, [each])
        auditor.applied(t)
        auditor.tick()
        sent = [effect.message for effect in ctx.outbox.effects if isinstance(effect, ev.Send)]
        assert all(t - AUDIT_STEPS < message.t for message in sent[-1:] if isinstance(message, FetchWork))
    assert len(auditor._queue) < AUDIT_STEPS and len(auditor._drawn) <= AUDIT_STEPS
