"""Dial-backs: a joiner's addresses are tried within limits; those that do not answer are left out (I7)."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.fleet.dial_backs import KEPT, UNDER_WAY, DialBacks
from anabranch.protocol.interface.events import DialBack, DialledBack, Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages import Reached
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout


def context() -> PeerContext:
    return make_context("d0", 1, 0, Settings("run", 0, 1, 1, 1), "d0")


def test_addresses_that_do_not_answer_are_left_out() -> None:
    ctx = context()
    ctx.links.add("r1", AdaptiveTimeout(0.0, 1.0))
    backs = DialBacks(ctx)
    backs.ask("r1", "10.0.0.1:1,my.host:2,my.carrier:3/" + "a" * 64)
    assert ctx.outbox.take_effects() == [DialBack("r1", "10.0.0.1:1,my.host:2")]
    mine = "10.0.0.1:1,my.host:2,my.carrier:3/" + "a" * 64
    assert backs.confirmed("r1", mine) == mine  # nothing is known yet
    backs.answered(DialledBack("r1", "10.0.0.1:1,my.host:2", "my.host:2", "10.0.0.1:1 is silent"))
    assert Send("r1", Reached("my.host:2", "10.0.0.1:1 is silent")) in ctx.outbox.take_effects()
    assert backs.confirmed("r1", mine) == "my.host:2,my.carrier:3/" + "a" * 64
    assert backs.confirmed("r1", "other.host:1") == "other.host:1"  # it was not tried


def test_dial_backs_are_limited() -> None:
    ctx = context()
    backs = DialBacks(ctx)
    for number in range(100):
        backs.ask(f"r{number}", "10.0.0.1:1")
        backs.ask(f"r{number}", "10.0.0.1:2")
    assert len(ctx.outbox.take_effects()) == UNDER_WAY
    for number in range(2 * KEPT):
        backs.answered(DialledBack(f"r{number}", "10.0.0.1:1", "", "silent"))
    assert len(backs._results) == KEPT
    backs.ask("r", "no address")
    backs.ask("r", "a:1/b")
    assert not [e for e in ctx.outbox.take_effects() if isinstance(e, DialBack)]
