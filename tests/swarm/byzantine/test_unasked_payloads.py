"""Payloads that nobody asked for: who sends them is banned, and late answers are not among them (I7)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.context.rate_limits_and_bans import COPIES, MOST_OWED
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages.table import PROBES, UNASKED
from anabranch.protocol.peer.peer import Peer
from anabranch.protocol.routing.bandwidth_probes import trial_bytes

SETTINGS = Settings("flood", 1, 1, 2, 3, activation_bytes=1 << 16)
ANSWERS = {
    msg.FetchGradient(1, 1): msg.Gradient(1, 1),
    msg.FetchPiece(1, 1, 0): msg.Piece(1, 1, 0),
    msg.FetchWork(1, 1, "ada", "dy"): msg.Work(1, 1, "ada", "dy"),
}


@pytest.fixture
def peer() -> Peer:
    made = Peer("a", 1, "a", SETTINGS)
    made.ctx.run.membership.apply(Members(1, joined=(Member("ada", 1, 1, "class", 2),)))
    made.handle(ev.LinkUp("ada", 1, None), 0.0)
    return made


def taken(peer: Peer, message: msg.Message, count: int, size_bytes: int = 1, now: float = 1.0) -> int:
    """Number of payloads of `ada`, of `count`, after which its link is closed."""
    for number in range(count):
        effects = peer.handle(ev.Received("ada", message, b"payload", 0.0, size_bytes), now)
        if any(isinstance(effect, ev.HangUp) for effect in effects):
            return number
    return count


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=lambda each: type(each).__name__)
def test_a_member_that_sends_what_nobody_asked_for_is_banned(peer: Peer, answer: msg.Message) -> None:
    assert taken(peer, answer, 100) == UNASKED.burst


@pytest.mark.parametrize(("request_", "answer"), ANSWERS.items(), ids=lambda each: type(each).__name__)
def test_answers_are_awaited_however_late(peer: Peer, request_: msg.Message, answer: msg.Message) -> None:
    """Also over another link."""
    for _ in range(20):
        peer.ctx.outbox.send("ada", request_)
    peer.handle(ev.LinkDown("ada", "broke"), 1000.0)
    peer.handle(ev.LinkUp("ada", 1, None), 2000.0)
    assert taken(peer, answer, 100, now=3000.0) == 20 * COPIES + UNASKED.burst


def test_requests_without_an_answer_save_nothing_up(peer: Peer) -> None:
    for _ in range(1000):
        peer.ctx.outbox.send("ada", msg.FetchGradient(1, 1))
    assert taken(peer, msg.Gradient(1, 1), 1000) == MOST_OWED + UNASKED.burst


def test_an_answer_without_a_payload_is_an_answer(peer: Peer) -> None:
    for _ in range(20):
        peer.ctx.outbox.send("ada", msg.FetchGradient(1, 1))
        for _ in range(COPIES):
            peer.handle(ev.Received("ada", msg.Gradient(1, 1)), 1.0)
    assert taken(peer, msg.Gradient(1, 1), 100) == UNASKED.burst


def test_probes_have_a_budget_of_bytes(peer: Peer) -> None:
    trial = trial_bytes(SETTINGS)
    assert taken(peer, msg.Burst(1, b""), 100, trial) == PROBES.burst


def test_long_probes_cost_more(peer: Peer) -> None:
    trial = trial_bytes(SETTINGS)
    assert taken(peer, msg.Burst(1, b""), 100, 10 * trial) == PROBES.burst // 10
