"""Onlookers: they get the event log within bounds, and are nothing else to the run."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from anabranch.observe.event_log import PIECE_BYTES, piece_of
from anabranch.protocol import messages as msg
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.step_parameters import Schedule, StepParameters
from anabranch.protocol.messages import Shown, Watch
from anabranch.protocol.observers.event_log_client import PIECE_MAX, EventLogClient
from anabranch.protocol.observers.event_log_server import (
    BURST_BYTES,
    BYTES_PER_S,
    IDLE_S,
    OBSERVERS_MAX,
    SEAT_S,
)
from anabranch.protocol.peer.bootstrap import lead
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.workers.integer_world import Machine, genesis_of, member_of

SETTINGS = Settings("run", 1, 1, 2, 4)


def founder() -> Peer:
    schedule = Schedule("batch {}".format, lambda t, step, norm: StepParameters(1.0, 1.0, 1.0, 1.0), 2, 1)
    peer = lead(
        member_of(Machine("d0", 0)), SETTINGS, schedule, genesis_of(SETTINGS, "d0"), SavedVoterState("0")
    )
    peer.handle(ev.Started(), 0.0)
    return peer


def watches(peer: Peer, who: str, now: float, role: str = "watch", position: int = 0) -> list[ev.Effect]:
    if who not in peer.credentials:
        shown = ev.VerifiedCredential(role, ev.NEVER_EXPIRES_S)
        peer.handle(ev.LinkUp(who, 1, shown), now)
    return peer.handle(ev.Received(who, Watch(position)), now)


def of(effects: list[ev.Effect], kind: type[ev.Effect]) -> list[ev.Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def reads(peer: Peer, who: str, now: float, size: int) -> list[ev.Effect]:
    return peer.handle(ev.EventsRead(who, 0, bytes(size), size), now)


@pytest.mark.parametrize("role", ["watch", "relay", "data"])
def test_an_onlooker_is_answered_and_never_asked_after(role: str) -> None:
    peer = founder()
    assert of(watches(peer, "eve", 1.0, role, 7), ev.ReadEvents) == [ev.ReadEvents("eve", 7)]
    assert of(peer.handle(ev.EventsRead("eve", 7, b"xy", 9), 1.0), ev.Send) == [
        ev.Send("eve", Shown(7, b"xy", 9))
    ]
    seen: list[ev.Effect] = []
    for second in range(2, 90):  # silent for long: no ping, no suspicion, no word in the event log
        seen += peer.handle(ev.Wake(), float(second))
    assert not any(isinstance(effect, ev.Send) and effect.peer == "eve" for effect in seen)
    assert not any(isinstance(effect, ev.Note) and "eve" in str(effect.fields) for effect in seen)
    assert of(peer.handle(ev.LinkDown("eve", "went away"), 91.0), ev.Note) == []


def test_an_onlooker_can_do_nothing_else_and_is_hung_up_on() -> None:
    peer = founder()
    watches(peer, "eve", 1.0)
    said = (msg.FetchLog(0), msg.FetchState(1, 0), msg.Enquire(), msg.Report((b"{}",)), msg.Wish("pause"))
    refused: list[ev.Effect] = []
    for number in range(1000):
        refused += peer.handle(ev.Received("eve", said[number % len(said)]), 1.0)
        if of(refused, ev.HangUp):
            break
    assert number < 999 and not of(refused, ev.Send) and not of(refused, ev.Reported)
    assert of(
        peer.handle(ev.LinkUp("eve", 1, ev.VerifiedCredential("watch", ev.NEVER_EXPIRES_S)), 2.0), ev.HangUp
    )


def test_places_are_few_and_the_idle_make_room() -> None:
    peer = founder()
    for number in range(OBSERVERS_MAX):
        assert of(watches(peer, f"eve{number}", 1.0), ev.ReadEvents)
    late = watches(peer, "late", 2.0)
    assert of(late, ev.HangUp) and not of(late, ev.ReadEvents)
    watches(peer, "eve3", 50.0)
    peer.handle(ev.LinkDown("late", "hung up"), 50.0)
    assert of(watches(peer, "later", 1.5 + IDLE_S), ev.ReadEvents)
    assert "eve3" in peer.event_log_server and "eve4" not in peer.event_log_server


def test_all_of_them_get_no_more_than_their_allowance_and_one_piece_at_a_time() -> None:
    peer = founder()
    most = 1 << 19
    told = 0
    for tick in range(400):
        now = 1.0 + tick / 4
        for who in ("eve", "mallory"):
            effects = watches(peer, who, now)
            assert not of(watches(peer, who, now), ev.ReadEvents) or not of(effects, ev.ReadEvents)
            if of(effects, ev.ReadEvents):
                reads(peer, who, now, most)
                told += most
    assert told <= BURST_BYTES + 100 * BYTES_PER_S + 2 * most


def test_an_onlooker_goes_on_where_it_was_and_dials_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = b"".join(b'{"kind": "note", "number": %d}\n' % number for number in range(30_000))
    path.write_bytes(written)
    here, now = bytearray(written[:1000]), 0.0
    onlooker = EventLogClient("d0", "d0:1", len(here))
    effects = onlooker.handle(ev.Started(), now)
    assert effects == [ev.Dial("d0", "d0:1")]
    questions = 0
    effects = onlooker.handle(ev.LinkUp("d0", 1), now)
    while len(here) < len(written):
        (question,) = effects
        assert question == ev.Send("d0", Watch(len(here)))
        questions += 1
        if questions == 2:  # the link breaks before the answer
            onlooker.handle(ev.LinkDown("d0", "reset"), now)
            now = onlooker.deadline()
            assert onlooker.handle(ev.Wake(), now) == [ev.Dial("d0", "d0:1")]
            effects = onlooker.handle(ev.LinkUp("d0", 1), now)
            continue
        (showed,) = onlooker.handle(ev.Received("d0", Shown(len(here), *piece_of(path, len(here)))), now)
        assert isinstance(showed, ev.Showed) and showed.position == len(here)
        assert len(showed.data) <= PIECE_BYTES
        here += showed.data
        now = onlooker.deadline()
        effects = onlooker.handle(ev.Wake(), now)
    assert bytes(here) == written


def test_what_an_onlooker_is_shown_is_bounded_and_not_believed() -> None:
    onlooker = EventLogClient("d0", "d0:1", 100)
    onlooker.handle(ev.LinkUp("d0", 1), 0.0)
    assert onlooker.handle(ev.Received("x", Shown(100, zlib.compress(b"a"), 101)), 0.1) == []
    (showed,) = onlooker.handle(ev.Received("d0", Shown(100, zlib.compress(bytes(64 << 20)), 1 << 30)), 0.1)
    assert isinstance(showed, ev.Showed) and len(showed.data) == PIECE_MAX
    onlooker.handle(ev.Wake(), 1.0)
    unasked = Shown(3, zlib.compress(b"a"), 1 << 30)
    assert onlooker.handle(ev.Received("d0", unasked), 1.1) == []
    onlooker.handle(ev.Wake(), 2.0)
    (stop,) = onlooker.handle(ev.Received("d0", Shown(onlooker.position, b"noise", 1 << 30)), 2.1)
    assert isinstance(stop, ev.Stop)
    less = EventLogClient("d0", "d0:1", 100)
    less.handle(ev.LinkUp("d0", 1), 0.0)
    (stop,) = less.handle(ev.Received("d0", Shown(100, b"", 50)), 0.1)
    assert isinstance(stop, ev.Stop) and "--home" in stop.reason


def test_the_onlooker_hangs_up_on_who_does_not_answer() -> None:
    onlooker = EventLogClient("d0", "d0:1", 0)
    onlooker.handle(ev.LinkUp("d0", 1), 0.0)
    now = onlooker.deadline()
    assert onlooker.handle(ev.Wake(), now) == [ev.HangUp("d0", "no answer")]
    assert onlooker.handle(ev.Wake(), onlooker.deadline()) == [ev.Dial("d0", "d0:1")]


def sits_down(peer: Peer, who: str, now: float, ticket: str) -> bool:
    """True if an onlooker with this ticket is answered."""
    peer.handle(ev.LinkUp(who, 1, ev.VerifiedCredential("watch", ev.NEVER_EXPIRES_S, ticket)), now)
    return bool(of(peer.handle(ev.Received(who, Watch(0)), now), ev.ReadEvents))


def test_one_ticket_does_not_keep_all_seats() -> None:
    peer = founder()
    assert all(sits_down(peer, f"eve{n}", 1.0, "flood") for n in range(OBSERVERS_MAX))
    assert not sits_down(peer, "eve", 1.0, "flood")
    for n in range(OBSERVERS_MAX // 2):
        assert sits_down(peer, f"ann{n}", 1.0, "other"), "another ticket has a right to its half"
    assert not sits_down(peer, "bob", 1.0, "other")
    seats = [who for who in (f"eve{n}" for n in range(OBSERVERS_MAX)) if who in peer.event_log_server]
    assert seats == [f"eve{n}" for n in range(OBSERVERS_MAX // 2, OBSERVERS_MAX)]


def test_onlookers_with_one_ticket_take_turns() -> None:
    peer = founder()
    for n in range(OBSERVERS_MAX):
        assert sits_down(peer, f"eve{n}", 1.0, "public")
    for second in range(2, int(SEAT_S)):
        for n in range(OBSERVERS_MAX):
            watches(peer, f"eve{n}", float(second))
    assert not sits_down(peer, "ann", SEAT_S, "public")
    assert sits_down(peer, "ann", SEAT_S + 2.0, "public")
    assert "eve0" not in peer.event_log_server and "ann" in peer.event_log_server
