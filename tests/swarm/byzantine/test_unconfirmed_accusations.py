"""A relay that finds honest work different, while an accomplice beside its stage is silent to the second
auditor: a second audit has to end before the weights for it are gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol.audit.auditor import TURN_S, WAIT_S, Auditor
from anabranch.protocol.audit.draw import Drawn, drawn
from anabranch.protocol.audit.kept_work import RECEIPT, KeptWork
from anabranch.protocol.audit.receipts import opened, receipt_hash
from anabranch.protocol.coordinator.audit_cases import AuditCases
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.log.records import Revoke, Rollback
from anabranch.protocol.messages import AnyMessage, Audit, Audited, FetchWork, Work, decode
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import wrong_states
from support.grids import first_of
from swarm.byzantine.test_audit import audited_world, give_lying_worker, records_of
from swarm.byzantine.test_review_audits import HONEST, Removals, committed, context, leader, prepared

ACCUSER, SILENT, STEPS = "r1.1", "r2.0", 40

#: Function from a payload that the accuser is asked for to what it hands over (None: nothing).
Answer = Callable[[Payload], Payload | None]


def no_answer(payload: Payload) -> Payload | None:
    return None


def garbage(payload: Payload) -> Payload | None:
    return tuple(word + 1 for word in payload) if isinstance(payload, tuple) else 1


def accused_world(answer: Answer = no_answer, delay_s: float = 0.0, mute: bool = False) -> World:
    """Steps of half a second. The accuser lies where it is drawn first, the accomplice sent one of the
    gradients, and the second auditor has not waited for that one in vain yet. delay_s: time that the accuser
    takes to report. mute: True if the accomplice answers no other auditor, and the accuser lies although one
    waited for it. The run's name draws an audit in which that can happen."""
    world = audited_world(share=1.0, steps=STEPS, checkpoint_every=4, run="audited a")
    senders, false = dict[tuple[int, str], set[str]](), set[tuple[int, str]]()
    carry = world.carry

    def say(message: AnyMessage) -> AnyMessage:
        if not isinstance(message, Audited) or message.subject == ACCUSER:
            return message
        recent = world.nodes[ACCUSER].peer.iterations.auditor.recent.get(message.t, ())
        of = (message.t, message.subject)
        for each in recent:
            second = [peer for peer in each.jury if peer != ACCUSER]
            first = each.subject == message.subject and each.jury[0] == ACCUSER
            waited = second and world.nodes[second[0]].peer.iterations.auditor._awaited
            if first and second and SILENT in senders.get(of, ()) and (mute or SILENT not in waited):
                false.add(of)
                return msgspec.structs.replace(message, verdict="different", what="part 0 of the sum")
        return message

    def on_its_way(sender: Node, peer: str, data: bytes, payload: Payload | None) -> None:
        said = decode(data)
        if isinstance(said, Work) and peer == ACCUSER and said.receipt:
            receipt = opened(said.receipt, world.nodes[ACCUSER].peer.ctx.signer)
            assert receipt is not None
            senders[said.t, said.subject] = {unit.gradient_in.sender for unit in receipt.units}
        about = isinstance(said, Work) and peer != ACCUSER and (mute or (said.t, said.subject) in false)
        if about and sender.id == SILENT:
            return
        if isinstance(said, Work) and (said.t, said.subject) in false and sender.id == ACCUSER:
            payload = None if payload is None else answer(payload)
            if payload is None:
                return
        if isinstance(said, Audited) and sender.id == ACCUSER and said.verdict == "different" and delay_s:
            world.clock.after(delay_s, lambda: carry(sender, peer, data, payload))
        else:
            carry(sender, peer, data, payload)

    world.mouths[ACCUSER] = say
    world.carry = on_its_way  # type: ignore[method-assign]
    return world


#: Answers of the accuser, its delay (s), and True if the accomplice answers no auditor.
DEEDS = [(no_answer, 1.75, False), (garbage, 0.0, False), (no_answer, 0.0, True)]
DEEDS += [(no_answer, 0.0, False), (no_answer, 1.0, True), (garbage, 1.0, True)]


