"""Budgets and bans by peer, ticket and address block: a new key does not start afresh (I7)."""

from __future__ import annotations

import pytest

from anabranch.addresses import foreign_block_of
from anabranch.protocol import messages as msg
from anabranch.protocol.context.rate_limits_and_bans import BAN_S, LONGEST_BAN_S, REFUSALS, SHARED, RateLimits
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.peer.peer import Peer

TICKET, BLOCK = "ab" * 32, "198.51.100.0/24"


def test_strangers_share_the_allowance_of_their_ticket() -> None:
    """Many keys have no more together than SHARED peers; a member still has its own."""
    limits = RateLimits(lambda peer: peer == "member")
    burst = REFUSALS.burst
    for key in range(100):
        limits.came_with(f"key {key}", TICKET, "")
    taken = sum(limits.charge(f"key {key}", REFUSALS, 0.0) for key in range(100) for _ in range(int(burst)))
    assert taken == SHARED * burst
    limits.came_with("member", TICKET, "")
    assert limits.charge("member", REFUSALS, 0.0)
    limits.came_with("else", "cd" * 32, "")
    assert limits.charge("else", REFUSALS, 0.0)


@pytest.mark.parametrize("shared", [(TICKET, ""), ("", BLOCK)])
def test_a_ban_outlives_a_new_key(shared: tuple[str, str]) -> None:
    limits = RateLimits(lambda peer: peer == "member")
    for peer in ("eve", "eve again", "member"):
        limits.came_with(peer, *shared)
    limits.ban("eve", 0.0)
    assert limits.banned("eve again", BAN_S - 1.0)
    assert not limits.banned("member", BAN_S - 1.0) and not limits.banned("bob", BAN_S - 1.0)
    assert not limits.banned("eve again", BAN_S)
    limits.ban("eve again", BAN_S)
    assert limits.banned("eve", 3 * BAN_S - 1.0), "the second ban of a ticket is twice as long"
    for number in range(40):
        limits.ban(f"key {number}", 0.0)
        limits.came_with(f"key {number}", *shared)
        limits.ban(f"key {number}", 0.0)
    assert limits.banned("eve", LONGEST_BAN_S - 1.0) and not limits.banned("eve", LONGEST_BAN_S)


def hung_up(effects: list[ev.Effect]) -> set[str]:
    return {effect.peer for effect in effects if isinstance(effect, ev.HangUp)}


def test_a_peer_bans_the_ticket_of_a_flooder_and_members_keep_their_seats() -> None:
    peer = Peer("a", 1, "a", Settings("flood", 1, 1, 2, 3))
    peer.ctx.run.membership.apply(Members(1, joined=(Member("ada", 1, 1, "class", 2, ticket=TICKET),)))
    shown = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, TICKET)
    for who in ("ada", "eve"):
        assert not hung_up(peer.handle(ev.LinkUp(who, 1, shown), 0.0))
    effects: list[ev.Effect] = []
    for _ in range(1000):
        effects += peer.handle(ev.Received("eve", msg.Wish("pause")), 0.1)
    assert hung_up(effects) == {"eve"}
    assert hung_up(peer.handle(ev.LinkUp("mallory", 1, shown), 1.0)) == {"mallory"}
    assert not hung_up(peer.handle(ev.LinkUp("ada", 1, shown), 1.0))
    other = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S, "cd" * 32)
    assert not hung_up(peer.handle(ev.LinkUp("bob", 1, other), 1.0))
    assert not hung_up(peer.handle(ev.LinkUp("mallory", 1, shown), 0.1 + BAN_S))


@pytest.mark.parametrize(
    ("host", "block"),
    [
        ("127.0.0.1", ""),
        ("::1", ""),
        ("", ""),
        ("198.51.100.7", BLOCK),
        ("::ffff:198.51.100.7", BLOCK),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
    ],
)
def test_blocks_of_addresses(host: str, block: str) -> None:
    assert foreign_block_of(host) == block
