"""Attacks on audits, found by review: receipts with garbage, verdicts on one word, false inputs, silence."""

from __future__ import annotations

import math
import random
from typing import Any, cast

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.audit.auditor import WAIT_S, Auditor
from anabranch.protocol.audit.draw import drawn
from anabranch.protocol.audit.kept_work import RECEIPT, KeptWork
from anabranch.protocol.audit.receipts import (
    EndReceipt,
    Receipt,
    SumReceipt,
    Transfer,
    UnitReceipt,
    contradictions,
    receipt_hash,
    signed,
)
from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, NOTHING, STATED_MAX, seal_text
from anabranch.protocol.audit.tracing import traced
from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.coordinator.audit_cases import AuditCases
from anabranch.protocol.coordinator.disputes import Disputes
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.coordinator.step_receipts import UNLISTED_S, StepReceipts, unlinked
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Result
from anabranch.protocol.log.records import Commit, Member, Members, Revoke, StageCommit
from anabranch.protocol.messages import Attempt, AttemptId, Audited, FetchWork, Prepared, Work
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog
from anabranch.protocol.reduce.partial_sums import PARTS
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.sim.kernel.simulated_signer import SimulatedSigner
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import wrong_states
from swarm.byzantine.test_audit import STEPS, audited_world, give_lying_worker, records_of

RELAYS = ("a", "b", "c")


def context(me: str, stage: int) -> PeerContext:
    """Peer of a run with one stage of three relays that owns a microbatch each; all are linked."""
    settings = Settings("run", 1, 1, 3, 10, audit_share=1.0)
    ctx = make_context(me, 1, stage, settings, "d0", signer=SimulatedSigner(me))
    members = (Member("d0", 0, 1, "c", 4), *(Member(name, 1, 1, "c", 4, ticket="t") for name in RELAYS))
    ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    ctx.links.up = {member.id: AdaptiveTimeout(0.0, 1.0) for member in members if member.id != me}
    return ctx


class Removals:
    """Stand-in for Admission that notes who is removed."""

    def __init__(self) -> None:
        self.removed: dict[str, str] = {}
        self.banned: set[str] = set()

    def remove(self, peer: str, reason: str) -> None:
        self.removed[peer] = reason

    def expel(self, peer: str, reason: str) -> None:
        self.remove(peer, reason)
        self.banned.add(peer)


class Told(Convictions):
    """Convictions that keep whose keys and tickets they ask to revoke (`revoked`)."""

    def __init__(self, ctx: PeerContext) -> None:
        self.asked = dict[str, str]()
        super().__init__(ctx, self.asked.__setitem__)


def leader() -> tuple[AuditCases, Removals]:
    removals, ctx = Removals(), context("d0", 0)
    return AuditCases(ctx, cast(Admission, removals), Told(ctx)), removals


def of_step(cases: AuditCases) -> StepReceipts:
    """Receipts of the open step at the same leader."""
    return StepReceipts(cases.ctx, cases.admission, cases.convictions)


ATTEMPT = Attempt(msg.Fence(1, 1, 1, "base", 1), 1, AttemptId(1, 1), 1, RELAYS, (0, 1, 2))


def transfer(sender: str, stage: int, kind: str, name: str) -> Transfer:
    seal = SimulatedSigner(sender).sign(seal_text("run", "base", stage, kind, name, "h"))
    return Transfer("h", sender, stage, seal)


def receipt_of(peer: str) -> Receipt:
    """Receipt of an honest relay."""
    unit = RELAYS.index(peer)
    came = [transfer("d0", 0, kind, str(unit)) for kind in (ACTIVATION, GRADIENT)]
    inputs = tuple((k, transfer(name, 1, "part", f"1.1.{unit}")) for k, name in enumerate(RELAYS))
    reduced = tuple(transfer(name, 1, "reduced part", f"1.1.{k}") for k, name in enumerate(RELAYS))
    sums = (SumReceipt(unit, inputs, "h"),)
    units = (UnitReceipt(unit, *came, "h", "h"),)
    return Receipt("run", "base", 1, 1, peer, 1, 1, units, ("h",) * 3, sums, reduced)


def prepared(receipt: Receipt) -> Prepared:
    data = signed(receipt, SimulatedSigner(receipt.peer))
    return Prepared(ATTEMPT.fence, 1, ATTEMPT.attempt, "digest", {"w": 1.0}, data)


HONEST = receipt_of("a")
UNIT = HONEST.units[0]
replace = msgspec.structs.replace
TOTAL = HONEST.sums[0]


