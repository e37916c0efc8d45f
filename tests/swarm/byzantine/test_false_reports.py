"""Event-log lines of strangers and of members that flood: nothing of the former, a bounded part of the latter
is written (H4)."""

from __future__ import annotations

from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Report
from anabranch.protocol.observers.report_budget import PEER
from anabranch.sim.kernel.simulated_peer import Node
from support.swarms.leaving_voters import swarm, until

LINE = b"x" * 8192


def written(node: Node) -> dict[str, int]:
    """Bytes given to the event log so far, by peer; filled in later."""
    found: dict[str, int] = {}
    carry_out = node._carry_out

    def look(effect: ev.Effect) -> None:
        if isinstance(effect, ev.Reported):
            found[effect.peer] = found.get(effect.peer, 0) + sum(map(len, effect.events))
        carry_out(effect)

    node._carry_out = look  # type: ignore[method-assign]
    return found


def test_only_members_report_and_within_their_budget() -> None:
    world = swarm(5, replicas=2)
    founder = world.nodes["d0"]
    found = written(founder)
    for _ in range(1000):
        founder.handle(ev.Received("stranger", Report((LINE,))))
        founder.handle(ev.Received("r1.0", Report((LINE,))))
        founder.handle(ev.Received("r1.0", Report((LINE,), "r2.0")))
    founder.handle(ev.Received("r2.1", Report((b"honest",))))
    assert set(found) == {"r1.0", "r2.1"}
    assert 0.9 * PEER.burst < found["r1.0"] <= PEER.burst + 60 * PEER.per_s
    reports = founder.peer.ctx.rate_limits.counts
    assert reports["r1.0"]["Report"] and "r2.1" not in reports
    before = world.history().t
    until(world, world.clock.now + 20.0)
    assert world.history().t > before, "the run goes on"
