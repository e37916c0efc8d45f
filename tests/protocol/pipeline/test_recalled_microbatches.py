"""Units that wait at a relay and are called back: by whom, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.protocol.audit.seals import Seals
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Result
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Backward, CallBack, Forward, Have, Lack, Want
from anabranch.protocol.pipeline.incoming import IncomingMicrobatch
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.pipeline.upstream_replies import SENT_AGAIN_S, UpstreamReplies, no_units
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout


class Relay:
    """`a`, alone at stage 1, with the data nodes `d` and `e`. The worker is busy with the first unit."""

    def __init__(self, computed: Callable[[str], int] = no_units) -> None:
        self.ctx = make_context("a", 1, 1, Settings("r", 1, 1, 8, 1), "d")
        members = tuple(Member(name, int(name == "a"), 1, "", 8, name=name) for name in "ade")
        self.ctx.run.membership.apply(Members(1, joined=members, active_from=dict.fromkeys("ade", 1)))
        self.ctx.links.up = {peer: AdaptiveTimeout(0.0, 1.0) for peer in "de"}
        self.iteration = Iteration(self.ctx, 1, "base", 8, 0, True, computed=computed)

    def forward(self, peer: str, index: int, way: int, needed: bool = True) -> None:
        fence = self.ctx.fence(1, "base")
        message = Forward(fence, index, (peer,), True, False, needed, way)
        assert self.iteration.on_forward(peer, message, b"x") is None
        self.ctx.start_next()

    def want(self, peer: str, index: int, way: int) -> None:
        self.iteration.on_want(peer, Want(self.ctx.fence(1, "base"), index, True, way))

    def call_back(self, peer: str, ways: dict[int, int], most: int = 8) -> list[int]:
        """Units that it let go, as `peer` is told."""
        self.ctx.outbox.effects.clear()
        self.iteration.on_call_back(peer, CallBack(self.ctx.fence(1, "base"), ways, most))
        sent = [each for each in self.ctx.outbox.effects if isinstance(each, Send)]
        return [each.message.index for each in sent if isinstance(each.message, Lack) and each.peer == peer]


def test_what_waits_is_let_go_of_and_can_come_again() -> None:
    relay = Relay()
    for index in range(3):
        relay.forward("d", index, index + 1)
    assert relay.call_back("d", {0: 1, 1: 2, 2: 7}) == [1], "0 is being computed, 2 came on another way"
    assert relay.call_back("d", {1: 2}) == []
    assert sorted(relay.iteration.units) == [0, 2]
    backward = Backward(relay.ctx.fence(1, "base"), 1)
    assert relay.iteration.on_backward("d", backward, b"g") is None, "it is another's"
    relay.forward("d", 1, 9)
    assert relay.call_back("d", {0: 1, 1: 9, 2: 3}, most=1) == [2]
    assert sorted(relay.iteration.units) == [0, 1]


@pytest.mark.parametrize("case", ["sender heard", "sender lost", "sent whole", "worked"])
def test_who_may_ask_for_what_another_sent(case: str) -> None:
    """`e` asks for four microbatches of `d`: it finds one, and one more for each two that it computed in the
    last step; all if `d` is not heard any more, or if it sends them itself."""
    relay = Relay(lambda peer: 2 if (case, peer) == ("worked", "e") else 0)
    for index in range(4):
        relay.forward("d", index, index + 1)
    if case == "sender lost":
        del relay.ctx.links.up["d"]
    for index in range(4):
        if case == "sent whole":
            relay.forward("e", index, 2 * index + 1)
        relay.want("e", index, 2 * index + 2)
    sent = [each.message for each in relay.ctx.outbox.effects if isinstance(each, Send) and each.peer == "e"]
    found = [message.index for message in sent if isinstance(message, Have)]
    assert found == {"sender heard": [0], "worked": [0, 1]}.get(case, [0, 1, 2, 3])


@pytest.mark.parametrize("needed", [True, False])
def test_nobody_calls_back_what_another_sent(needed: bool) -> None:
    """A peer of the stage before asks after units that are none of its, is taken for their new upstream, and
    calls them back: whoever sent them would learn of it only when it asks after them, and again (and where it
    has their gradients, only when the leader misses them)."""
    relay = Relay()
    for index in range(3):
        relay.forward("d", index, index + 1, needed)
        relay.want("e", index, 1)
    assert relay.call_back("e", dict.fromkeys(range(3), 1)) == []
    assert sorted(relay.iteration.units) == [0, 1, 2]


def test_who_took_over_from_a_peer_that_is_gone_calls_back() -> None:
    relay = Relay()
    for index in range(3):
        relay.forward("d", index, index + 1)
    relay.ctx.run.membership.apply(Members(2, removed={"d": "gone"}))
    relay.iteration.peer_removed("d", 0, "gone")
    for index in range(3):
        relay.want("e", index, 1)
    assert relay.call_back("e", dict.fromkeys(range(3), 1), most=1) == [2]


def test_a_microbatch_is_called_back_once() -> None:
    """Each time the next stage is to send its gradient anew: an upstream peer that calls the same one back
    again and again would have it take an honest peer for one that asks too often."""
    relay = Relay()
    for index in range(2):
        relay.forward("d", index, index + 1)
    assert relay.call_back("d", {1: 2}) == [1]
    relay.forward("d", 1, 3)
    assert relay.call_back("d", {1: 3}) == []
    assert sorted(relay.iteration.units) == [0, 1]


def test_a_gradient_is_sent_anew_to_a_peer_that_gave_the_microbatch_up() -> None:
    """It was called back from `d`, and it overflowed there: each time `d` sends a whole Forward. Where that
    comes while the gradient may be under way, the question after it is answered."""
    ctx, sent = Relay().ctx, list[str]()
    replies = UpstreamReplies(ctx, 1, "base", Seals(ctx, "base"), no_units)
    ctx.outbox.send = lambda peer, message, payload=None: sent.append(peer)  # type: ignore[method-assign]
    unit = IncomingMicrobatch(0, True, "d", ("d",), b"a", True, None, 1, sender="d")
    unit.returned, unit.gradient_out = True, b"g"
    replies.send_back(unit)
    fence = ctx.fence(1, "base")

    def ask(way: int) -> None:
        ctx.clock.now += 1e5
        replies.adopt(unit, "d", Want(fence, 0, True, way))

    ask(1)
    ask(1)
    assert len(sent) == 2, "a peer that asks on and on must not take up the line"
    for way in (2, 3):
        replies.adopt(unit, "d", Forward(fence, 0, ("d",), True, False, True, way))
        ask(way)
        ask(way)
        assert len(sent) == way + 1
        ctx.clock.now += 1e5
    replies.adopt(unit, "d", Forward(fence, 0, ("d",), True, False, True, 4))
    assert len(sent) == 4, "no honest peer sends it anew so often"


def test_a_gradient_is_sent_once_more_to_a_peer_that_asked_too_soon() -> None:
    """`e` took over from `d`, which is gone; the microbatch was called back from it while the gradient came,
    and is with it again later. It never got that gradient."""
    ctx, sent = Relay().ctx, list[str]()
    replies = UpstreamReplies(ctx, 1, "base", Seals(ctx, "base"), lambda peer: 4)
    ctx.outbox.send = lambda peer, message, payload=None: sent.append(peer)  # type: ignore[method-assign]
    unit = IncomingMicrobatch(0, True, "d", ("d",), b"a", True, None, 1, sender="d")
    unit.returned, unit.gradient_out = True, b"g"
    found = []
    for wait_s in (0.0, SENT_AGAIN_S / 2.0, SENT_AGAIN_S, SENT_AGAIN_S, SENT_AGAIN_S):
        ctx.clock.now += wait_s
        replies.adopt(unit, "e", Want(ctx.fence(1, "base"), 0, True, 1))
        found.append(len(sent))
    assert found == [1, 1, 2, 2, 2]


def test_a_gradient_that_goes_back_two_ways_is_sent_once_on_each_however_often_both_ask() -> None:
    relay = Relay()
    ctx = relay.ctx
    ctx.costs.activation_bytes = 10_000_000  # a link may need 320 s for it
    relay.forward("d", 0, 1)
    relay.want("e", 0, 1)

    def done(payload: bytes) -> None:
        running = ctx.tasks.running
        assert running is not None
        then = ctx.tasks.finish(running.task)
        assert then is not None
        then(Result(outputs=(payload,)))
        ctx.start_next()

    def sent() -> list[str]:
        found = [effect for effect in ctx.outbox.effects if isinstance(effect, Send)]
        ctx.outbox.effects.clear()
        return sorted(effect.peer for effect in found if isinstance(effect.message, Backward))

    done(b"activation")
    relay.iteration._gradient_arrived("d", 0, b"gradient")
    ctx.start_next()
    done(b"gradient")
    assert sent() == ["d", "e"]
    for _ in range(3):
        ctx.clock.now += 10.0
        relay.want("d", 0, 1)
        relay.want("e", 0, 1)
    assert sent() == []
    relay.iteration.link_down("d", "broken")
    relay.want("d", 0, 1)
    assert sent() == ["d"]


@pytest.mark.parametrize("case", ["asked for", "acknowledged", "sent anew"])
def test_a_gradient_is_lost_only_if_it_is_asked_for_and_was_never_acknowledged(case: str) -> None:
    """A second Forward follows a recall or an overflow, whatever became of the gradient."""
    ctx = Relay().ctx
    ctx.links.carriers["d"] = "carrier"
    replies, fence = UpstreamReplies(ctx, 1, "base", Seals(ctx, "base"), no_units), ctx.fence(1, "base")
    units = [
        IncomingMicrobatch(index, True, "d", ("d",), b"a", True, None, 1, sender="d") for index in range(2)
    ]
    for unit in units:
        unit.returned, unit.gradient_out = True, b"g"
        replies.send_back(unit)
        if case == "acknowledged":
            replies.delivered(unit, "d")
    ctx.clock.now += 1e5
    for unit in units:
        again = Forward(fence, unit.index, ("d",), True, False, True, 2)
        replies.adopt(unit, "d", again if case == "sent anew" else Want(fence, unit.index, True, 1))
    assert ("d" in ctx.links.lossy) == (case == "asked for")
    replies.delivered(units[1], "d")
    assert not ctx.links.lossy, "what came speaks for what was sent before"