@pytest.mark.costly
@pytest.mark.parametrize(("answer", "delay_s", "mute"), first_of(DEEDS, 3))
def test_who_accuses_falsely_loses_its_seat_and_costs_little_time(
    answer: Answer, delay_s: float, mute: bool
) -> None:
    """The second auditor waited 30 s for the accomplice. By then the weights were gone, and the log went back
    after 0, 30, 60, ... seconds, once for each honest auditor: 40 steps took 110 s. With a delay of 1.75 s
    the accusation comes in the last moment: the next step waits for the second auditor."""
    world = accused_world(answer, delay_s, mute)
    world.run(until_s=900.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    assert not [record for record in records_of(world) if isinstance(record, Revoke | Rollback)]
    assert world.history().removals == 1 and ACCUSER not in world.history().membership.members
    assert world.clock.now < 60.0


def test_a_liar_is_convicted_though_it_and_the_next_stage_are_silent_to_the_second_auditor() -> None:
    """The accuser hands over all that it has computed with."""
    world = audited_world(share=1.0, checkpoint_every=1, steps=24)
    liar, worker = "r1.1", give_lying_worker(world, "r1.1", tasks.Freeze)
    carry, accusers = world.carry, dict[int, str]()

    def on_its_way(sender: Node, peer: str, data: bytes, payload: Payload | None) -> None:
        said = decode(data)
        if isinstance(said, Audited) and said.verdict == "different":
            accusers.setdefault(said.t, sender.id)
        about = isinstance(said, Work) and said.subject == liar and sender.id in (liar, SILENT)
        if not (about and isinstance(said, Work) and accusers.get(said.t, peer) != peer):
            carry(sender, peer, data, payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    world.run(until_s=900.0)
    assert 0 < worker.lies <= 6 and world.history().t == 24 and wrong_states(world).keys() == {liar}
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == [liar]


# --- the leader -------------------------------------------------------------------------------------------


def accused() -> tuple[AuditCases, Removals, Drawn]:
    """Leader after a step, the first audit of which found a difference."""
    cases, removals = leader()
    cases.committed(committed(), "hash", None)
    [each, *_] = drawn(committed(), "hash", 1.0)
    says(cases, each, each.auditors[0], "different")
    return cases, removals, each


def says(cases: AuditCases, each: Drawn, peer: str, verdict: str) -> None:
    assert cases.on_audited(peer, Audited(1, "hash", 1, each.subject, verdict)) is None


def test_a_second_auditor_that_is_at_work_learns_who_found_a_difference() -> None:
    cases, _ = leader()
    cases.committed(committed(), "hash", None)
    [each, *_] = drawn(committed(), "hash", 1.0)
    cases._late(cases._cases[1, each.subject])
    says(cases, each, each.auditors[0], "different")
    sent = [effect for effect in cases.ctx.outbox.effects if isinstance(effect, ev.Send)]
    orders = [(e.peer, e.message.sources) for e in sent if isinstance(e.message, Audit)]
    second = each.auditors[1]
    assert orders == [(second, (each.subject,)), (second, (each.auditors[0], each.subject))]


def test_an_order_that_may_be_lost_is_repeated_when_the_link_is_back() -> None:
    cases, _, each = accused()
    second = each.auditors[1]
    for report, orders in ((False, 1), (True, 0)):
        cases.ctx.outbox.effects.clear()
        if report:
            says(cases, each, second, "same")
        for peer in each.auditors:
            cases.repeat(peer)
        sent = [effect for effect in cases.ctx.outbox.effects if isinstance(effect, ev.Send)]
        assert [effect.peer for effect in sent if isinstance(effect.message, Audit)] == [second] * orders


# --- the auditor ------------------------------------------------------------------------------------------


def second_auditor() -> tuple[Auditor, list[Drawn], bytes]:
    """A relay that is drawn first for one contribution and second for another, these two, and the receipt of
    both, which has all inputs from the data node."""
    receipt = prepared(HONEST).receipt
    for base in map(str, range(100)):
        audits = drawn(committed(), base, 1.0)
        [second] = [each for each in audits if each.subject == "a"]
        me = second.auditors[1]
        if first := [each for each in audits if each.auditors[0] == me]:
            break
    both = [dataclasses.replace(each, receipt=receipt_hash(receipt)) for each in (first[0], second)]
    auditor = Auditor(ctx := context(me, 1), KeptWork(ctx))
    assert auditor.committed(1, both)
    return auditor, both, receipt


def asked(auditor: Auditor) -> list[tuple[str, str, str]]:
    """Peers that were asked since the last call, by subject and kind of piece."""
    effects = auditor._ctx.outbox.effects
    sent = [(effect.peer, effect.message) for effect in effects if isinstance(effect, ev.Send)]
    effects.clear()
    return [(peer, said.subject, said.item.kind) for peer, said in sent if isinstance(said, FetchWork)]


def test_who_checks_a_difference_asks_accuser_and_subject_at_once() -> None:
    """The sender of a piece comes after them: it may be the accomplice of either. The audit that is under way
    gives its turn up if its source is silent."""
    auditor, (first, second), receipt = second_auditor()
    auditor.tick()
    assert asked(auditor) == [("d0", first.subject, "receipt")]
    accuser = second.auditors[0]
    order = Audit(1, second.base, 1, "a", (accuser, "a"))
    assert auditor.on_audit(order) is None
    auditor._ctx.clock.advance(auditor.deadline())
    assert auditor._ctx.clock.now == TURN_S
    auditor.tick()
    auditor.tick()
    assert asked(auditor) == [(peer, "a", "receipt") for peer in ("d0", accuser, "a")]
    auditor.on_work("d0", Work(1, 1, "a", RECEIPT, receipt=receipt), None)
    assert asked(auditor) == [(accuser, "a", "activation"), ("a", "a", "activation")]
    assert auditor.on_audit(order) is None and asked(auditor) == []  # it is under way
    auditor._ctx.clock.advance(auditor.deadline())
    assert auditor._ctx.clock.now == TURN_S + WAIT_S
    auditor.tick()
    assert asked(auditor) == [("d0", "a", "activation")]
    auditor._ctx.clock.advance(auditor.deadline())
    auditor.tick()  # nobody answered
    assert [job.drawn for job in auditor._queue] == [first]
    auditor.tick()
    assert asked(auditor) == [("d0", first.subject, "receipt")]


def test_a_report_is_repeated_if_the_audit_is_ordered_again() -> None:
    auditor, (_, second), _ = second_auditor()
    order = Audit(1, second.base, 1, "a", ("a",))
    for _ in range(2):
        auditor._ctx.outbox.effects.clear()
        assert auditor.on_audit(order) is None
        job = next((job for job in auditor._queue if job.drawn == second), None)
        if job is not None:
            auditor._queue.remove(job)
            auditor._report(job, "same")
    sent = [effect.message for effect in auditor._ctx.outbox.effects if isinstance(effect, ev.Send)]
    assert [message.verdict for message in sent if isinstance(message, Audited)] == ["same"]