@pytest.mark.parametrize(
    "change",
    [
        {"sums": (msgspec.structs.replace(TOTAL, part=-9),)},  # was an IndexError at the leader
        {"sums": (msgspec.structs.replace(TOTAL, part=1),)},
        {"sums": ()},  # nobody would audit what it added up
        {"sums": (TOTAL,) * 2000},
        {"sums": (msgspec.structs.replace(TOTAL, inputs=TOTAL.inputs[:1]),)},
        {"sums": (msgspec.structs.replace(TOTAL, inputs=((-1, TOTAL.inputs[0][1]),)),)},
        {"parts": ()},  # nothing of its sum would be compared
        {"parts": ("h",) * 5000},
        {"reduced": ()},
        {"units": HONEST.units * 2},
        {"units": ()},
        {"units": (replace(UNIT, gradient_out=""),), "others": (UNIT,)},  # was a KeyError at the leader
        {"units": (replace(UNIT, activation_out=""),)},
        {"others": (replace(UNIT, activation_in=replace(UNIT.activation_in, stage=1)),)},
        {"others": (UNIT, UNIT)},  # many of them made the leader compare for minutes
        {"others": tuple(replace(UNIT, activation_out=str(number)) for number in range(STATED_MAX + 1))},
        {"stage": -1},
        {"peer": "b"},
    ],
)
def test_a_receipt_with_garbage_is_refused(change: dict[str, Any]) -> None:
    """The leader takes no such receipt, and stays alive when it compares those that it has."""
    cases, _ = leader()
    step = of_step(cases)
    current = Round(1, "base", 0.0)
    current.attempts[1], current.served = ATTEMPT, {(0, "d0")}
    for peer in ("b", "c"):
        assert step.refused(peer, prepared(receipt_of(peer)), ATTEMPT, current) is None
    false = msgspec.structs.replace(HONEST, **change)
    assert step.refused("a", prepared(false), ATTEMPT, current) is not None
    assert step.consistent(current)
    assert step.refused("a", prepared(HONEST), ATTEMPT, current) is None
    assert step.consistent(current)


@pytest.mark.parametrize("count", [1, 2, 4, 2000])
def test_moments_of_other_contributions_are_refused(count: int) -> None:
    """A relay has to report moments of all contributions to its part, or none (an IndexError at the
    leader, or work without end)."""
    cases, _ = leader()
    step = of_step(cases)
    current = Round(1, "base", 0.0, attempts={1: ATTEMPT}, served={(0, "d0")})
    for given in (((1.0, 1.0),) * count, ()):
        report = msgspec.structs.replace(prepared(HONEST), moments=given)
        assert (step.refused("a", report, ATTEMPT, current) is None) == (not given)


ODD: tuple[Any, ...] = ("", "h", "d0", "false", "x" * 128, 0, 1, 2, 1 << 31, b"", b"s" * 64)


def changed(value: Any, rng: random.Random) -> Any:
    """Copy of nested lists with one place made odd: another value, an item left out, or one repeated."""
    if not isinstance(value, list | tuple):
        return rng.choice([odd for odd in ODD if type(odd) is type(value)])
    copy, at = list(value), rng.randrange(len(value) or 1)
    if not value or rng.random() < 0.1:
        return copy[:at] if rng.random() < 0.5 else [*copy, *copy[at : at + 1]]
    copy[at] = changed(copy[at], rng)
    return copy


def test_no_receipt_ends_the_leader() -> None:
    """Receipts that decode, with odd fields anywhere, in pairs, so that they contradict each other too."""
    rng, tried = random.Random(1), 0
    listed = computed(replace(UNIT.activation_in, hash="other"), "false"), replace(UNIT, gradient_out="false")
    whole = replace(HONEST, others=listed)
    for _ in range(1000):
        cases, _ = leader()
        step = of_step(cases)
        current = Round(1, "base", 0.0, attempts={1: ATTEMPT}, served={(0, "d0")})
        current.prepared[1] = {}
        for peer in RELAYS:
            cells: Any = msgspec.to_builtins(rng.choice((whole, receipt_of(peer))), builtin_types=(bytes,))
            cells = [*cells[:4], peer, *cells[5:]]
            for _ in range(rng.randrange(3)):
                part = rng.choice((7, 12, rng.randrange(len(cells))))  # units and others more often
                cells[part] = changed(cells[part], rng)
            try:
                odd = msgspec.convert(cells, Receipt, builtin_types=(bytes,))
            except msgspec.ValidationError:
                continue
            tried += 1
            data = signed(odd, SimulatedSigner(peer))
            report = Prepared(ATTEMPT.fence, 1, ATTEMPT.attempt, "digest", {"w": 1.0}, data)
            if step.refused(peer, report, ATTEMPT, current) is None:
                current.prepared[1][peer] = report
        after = stage_two_got(rng.choice(("false", "h", "other")), rng.choice(RELAYS))
        current.receipts.setdefault(2, {})["x"] = after
        seal = seal_text("run", "base", 1, GRADIENT, "0", "false")
        came = Transfer("false", "a", 1, SimulatedSigner("a").sign(seal))
        current.receipts[0] = {"d0": data_receipt(EndReceipt(1, came))}
        for _ in range(2):
            step.consistent(current)
            cases.ctx.clock.now += UNLISTED_S
    assert tried > 1000


DATA = Attempt(msg.Fence(1, 1, 1, "base", 0), 0, AttemptId(1, 1), 1, ("d0",), (0, 0))


