"""Heartbeats: the peers that are pinged, and those that were heard enough."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.failure_detection.connections import LOOKS, MEASURED, Connections
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Ping, Want
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout

BEATS = 16


def pings(relays: int, heard_every: float, payload: bytes | None = None) -> Counter[float]:
    """When (in heartbeats) a relay is pinged that is heard so often, and is sent something with each."""
    ctx = make_context("d", 1, 0, Settings("run", 1, 1, 4, 100, neighbours=1), "other")
    peers = [f"r{n}" for n in range(relays)]
    members = (Member("d", 0, 1, "", 4), *(Member(peer, 1, 1, "", 4) for peer in peers))
    ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    ctx.links.up = {peer: AdaptiveTimeout(0.0, 1.0) for peer in peers}
    connections = Connections(ctx)
    near = sorted(ctx.run.near.all(0))[0]
    found: Counter[float] = Counter()
    for look in range(LOOKS * BEATS):
        ctx.clock.now = look / LOOKS
        for peer, silence in ctx.links.up.items():
            if peer != near or ctx.clock.now % heard_every == 0.0:
                silence.heard(ctx.clock.now)
        ctx.outbox.send(near, Want(ctx.fence(1, "base"), 0, False, 0), payload)
        ctx.outbox.effects.clear()
        if ctx.clock.now >= connections.deadline():
            connections.tick(0)
        sent = [effect for effect in ctx.outbox.effects if isinstance(effect, Send)]
        found[ctx.clock.now] += sum(
            isinstance(effect.message, Ping) and effect.peer == near for effect in sent
        )
    return +found


@pytest.mark.parametrize(("relays", "crowded"), [(2, False), (9, True)])
def test_in_a_large_swarm_no_ping_goes_to_whom_one_hears(relays: int, crowded: bool) -> None:
    assert pings(relays, 0.5).total() == (BEATS // MEASURED if crowded else BEATS)


@pytest.mark.parametrize("payload", [None, b"an activation"])
def test_who_is_silent_for_a_heartbeat_is_pinged_whatever_it_is_sent(payload: bytes | None) -> None:
    """And so often that it has answered before it is doubted."""
    pinged = pings(9, 1e9, payload)
    assert pinged.total() >= BEATS - 1
    between = [later - earlier for earlier, later in zip(pinged, list(pinged)[1:], strict=False)]
    assert max(between) <= 1.0 < AdaptiveTimeout(0.0, 1.0).doubted_at()


def test_a_neighbour_is_dialled_again_by_one_that_keeps_the_log_no_longer() -> None:
    names = [f"r{n}" for n in range(12)]
    me = names[-1]
    ctx = make_context(me, 1, 1, Settings("r", 1, 1, 4, 9, neighbours=2, voters=3), "d")
    connections = Connections(ctx)
    members = [Member(n, 0, 1, "", 1, name=n, address=f"{n}:1") for n in ("d", "e")]
    members += [Member(n, 1, 1, "", 1, name=n, address=f"{n}:1") for n in names]
    ctx.run.membership.apply(Members(1, tuple(members), {member.id: 1 for member in members}))
    ctx.run.membership.open(1, 1)
    ctx.log.leader, ctx.log.voters, ctx.clock.now = "d", ("d/", "e/", f"{me}/"), 10.0
    for peer in [*names[:-1], "d", "e"]:
        connections.link_up(peer)
    connections.tick(0)
    ctx.log.elect(("d/", "e/", "r0/"))
    connections.connect()
    near = sorted(ctx.run.near.all(1) - {me, "r0", "d", "e"})
    other = next(peer for peer in near if ctx.run.membership.dials(me, peer))
    ctx.clock.now += 0.3
    connections.link_down(other)
    connections.redial(other)
    assert ctx.run.near.crowded and other in ctx.dialer.dialled


def test_a_hurried_heartbeat_goes_to_all() -> None:
    ctx = make_context("d", 1, 0, Settings("run", 1, 1, 4, 100, neighbours=1), "other")
    peers = [f"r{n}" for n in range(12)]
    members = (Member("d", 0, 1, "", 4), *(Member(peer, 1, 1, "", 4) for peer in peers))
    ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    ctx.links.up = {peer: AdaptiveTimeout(0.0, 1.0) for peer in peers}
    connections = Connections(ctx)
    connections.tick(0)
    ctx.clock.now = 0.2
    for silence in ctx.links.up.values():
        silence.heard(ctx.clock.now)
    ctx.outbox.effects.clear()
    connections.hurry()
    connections.tick(0)
    pinged = {effect.peer for effect in ctx.outbox.effects if isinstance(effect, Send)}
    assert ctx.run.near.crowded and pinged >= ctx.run.near.all(0) - {"d"}


def test_the_silence_of_a_peer_that_nobody_pings_teaches_no_patience() -> None:
    """A partner of reduces, heard once a round and watched only while a reduce may wait for it."""
    ctx = make_context("r0", 1, 1, Settings("run", 1, 1, 4, 100, neighbours=1), "d")
    peers = [f"r{n}" for n in range(12)]
    members = (Member("d", 0, 1, "", 4), *(Member(peer, 1, 1, "", 4) for peer in peers))
    ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    ctx.run.membership.open(1, 1)
    waited: set[str] = set()
    ctx.links.register_user(lambda: peers, lambda: waited)
    connections = Connections(ctx)
    for peer in peers[1:]:
        connections.link_up(peer)
    connections.tick(0)
    other = next(peer for peer in peers[1:] if peer not in ctx.run.near.all(1))
    patience_s = ctx.links.up[other].patience_s
    for round_ in range(1, 5):
        ctx.clock.now = 400.0 * round_
        connections.heard(other)
    assert ctx.run.near.crowded and ctx.links.up[other].patience_s == patience_s
    waited.add(other)
    ctx.clock.now += 100.0
    connections.tick(0)
    assert ctx.links.up[other].last_heard == ctx.clock.now, "its silence begins with its watch"
    for _ in range(8):
        ctx.clock.now += 1.5
        connections.heard(other)
    assert ctx.links.up[other].patience_s > patience_s
