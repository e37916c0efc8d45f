"""Reports of peers while the founder is away: they reach its event log when it is back."""

from __future__ import annotations

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Report
from anabranch.protocol.observers.report_buffer import LINES_MAX, ReportBuffer
from anabranch.sim.kernel.simulated_peer import Node
from support.swarms.leaving_voters import swarm, until
from support.swarms.voters import come_back


def reported_to(node: Node) -> list[tuple[str, tuple[bytes, ...]]]:
    """Filled in as the node's driver is given lines for the event log."""
    found: list[tuple[str, tuple[bytes, ...]]] = []
    carry_out = node._carry_out

    def look(effect: ev.Effect) -> None:
        if isinstance(effect, ev.Reported):
            found.append((effect.peer, effect.events))
        carry_out(effect)

    node._carry_out = look  # type: ignore[method-assign]
    return found


def test_reports_to_another_leader_are_handed_to_the_founder() -> None:
    world = swarm(5, replicas=2)
    world.crash("d0")
    until(world, world.clock.now + 5.0)
    world.nodes["r2.0"].handle(ev.Observed((b"one", b"two")))
    leader = world.leading()
    leader.handle(ev.Observed((b"three",)))
    until(world, world.clock.now + 1.0)
    come_back(world, "d0", 0.0, leader.id)
    until(world, world.clock.now + 0.01)
    found = reported_to(world.nodes["d0"])
    forged = Report((b"forged",), "r1.0")
    for other in ("r1.0", "r2.0", "r2.1"):
        if not world.nodes[other].peer.ctx.log.keeps_log(other):
            world.clock.after(6.0, lambda other=other: world.nodes["d0"].handle(ev.Received(other, forged)))  # type: ignore[misc]
    until(world, world.clock.now + 8.0)
    assert sorted(found) == sorted([("r2.0", (b"one", b"two")), (leader.id, (b"three",))])


def test_many_short_reports_are_handed_over_at_once() -> None:
    """A run may end a moment after the founder is back."""
    world = swarm(5, replicas=2)
    world.crash("d0")
    until(world, world.clock.now + 5.0)
    leader = world.leading()
    said = [(leader.id, (b"line %d" % n,)) for n in range(500)]
    for _, lines in said:
        leader.handle(ev.Observed(lines))
    come_back(world, "d0", 0.0, leader.id)
    until(world, world.clock.now + 0.01)
    found = reported_to(world.nodes["d0"])
    until(world, world.clock.now + 8.0)
    assert found and found == said


@pytest.mark.costly
def test_the_founder_takes_all_that_is_handed_over() -> None:
    """It takes so many lines of one peer and no more: who hands over what others said is not hung up on."""
    world = swarm(5, replicas=2)
    world.crash("d0")
    until(world, world.clock.now + 5.0)
    leader, line = world.leading(), (b"x",)
    for _ in range(LINES_MAX):
        leader.peer.report_buffer.keep("r2.0", line)
    come_back(world, "d0", 0.0, leader.id)
    until(world, world.clock.now + 0.01)
    founder = world.nodes["d0"]
    others = [name for name in world.nodes if name.startswith("r") and name != leader.id][:3]

    def talk(name: str) -> None:
        for _ in range(3000):
            leader.handle(ev.Received(name, Report(line)))

    for name in others:
        world.clock.after(0.55, lambda name=name: talk(name))  # type: ignore[misc]
    until(world, world.clock.now + 40.0)
    refused = founder.peer.ctx.rate_limits.counts.get(leader.id, {})
    assert len(others) == 3 and not refused.get("Report")


def test_reports_without_lines_are_not_kept() -> None:
    report_buffer = ReportBuffer(make_context("d", 1, 0, Settings("run", 1, 1, 4, 100), "d"))
    report_buffer.keep("r", ())
    assert not report_buffer._kept


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    ctx = make_context("d", 1, 0, Settings("run", 1, 1, 4, 100), "d")
    report_buffer = ReportBuffer(ctx)
    for n in range(LINES_MAX + 10):
        report_buffer.keep("r", (b"%d" % n,))
    assert len(report_buffer._kept) == LINES_MAX and report_buffer._kept[0] == ("r", (b"10",))
    report_buffer.keep("r", (b"x" * (5 << 20),))
    assert not report_buffer._kept
