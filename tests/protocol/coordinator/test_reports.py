"""Reports of overflows at the coordinator: whose words skip a step (R8)."""

from __future__ import annotations

from typing import cast

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.reports import ONE_SOURCE_STALLS, Reports
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.coordinator.step_receipts import StepReceipts
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.fleet.operator_control import RevocationRequests
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Claim, Fence, Overflow
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from support.admission import DATA_TICKETS

T, BASE, INDEX = 6, "entry", 2


class Led:
    """Run of two stages led by d0, in iteration T. names: relays, whose stage is the digit in the name."""

    def __init__(self, names: str) -> None:
        self.names, self.number = names.split(), 2
        ctx = self.ctx = make_context("d0", 1, 0, Settings("run", 1, 2, 4, 100), "d0")
        self.membership = ctx.run.membership
        joined = (Member("d0", 0, 1, "", 4), *(Member(p, int(p[1]), 1, "", 4) for p in self.names))
        self.membership.apply(Members(1, joined=joined))
        self.membership.apply(Members(2, active_from={member.id: 1 for member in joined}))
        self.membership.open(T, 2)
        for name in self.names:
            ctx.links.up[name] = AdaptiveTimeout(0.0, 1.0)
        admission = Admission(ctx, Connections(ctx), "", "", "", print, DATA_TICKETS, lambda *_: None)
        tip = LogTip(ctx)
        tip.move(T - 1, BASE, T - 1, ())
        tip.round = self.round = Round(T, BASE, 0.0)
        receipts = StepReceipts(ctx, admission, Convictions(ctx, RevocationRequests(ctx).revoke))
        self.admission = admission
        self.reports = Reports(ctx, tip, admission, receipts, cast(ReduceAttempts, None))

    def says(self, peer: str, sender: str = "") -> bool:
        """Report of `peer` that a microbatch overflowed with an input of `sender`; True if that skips the
        step."""
        stage = int(peer[1])
        fence = Fence(1, 1, T, BASE, stage)
        assert self.reports.on_overflow(peer, Overflow(fence, stage, INDEX, "wq", sender)) is None
        return self.round.witness is not None

    def changes(self, removed: str = "", joined: str = "", stage: int = 1) -> None:
        self.number += 2
        members = (Member(joined, stage, 1, "", 4),) if joined else ()
        gone = {removed: "left"} if removed else {}
        self.membership.apply(Members(self.number - 1, removed=gone, joined=members))
        self.membership.apply(Members(self.number, active_from={joined: T} if joined else {}))


def test_the_word_of_one_that_left_does_not_count() -> None:
    """It leaves, and comes back with another key."""
    led = Led("h1a h1b z1a h2a")
    assert not led.says("z1a")
    led.changes(removed="z1a", joined="z1b")
    assert not led.says("z1b")
    led.round.stalls = ONE_SOURCE_STALLS
    led.changes(removed="z1b")
    led.reports.take_unanswered(led.round)
    assert led.round.witness is None
    assert not led.says("h1a") and led.says("h1b")


def test_not_all_that_alone_find_overflows_lose_their_seats_at_once() -> None:
    """Two data nodes that overflow in turn: each is the only one that can tell."""
    led, peers = Led("h1a h1b h2a"), ("h1a", "h1b")
    led.round.stalls = ONE_SOURCE_STALLS
    for t, peer in enumerate(2 * peers):
        assert not led.reports._is_doubted(peer, t)
    for index, peer in enumerate(peers):
        led.reports.on_overflow(peer, Overflow(Fence(1, 1, T, BASE, 1), 1, index, "wq", ""))
    led.reports.take_unanswered(led.round)
    assert list(led.admission.going()) == ["h1a"]
    assert led.round.witness is not None and led.round.witness.peer == "h1b"


def test_who_reports_first_what_all_find_with_inputs_of_half_a_stage_keeps_its_seat() -> None:
    """A true overflow of a stage after four relays, of which two sent inputs before the step stalled."""
    led = Led("h1a h1b h2a h2b h2c h2d")
    for _ in range(4):
        led.round.witness = None
        assert not any(led.says(peer, sender) for peer in ("h1a", "h1b") for sender in ("h2a", "h2b"))
        led.round.stalls = ONE_SOURCE_STALLS
        led.reports.take_unanswered(led.round)
        assert led.round.witness is not None and not led.admission.going()
        led.reports._alone = {k - 1: peer for k, peer in led.reports._alone.items()}


def test_one_whose_fellow_has_lost_its_link_for_a_moment_decides_nothing() -> None:
    led = Led("h1a z1a h2a h2b")
    del led.ctx.links.up["h1a"]
    assert not led.says("z1a")
    led = Led("h1a h1b h2a z2a")
    del led.ctx.links.up["h2a"]
    assert not (led.says("h1a", "z2a") or led.says("h1b", "z2a"))


def test_a_sender_counts_as_one_source_though_it_left_or_moved() -> None:
    for joined in ("", "z2a"):
        led = Led("h1a h1b h2a z2a")
        led.changes(removed="z2a", joined=joined, stage=1)
        assert not (led.says("h1a", "z2a") or led.says("h1b", "z2a"))
        assert led.says("h1b", "h2a") or led.says("h1a", "h2a")


def test_few_that_name_another_sender_do_not_clear_a_forger() -> None:
    led = Led("h1a h1b z1a h2a z2a")
    assert not any(led.says(*each) for each in (("h1a", "z2a"), ("h1b", "z2a"), ("z1a", "h2a"), ("z1a", "")))
    led.round.stalls = ONE_SOURCE_STALLS
    led.reports.take_unanswered(led.round)
    assert led.round.witness is not None  # nobody computed it for long


def test_an_overflow_that_comes_with_two_senders_is_believed() -> None:
    for names, said in (
        ("h1a h2a h2b", ["h1a h2a", "h1a h2b"]),
        ("h1a h1b h2a h2b", ["h1a h2a", "h1b h2a", "h1b h2b"]),
        ("h1a h1b h1c h2a h2b", ["h1a h2a", "h1b h2a", "h1b h2b", "h1a h2b"]),
        ("h1a h1b h2a", ["h1a h2a", "h1b h2a"]),  # no other relay could send it
    ):
        led, words = Led(names), [each.split() for each in said]
        assert [led.says(*each) for each in words] == [False] * (len(words) - 1) + [True]


def test_what_members_name_as_senders_takes_no_memory() -> None:
    led = Led("z1a h1a h2a h2b")
    for number in range(1000):
        led.says("z1a", f"nobody {number}")
    assert led.round.sources[1, INDEX] == {"z1a": [""]}


def test_a_claim_of_nothing_brings_the_hash_of_the_batch_and_is_none() -> None:
    """A stop ends the open iteration at once while nothing of it is claimed."""
    led = Led("a1 a2")
    assert led.reports.on_claim("d0", Claim(Fence(1, 1, T, BASE, 0), 0, (), manifest="hash")) is None
    assert led.round.manifest == "hash" and not led.round.claims
