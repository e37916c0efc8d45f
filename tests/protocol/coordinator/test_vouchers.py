"""Proofs of joiners' states: which of them count for or against a joiner (R14)."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Fence, Vouch
from anabranch.protocol.state.vouchers import OLDEST, SEATED_S, SHOWN_WITHIN, SHOWN_WITHIN_S, Vouchers
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout


class Led:
    """Vouchers of a leader whose log is `length` entries long; replicas a, b and c serve stage 1, x joins."""

    def __init__(self) -> None:
        ctx = self.ctx = make_context("d", 1, 0, Settings("run", 1, 1, 4, 100), "d")
        joined = tuple(Member(name, int(name != "d"), 1, "", 4, name=name) for name in "dabcx")
        ctx.run.membership.apply(Members(1, joined=joined))
        ctx.run.membership.apply(Members(2, active_from=dict.fromkeys("dabc", 1)))
        ctx.run.membership.open(4, 1)
        Connections(ctx)
        for name in "abcx":
            ctx.links.up[name] = AdaptiveTimeout(0.0, 1.0)
        self.length = 10
        self.vouchers = Vouchers(ctx, lambda: self.length)

    def vouch(self, names: str, base: str, proof: str) -> None:
        for name in names:
            assert self.vouchers.on_vouch(name, Vouch(Fence(1, 1, 3, base, 1), 1, proof)) is None


def test_more_than_half_of_the_replicas_refute_a_proof() -> None:
    led = Led()
    led.vouchers.moved(3, "entry")
    led.vouch("a", "entry", "other")
    assert led.vouchers.proves(3, 1, "proof") is None
    led.vouch("b", "entry", "other")
    assert led.vouchers.proves(3, 1, "proof") is False
    led.vouch("c", "entry", "proof")
    assert led.vouchers.proves(3, 1, "proof") is True


def test_a_report_counts_against_a_joiner_once_it_has_followed_the_log_so_far() -> None:
    led = Led()
    led.vouchers.moved(3, "entry")
    led.vouchers.on_ready("x")
    assert led.vouchers.outdated("x", 3), "no heartbeat has come yet"
    led.vouchers.followed("x", 10)
    assert led.vouchers.outdated("x", 3), "its report came before that"
    led.vouchers.on_ready("x")
    assert not led.vouchers.outdated("x", 3)
    led.length = 12
    led.vouchers.moved(3, "return")  # the log went back
    assert led.vouchers.outdated("x", 3)
    led.vouchers.followed("x", 11)
    led.vouchers.on_ready("x")
    assert led.vouchers.outdated("x", 3)
    led.vouchers.followed("x", 12)
    led.vouchers.on_ready("x")
    assert not led.vouchers.outdated("x", 3)
    led.length = 13
    led.vouchers.moved(4, "next")
    assert not led.vouchers.outdated("x", 3) and led.vouchers.outdated("x", 4)


def test_only_heartbeats_of_joiners_are_noted() -> None:
    """A stranger's would fill the table; a new process under the same key begins anew."""
    led = Led()
    led.vouchers.moved(3, "entry")
    for name in ("a", "stranger"):
        led.vouchers.followed(name, 10)
        led.vouchers.on_ready(name)
        assert led.vouchers.outdated(name, 3)
    led.vouchers.followed("x", 10)
    led.vouchers.gone("x")
    led.vouchers.on_ready("x")
    assert led.vouchers.outdated("x", 3)


def test_the_initial_state_needs_no_proof_only_while_it_is_the_last() -> None:
    led = Led()
    led.vouchers.moved(0, "genesis")
    assert led.vouchers.proves(0, 1, "") is True
    led.vouchers.moved(1, "entry")
    assert led.vouchers.proves(0, 1, "") is None


def test_a_joiner_has_steps_and_time_to_show_its_proof() -> None:
    led = Led()
    led.vouchers.moved(3, "entry")
    for name in "axx":  # a serves already
        led.vouchers.on_ready(name)
    led.ctx.clock.now = SHOWN_WITHIN_S
    led.vouchers.moved(2 + SHOWN_WITHIN, "entry")
    assert not led.vouchers.overdue()
    led.vouchers.moved(3 + SHOWN_WITHIN, "entry")
    assert list(led.vouchers.overdue()) == ["x"]
    led.ctx.clock.now -= 1.0
    assert not led.vouchers.overdue()
    led.ctx.clock.now += 1.0
    led.vouchers.shown("x")
    assert not led.vouchers.overdue()