def data_receipt(*ends: EndReceipt) -> Receipt:
    """Receipt of the only data node of a run with one microbatch."""
    inputs = ((0, transfer("d0", 0, "part", "1.1.0")),)
    sums, reduced = (SumReceipt(0, inputs, "h"),), (transfer("d0", 0, "reduced part", "1.1.0"),)
    return Receipt("run", "base", 1, 0, "d0", 1, 1, (), ("h",), sums, reduced, ends)


def test_a_receipt_of_a_data_node_with_garbage_is_refused() -> None:
    cases, _ = leader()
    step = of_step(cases)
    current = Round(1, "base", 0.0)
    current.served = {(1, "a")}
    head = EndReceipt(0, transfer("a", 1, ACTIVATION, "0"))
    embedding = EndReceipt(1, transfer("a", 1, GRADIENT, "0"))

    def refused(receipt: Receipt) -> str | None:
        data = signed(receipt, SimulatedSigner("d0"))
        report = Prepared(DATA.fence, 0, DATA.attempt, "digest", {"w": 1.0}, data)
        return step.refused("d0", report, DATA, current)

    good = data_receipt(head, embedding)
    assert refused(good) is None
    other_stage = msgspec.structs.replace(head, came=transfer("a", 2, ACTIVATION, "0"))
    stranger = msgspec.structs.replace(head, came=transfer("z", 1, ACTIVATION, "0"))
    garbage = [(head,), (), (embedding, head), (head, embedding, embedding)]
    garbage += [(other_stage, embedding), (stranger, embedding)]
    for ends in garbage:
        assert refused(data_receipt(*ends)) is not None
    assert refused(msgspec.structs.replace(good, units=HONEST.units)) is not None
    assert step.refused("a", prepared(msgspec.structs.replace(HONEST, ends=(head,))), ATTEMPT, current)


def test_who_makes_up_a_seal_is_convicted_and_not_whom_it_names() -> None:
    """A relay, or a data node, that names another peer as the sender of false bytes."""
    signer = SimulatedSigner("d0")
    made_up = Transfer("false", "z", 1, b"no seal of z")
    lying = data_receipt(EndReceipt(0, made_up), EndReceipt(1, transfer("a", 1, GRADIENT, "0")))
    assert contradictions([HONEST, lying], signer).keys() == {"d0"}
    unit = msgspec.structs.replace(HONEST.units[0], activation_in=made_up)
    after = msgspec.structs.replace(HONEST, stage=2, peer="x", units=(unit,), sums=(), reduced=())
    assert contradictions([HONEST, after], signer).keys() == {"x"}
    seal = SimulatedSigner("z").sign(seal_text("run", "base", 1, ACTIVATION, "0", "false"))
    sealed = data_receipt(EndReceipt(0, Transfer("false", "z", 1, seal)))
    assert contradictions([HONEST, sealed], signer) == {}
    assert unlinked([HONEST, sealed]) == "microbatch 0 between stages 1 and 0"


def test_a_new_leader_takes_seals_of_a_peer_that_was_removed_before_it_led() -> None:
    """The peer sent an activation, crashed and was removed; then the lead changed. The owner's PREPARED was
    refused for ever, and the run stalled."""
    cases, _ = leader()
    step = of_step(cases)
    cases.ctx.run.membership.apply(Members(2, (Member("d1", 0, 1, "c", 4),), {"d1": 1}))
    cases.ctx.run.membership.open(1, 1)
    cases.ctx.run.membership.apply(Members(3, removed={"d1": "crashed"}))
    unit = msgspec.structs.replace(HONEST.units[0], activation_in=transfer("d1", 0, ACTIVATION, "0"))
    receipt = msgspec.structs.replace(HONEST, units=(unit,))
    current = Round(1, "base", 0.0)
    assert step.refused("a", prepared(receipt), ATTEMPT, current) is None


def test_liars_of_adjacent_stages_do_not_make_the_leader_compare_for_ever() -> None:
    """At each of eight stages a liar lists the most results that a receipt takes, all of one false input."""
    checks, stages = 0, 8

    class Counted(SimulatedSigner):
        def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
            nonlocal checks
            checks += 1
            return super().verify(peer, data, signature)

    def sealed(sender: str, stage: int, kind: str, payload_hash: str) -> Transfer:
        text = seal_text("run", "base", stage, kind, "0", payload_hash)
        return Transfer(payload_hash, sender, stage, SimulatedSigner(sender).sign(text))

    def receipt(stage: int, peer: str, *units: UnitReceipt, others: tuple[UnitReceipt, ...] = ()) -> Receipt:
        return replace(HONEST, stage=stage, peer=peer, units=units, sums=(), reduced=(), others=others)

    receipts, right, false = [], sealed("d0", 0, ACTIVATION, "e"), sealed("d0", 0, ACTIVATION, "e")
    for stage in range(1, stages + 1):
        gradient = sealed(f"o{stage + 1}", stage + 1, GRADIENT, "g")
        listed = (UnitReceipt(0, false, replace(NOTHING, hash=str(k)), "F", "") for k in range(STATED_MAX))
        receipts.append(receipt(stage, f"z{stage}", others=tuple(listed)))
        came = right if stage < stages else sealed(f"z{stage - 1}", stage - 1, ACTIVATION, "F")
        receipts.append(receipt(stage, f"o{stage}", UnitReceipt(0, came, gradient, "h", "g")))
        right = sealed(f"o{stage}", stage, ACTIVATION, "h")
        false = sealed(f"z{stage}", stage, ACTIVATION, "F")
    traced(receipts, Counted("d0"))
    assert 0 < checks <= 2 * stages


