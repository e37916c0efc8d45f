"""Audits whose leader dies: the next one follows them, and what was proven is not forgotten."""

from __future__ import annotations

import pytest

from anabranch.protocol.audit.draw import drawn
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import Commit, Members, Revoke, Rollback
from anabranch.protocol.messages import Audited, decode
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import IntegerWorker
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from swarm.byzantine.test_audit import LyingWorker, give_lying_worker, records_of
from swarm.byzantine.test_auditors import joins
from swarm.byzantine.test_review_audits import committed, leader, revoked

LIAR, STEPS, FALSE = "r1.1", 24, range(8, 12)


class LiesAwhile(LyingWorker):
    """Worker whose contributions to the iterations FALSE are false."""

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        lies = isinstance(task, tasks.Freeze) and task.t in FALSE
        return super().run(task, inputs) if lies else IntegerWorker.run(self, task, inputs)


def counts(world: World) -> bool:
    """True if a commit counts a false contribution of the liar."""
    commits = [record for record in records_of(world) if isinstance(record, Commit) and record.t in FALSE]
    parts = [commit.stages[1] for commit in commits]
    return any(dict(zip(part.members, part.receipts, strict=False)).get(LIAR) for part in parts)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("phase", "trusted"), every_value(["committed", "reported", "revoked"], [False, True])
)
def test_a_false_step_is_taken_back_though_the_leader_dies(phase: str, trusted: bool) -> None:
    """When the step is committed, when the first auditor found it false, and between the conviction and the
    return of the log."""
    settings = Settings("audited", 1, 2, 6, STEPS, min_replicas=3, audit_share=1.0, voters=3)
    machines = [Machine("d0", 0), Machine("d1", 0)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in (1, 2) for n in range(3)]
    world = counting_world(settings, machines, 1)
    if trusted:
        joins(world, "a1", 1)
    worker, died = give_lying_worker(world, LIAR, tasks.Freeze, also_audits=False), list[str]()
    worker.__class__ = LiesAwhile

    def watch(node: Node, event: ev.Event) -> None:
        if node.peer.lead is None or died:
            return
        message = event.message if isinstance(event, ev.Received) else None
        reported = isinstance(message, Audited) and message.verdict == "different"
        last = records_of(world)[-1:]
        met = {
            "committed": counts(world),
            "reported": reported,
            "revoked": any(isinstance(record, Revoke) for record in last),
        }
        if met[phase]:
            died.append(node.id)
            world.clock.after(0.0, lambda: world.crash(node.id))

    world.watchers.append(watch)
    world.run(until_s=900.0)
    records = records_of(world)
    assert died and worker.lies and world.history().t == STEPS and wrong_states(world).keys() <= {LIAR}
    assert [record.id for record in records if isinstance(record, Revoke)] == [LIAR]
    assert any(isinstance(record, Rollback) for record in records)


def test_a_report_that_was_lost_with_a_link_is_repeated() -> None:
    """Both auditors' reports are sent over links that break."""
    settings = Settings("audited", 1, 1, 6, STEPS, min_replicas=3, audit_share=1.0)
    world = counting_world(settings, [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(3))], 1)
    worker, lost = give_lying_worker(world, LIAR, tasks.Freeze, also_audits=False), list[str]()
    worker.__class__ = LiesAwhile
    carry = world.carry

    def break_links(sender: Node, peer: str, data: bytes, payload: Payload | None) -> None:
        said = decode(data)
        different = isinstance(said, Audited) and said.verdict == "different"
        if different and sender.id not in (LIAR, *lost):
            lost.append(sender.id)
            world.cut(sender.id, peer)
        else:
            carry(sender, peer, data, payload)

    world.carry = break_links  # type: ignore[method-assign]
    world.run(until_s=900.0)
    assert len(lost) == 2 and worker.lies and wrong_states(world).keys() <= {LIAR}
    assert [record.id for record in records_of(world) if isinstance(record, Revoke)] == [LIAR]


def test_a_new_leader_blames_nobody_for_what_was_dropped_before_it_led() -> None:
    """The audited peer left its stage, and came back."""
    for returned in (False, True):
        cases, removals = leader()
        membership, each = cases.ctx.run.membership, drawn(committed(), "hash", 1.0)[0]
        if returned:
            member = membership.members[each.subject]
            membership.apply(Members(2, removed={each.subject: "moved"}, joined=(member,)))
            membership.apply(Members(3, active_from={each.subject: 3}))
        cases.inherit([drawn(committed(), "hash", 1.0)])
        for auditor in reversed(each.auditors):
            cases.on_audited(auditor, Audited(1, "hash", 1, each.subject, "withheld"))
        assert list(removals.removed) == ([] if returned else [each.subject])
        assert revoked(cases) == [] and bool(cases.convictions.returns) == (not returned)


def test_a_second_word_alone_ends_no_inherited_audit() -> None:
    """It may be a liar's, and be repeated sooner than that of the first auditor."""
    cases, removals = leader()
    [each, *_] = drawn(committed(), "hash", 1.0)
    cases.inherit([drawn(committed(), "hash", 1.0)])
    said = zip(reversed(each.auditors), ("same", "different"), strict=True)
    for auditor, verdict in said:
        cases.on_audited(auditor, Audited(1, "hash", 1, each.subject, verdict))
    assert list(removals.removed) == [each.auditors[0]] and revoked(cases) == []
