"""Returns of the log in a dispute: at once for each joiner that could settle it, else ever more rarely."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.disputes import AGAIN_S, Disputes
from anabranch.protocol.coordinator.round import LogTip
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog

DISPUTE = 1, ["a", "b"]


class Led:
    """Disputes of a leader whose replicas a and b of stage 1 report different states after step 3."""

    def __init__(self) -> None:
        ctx = self.ctx = make_context("d", 1, 0, Settings("run", 1, 1, 4, 100), "d")
        joined = tuple(Member(name, int(name != "d"), 1, "", 4) for name in "dab")
        ctx.run.membership.apply(Members(1, joined=joined, active_from=dict.fromkeys("dab", 1)))
        self.catalog, tip = SnapshotCatalog(ctx), LogTip(ctx)
        tip.move(3, "entry", 0, ("", ""))
        self.disputes = Disputes(ctx, tip, self.catalog)

    def keep_a_snapshot(self) -> None:
        self.catalog.points[0] = RestorePoint(0, ("", ""), 0, initial=True)

    def come(self, peer: str) -> None:
        membership = self.ctx.run.membership
        membership.apply(Members(membership.number + 1, joined=(Member(peer, 1, 1, "", 4),)))

    def go(self, peer: str) -> None:
        membership = self.ctx.run.membership
        membership.apply(Members(membership.number + 1, removed={peer: "left"}))

    def goes_back(self) -> bool:
        return self.disputes.decide(DISPUTE) is not None


def test_the_log_goes_back_at_once_for_each_joiner_and_else_after_a_wait() -> None:
    led = Led()
    led.keep_a_snapshot()
    assert led.goes_back() and not led.goes_back()
    led.come("x")
    assert led.goes_back() and not led.goes_back()
    led.come("y")
    assert led.goes_back() and not led.goes_back()
    led.ctx.clock.advance(AGAIN_S[0])
    assert led.goes_back()


def test_a_joiner_that_came_before_any_snapshot_still_brings_a_return() -> None:
    led = Led()
    led.keep_a_snapshot()
    assert led.goes_back()
    led.catalog.points.clear()
    led.come("x")
    assert not led.goes_back(), "there is nothing to go back to"
    led.keep_a_snapshot()
    assert led.goes_back() and not led.goes_back()


def test_only_members_are_remembered() -> None:
    led = Led()
    led.keep_a_snapshot()
    assert led.goes_back()
    for peer in "uvwx":
        led.come(peer)
        assert led.goes_back() and not led.goes_back()
        led.go(peer)
    assert not led.goes_back() and led.disputes._called == set()
