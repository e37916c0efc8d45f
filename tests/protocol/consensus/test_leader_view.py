"""Leader that a peer follows, by the claims of voters."""

from __future__ import annotations

from anabranch.protocol.consensus.leader_view import LeaderView
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.settings import Settings


def test_a_leader_that_resigns_follows_a_claim_of_the_term_that_it_knows() -> None:
    """It may have heard of its successor before it resigned, and forgets whom it followed then."""
    ctx, changes = make_context("a", 1, 1, Settings("run", 1, 1, 2, 10), "a"), list[str]()
    view = LeaderView(ctx, lambda: changes.append(ctx.log.leader))
    view.elected("a", 2)
    assert view.claims("b", 3) is None and ctx.log.leader == "b"
    ctx.log.follow_leader("")
    assert view.claims("c", 2) is None and ctx.log.leader == "", "an older term"
    view.line(3)
    assert view.claims("b", 3) is None and ctx.log.leader == "b"
    assert view.claims("c", 3) is None and ctx.log.leader == "b"
    assert changes == ["a", "b", "b"]


def test_nobody_else_is_believed_to_have_led_a_term_that_this_peer_led() -> None:
    ctx = make_context("a", 1, 1, Settings("run", 1, 1, 2, 10), "a")
    view = LeaderView(ctx, lambda: None)
    view.elected("a", 2)
    view.line(2)
    ctx.log.follow_leader("")
    assert view.claims("liar", 2) is None and ctx.log.leader == ""
    assert view.claims("b", 3) is None and ctx.log.leader == "b"
