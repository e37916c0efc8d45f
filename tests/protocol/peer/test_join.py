"""A joiner finds whoever leads; a member's next process is not taken for the member (R14)."""

from __future__ import annotations

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Elsewhere, Enquire
from anabranch.protocol.peer.join import KNOCK_S
from anabranch.protocol.peer.peer import Peer
from support.admission import DATA_TICKETS

SETTINGS = Settings("doors", 1, 1, 2, 3)


def dialled(effects: list[ev.Effect]) -> list[str]:
    return [effect.peer for effect in effects if isinstance(effect, ev.Dial)]


def test_a_door_that_knows_of_nobody_is_left_for_the_next_and_never_for_my_own() -> None:
    """Two that have come back would otherwise ask each other for ever."""
    peer = Peer("b", 2, "a", SETTINGS, doors={"a": "a:1", "b": "b:1", "c": "c:1"})
    peer.handle(ev.Started(), 0.0)
    asked = peer.handle(ev.LinkUp("a", 1), 0.0)
    assert any(isinstance(effect, ev.Send) and isinstance(effect.message, Enquire) for effect in asked)
    found: list[str] = []
    for number in range(1, 6):
        now = number * (KNOCK_S + 0.5)
        door = peer.ctx.log.leader
        peer.handle(ev.LinkUp(door, 1), now - 0.4)
        found += dialled(peer.handle(ev.Received(door, Elsewhere("", "")), now - KNOCK_S))
        found += dialled(peer.handle(ev.Wake(), now))
    assert "c" in found and "b" not in found


def test_a_door_that_is_found_shut_again_and_again_is_left_for_the_next() -> None:
    """Whoever started it dials there once more every second; each failure put the next door off."""
    peer = Peer("b", 2, "a", SETTINGS, doors={"a": "a:1", "b": "b:1", "c": "c:1"})
    peer.handle(ev.Started(), 0.0)
    found: list[str] = []
    for number in range(1, 9):
        found += dialled(peer.handle(ev.LinkDown("a", "no answer"), number * KNOCK_S / 2))
        found += dialled(peer.handle(ev.Wake(), number * KNOCK_S / 2 + 0.1))
    assert "c" in found


@pytest.mark.parametrize("doors", [{"b": "b:1"}, {}, {"b": "b:1", "dead": "c:1"}])
def test_a_linked_peer_that_knew_of_no_leader_is_asked_again(doors: dict[str, str]) -> None:
    """It may know one later; the only other door is my own, none, or a dead voter's."""
    peer = Peer("b", 2, "a", SETTINGS, doors=doors)
    peer.handle(ev.Started(), 0.0)
    peer.handle(ev.LinkUp("a", 1), 0.0)
    asked = 0
    peer.handle(ev.Received("a", Elsewhere("", "")), 0.1)
    for second in range(1, 100):
        effects = peer.handle(ev.Wake(), float(second))
        for door in dialled(effects):
            peer.handle(ev.LinkDown(door, "nobody answers"), second + 0.1)
        if any(isinstance(effect, ev.Send) and isinstance(effect.message, Enquire) for effect in effects):
            asked += 1
            peer.handle(ev.Received("a", Elsewhere("", "")), second + 0.2)
    assert asked >= 3 and not peer.shared.exit.stopped


def test_the_next_process_of_a_member_ends_the_last_ones_membership() -> None:
    """It is linked, and answers; what the last process had is gone all the same."""
    ctx = make_context("a", 1, 0, SETTINGS, "a")
    ctx.run.membership.apply(Members(1, joined=(Member("b", 1, 4, "class", 2),), active_from={"b": 1}))
    admission = Admission(
        ctx, Connections(ctx), "class", "", "", lambda member: None, DATA_TICKETS, lambda *_: None
    )
    ctx.links.incarnations["b"] = 4
    admission.link_up("b")
    assert admission.change(lambda stage, t: 1) is None
    ctx.links.incarnations["b"] = 5
    admission.link_up("b")
    record = admission.change(lambda stage, t: 1)
    assert record is not None and record.removed == {"b": "it came back as a new process"}


def test_a_link_that_breaks_while_its_peers_removal_is_written_is_dialled_no_more() -> None:
    ctx = make_context("a", 1, 0, SETTINGS, "a")
    ctx.run.membership.apply(Members(1, joined=(Member("b", 1, 4, "class", 2, "b:1"),), active_from={"b": 1}))
    admission = Admission(
        ctx, Connections(ctx), "class", "", "", lambda member: None, DATA_TICKETS, lambda *_: None
    )
    admission.remove("b", "it is taken out")
    record = admission.change(lambda stage, t: 1)
    assert record is not None
    for _ in range(2):
        admission.link_down("b", "connection reset", False, 2.0)
    ctx.run.membership.apply(record)
    ctx.outbox.effects.clear()
    ctx.clock.now = 1.5
    admission.lost.tick()
    assert dialled(ctx.outbox.effects) == []
    assert admission.deadline() == float("inf")