# --- verdicts -----------------------------------------------------------------------------------------


def committed() -> Commit:
    """Commit of the step, whose draws are all three contributions."""
    hashes = ("ra", "rb", "rc")
    stage = StageCommit("", "digest", {}, RELAYS, ("c",) * 3, (0, 1, 2), hashes)
    none = StageCommit("", "digest", {}, ("d0",), ("c",), (0,))
    return Commit("run", 1, 1, 1, "", "", "step", 8, (), (none, stage), 1.0, 1.0, 0.1, 0.1, 0.05, 1)


def verdicts(*said: str) -> tuple[AuditCases, Removals, str, tuple[str, ...]]:
    """Leader that the auditors of the first contribution told these verdicts, subject and auditors."""
    cases, removals = leader()
    cases.committed(committed(), "hash", None)
    case = drawn(committed(), "hash", 1.0)[0]
    for auditor, verdict in zip(case.auditors, said, strict=False):
        cases.on_audited(auditor, Audited(1, "hash", 1, case.subject, verdict))
    return cases, removals, case.subject, case.auditors


def revoked(cases: AuditCases) -> list[str]:
    assert isinstance(cases.convictions, Told)
    found = [*cases.convictions.asked]
    cases.convictions.asked.clear()
    return found


@pytest.mark.parametrize("said", [("same", "different"), ("same", "withheld"), ("withheld", "different")])
def test_one_word_of_the_second_auditor_convicts_nobody(said: tuple[str, str]) -> None:
    """The second auditor reports although the first one found nothing, and was not asked."""
    cases, removals, _, _ = verdicts(*said)
    assert revoked(cases) == [] and removals.removed == {}
    assert bool(cases.convictions.returns) == (said[0] != "same")


def test_what_two_auditors_could_not_fetch_is_no_proof() -> None:
    """A member that does not answer loses its seat; one that started again or moved has nothing to show."""
    cases, removals, subject, _ = verdicts("withheld", "withheld")
    assert revoked(cases) == [] and list(removals.removed) == [subject] and cases.convictions.returns
    cases, removals, subject, auditors = verdicts("withheld")
    again = Member(subject, 1, 2, "c", 4)
    cases.ctx.run.membership.apply(Members(2, removed={subject: "crashed"}))
    cases.ctx.run.membership.apply(Members(3, (again,), {subject: 2}))
    cases.on_audited(auditors[1], Audited(1, "hash", 1, subject, "withheld"))
    assert revoked(cases) == [] and removals.removed == {} and not cases.convictions.returns


@pytest.mark.parametrize("second", ["unable", "withheld"])
def test_a_difference_that_the_second_auditor_cannot_check_is_not_kept(second: str) -> None:
    cases, _, _, _ = verdicts("different", second)
    assert cases.convictions.returns and cases.convictions.returns_before == 1 and revoked(cases) == []


def test_a_difference_is_not_forgotten_when_the_second_auditor_never_answers() -> None:
    cases, _, _, _ = verdicts("different")
    assert not cases.convictions.returns
    cases.committed(msgspec.structs.replace(committed(), t=1 + tasks.AUDIT_STEPS), "later", None)
    assert cases.convictions.returns and cases.convictions.returns_before == 1


def expired(cases: AuditCases) -> list[object]:
    """Subjects of the audits that were noted as expired."""
    notes = [effect for effect in cases.ctx.outbox.effects if getattr(effect, "kind", "") == "audit"]
    found = [cast(Any, note).fields for note in notes]
    return [fields["subject"] for fields in found if fields["verdict"] == "expired"]


def test_an_audit_without_a_verdict_is_told() -> None:
    """It was dropped silently: nobody knew that work had been drawn and not been looked at."""
    cases, _, subject, _ = verdicts("same")
    cases.committed(msgspec.structs.replace(committed(), t=1 + tasks.AUDIT_STEPS), "later", None)
    assert sorted(map(str, expired(cases))) == sorted({*RELAYS} - {subject})
    cases, _, subject, _ = verdicts("same")
    cases.rolled_back(1)
    assert len(expired(cases)) == 2
    cases, _, subject, _ = verdicts("same")
    cases.rolled_back(0)  # the step is void, and its audits with it
    assert expired(cases) == []


def test_the_end_of_a_run_does_not_forget_a_difference() -> None:
    """Nobody checked it a second time before the run ended: the run ended with the false step."""
    cases, _, _, _ = verdicts("different")
    assert cases.ended() and cases.convictions.returns_before == 1
    assert not cases.ended()
    cases, _, _, _ = verdicts("same")
    assert not cases.ended() and len(expired(cases)) == 2


