"""Members that a carrier links are dialled at their own addresses again, now and then."""

from __future__ import annotations

import itertools

import pytest

from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.failure_detection.connections import DIRECT_MAX_S, DIRECT_S, Connections
from anabranch.protocol.interface.events import Dial
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members

LEADER, ME, OTHER, CARRIER = (letter * 64 for letter in "abcd")


def context(address: str, mine: str = "") -> PeerContext:
    """Context of relay ME, which joined last, beside relay OTHER at `address`."""
    ctx = make_context(ME, 1, 1, Settings("run", 1, 2, 1, 9), LEADER)
    stages = {LEADER: (0, "leader:1"), OTHER: (2, address), ME: (1, mine)}
    members = tuple(Member(peer, stage, 1, "", 4, address=at) for peer, (stage, at) in stages.items())
    ctx.run.membership.apply(Members(1, members, dict.fromkeys(stages, 1)))
    return ctx


def dials(connections: Connections, until_s: float, step_s: float = 10.0) -> list[tuple[float, str]]:
    """Time and addresses of each dial of OTHER, of iterations that begin each `step_s` from now on."""
    ctx, found = connections.ctx, []
    while ctx.clock.now < until_s:
        ctx.outbox.effects.clear()
        connections.seek_direct()
        for effect in ctx.outbox.effects:
            assert isinstance(effect, Dial) and effect.peer == OTHER
            found.append((ctx.clock.now, effect.address))
        ctx.clock.now += step_s
    return found


def test_a_carried_member_is_dialled_at_its_own_addresses_ever_more_rarely() -> None:
    """Its own addresses of all kinds, and none of a carrier."""
    ctx = context(f"far:1,relay:2/iroh,carrier:3/{CARRIER}")
    ctx.links.opened(OTHER, 1, CARRIER)
    times = dials(Connections(ctx), 5000.0)
    assert {address for _, address in times} == {"far:1,relay:2/iroh"}
    starts = [at for at, _ in times]
    assert starts[0] == DIRECT_S
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert pauses == [min(DIRECT_S * 2 ** (n + 1), DIRECT_MAX_S) for n in range(len(pauses))]
    assert pauses[-1] == DIRECT_MAX_S


def test_a_link_that_falls_back_to_a_carrier_is_not_tried_at_once_again() -> None:
    """A way that lets a handshake pass and nothing else would cost the link again and again."""
    ctx = context("far:1")
    connections = Connections(ctx)
    ctx.links.opened(OTHER, 1, CARRIER)
    assert [at for at, _ in dials(connections, 100.0)] == [60.0]
    ctx.links.opened(OTHER, 1)
    assert dials(connections, 150.0) == []
    ctx.links.opened(OTHER, 1, CARRIER)
    assert [at for at, _ in dials(connections, 500.0)] == [180.0, 420.0]
    connections.forget(OTHER)
    ctx.links.opened(OTHER, 2, CARRIER)
    assert [at for at, _ in dials(connections, 570.0)] == [560.0]  # another membership: from the beginning


@pytest.mark.parametrize(
    ("address", "mine", "via"),
    [
        ("far:1", "", ""),  # direct already
        ("far:1", "", "iroh"),  # iroh looks for the better way itself
        ("", "", CARRIER),
        (f"carrier:3/{CARRIER}", "", CARRIER),
        (f"carrier:3/{CARRIER}", "me:1", CARRIER),  # the other one dials
    ],
)
def test_nobody_else_is_dialled(address: str, mine: str, via: str) -> None:
    ctx = context(address, mine)
    ctx.links.opened(OTHER, 1, via)
    assert dials(Connections(ctx), 500.0) == []
