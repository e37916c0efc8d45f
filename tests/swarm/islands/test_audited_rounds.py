"""Audits of rounds in virtual time, with real tensors: an auditor finds the bits of honest slots, and who
sends a false contribution is out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.config import RunConfig
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Members, Revoke, Rollback
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.lying_worker import LyingWorker
from anabranch.sim.workers.torch_world import node_member
from anabranch.train.model.rounds import iterations
from swarm.byzantine.test_audit import audits_of, records_of
from swarm.byzantine.test_auditors import TICKET
from swarm.islands.test_rounds import check_replayed, island_run, strike, world_of


def audited(**changes: object) -> RunConfig:
    run = island_run(**changes)
    return replace(run, audit=replace(run.audit, share=1.0))


def with_auditor(run: RunConfig, relays: int, seed: int = 1) -> World:
    world = world_of(run, relays, seed)
    world.tickets["a1"] = TICKET
    world.add(node_member("a1", 1, 2), "d0", at=0.3)
    return world


@pytest.mark.costly(stay=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"first_moment": "agree", "outer_momentum": 0.0, "end": 0.2},
        {"first_moment": "estimate", "contributions": "int8", "results": "exact"},
        {"first_moment": "estimate", "results": "int4"},
    ],
    ids=["agree", "estimate", "int4"],
)
def test_honest_islands_pass_though_one_dies(changes: dict[str, object]) -> None:
    run = audited(**changes)
    world = with_auditor(run, relays=3)
    struck = strike(world, 4)
    world.run(until_s=2000)
    check_replayed(run, world)
    by_auditor = [audit for audit in audits_of(world) if audit["auditor"] == "a1"]
    assert struck and {audit["verdict"] for audit in by_auditor} <= {"same", "expired", "unable"}
    assert {audit["t"] for audit in by_auditor if audit["verdict"] == "same"} >= {3, 5, iterations(run)}
    records = records_of(world)
    assert not [record for record in records if isinstance(record, Revoke | Rollback)]
    assert {peer for r in records if isinstance(r, Members) for peer in r.removed} == set(struck)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("kind", [tasks.Forward, tasks.Freeze, tasks.SumPart])
def test_a_false_contribution_of_tensors_convicts(kind: type[tasks.Task]) -> None:
    """The replay of the log has the states of all that are left."""
    run, since = audited(), 4
    world, lies = with_auditor(run, relays=3), list[LyingWorker]()

    def begin() -> None:
        node = world.nodes["r1.1"]
        if node.computer is None:
            world.clock.after(0.05, begin)
            return
        lies.append(LyingWorker(node.computer, kind, lambda task: task.t == since))
        node.computer = lies[0]

    world.clock.after(0.1, begin)
    world.run(until_s=2000)
    assert lies[0].lies and [r.id for r in records_of(world) if isinstance(r, Revoke)] == ["r1.1"]
    assert [record.t for record in records_of(world) if isinstance(record, Rollback)]
    check_replayed(run, world)
