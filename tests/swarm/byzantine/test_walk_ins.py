"""Walk-ins, which came with an open ticket: a minority without votes, audited in all their work at first."""

from __future__ import annotations

import pytest

from anabranch.protocol.audit.draw import PROBATION_STEPS, drawn
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Commit, Member, Members, Revoke, Rollback, StageCommit
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, member_of, wrong_states
from swarm.byzantine.test_audit import STEPS, audited_world, audits_of, give_lying_worker, records_of

DOOR = ev.VerifiedCredential("open", ev.NEVER_EXPIRES_S, "door")
#: Share of invited replicas' work that is audited: practically none.
TINY = 1e-9


def joins(world: World, name: str, stage: int, at: float = 0.5) -> None:
    world.tickets[name] = DOOR
    world.add(member_of(Machine(name, stage)), "d0", at=at)


def admitted(world: World) -> list[Member]:
    records = [record for record in records_of(world) if isinstance(record, Members)]
    return [member for record in records for member in record.joined if member.ticket == "door"]


def test_an_honest_walk_in_serves_without_a_vote_and_is_audited() -> None:
    world = audited_world(share=TINY, replicas=2)
    joins(world, "w1", 1)
    world.run(until_s=600.0)
    assert world.history().t == STEPS and wrong_states(world) == {}
    [member] = admitted(world)
    assert member.walk_in is True and member.disk == "" and member.stage == 1
    audits = audits_of(world)
    assert {audit["subject"] for audit in audits} == {"w1"} and len(audits) > 3
    assert {audit["verdict"] for audit in audits} == {"same"}
    assert not [record for record in records_of(world) if isinstance(record, Revoke | Rollback)]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kind", [tasks.Forward, tasks.InputGradient, tasks.Freeze, tasks.SumPart])
def test_a_walk_in_that_lies_is_convicted_though_audits_are_rare(kind: type[tasks.Task]) -> None:
    world = audited_world(share=TINY, replicas=2)
    joins(world, "w1", 1)
    worker = give_lying_worker(world, "w1", kind, also_audits=False)
    world.run(until_s=900.0)
    revoked = [record.id for record in records_of(world) if isinstance(record, Revoke)]
    assert worker.lies > 0 and revoked == ["w1"]
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"w1"}


def test_convicted_walk_ins_do_not_close_the_door() -> None:
    """Two liars would revoke a ticket that its holders answer for; anybody can have an open one."""
    world = audited_world(share=TINY, replicas=2)
    workers = []
    for name, stage in (("w1", 1), ("w2", 2)):
        joins(world, name, stage)
        workers.append(give_lying_worker(world, name, tasks.Freeze, also_audits=False))
    world.run(until_s=900.0)
    revoked = {record.id for record in records_of(world) if isinstance(record, Revoke)}
    assert all(worker.lies > 0 for worker in workers) and revoked == {"w1", "w2"}
    assert world.history().t == STEPS and wrong_states(world).keys() <= {"w1", "w2"}


def test_invited_replicas_outnumber_walk_ins_at_every_stage() -> None:
    world = audited_world(share=TINY, replicas=2)
    joins(world, "w1", 1)
    joins(world, "x1", 1, at=3.0)
    world.run(until_s=900.0)
    assert [member.id for member in admitted(world)] == ["w1"]
    assert "invited peers must outnumber" in str(world.nodes["x1"].stopped)
    assert world.history().t == STEPS and wrong_states(world) == {}


def test_a_walk_in_gets_the_corpus_nowhere() -> None:
    world = audited_world(share=TINY, replicas=2)
    joins(world, "w0", 0)
    world.run(until_s=900.0)
    assert not admitted(world) and "not as a data node" in str(world.nodes["w0"].stopped)


def test_a_run_without_audits_has_no_door() -> None:
    world = audited_world(share=0.0, replicas=2)
    joins(world, "w1", 1)
    world.run(until_s=900.0)
    assert not admitted(world) and "no audits" in str(world.nodes["w1"].stopped)


def commit(t: int, members: tuple[str, ...]) -> Commit:
    stage = StageCommit("", "", {}, members, ("",) * len(members), (0, 1, 2), ("hash",) * len(members))
    data = StageCommit("", "", {}, ("d",), ("",), (0,), ("",))
    rest = (0.0, 1.0, 1e-3, 1.0, 1.0, 0)
    return Commit("run", 1, 1, t, "", "", "step", 1, (), (data, stage), *rest)


def test_probation_ends_and_walk_ins_audit_last() -> None:
    members, since = ("a", "b", "w"), {"w": 10}
    for t in (10, 10 + PROBATION_STEPS - 1):
        [each] = drawn(commit(t, members), f"base {t}", 0.0, since)
        assert each.subject == "w" and set(each.auditors) == {"a", "b"}
    assert drawn(commit(10 + PROBATION_STEPS, members), "base", 0.0, since) == []
    for number in range(20):
        for each in drawn(commit(10, members), f"base {number}", 1.0, since):
            assert each.subject == "w" or each.auditors[-1] == "w"
