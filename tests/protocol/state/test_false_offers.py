"""Offers of a state that are far too large, or that trickle, from a source that answers first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.protocol.interface.tasks import PIECE_BYTES, Result
from anabranch.protocol.messages import Piece, StateOffer
from anabranch.protocol.state.download import Download, SourceStatus, State
from protocol.state.test_slow_sources import joiner

PRINT = "f" * 32
#: Pieces of the state of stage 1, by the settings of `joiner`.
PIECES = (64 << 20) // PIECE_BYTES
TRUE = StateOffer(1, 5, PRINT, PIECES, ("h",) * PIECES)


def begun(found: list[State], check: bool, stage: int = 1, t: int = 5) -> Download:
    """Download of the state of a stage after iteration t, from a liar and an honest source."""
    ctx = joiner({"liar": 2e7, "b": 2e7})
    ctx.use_settings(replace(ctx.run.settings, frozen=("e", "f"), frozen_bytes=(0, PIECES * PIECE_BYTES)))
    download = Download(ctx, stage, t, ["liar", "b"], found.append, print, PRINT, check=check)
    download.start()
    return download


#: Number and iteration under which states are fetched: of stage 1, and of its frozen weights.
KINDS = [(1, 5), (3, 0)]


@pytest.mark.parametrize(("stage", "t"), KINDS)
@pytest.mark.parametrize("pieces", [1 << 14, 4 * PIECES])
def test_an_offer_beyond_what_the_state_can_be_is_refused(pieces: int, stage: int, t: int) -> None:
    found: list[State] = []
    download = begun(found, False, stage, t)
    download.on_offer("liar", StateOffer(stage, t, PRINT, pieces, ()))
    assert download.sources["liar"].asked == set()
    download.on_offer("b", StateOffer(stage, t, PRINT, PIECES, ("h",) * PIECES))
    while not found:
        for piece in sorted(download.sources["b"].asked):
            download.on_piece("b", Piece(stage, t, piece), b"x")
    assert len(found[0].pieces) == PIECES and download.givers == {"b"}


@pytest.mark.parametrize(("stage", "t"), KINDS)
def test_an_offer_that_trickles_is_given_up_for_another(stage: int, t: int) -> None:
    """A tiny piece comes just before each wait is over: the whole has the time of a slow link, then the other
    offer is taken."""
    found: list[State] = []
    download = begun(found, False, stage, t)
    true = StateOffer(stage, t, PRINT, PIECES, ("h",) * PIECES)
    download.on_offer("liar", StateOffer(stage, t, PRINT, PIECES, ()))
    download.on_offer("b", true)
    clock = download.ctx.clock
    whole_s = download.ctx.costs.coming_s("liar", PIECES * PIECE_BYTES)
    while download.sources["b"].asked == set() and clock.now < 10.0 * whole_s:
        clock.now = min(clock.now + 9.0, download.deadline())
        download.tick()
        if download.sources["b"].status.name == "ASKED":
            download.on_offer("b", true)
        for piece in sorted(download.sources["liar"].asked)[:1]:
            if len(download._pieces) < PIECES - 1:
                download.on_piece("liar", Piece(stage, t, piece), b"x")
    assert clock.now < whole_s + 20.0
    while not found:
        for piece in sorted(download.sources["b"].asked):
            download.on_piece("b", Piece(stage, t, piece), b"x")
    assert download.givers == {"b"}


def steps(
    download: Download, offers: dict[str, StateOffer], piece_s: dict[str, float], until_s: float
) -> None:
    """Let time pass until the download ends, or to `until_s`. The source `peer` answers a question by
    offers[peer], if at all, and delivers a piece every piece_s[peer] seconds, if at all."""
    clock, last = download.ctx.clock, dict.fromkeys(piece_s, download.ctx.clock.now)
    while not download.over and clock.now < until_s:
        clock.now += 1.0
        download.tick()
        for peer, offer in offers.items():
            if download.sources[peer].status is SourceStatus.ASKED:
                download.on_offer(peer, offer)
        for peer, each_s in piece_s.items():
            if clock.now - last[peer] >= each_s and (asked := sorted(download.sources[peer].asked)):
                last[peer] = clock.now
                download.on_piece(peer, Piece(1, 5, asked[0]), b"x")


def test_an_honest_source_that_is_slower_than_expected_gets_another_turn() -> None:
    """It serves two joiners, and trains. A liar offers other bytes, which trickle."""
    found, failed = list[State](), list[str]()
    ctx = joiner({"liar": 2e7, "b": 2e7})
    download = Download(ctx, 1, 5, ["b", "liar"], found.append, failed.append, PRINT, check=False)
    download.start()
    false = StateOffer(1, 5, PRINT, PIECES, ())
    for peer, offer in (("b", TRUE), ("liar", false)):
        download.on_offer(peer, offer)
    whole_s = ctx.costs.coming_s("b", PIECES * PIECE_BYTES)
    each_s = {"b": 1.5 * whole_s / PIECES, "liar": 1.8 * whole_s / PIECES}
    steps(download, {"b": TRUE, "liar": false}, each_s, 10.0 * whole_s)
    assert found and not failed and download.givers == {"b"}


def test_liars_that_trickle_and_answer_first_do_not_keep_an_honest_source_out() -> None:
    """Two of them, each with bytes of its own: every source has its turn before one has another."""
    found, failed = list[State](), list[str]()
    ctx = joiner({"x": 2e7, "y": 2e7, "b": 2e7})
    download = Download(ctx, 1, 5, ["x", "y", "b"], found.append, failed.append, PRINT, check=False)
    download.start()
    false = {peer: StateOffer(1, 5, PRINT, PIECES, (peer,) * PIECES) for peer in "xy"}
    whole_s = ctx.costs.coming_s("b", PIECES * PIECE_BYTES)
    trickle = dict.fromkeys("xy", 2.0 * whole_s / PIECES)
    steps(download, {**false, "b": TRUE}, {**trickle, "b": 1.0}, 3.0 * whole_s)
    assert found and not failed and download.givers == {"b"}


def test_a_source_that_sent_wrong_bytes_has_no_other_turn() -> None:
    found, failed = list[State](), list[str]()
    ctx = joiner({"liar": 2e7, "slow": 2e7, "b": 2e7})
    download = Download(ctx, 1, 5, ["liar", "slow", "b"], found.append, failed.append, PRINT, check=False)
    download.start()
    for peer in ("liar", "slow"):
        download.on_offer(peer, StateOffer(1, 5, PRINT, PIECES, ()))
    download.on_offer("b", TRUE)
    download._condemn(download.sources["liar"], "Piece 0: not what it offered")
    whole_s = ctx.costs.coming_s("b", PIECES * PIECE_BYTES)
    steps(download, {"b": TRUE}, {"slow": 8.0, "b": 8.0}, 1.5 * whole_s)
    assert download.sources["b"].status is SourceStatus.PULLED
    assert download.sources["slow"].status is SourceStatus.IDLE
    assert download.sources["liar"].status is SourceStatus.OUT


def test_a_second_liar_that_offers_the_same_bytes_late_does_not_hang_the_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its offer comes when the pieces of the first one are all there and were found false."""
    failed = list[str]()
    ctx = joiner({"x": 2e7, "y": 2e7})
    download = Download(ctx, 1, 5, ["x", "y"], print, failed.append, PRINT)
    checked = list[Callable[[Result], None]]()
    monkeypatch.setattr(ctx.tasks, "submit", lambda *task: checked.append(task[-1]))
    download.start()
    download.on_offer("x", TRUE)
    steps(download, {}, {"x": 1.0}, float(PIECES + 9))
    checked.pop()(Result(hashes=TRUE.hashes, fingerprint="0" * 32))
    assert download.sources["x"].status is SourceStatus.OUT and not download.over
    steps(download, {"y": TRUE}, {"y": 1.0}, ctx.clock.now + PIECES + 99.0)
    checked.pop()(Result(hashes=TRUE.hashes, fingerprint="0" * 32))
    assert failed and download.over