def test_a_ticket_is_revoked_for_two_peers_not_for_two_steps_of_one() -> None:
    cases, _ = leader()
    cases.convictions.convict("a", "it lied", 1)
    cases.convictions.convict("a", "it lied", 2)
    assert revoked(cases) == ["a"]
    cases.convictions.convict("b", "it lied", 3)
    assert revoked(cases) == ["b", "t"]


def test_states_after_a_false_step_are_doubtful_until_the_return() -> None:
    """Between a conviction and its return a newer snapshot was complete: the older one was dropped, and the
    false step between them stayed."""
    cases, _ = leader()
    cases.convictions.convict("a", "it lied", 2)
    cases.convictions.convict("a", "it lied", 3)
    assert cases.doubtful_from() == 2
    cases.rolled_back(1)
    assert cases.doubtful_from() == math.inf


def test_an_auditor_puts_no_bytes_of_its_own_in_the_event_log() -> None:
    cases, _ = leader()
    cases.committed(committed(), "hash", None)
    case = drawn(committed(), "hash", 1.0)[0]
    cases.on_audited(case.auditors[0], Audited(1, "hash", 1, case.subject, "same", receipt=b"x" * 500_000))
    [note] = [effect for effect in cases.ctx.outbox.effects if getattr(effect, "kind", "") == "audit"]
    assert cast(Any, note).fields["receipt"] == ""


def test_a_conviction_goes_back_at_once() -> None:
    """Earlier disputes have made the back-off an hour; the run committed nothing until it was over."""
    ctx = context("d0", 0)
    catalog = SnapshotCatalog(ctx)
    catalog.points[0] = RestorePoint(0, ("", ""), 0, initial=True)
    disputes = Disputes(ctx, LogTip(ctx), catalog)
    assert disputes.go_back("a dispute", "", 1) is not None and disputes.go_back("again", "", 1) is None
    assert disputes.go_back("a conviction", "", 1, settled=True) is not None


# --- auditors -------------------------------------------------------------------------------------------


class AuditorUnderTest:
    """Auditor of the first contribution, whose receipt it has got from the leader. apart: True if it has no
    links any more."""

    def __init__(self, apart: bool = False) -> None:
        record = committed()
        [subject] = drawn(record, "hash", 1.0)[:1]
        data = prepared(receipt_of(subject.subject)).receipt
        self.ctx = context(subject.auditors[0], 1)
        self.auditor, self.subject = Auditor(self.ctx, KeptWork(self.ctx)), subject.subject
        hashes = [""] * 3
        hashes[subject.position] = receipt_hash(data)
        stage = msgspec.structs.replace(record.stages[1], receipts=tuple(hashes))
        record = msgspec.structs.replace(record, stages=(record.stages[0], stage))
        assert self.auditor.committed(record.t, drawn(record, "hash", 1.0))
        self.auditor.tick()
        if apart:
            self.ctx.links.up.clear()
        self.answer(RECEIPT, None, data)

    def sent(self, kind: type[msg.AnyMessage]) -> list[Any]:
        return [e for e in self.ctx.outbox.effects if isinstance(e, Send) and isinstance(e.message, kind)]

    def answer(self, item: msg.WorkItem, payload: object, receipt: bytes = b"") -> None:
        asked = self.sent(FetchWork)[-1]
        assert asked.message.item == item
        self.auditor.on_work(asked.peer, Work(1, 1, self.subject, item, receipt=receipt), payload)

    def inputs(self, payload: object) -> None:
        for _ in range(2):
            self.answer(self.sent(FetchWork)[-1].message.item, payload)

    def compute(self, result: Result) -> tasks.Task:
        found = self.ctx.tasks.next()
        assert found is not None
        then = self.ctx.tasks.finish(found[0])
        assert then is not None
        then(result)
        return found[0]


def test_false_inputs_that_overflow_are_no_difference() -> None:
    """A liar that is asked for inputs gives numbers so large that honest work with them overflows: an honest
    subject was convicted by two honest auditors, for inputs that were never its own."""
    under_test = AuditorUnderTest()
    under_test.inputs("huge")
    under_test.compute(Result(overflow="y"))
    assert isinstance(under_test.compute(Result(hashes=("x", "x"))), tasks.HashInputs)
    assert not under_test.sent(Audited)
    assert under_test.sent(FetchWork)[-1].peer == under_test.subject  # those who sent them gave them falsely
    under_test.inputs("right")
    under_test.compute(Result(overflow="y"))
    under_test.compute(Result(hashes=("h", "h")))
    assert under_test.sent(Audited)[-1].message.verdict == "different"


def test_a_worker_that_lost_the_audit_is_unable_to_tell() -> None:
    """Its state was replaced between two tasks of the audit: this was an IndexError in the auditor."""
    under_test = AuditorUnderTest()
    under_test.inputs("right")
    under_test.compute(Result(hashes=("h",) * 4))
    assert isinstance(under_test.compute(Result(error="no unit of step 1 was audited")), tasks.AuditSum)
    assert under_test.sent(Audited)[-1].message.verdict == "unable"


