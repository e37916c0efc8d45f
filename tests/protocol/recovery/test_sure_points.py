"""Restore points that are preferred as each of their states can certainly be had."""

from __future__ import annotations

from anabranch.protocol import messages as msg
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog
from protocol.coordinator.test_state_agreement import Stage

LEADER, OLDER, NEWER = "d0", 2, 4


def test_the_leaders_own_copy_is_sure() -> None:
    """It was worth no more than any single keeper's word, and the log went back to an older point."""
    catalog = SnapshotCatalog(Stage("h0 h1").ctx)
    for t in (OLDER, NEWER):
        catalog.points[t] = RestorePoint(t, ("0", "1"), t)
    for peer in (LEADER, "h0"):
        states = [(stage, t) for stage in (0, 1) for t in (OLDER, NEWER) if t == OLDER or peer == LEADER]
        assert catalog.on_holds(peer, msg.Holds(tuple(msg.Held(s, t, str(s)) for s, t in states), 1)) is None
    point = catalog.newest(10)
    assert point is not None and point.t == NEWER
