"""A data node that holds a step up is removed, and expelled if it does so again soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.recovery.late_data_nodes import LATE_S, LATE_STALLS, REMEMBERED, LateDataNodes


def context() -> PeerContext:
    """Leader and data node `a` with another, `b`; two microbatches, one of each."""
    ctx = make_context("a", 0, 0, Settings("late", 1, 1, 2, 1000), "a")
    joined = tuple(Member(peer, 0, 1, "class", 2) for peer in ("a", "b"))
    ctx.run.membership.apply(Members(1, joined=joined, active_from={"a": 1, "b": 1}))
    return ctx


@pytest.mark.parametrize(("later", "second"), [(REMEMBERED, "expel"), (REMEMBERED + 1, "remove")])
def test_a_second_accident_long_afterwards_is_no_misconduct(later: int, second: str) -> None:
    ctx, done = context(), list[str]()
    admission: Any = SimpleNamespace(
        remove=lambda peer, reason: done.append(f"remove {peer}"),
        expel=lambda peer, reason: done.append(f"expel {peer}"),
    )
    late = LateDataNodes(ctx, cast(Admission, admission))
    for t in (1, 1 + later):
        ctx.run.membership.open(t, 1, False)
        holder = ctx.run.membership.assignment(t, ctx.run.batch(t)).holder
        [own] = [index for index, peer in holder.items() if peer == "b"]
        opened_at = ctx.clock.now
        ctx.clock.now += 2 * LATE_S
        for _ in range(LATE_STALLS):
            late.stalled(t, opened_at, {1: [own]}, opened_at + 1.0, 1.0, True)
    assert done == ["remove b", f"{second} b"]