def test_a_source_out_of_reach_withholds_nothing() -> None:
    """In a large swarm an auditor has no link with most peers: it dials them first."""
    under_test = AuditorUnderTest(apart=True)
    assert not under_test.sent(Audited)
    under_test.ctx.links.up = dict.fromkeys(("d0", under_test.subject), AdaptiveTimeout(0.0, 1.0))
    under_test.ctx.clock.now += 1.0
    under_test.auditor.tick()
    assert under_test.sent(FetchWork)[-1].peer == "d0"


def test_a_dialled_source_is_asked_as_soon_as_it_is_linked() -> None:
    """The auditor looked once a second, and with steps of half a second the audit was over by then: a liar
    that two of three replicas had found kept its seat. A source that is suspected is not asked yet."""
    under_test = AuditorUnderTest(apart=True)
    auditor, clock, links = under_test.auditor, under_test.ctx.clock, under_test.ctx.links
    [receipt] = under_test.sent(FetchWork)
    assert auditor.deadline() == clock.now + WAIT_S
    clock.advance(0.02)
    links.up["d0"] = AdaptiveTimeout(0.0, 1.0)
    links.suspects.add("d0")
    assert auditor.deadline() > clock.now
    links.suspects.clear()
    assert auditor.deadline() <= clock.now
    auditor.tick()
    assert [asked.peer for asked in under_test.sent(FetchWork)] == [receipt.peer, "d0"]
    assert auditor.deadline() == clock.now + WAIT_S


def test_a_source_that_was_waited_for_in_vain_is_asked_last_until_it_answers() -> None:
    """Two that were are asked in the usual order: who sent the piece to the audited replica comes first."""
    under_test = AuditorUnderTest()
    auditor, clock, subject = under_test.auditor, under_test.ctx.clock, under_test.subject
    sender, item = under_test.sent(FetchWork)[-1].peer, under_test.sent(FetchWork)[-1].message.item

    def order() -> list[str]:
        job = auditor._job
        assert job is not None
        job.silent.clear()
        auditor._fetch(job)
        return [*job.asked, *job.left]

    assert order() == [sender, subject]
    clock.now += WAIT_S
    auditor.tick()
    assert order() == [subject, sender]
    clock.now += WAIT_S
    auditor.tick()
    assert order() == [sender, subject]
    auditor.on_work(sender, Work(1, 1, subject, item, held=False), None)
    assert order() == [sender, subject]
    assert auditor._awaited == {subject}
    auditor.committed(1 + tasks.AUDIT_STEPS, [])  # the audit is over, and waited for the sender
    assert auditor._awaited == {sender, subject}


def test_false_pieces_of_a_liar_are_fetched_from_their_sender_though_that_was_silent_before() -> None:
    """The audited replica is asked first then. It gave other inputs, was asked once more, and its work
    counted as withheld, which convicts nobody."""
    under_test = AuditorUnderTest()
    sender, subject = under_test.sent(FetchWork)[-1].peer, under_test.subject
    job = under_test.auditor._job
    assert job is not None
    under_test.auditor._in_vain(sender)
    under_test.auditor._fetch(job)
    for source, hashes in ((subject, ("x", "x")), (sender, ("h", "h", "x", "x"))):
        assert under_test.sent(FetchWork)[-1].peer == source
        under_test.inputs("inputs")
        under_test.compute(Result(hashes=hashes))
    assert [each.message.verdict for each in under_test.sent(Audited)] == ["different"]


def test_work_is_withheld_once_no_source_is_left_that_did_not_give_false_pieces() -> None:
    under_test = AuditorUnderTest()
    sender, subject = under_test.sent(FetchWork)[-1].peer, under_test.subject
    for source in (sender, subject):
        assert not under_test.sent(Audited) and under_test.sent(FetchWork)[-1].peer == source
        under_test.inputs("inputs")
        under_test.compute(Result(hashes=("x", "x")))
    assert [each.message.verdict for each in under_test.sent(Audited)] == ["withheld"]


@pytest.mark.parametrize("breaks", [1, 2])
def test_work_that_was_lost_with_a_link_is_asked_for_once_more(breaks: int) -> None:
    """The auditor waited 30 s for it, called the work withheld, and the log went back. After a second break
    it goes on to the next source; that one was out of reach, so nothing was withheld."""
    under_test = AuditorUnderTest()
    links, clock = under_test.ctx.links.up, under_test.ctx.clock
    first = under_test.sent(FetchWork)[-1]
    for number in range(breaks):
        assert under_test.auditor.deadline() > clock.now
        lost = links.pop(first.peer)
        assert under_test.auditor.deadline() <= clock.now
        under_test.auditor.tick()
        links[first.peer] = lost
        clock.now += 1.0
        under_test.auditor.tick()
        asked = under_test.sent(FetchWork)[-1]
        assert asked is not first and (asked.peer == first.peer) == (number == 0)
        assert asked.message == first.message and not under_test.sent(Audited)
    for _ in range(3):
        clock.now += 31.0
        under_test.auditor.tick()
    assert under_test.sent(Audited)[-1].message.verdict == ("withheld" if breaks == 1 else "unable")


