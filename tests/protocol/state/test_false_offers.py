"""Offers of a state that are far too large, or that trickle, from a source that answers first."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.protocol.messages import Piece, StateOffer
from anabranch.protocol.state.download import Download, State
from protocol.state.test_slow_sources import joiner

PRINT = "f" * 32
#: Pieces of the state of stage 1, by the settings of `joiner`.
PIECES = (64 << 20) // PIECE_BYTES
TRUE = StateOffer(1, 5, PRINT, PIECES, ("h",) * PIECES)


def begun(found: list[State], check: bool) -> Download:
    """Download of the state after iteration 5, from a liar and an honest source."""
    ctx = joiner({"liar": 2e7, "b": 2e7})
    download = Download(ctx, 1, 5, ["liar", "b"], found.append, print, PRINT, check=check)
    download.start()
    return download


@pytest.mark.parametrize("pieces", [1 << 14, 4 * PIECES])
def test_an_offer_beyond_what_the_state_can_be_is_refused(pieces: int) -> None:
    found: list[State] = []
    download = begun(found, check=False)
    download.on_offer("liar", StateOffer(1, 5, PRINT, pieces, ()))
    assert download.sources["liar"].asked == set()
    download.on_offer("b", TRUE)
    while not found:
        for piece in sorted(download.sources["b"].asked):
            download.on_piece("b", Piece(1, 5, piece), b"x")
    assert len(found[0].pieces) == PIECES and download.givers == {"b"}


def test_an_offer_that_trickles_is_given_up_for_another() -> None:
    """A tiny piece comes just before each wait is over: the whole has the time of a slow link, then the other
    offer is taken."""
    found: list[State] = []
    download = begun(found, check=False)
    download.on_offer("liar", StateOffer(1, 5, PRINT, PIECES, ()))
    download.on_offer("b", TRUE)
    clock = download.ctx.clock
    whole_s = download.ctx.costs.coming_s("liar", PIECES * PIECE_BYTES)
    while download.sources["b"].asked == set() and clock.now < 10.0 * whole_s:
        clock.now = min(clock.now + 9.0, download.deadline())
        download.tick()
        if download.sources["b"].status.name == "ASKED":
            download.on_offer("b", TRUE)
        for piece in sorted(download.sources["liar"].asked)[:1]:
            if len(download._pieces) < PIECES - 1:
                download.on_piece("liar", Piece(1, 5, piece), b"x")
    assert clock.now < whole_s + 20.0
    while not found:
        for piece in sorted(download.sources["b"].asked):
            download.on_piece("b", Piece(1, 5, piece), b"x")
    assert download.givers == {"b"}
