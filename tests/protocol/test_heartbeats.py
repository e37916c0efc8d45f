"""Who is pinged with a heartbeat, and who was told enough."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol.contacts import LEFT_OUT, Contacts
from anabranch.protocol.core import Core
from anabranch.protocol.detector import Silence
from anabranch.protocol.events import Send
from anabranch.protocol.messages import Ping, Want
from anabranch.protocol.records import Member, Members
from anabranch.protocol.settings import Settings

BEATS = 16


def pings(relays: int, payload: bytes | None, earlier: float = 0.0) -> Counter[int]:
    """Of BEATS heartbeats those with which a relay is pinged that is sent something before each: so many
    seconds (heartbeats) earlier."""
    core = Core("d", 1, 0, Settings("run", 1, 1, 4, 100, neighbours=1), "other")
    peers = [f"r{n}" for n in range(relays)]
    members = (Member("d", 0, 1, "", 4), *(Member(peer, 1, 1, "", 4) for peer in peers))
    core.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    core.links = {peer: Silence(0.0, 1.0) for peer in peers}
    contacts = Contacts(core)
    near = sorted(core.near.all(0))[0]
    found: Counter[int] = Counter()
    for beat in range(BEATS):
        core.now = beat - earlier
        core.send(near, Want(core.fence(1, "base"), 0, False, 0), payload)
        core.effects.clear()
        core.now = float(beat)
        for silence in core.links.values():
            silence.heard(core.now)
        contacts.tick(0)
        sent = [effect for effect in core.effects if isinstance(effect, Send)]
        found[beat] += sum(isinstance(effect.message, Ping) and effect.peer == near for effect in sent)
    return +found


@pytest.mark.parametrize(("relays", "crowded"), [(2, False), (9, True)])
def test_in_a_large_swarm_no_ping_goes_where_something_was_said(relays: int, crowded: bool) -> None:
    assert pings(relays, None).total() == (BEATS // (LEFT_OUT + 1) if crowded else BEATS)


@pytest.mark.parametrize("earlier", [0.4, 0.6])
def test_what_was_said_long_ago_is_no_ping(earlier: float) -> None:
    """Whoever is told something early in a heartbeat, and nothing in the next, doubts the sender."""
    assert (pings(9, None, earlier).total() < BEATS) == (earlier < 0.5)


def test_what_takes_long_on_its_way_says_nothing() -> None:
    """A payload that is handed to a slow link with every heartbeat keeps nobody from thinking that the sender
    is gone: nothing of it is heard until it is there."""
    assert pings(9, b"an activation").total() == BEATS