def test_two_seals_of_a_microbatch_convict_nobody() -> None:
    """A liar upstream sends another activation, takes the microbatch back, and sends the right one: both
    seals of the honest relay are valid, and its receipt contradicts one of them."""
    seal = SimulatedSigner("a").sign(seal_text("run", "base", 1, ACTIVATION, "0", "former"))
    unit = msgspec.structs.replace(HONEST.units[0], activation_in=Transfer("former", "a", 1, seal))
    after = msgspec.structs.replace(HONEST, stage=2, peer="x", units=(unit,), sums=(), reduced=())
    assert contradictions([HONEST, after], SimulatedSigner("d0")) == {}
    assert unlinked([HONEST, after]) == "microbatch 0 between stages 1 and 2"


def stage_two_got(hash_: str, sender: str) -> Receipt:
    """Receipt of a relay of stage 2 that got this activation of microbatch 0, which `a` owns at stage 1."""
    came = transfer(sender, 1, ACTIVATION, "0")
    seal = SimulatedSigner(sender).sign(seal_text("run", "base", 1, ACTIVATION, "0", hash_))
    unit = msgspec.structs.replace(HONEST.units[0], activation_in=replace(came, hash=hash_, seal=seal))
    return replace(HONEST, stage=2, peer="x", units=(unit,), sums=(), reduced=())


def receipt_of_none(*others: UnitReceipt) -> Receipt:
    """Receipt of z, which owns no unit of stage 1 and computed `others`."""
    return replace(HONEST, peer="z", units=(), sums=(), others=others)


def computed(came: Transfer, out: str) -> UnitReceipt:
    """Forward of microbatch 0, whose gradient did not come."""
    return UnitReceipt(0, came, NOTHING, out, "")


def test_a_false_activation_of_a_peer_that_owns_nothing_is_computed_again() -> None:
    """The owner of the microbatch says otherwise: the log went back each time, and the sender stayed."""
    receipts = [HONEST, stage_two_got("false", "z"), receipt_of_none(computed(UNIT.activation_in, "false"))]
    assert unlinked(receipts) and contradictions(receipts, SimulatedSigner("d0")) == {}
    found = traced(receipts, SimulatedSigner("d0"))
    assert {(each.peer, each.output) for each in found.disputed} == {("z", "false"), ("a", "h")}
    assert not found.liars and not found.unlisted


def test_a_peer_that_does_not_list_what_it_sealed_is_found() -> None:
    for receipts in ([], [receipt_of_none()]):
        found = traced([HONEST, stage_two_got("false", "z"), *receipts], SimulatedSigner("d0"))
        assert found.unlisted.keys() == {(1, "z")} and not found.disputed


def test_two_results_of_one_input_are_signed_by_a_liar_alone() -> None:
    twice = replace(HONEST, others=(computed(UNIT.activation_in, "false"),))
    assert traced([twice, stage_two_got("false", "a")], SimulatedSigner("d0")).liars.keys() == {"a"}


def test_a_peer_that_was_given_a_false_input_shows_who_sent_it() -> None:
    """z computed rightly from what u of the stage before sent it; u took the microbatch back."""

    def moved(receipt: Receipt) -> Receipt:  # to the next stage
        return replace(receipt, stage=receipt.stage + 1)

    seal = SimulatedSigner("u").sign(seal_text("run", "base", 1, ACTIVATION, "0", "forged"))
    given, out = Transfer("forged", "u", 1, seal), "right for that"
    own = replace(UNIT, activation_in=replace(UNIT.activation_in, stage=1))
    after_seal = SimulatedSigner("z").sign(seal_text("run", "base", 2, ACTIVATION, "0", out))
    after = replace(own, activation_in=Transfer(out, "z", 2, after_seal))
    receipts = [
        HONEST,
        moved(replace(HONEST, peer="b", units=(own,))),
        moved(receipt_of_none(computed(given, out))),
        moved(moved(replace(HONEST, peer="x", units=(after,)))),
    ]
    assert traced(receipts, SimulatedSigner("d0")).unlisted.keys() == {(1, "u")}
    forged = computed(Transfer("forged", "u", 1, b"no"), out)
    receipts[2] = moved(receipt_of_none(forged))
    assert traced(receipts, SimulatedSigner("d0")).liars.keys() == {"z"}


