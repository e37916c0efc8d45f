"""Waits for slow sources: a peer's claims about its line bound them, never to infinity."""

from __future__ import annotations

import math

import pytest

from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import FetchPiece, Piece, StateOffer
from anabranch.protocol.state.download import Download, State
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.protocol.telemetry.peer_costs import PeerCosts

#: A rate that a peer may tell, for it is positive, and the seconds of a day.
CRAWL_BPS, DAY_S = 1e-17, 86400.0


def joiner(told: dict[str, float]) -> PeerContext:
    """`a` of stage 1, which is told such bandwidths by the peers it is linked to."""
    ctx = make_context(
        "a", 1, 1, Settings("run", 1, 1, 2, 10, block_bytes=1 << 20, state_bytes=64 << 20), "d"
    )
    members = [Member(peer, int(peer != "d"), 1, "", 1, name=peer) for peer in ("a", *told)]
    ctx.run.membership.apply(Members(1, joined=tuple(members), active_from=dict.fromkeys(told, 1)))
    for peer, bandwidth_bps in told.items():
        ctx.links.up[peer] = AdaptiveTimeout(0.0, 1.0)
        ctx.costs.told(peer, 0.0, 0.0, bandwidth_bps, math.inf)
    return ctx


@pytest.mark.parametrize("own", [True, False])
def test_a_source_that_brings_nothing_is_given_up_whatever_it_says_of_its_line(own: bool) -> None:
    """It is asked first, offers a state that nobody else has, in one piece, and sends nothing. Or it is
    somebody else who says that lines crawl, and nothing is known of its own."""
    told = {"liar": CRAWL_BPS, "b": 5e7, "c": 2e7} if own else {"liar": 0.0, "b": CRAWL_BPS, "c": 2e7}
    ctx, found = joiner(told), list[State]()
    download = Download(ctx, 1, -1, ["liar", "b"], found.append, lambda reason: None, check=False)
    download.start()
    download.on_offer("liar", StateOffer(1, 5, "false", 1, ("x",)))
    download.on_offer("b", StateOffer(1, 5, "true", 2, ("y", "z")))
    while not found and ctx.clock.now < DAY_S:
        ctx.clock.now = download.deadline()
        download.tick()
        if ctx.clock.now < DAY_S and download.sources["b"].asked == set():
            download.on_offer("b", StateOffer(1, 5, "true", 2, ("y", "z")))
        for piece in sorted(download.sources["b"].asked):
            download.on_piece("b", Piece(1, 5, piece), b"")
    assert [state.fingerprint for state in found] == ["true"]
    assert any(isinstance(getattr(effect, "message", None), FetchPiece) for effect in ctx.outbox.effects)
    assert ctx.clock.now < DAY_S / 4.0


@pytest.mark.parametrize("bandwidth_bps", [math.nan, math.inf, -1.0, 0.0, 1e-300, CRAWL_BPS, 1e17])
def test_every_wait_for_what_comes_is_finite(bandwidth_bps: float) -> None:
    costs = PeerCosts(activation_bytes=1 << 20)
    costs.told("a", 0.0, 0.0, bandwidth_bps, 0.0)
    for peer in ("a", "unknown"):
        assert 0.0 <= costs.coming_s(peer, 8 << 20) < DAY_S / 16.0


def test_a_receipt_that_is_put_off_does_not_make_a_lost_activation_be_waited_for() -> None:
    """An activation of 1 MiB, the receipt of which came after eleven days."""
    costs = PeerCosts(activation_bytes=1 << 20)
    costs.delivered("a", 1e6, 1e6)
    ahead_bytes = costs.hand("a", 1e6)
    assert costs.most_s("a", ahead_bytes) < DAY_S / 64.0
    assert costs.reduce_s(1 << 20) < DAY_S / 64.0


def test_a_line_that_is_thin_is_given_its_time() -> None:
    """Told or measured: four times what it needs, also where others are much quicker."""
    costs = PeerCosts(activation_bytes=1 << 20)
    for peer, bandwidth_bps in (("a", 0.3e6), ("b", 8e6), ("c", 5e6)):
        costs.told(peer, 0.0, 0.0, bandwidth_bps, 0.0)
    assert costs.coming_s("a", 1 << 20) == pytest.approx(4.0 * 8.0 * (1 << 20) / 0.3e6)
    costs.delivered("a", 80.0, 100.0)
    assert costs.most_s("a", costs.hand("a", 100.0)) == pytest.approx(4.0 * 80.0, rel=0.01)
