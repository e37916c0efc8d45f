"""Addresses at which a peer dials another through carriers: every address of a carrier counts."""

from __future__ import annotations

from anabranch.addresses import MOST_ADDRESSES, MOST_DIALLED, parse_addresses
from anabranch.protocol.context.carriers import ADDRESSES_TRIED
from anabranch.protocol.context.links import LATE_S
from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.carrier_list import CarrierList
from anabranch.protocol.interface.events import Dial, VerifiedCredential
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.protocol.telemetry.peer_costs import Neighbour

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


def test_a_dial_through_carriers_tries_all_addresses_of_the_peer_too() -> None:
    """A peer that did not answer once may be there again, at any of them. No dial has more addresses than
    the driver takes: it would be refused as malformed, each time anew, and the peer never reached."""
    own = [f"far{number}.example:1" for number in range(MOST_ADDRESSES)]
    theirs = [",".join(f"{name}{number}.example:1" for number in range(MOST_ADDRESSES)) for name in "lo"]
    ctx = context(theirs[0], ",".join(own), theirs[1])
    dialled = ctx.dialer.addresses(FAR, again=True)
    addresses = parse_addresses(dialled, MOST_DIALLED)
    assert dialled.split(",")[:MOST_ADDRESSES] == own
    assert len(addresses) == MOST_ADDRESSES + ADDRESSES_TRIED <= MOST_DIALLED


def carried(ctx: PeerContext) -> list[str]:
    """Hosts of the carriers through which the next dial to FAR goes."""
    addresses = parse_addresses(ctx.dialer.addresses(FAR, again=True), MOST_DIALLED)
    return [address.host for address in addresses if address.carrier]


def test_suspected_carriers_are_tried_last() -> None:
    ctx = context("l1.example:1", "", "o1.example:1")
    assert carried(ctx) == ["o1.example", "l1.example"]  # the log's leader after others
    ctx.links.opened(FAR, 1)
    ctx.links.suspects.add(OTHER)
    assert carried(ctx) == ["l1.example", "o1.example"]


def test_a_suspicion_of_the_only_carrier_does_not_end_the_dials() -> None:
    """Nothing would begin them again before the next change of the members."""
    ctx = context("l1.example:1", "")
    ctx.links.suspects.add(LEADER)
    ctx.dialer.plan(FAR)
    ctx.clock.now = ctx.dialer.deadline()
    ctx.dialer.tick()
    assert ctx.outbox.effects == [Dial(FAR, f"l1.example:1/{LEADER}")]
    assert FAR in ctx.dialer.dialled


def test_carriers_that_never_answer_do_not_keep_others_from_being_tried() -> None:
    """Anybody with a relay ticket can offer some. After a link all counts begin anew."""
    ctx = context("l1.example:1", "", "o1.example:1")
    ctx.run.carriers = {number * 64: f"c{number}.example:1" for number in "12345"}
    first, second, third = carried(ctx), carried(ctx), carried(ctx)
    assert len({*first, *second, *third}) == 7 and len(first) == len(second) == 3
    assert {"l1.example", "o1.example"} <= {*second, *third}
    ctx.links.opened(FAR, 1, NEAR)
    assert carried(ctx) == first


def test_a_carrier_at_no_plain_address_spoils_no_dial() -> None:
    ctx = context("l1.example:1", "")
    ctx.run.carriers = {"1" * 64: "c1.example:1/iroh", "2" * 64: "c2.example:1/udp,c2.example:2"}
    assert carried(ctx) == ["c2.example", "l1.example"]
    offers = CarrierList(ctx, {})
    assert offers.offered("3" * 64, "c3.example:1/iroh") is not None and offers.record() is None
    assert offers.offered("3" * 64, "c3.example:1") is None


def test_one_ticket_leaves_places_for_carriers_of_others() -> None:
    """Sixteen keys by one ticket were all the carriers of a run: the owner's own found no place."""
    ctx = context("l1.example:1", "")
    credentials = {f"{k:064}": VerifiedCredential("relay", 1 << 40, "guest") for k in range(20)}
    offers = CarrierList(ctx, credentials | {"o" * 64: VerifiedCredential("relay", 1 << 40, "other")})
    for peer in credentials:
        offers.offered(peer, "c.example:1")
        record = offers.record()
        ctx.run.carriers = ctx.run.carriers if record is None else record.addresses
    assert len(ctx.run.carriers) == 4
    assert "by this ticket" in (offers.offered(f"{19:064}", "c.example:1") or "")
    assert offers.offered(f"{0:064}", "d.example:1") is None  # a listed one may move
    assert offers.offered("o" * 64, "c.example:1") is None