@pytest.mark.parametrize("linked", [False, True])
def test_a_peer_that_lacks_the_sums_gets_them_before_it_loses_its_seat(linked: bool) -> None:
    """A false activation that it was sent first, and a sum that another liar withheld from it alone, cost an
    honest standby its seat. linked: True if the leader reaches it."""
    cases, removals = leader()
    step = of_step(cases)
    ctx = cases.ctx
    ctx.run.membership.apply(Members(2, (Member("z", 1, 1, "c", 4),), {"z": 1}))
    if linked:
        ctx.links.up["z"] = AdaptiveTimeout(0.0, 1.0)
    current = Round(1, "base", 0.0)
    current.attempts[1] = ATTEMPT

    def waits() -> None:
        assert not step.consistent(current)
        ctx.clock.now += UNLISTED_S
        assert not step.consistent(current)

    current.receipts = {1: {"a": HONEST}, 2: {"x": stage_two_got("false", "z")}}
    waits()
    assert current.repeat == {1} and removals.removed == {} and not cases.convictions.returns
    current.repeat.clear()
    helper = {"helpers": ("d0",), "sums": (len(RELAYS),) * PARTS}
    current.attempts[1] = msgspec.structs.replace(ATTEMPT, attempt=AttemptId(1, 2), **helper)
    waits()
    assert list(removals.removed) == ["z"] and removals.banned == {"z"} & {"z" * linked}
    assert cases.convictions.returns


def test_only_owners_of_units_sum_parts() -> None:
    """A member that owns none has no receipt in the commit, so that its sums were never audited."""
    cases, _ = leader()
    step = of_step(cases)
    assert step.summing(1, 4, (0, 2, 2)) == (0, 2)
    owners = tuple(range(20))  # in a large stage they take turns
    turns = [step.summing(1, t, owners) for t in range(5)]
    assert all(len(set(turn)) == PARTS for turn in turns) and set(owners) == set(turns[0]) | set(turns[1])


# --- swarms ---------------------------------------------------------------------------------------------


def silence(world: World, liar: str, *kinds: type[msg.AnyMessage]) -> None:
    """Let a relay send no messages of these kinds from iteration 3 on."""

    def mouth(message: msg.AnyMessage) -> msg.AnyMessage | None:
        said = isinstance(message, kinds) and world.nodes[liar].peer.committed >= 2
        return None if said else message

    world.mouths[liar] = mouth


def revoked_in(world: World) -> list[str]:
    return [record.id for record in records_of(world) if isinstance(record, Revoke)]


def honest_are_right(world: World, liar: str) -> bool:
    return world.history().t == STEPS and wrong_states(world).keys() <= {liar}


def test_a_liar_that_hands_nothing_over_is_convicted() -> None:
    """It was asked first for each piece, 30 s each; by then the weights of its step were dropped."""
    world = audited_world(share=1.0)
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    silence(world, "r1.1", Work)
    world.run(until_s=900.0)
    assert worker.lies > 0 and revoked_in(world) == ["r1.1"] and honest_are_right(world, "r1.1")


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_relay_that_claims_nothing_does_not_stop_the_run(share: float) -> None:
    """With audits or without: it answers every inquiry after its microbatches with Have."""
    world = audited_world(share)
    silence(world, "r1.1", msg.Claim)
    world.run(until_s=90.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert revoked_in(world) == []


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("slow", [1, 2])
def test_a_return_goes_back_before_every_step_whose_audit_is_open(slow: int) -> None:
    """The audits of the first false step took longer than those of the next one. Its conviction went back to
    the state between the two, and the first false step stayed in the log.

    slow: auditors of the step whose reports are late."""
    # By its name two false steps are counted within the steps for which an audit may be late.
    world = audited_world(share=1.0, checkpoint_every=1, run="audited b")
    worker = give_lying_worker(world, "r1.1", tasks.Freeze)
    send, held = world.send, list[int]()

    def late(sender: Any, peer: str, message: Any, payload: Any) -> None:
        found = isinstance(message, Audited) and message.subject == "r1.1" and message.verdict == "different"
        if found and len(held) < slow and {message.t}.issuperset(held):
            held.append(message.t)  # the first false step that counts its work
            world.clock.after(20.0, lambda: send(sender, peer, message, payload))
        else:
            send(sender, peer, message, payload)

    world.send = late  # type: ignore[method-assign]
    world.run(until_s=900.0)
    assert len(held) == slow and worker.lies > 1
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == ["r1.1"]
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"r1.1"}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("liar", "kind", "silent"),
    [
        ("r1.1", tasks.Forward, False),
        ("r2.1", tasks.InputGradient, True),
        pytest.param("r1.1", tasks.Forward, True, marks=pytest.mark.soak),
        pytest.param("r2.1", tasks.InputGradient, False, marks=pytest.mark.soak),
    ],
)
def test_a_relay_that_sends_on_what_it_does_not_claim_is_convicted(
    liar: str, kind: type[tasks.Task], silent: bool
) -> None:
    """Relays sent false outputs on and claimed no unit, so nothing of them was audited: the log went back
    each time. silent: True if it reports no PREPARED either, so that its receipt is lacking: it loses its
    seat."""
    world = audited_world(share=0.01, checkpoint_every=1)
    worker = give_lying_worker(world, liar, kind)
    world.mouths[liar] = lambda message: (
        None if worker.lies and isinstance(message, (msg.Claim, msg.Prepared)[: 1 + silent]) else message
    )
    world.run(until_s=900.0)
    assert worker.lies > 0 and honest_are_right(world, liar)
    assert liar not in world.history().membership.members
    assert revoked_in(world) == ([] if silent else [liar])
