"""A joiner's stage by links, attacked: what a peer says of itself and of its links, and a swarm in need."""

from __future__ import annotations

import math

import msgspec
import pytest

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Applied, Fence, JoinRequest, Ready, decode, encode
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.protocol.telemetry.link_table import LinkMeasurements
from support.admission import leading, swarm_of_two, told


def asks(admission: Admission, joiner: Member, peer: str = "new") -> int:
    """The stage that it is given; its request comes over a wire."""
    request = decode(encode(JoinRequest(joiner, -1, PROTOCOL_VERSION, "", "")))
    assert isinstance(request, JoinRequest)
    assert admission.on_join(peer, request) is None
    record = admission.change()
    assert record is not None
    return record.joined[0].stage


def test_without_a_data_node_a_joiner_is_given_a_stage() -> None:
    """The only data node is gone, a relay keeps the log and leads; the run waits for the data node, and
    meanwhile a relay comes that asks for any stage."""
    admission = leading("a")
    admission.ctx.run.membership.apply(Members(2, removed={"d0": "gone"}))
    admission.ways.removed("d0")
    assert asks(admission, Member("new", 0, 1, "class", 8, "new", "west", "", 0.01)) in (1, 2)


def test_who_asks_under_the_id_of_another_is_taken_for_itself() -> None:
    """The id in the request is what it says of itself; the connection has proved another."""
    admission = leading()
    assert asks(admission, Member("d0", 0, 1, "class", 8, "new", "west", "", 0.01)) == 2


@pytest.mark.parametrize("absurd", [math.inf, math.nan])
def test_an_absurd_speed_in_the_log_is_no_harm_to_those_who_come_later(absurd: float) -> None:
    """A member of stage 1 claims an infinite time, or no number: a joiner is still given a stage."""
    admission = leading()
    bad = Member("bad", 1, 1, "class", 8, "bad", "east", "", absurd)
    admission.ctx.run.membership.apply(Members(2, joined=(bad,)))
    assert asks(admission, Member("new", 0, 1, "class", 8, "new", "west", "", 0.01)) in (1, 2)


def test_what_a_member_tells_of_strangers_is_not_remembered() -> None:
    """Every report of a step may name thousands; no two reports the same. What is kept of one peer is
    bounded by how many members there are."""
    admission = leading()
    for report in range(20):
        links = {f"{report}.{n}": (0.1, 1e6) for n in range(1000)}
        message = decode(encode(Applied(Fence(1, 1, 1, "", 1), 1, "", {}, links)))
        assert isinstance(message, Applied)
        admission.ways.told("a", message.links)
    kept = sum(map(len, admission.ways._latency_s.values()))
    assert kept <= 1000 + 20, f"{kept} links are remembered of one peer and four others"


def test_one_liar_does_not_say_what_is_usual() -> None:
    """Links between regions that nobody measured count as the median of all: a member that makes up
    thousands of peers must not decide alone what that is, and what is near."""
    members = swarm_of_two()
    regions = {member.id: member.region for member in members} | {"x": "south", "y": "south", "z": "north"}
    honest, lied = LinkMeasurements(), LinkMeasurements()
    for ways in (honest, lied):
        told(ways, members, {member.id: member.region for member in members})
    lied.told("e", {f"made up {n}": (1e-12, 1e17) for n in range(1000)})
    for one, other in (("x", "z"), ("x", "y")):
        true, false = honest.between(regions), lied.between(regions)
        assert true is not None and false is not None
        assert false(one, other).latency_s == pytest.approx(true(one, other).latency_s)
        assert false(one, other).bandwidth_bps == pytest.approx(true(one, other).bandwidth_bps)


def test_who_is_a_member_already_is_welcomed_without_a_search() -> None:
    """It asks again, for it has not heard of its admission: its stage stands. (The search takes seconds of
    the leader's time in a swarm of some hundred.)"""
    admission = leading()
    known = admission.ctx.run.membership.members["a"]
    searched: list[str] = []
    between = admission.ways.between
    admission.ways.between = lambda regions: (searched.append("again"), between(regions))[1]  # type: ignore[method-assign]
    request = JoinRequest(msgspec.structs.replace(known, stage=0), -1, PROTOCOL_VERSION, "", "")
    assert admission.on_join("a", request) is None
    assert searched == []


def test_who_is_waited_for_and_is_apart_by_now_does_not_serve() -> None:
    """It was ready when the run waited for others; now it cannot reach one of its stage."""
    admission = leading()
    ctx = admission.ctx
    ctx.links.up["a"] = AdaptiveTimeout(0.0, 1.0)
    ctx.run.membership.apply(Members(2, joined=(Member("new", 1, 1, "class", 8),)))
    ctx.run.membership.open(4, 2)
    assert admission.on_ready("new", Ready(2, 1, "two"), "two", True) is None
    assert admission.change() is None
    assert admission.on_ready("new", Ready(3, 1, "three", ("a",)), "three", True) is None
    assert admission.change(lambda stage, t: 5) is None


@pytest.mark.parametrize("bandwidth_bps", [None, 5e6, 1e6, 1e5, 1e-17])
def test_one_thin_line_does_not_draw_all_who_come(bandwidth_bps: float | None) -> None:
    """A member of stage 2 says that its uplink is thin, truly (a home line) or not. It has its whole sum to
    send, however many share the reduce: more members there shorten nothing. Of a dozen who come, all alike,
    each stage is given its part."""
    admission = leading()
    membership = admission.ctx.run.membership
    if bandwidth_bps is not None:
        admission.ways.told("e", {other: (0.02, bandwidth_bps) for other in ("a", "b", "c", "d0")})
    given = []
    for number in range(12):
        name, region = f"new{number}", ("east", "west")[number % 2]
        stage = asks(admission, Member(name, 0, 1, "class", 8, name, region, "", 0.01), name)
        given.append(stage)
        joined = Member(name, stage, 1, "class", 8, name, region, "", 0.01)
        membership.apply(Members(membership.number + 1, joined=(joined,)))
    assert min(given.count(1), given.count(2)) >= 3, given
