"""Auditors, which came with the owner's ticket for it: they only compute others' work again, and are
believed."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Commit, Member, Members, Revoke, Rollback
from anabranch.protocol.messages import AnyMessage, Audited, FetchWork, Work
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, member_of, wrong_states
from swarm.byzantine.test_audit import (
    STEPS,
    audited_world,
    audits_of,
    give_lying_worker,
    others_are_right,
    records_of,
)

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