def test_counts_about_carriers_end_with_the_member() -> None:
    ctx = context("l1.example:1", "")
    carried(ctx)
    ctx.links.opened(FAR, 1, LEADER)
    ctx.links.drop(FAR)
    carried(ctx)
    assert ctx.links.tried_carriers and ctx.links.broken_circuits
    Connections(ctx).forget(FAR)
    assert not ctx.links.tried_carriers and not ctx.links.broken_circuits


def test_a_carrier_that_a_peer_names_at_two_addresses_is_dialled_at_both() -> None:
    """A leader at home names its carrier's addresses of both IP versions; it may have a route to one only."""
    ctx = context("l1.example:1", "", near=f"[fd00:77::1]:7700/{CARRIER},10.78.0.1:7700/{CARRIER}")
    assert ctx.dialer.carriers.listed() == {CARRIER: "[fd00:77::1]:7700,10.78.0.1:7700"}
    assert ctx.dialer.addresses(CARRIER) == "[fd00:77::1]:7700,10.78.0.1:7700"


def test_dedicated_carriers_have_links_with_members_that_can_be_dialled_too() -> None:
    """Somebody whose firewall lets out the carrier's port alone reaches them there. In a large swarm no
    carrier could hold so many links, and only those that a member's own addresses name are kept."""
    listed = {CARRIER: "my.example:443"}
    ctx = context("l1.example:1", "", near=f"10.78.0.2:1,own.example:443/{OTHER}")
    ctx.run.use_carriers(listed)
    assert ctx.dialer.carriers.listed() == {OTHER: "own.example:443", **listed}
    ctx.run.near._crowded = True
    assert ctx.dialer.carriers.listed() == {OTHER: "own.example:443"}


def lose(ctx: PeerContext, *numbers: int) -> None:
    """Activations of these numbers, sent to FAR through LEADER, do not come."""
    for number in numbers:
        ctx.links.payload_late(FAR, ("activation", 1, number, number), LATE_S)


def left(ctx: PeerContext) -> list[str]:
    return [peer for peer, _ in Connections(ctx).leave_lossy()]


def test_one_payload_that_is_asked_after_twice_is_one() -> None:
    ctx = context("l1.example:1", "", "o1.example:1")
    ctx.links.opened(FAR, 1, LEADER)
    lose(ctx, 1, 1, 1)
    assert not left(ctx)
    lose(ctx, 2)
    assert left(ctx) == [FAR]


def test_a_payload_that_came_speaks_for_those_before_it() -> None:
    """Payloads of a link arrive in order; a peer that wakes takes them all."""
    ctx = context("l1.example:1", "", "o1.example:1")
    ctx.links.opened(FAR, 1, LEADER)
    for number in range(4):
        lose(ctx, number)
        ctx.links.payloads_come(FAR)
    assert not left(ctx)


def test_the_only_carrier_is_not_left_for_payloads_that_do_not_come() -> None:
    """Made again through the same carrier, the link would begin the payloads anew, and be closed again."""
    ctx = context("l1.example:1", "")
    ctx.links.opened(FAR, 1, LEADER)
    lose(ctx, 1, 2)
    assert not left(ctx) and not ctx.links.lossy


def test_a_carrier_is_not_left_for_those_that_failed_before() -> None:
    ctx = context("l1.example:1", "", "o1.example:1")
    ctx.links.opened(FAR, 1, OTHER)
    ctx.links.drop(FAR)
    ctx.links.opened(FAR, 1, LEADER)
    lose(ctx, 1, 2)
    assert not left(ctx)


def test_a_slow_line_has_time_before_its_first_measurement() -> None:
    """4 MB take 64 s at 0.5 Mbit/s, and no measurement is made before they are whole."""
    assert Neighbour().most_s(4e6, 4_000_000) >= 64.0


def test_a_slow_line_is_not_taken_for_a_carrier_that_swallows_at_each_one() -> None:
    """4 MB take 320 s at 0.1 Mbit/s, the least that is believed. Each carrier that is left makes the time for
    the next twice as long, up to that bandwidth: at a quarter of it as where one is measured."""
    ctx = context("l1.example:1", "", "o1.example:1")
    ctx.run.carriers = {number * 64: f"c{number}.example:1" for number in "12345"}
    allowed_s = []
    for via in (LEADER, OTHER, *ctx.run.carriers):
        ctx.links.opened(FAR, 1, via)
        allowed_s.append(ctx.costs.of(FAR).most_s(4e6, 4_000_000))
        lose(ctx, 1, 2)
        assert left(ctx) == ([FAR] if len(allowed_s) < 7 else [])
        ctx.links.drop(FAR)
    assert allowed_s[:3] == [128.0, 256.0, 512.0] and allowed_s[-1] == 1280.0
