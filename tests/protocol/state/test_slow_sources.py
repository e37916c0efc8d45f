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


class Lines:
    """Download of 40 pieces from sources that take so many seconds for each piece, one after the other."""

    def __init__(self, piece_s: dict[str, float]) -> None:
        self.ctx, self.found = joiner(dict.fromkeys(piece_s, 1e8)), list[State]()
        self.piece_s, self.asked = piece_s, dict.fromkeys(piece_s, 0)
        self.download = Download(
            self.ctx, 1, -1, list(piece_s), self.found.append, lambda reason: None, check=False
        )
        self.download.start()
        for peer in piece_s:
            self.download.on_offer(peer, StateOffer(1, 5, "true", 40, tuple(map(str, range(40)))))
        self._due: list[tuple[float, str, int]] = []
        self._free = dict.fromkeys(piece_s, 0.0)

    def run(self, pieces: int, from_peer: str = "") -> None:
        """Deliver so many pieces, or until the download is over. from_peer: the only one that delivers."""
        for _ in range(pieces):
            for effect in self.ctx.outbox.effects:
                message = getattr(effect, "message", None)
                if isinstance(message, FetchPiece):
                    peer = effect.peer  # type: ignore[union-attr]
                    self.asked[peer] += 1
                    begun = max(self.ctx.clock.now, self._free[peer])
                    self._free[peer] = begun + self.piece_s[peer]
                    self._due.append((self._free[peer], peer, message.piece))
            self.ctx.outbox.effects.clear()
            if self.found:
                break
            self._due = sorted(due for due in self._due if from_peer in ("", due[1]))
            next_s = self._due[0][0] if self._due else math.inf
            if self.download.deadline() < next_s:
                self.ctx.clock.now = self.download.deadline()
                self.download.tick()
            else:
                self.ctx.clock.now, peer, piece = self._due.pop(0)
                self.download.on_piece(peer, Piece(1, 5, piece), b"")


def test_a_slow_line_is_left_to_its_own_work_while_others_are_quicker() -> None:
    lines = Lines({"b": 0.1, "c": 1.0, "d": 0.12})
    lines.run(60)
    assert lines.found
    assert lines.asked["c"] == 2
    assert lines.ctx.clock.now < 2.5


def test_lines_that_together_bring_much_are_all_used() -> None:
    lines = Lines({"b": 0.1, "c": 0.25, "d": 0.25})
    lines.run(60)
    assert lines.found
    assert min(lines.asked.values()) > 5
    assert lines.ctx.clock.now < 40 / (10.0 + 4.0 + 4.0) * 1.3


def test_a_slow_source_is_asked_again_when_the_quick_ones_are_gone() -> None:
    lines = Lines({"b": 0.1, "c": 1.0, "d": 0.12})
    lines.run(20)
    for peer in ("b", "d"):
        del lines.ctx.links.up[peer]
        lines.download.link_down(peer)
    while not lines.found and lines.ctx.clock.now < DAY_S:
        lines.run(1, from_peer="c")
    assert lines.found
    assert lines.asked["c"] > 10
    assert lines.ctx.clock.now < 120.0