def test_the_time_of_a_joiner_out_of_reach_begins_anew() -> None:
    led = Led()
    led.vouchers.moved(3, "entry")
    led.vouchers.on_ready("x")
    led.ctx.clock.now = SHOWN_WITHIN_S
    led.vouchers.moved(3 + SHOWN_WITHIN, "entry")
    link = led.ctx.links.up.pop("x")
    assert not led.vouchers.overdue()
    led.ctx.links.up["x"] = link
    assert not led.vouchers.overdue()
    led.vouchers.moved(3 + 2 * SHOWN_WITHIN, "entry")
    led.ctx.clock.now *= 2.0
    assert list(led.vouchers.overdue()) == ["x"]


def test_a_joiner_that_never_reports_itself_ready_has_a_day() -> None:
    led = Led()
    led.vouchers.moved(3, "entry")
    assert not led.vouchers.overdue()
    led.ctx.clock.now = SEATED_S - 1.0
    assert not led.vouchers.overdue()
    led.ctx.clock.now = SEATED_S
    assert list(led.vouchers.overdue()) == ["x"], "a, b and c serve"
    led.vouchers.gone("x")
    assert not led.vouchers.overdue(), "a new process has a day of its own"


def test_a_joiner_that_showed_its_proof_may_wait() -> None:
    """It may be unable to reach a fellow, or the run may wait for peers of another stage."""
    led = Led()
    led.vouchers.moved(3, "entry")
    led.vouchers.shown("x")
    led.ctx.clock.now = 2.0 * SEATED_S
    assert not led.vouchers.overdue()


def test_a_state_is_too_old_if_its_joiner_knows_that() -> None:
    led = Led()
    led.vouchers.moved(3 + OLDEST, "entry")
    led.vouchers.moved(4 + OLDEST, "next")
    led.vouchers.on_ready("x")
    assert not led.vouchers.too_old("x", 3), "it may not have followed the log yet"
    led.vouchers.followed("x", led.length)
    led.vouchers.on_ready("x")
    assert led.vouchers.too_old("x", 3) and not led.vouchers.too_old("x", 4)
    assert not led.vouchers.too_old("a", 3), "it serves: its report is from before it knew that"


def test_the_proof_of_one_that_serves_soon_is_neither_refused_nor_counted() -> None:
    """A replica that serves from a later iteration reports its state like the others while a second joiner
    waits."""
    led = Led()
    led.vouchers.moved(3, "entry")
    assert led.vouchers.on_vouch("x", Vouch(Fence(1, 1, 3, "entry", 1), 1, "x")) is not None
    led.ctx.run.membership.apply(Members(3, active_from={"x": 5}))
    led.vouch("x", "entry", "x")
    assert led.vouchers.proves(3, 1, "x") is None
    led.vouchers.moved(4, "next")
    assert led.vouchers.on_vouch("x", Vouch(Fence(1, 1, 4, "next", 1), 1, "x")) is None
    assert led.vouchers.proves(4, 1, "x") is True
    assert led.vouchers.on_vouch("x", Vouch(Fence(1, 1, 4, "next", 1), 2, "x")) is not None


def test_the_proof_of_a_replica_that_was_moved_or_removed_meanwhile_is_neither_refused_nor_counted() -> None:
    """It sent the proof before it heard of that."""
    led = Led()
    led.vouchers.moved(3, "entry")
    led.ctx.run.membership.apply(
        Members(3, joined=(Member("a", 2, 1, "", 4),), removed={"a": "moves to stage 2", "b": "left"})
    )
    led.vouch("ab", "entry", "x")
    assert led.vouchers.proves(3, 1, "x") is None
    assert led.vouchers.on_vouch("c", Vouch(Fence(1, 1, 3, "entry", 1), 2, "x")) is not None
    assert led.vouchers.on_vouch("a", Vouch(Fence(1, 1, 3, "entry", 1), 2, "x")) is not None
