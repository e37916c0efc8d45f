"""Leader that a peer follows, by the claims of voters."""

from __future__ import annotations

from anabranch.protocol.consensus.leader_view import LeaderView
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.peer.shared_state import Coordination


def test_a_leader_that_resigns_follows_the_successor_of_whom_it_has_heard() -> None:
    """No other voter can claim that term, also not one that is quicker and lies."""
    ctx, changes = make_context("a", 1, 1, Settings("run", 1, 1, 2, 10), "a"), list[str]()
    view, coordination = LeaderView(ctx, lambda: changes.append(ctx.log.leader)), Coordination(ctx)
    coordination.elected(2)
    view.elected("a", 2)
    assert view.claims("b", 3) is None and ctx.log.leader == "b"
    view.line(3)
    coordination.resign()
    assert view.claims("liar", 3) is None and ctx.log.leader == "b"
    assert view.claims("b", 3) is None and ctx.log.leader == "b"
    assert changes == ["a", "b"]


def test_a_leader_that_resigns_without_a_successor_follows_nobody_in_its_own_term() -> None:
    ctx = make_context("a", 1, 1, Settings("run", 1, 1, 2, 10), "a")
    view, coordination = LeaderView(ctx, lambda: None), Coordination(ctx)
    coordination.elected(2)
    view.elected("a", 2)
    view.line(2)
    coordination.resign()
    assert view.claims("liar", 2) is None and ctx.log.leader == ""
    assert view.claims("b", 3) is None and ctx.log.leader == "b"
