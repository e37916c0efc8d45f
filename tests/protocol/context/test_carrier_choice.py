"""Addresses at which a peer dials another through carriers: every address of a carrier counts."""

from __future__ import annotations

from anabranch.addresses import MOST_ADDRESSES, parse_addresses
from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member

LEADER, OTHER, NEAR, FAR, CARRIER = (letter * 64 for letter in "abcde")


def context(leader: str, far: str, other: str = "", near: str = "10.78.0.2:1") -> PeerContext:
    """Context of relay NEAR, of a run with data nodes LEADER and OTHER and relay FAR, at these addresses."""
    ctx = make_context(NEAR, 1, 1, Settings("run", 1, 2, 1, 1), LEADER)
    stages = {LEADER: (0, leader), OTHER: (0, other), NEAR: (1, near), FAR: (2, far)}
    members = [
        Member(peer, stage, 1, "class", 4, address=address)
        for peer, (stage, address) in stages.items()
        if address or peer == FAR
    ]
    ctx.run.membership.enter(members, dict.fromkeys(stages, 1), 1)
    return ctx


def test_a_carrier_of_two_addresses_is_tried_at_both() -> None:
    """A carrier that lists its IPv6 address first is reached by a machine that has IPv4 only."""
    ctx = context("[fd00:77::1]:7700,10.78.0.1:7700", "[fd00:77::3]:1")
    assert ctx.dialer.addresses(FAR) == "[fd00:77::3]:1"
    assert ctx.dialer.addresses(FAR, again=True).split(",") == [
        "[fd00:77::3]:1",
        f"[fd00:77::1]:7700/{LEADER}",
        f"10.78.0.1:7700/{LEADER}",
    ]


def test_each_carrier_is_tried_before_the_second_address_of_any() -> None:
    ctx = context("l1.example:1,l2.example:1,l3.example:1", "", "o1.example:1,o2.example:1")
    hosts = [address.host for address in parse_addresses(ctx.dialer.addresses(FAR))]
    assert sorted(hosts[:2]) == ["l1.example", "o1.example"]
    assert sorted(hosts[2:4]) == ["l2.example", "o2.example"]
    assert hosts[4:] == ["l3.example"]


def test_no_dial_has_more_addresses_than_a_peer_may() -> None:
    """A dial with more would be refused as malformed, each time anew, and the peer never reached."""
    own = ",".join(f"far{number}.example:1" for number in range(MOST_ADDRESSES))
    ctx = context("l1.example:1,l2.example:1", own)
    addresses = parse_addresses(ctx.dialer.addresses(FAR, again=True))
    assert len(addresses) == MOST_ADDRESSES
    assert [address.host for address in addresses if address.carrier] == ["l1.example", "l2.example"]


def test_a_carrier_that_a_peer_names_at_two_addresses_is_dialled_at_both() -> None:
    """A leader at home names its carrier's addresses of both IP versions; it may have a route to one only."""
    ctx = context("l1.example:1", "", near=f"[fd00:77::1]:7700/{CARRIER},10.78.0.1:7700/{CARRIER}")
    assert ctx.dialer.carriers.listed() == {CARRIER: "[fd00:77::1]:7700,10.78.0.1:7700"}
    assert ctx.dialer.addresses(CARRIER) == "[fd00:77::1]:7700,10.78.0.1:7700"
