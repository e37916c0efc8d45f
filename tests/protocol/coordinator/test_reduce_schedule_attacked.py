"""Choice of reduce helpers under attack, and the leader's conclusions from a reduce that got stuck."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.coordinator.reduce_schedule import ReduceSchedule
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Attempt, AttemptId, Fence
from anabranch.protocol.reduce.partial_sums import PARTS, misdealt
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.protocol.telemetry.link_table import LinkMeasurements

SLOW_BPS, QUICK_BPS = 1e7, 1e9


def leader() -> tuple[PeerContext, LinkMeasurements]:
    """Leader of a swarm with a stage of two whose link is slow, and one peer of stage 2, x. All but b have a
    link with x: b and x are homes of one region that cannot dial each other."""
    settings = Settings("run", 1, 2, 4, 100, block_bytes=10**9, ends_bytes=10**9)
    ctx = make_context("d", 1, 0, settings, "d")
    homes = {"b": "", "x": ""}
    members = [("d", 0), ("a", 1), ("b", 1), ("x", 2)]
    at = {name: (homes.get(name, f"{name}:1"), "eu" if name in homes else name) for name, _ in members}
    joined = tuple(Member(n, s, 1, "", 4, name=n, region=at[n][1], address=at[n][0]) for n, s in members)
    ctx.run.membership.apply(Members(1, joined=joined))
    ctx.run.membership.apply(Members(2, active_from=dict.fromkeys(("d", "a", "b", "x"), 1)))
    Connections(ctx)
    for name, _ in members[1:]:
        ctx.links.up[name] = AdaptiveTimeout(0.0, 1.0)
    ways = LinkMeasurements()
    ways.told("a", {"b": (0.2, SLOW_BPS), "x": (0.02, QUICK_BPS), "d": (0.2, SLOW_BPS)})
    ways.told("b", {"a": (0.2, SLOW_BPS), "d": (0.2, QUICK_BPS)})
    ways.told("x", {"a": (0.02, QUICK_BPS), "d": (0.2, SLOW_BPS)})
    ways.told("d", {"a": (0.2, SLOW_BPS), "b": (0.2, SLOW_BPS), "x": (0.2, SLOW_BPS)})
    return ctx, ways


def test_who_has_no_link_with_a_member_is_not_asked_to_help() -> None:
    """No link was ever measured between b and x, because there is none."""
    ctx, ways = leader()
    assert "x" not in ReduceSchedule(ctx, ways).of(1, 2, ["a", "b"], frozenset("abdx"), (0, 1)).helpers


def test_who_has_a_link_with_every_member_is_asked() -> None:
    ctx, ways = leader()
    ways.told("b", {"a": (0.2, SLOW_BPS), "d": (0.2, QUICK_BPS), "x": (0.02, QUICK_BPS)})
    everybody = frozenset("abdx")
    assert ReduceSchedule(ctx, ways).of(1, 2, ["a", "b"], everybody, (0, 1)).helpers == ("x",)


def test_who_owns_no_unit_sums_nothing() -> None:
    ctx, ways = leader()
    found = ReduceSchedule(ctx, ways).of(1, 2, ["a", "b"], frozenset("ax"), (0, 0, 0, 0))
    assert found.sums == (0,) and not found.helpers


def test_more_parts_than_anybody_keeps_are_refused() -> None:
    fence, sums = Fence(1, 1, 1, "base", 1), (0, 1) * PARTS
    message = Attempt(fence, 1, AttemptId(1, 1), 1, ("a", "b"), (0, 1), (), sums)
    assert misdealt(message) is not None
