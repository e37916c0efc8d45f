"""Frozen weights beside the snapshots of a peer: served as states are, and no snapshots."""

from __future__ import annotations

from typing import Any

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.state.download import State
from anabranch.protocol.state.server import StateServer
from anabranch.protocol.state.snapshots import Snapshots


def test_they_stay_when_old_snapshots_are_dropped() -> None:
    """A replica still has them for joiners after a snapshot of all stages, and after a rollback."""
    nowhere: Any = None
    server = StateServer(nowhere, lambda: 0, lambda t, stage: False)
    settings = Settings("run", 1, 2, 4, 9, frozen=("a", "b", "c"))
    number = settings.frozen_number(1)
    assert number > settings.stages and settings.frozen_hash(1) == "b" and settings.frozen_hash(7) == ""
    frozen, old = State(number, 0, "b", (), ()), State(1, 0, "x", (), ())
    server.frozen[number, 0] = frozen
    server.pinned[1, 0] = old
    snapshots = Snapshots(nowhere, server)
    snapshots.complete(5)
    assert server.find(1, 0) is None and server.find(number, 0) is frozen
    server.rolled_back(-1)
    assert server.find(number, 0) is frozen and not server.pinned, "nor are they told as snapshots"
