"""A relay tells each upstream peer how much it has of the others."""

from __future__ import annotations

import msgspec

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Forward as ForwardTask
from anabranch.protocol.interface.tasks import InputGradient, Result, Task, WeightGradient
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Backward, Forward, Slots, Want
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.routing.plan_share import PlanShare
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.protocol.telemetry.peer_costs import Neighbour


class Relay:
    """`r` of capacity 12, whose upstream peers are `a`, `b` and `c`."""

    def __init__(self, capacity: int = 12, recompute: float = 0.0) -> None:
        self.ctx = make_context("r", 1, 1, Settings("x", 1, 1, 20, 1, recompute=recompute), "a")
        stages = {"a": 0, "b": 0, "c": 0, "r": 1}
        members = tuple(Member(peer, stage, 1, "", 12) for peer, stage in stages.items())
        self.ctx.run.membership.apply(Members(1, joined=members, active_from=dict.fromkeys(stages, 1)))
        for peer in "abc":
            self.ctx.links.up[peer] = AdaptiveTimeout(0.0, 1.0)
        self.iteration = Iteration(self.ctx, 1, "base", capacity, 0, True)

    def told(self) -> dict[str, int]:
        """Last load that each peer was told since the last call."""
        effects, self.ctx.outbox.effects = self.ctx.outbox.effects, []
        sends = [effect for effect in effects if isinstance(effect, Send)]
        return {send.peer: send.message.others for send in sends if isinstance(send.message, Slots)}

    def forward(self, peer: str, index: int, gradient_needed: bool = True) -> None:
        fence = self.ctx.fence(1, "base")
        message = Forward(fence, index, (peer,), True, not gradient_needed, gradient_needed, index)
        assert self.iteration.on_forward(peer, message, b"x") is None

    def back(self, peer: str, index: int) -> None:
        """Gradient of a microbatch from `peer`, as if that had been sent it."""
        self.iteration.sender.items[index].told.add(peer)
        assert self.iteration.on_backward(peer, Backward(self.ctx.fence(1, "base"), index), b"z") is None

    def compute(self) -> Task:
        """The next task."""
        job = self.ctx.tasks.next()
        assert job is not None
        then = self.ctx.tasks.finish(job[0])
        assert then is not None
        then(Result(outputs=(b"y",)))
        return job[0]


def test_what_others_have_here_is_told_and_taken_back() -> None:
    relay = Relay()
    assert relay.told() == {"a": 0, "b": 0, "c": 0}
    relay.forward("a", 0)
    assert relay.told() == {"b": 1, "c": 1}
    relay.forward("b", 1)
    assert relay.told() == {"a": 1, "c": 2}
    relay.compute()  # the forward of 0
    assert relay.told() == {}
    relay.back("a", 0)
    relay.compute()  # its input gradient: that is all that hurries
    assert relay.told() == {"b": 0, "c": 1}


def test_of_many_one_more_is_no_news() -> None:
    relay = Relay()
    told = []
    for index in range(4):
        relay.forward("a", index)
        told.append(relay.told().get("b"))
    relay.iteration.credits.ledger.pool = 8
    relay.iteration.credits.ledger.asks = [(True, 10, "a")] * 8
    relay.iteration.credits.ledger._serve()
    for index in range(4, 12):
        relay.forward("a", index)
        told.append(relay.told().get("b"))
    assert told == [1, 2, 3, 4, None, 6, None, 8, None, None, 11, None]


def test_the_units_of_a_peer_that_lost_its_link_do_not_count_below_nothing() -> None:
    relay = Relay()
    relay.forward("a", 0)
    relay.iteration.credits.ledger.forget("a")
    relay.iteration.credits.ledger.ask("a", 5, False)
    relay.compute()
    relay.back("a", 0)
    relay.compute()
    assert relay.iteration.credits.ledger.grants["a"].at_work == 0


def test_what_nobody_upstream_waits_for_is_computed_last() -> None:
    """A contribution that died with its holder is redone when there is nothing else to do."""
    relay = Relay()
    for index, needed in ((0, False), (1, True), (2, False), (3, True)):
        relay.forward("a", index, needed)
    computed = [relay.compute() for _ in range(2)]
    for index in (1, 3):
        relay.back("a", index)
    computed += [relay.compute() for _ in range(6)]
    for index in (0, 2):
        relay.back("a", index)
    computed += [relay.compute() for _ in range(4)]
    forward, gradient, weights = (
        [getattr(task, "index", getattr(task, "unit", -1)) for task in computed if isinstance(task, kind)]
        for kind in (ForwardTask, InputGradient, WeightGradient)
    )
    assert forward == [1, 3, 0, 2]
    assert gradient == [1, 3, 0, 2]
    assert weights == [1, 3, 0, 2]
    assert [type(task) for task in computed[2:6]] == [InputGradient] * 2 + [WeightGradient] * 2


def test_beyond_its_capacity_a_relay_keeps_only_what_came() -> None:
    """Activations of the capacity and of the repair slot are kept; for others the forward is computed again,
    and nothing of them waits."""
    relay = Relay(capacity=3, recompute=1.0)
    for index in range(6):
        relay.forward("abc"[index % 3], index)
    forwards = [relay.compute() for _ in range(6)]
    assert [task.keep for task in forwards if isinstance(task, ForwardTask)] == [True] * 4 + [False] * 2
    for index in (4, 5, 0):
        relay.back("a", index)
    done = [relay.compute() for _ in range(6)]
    assert [(type(task), getattr(task, "index", getattr(task, "unit", -1))) for task in done] == [
        (InputGradient, 0),
        (InputGradient, 4),
        (WeightGradient, 4),
        (InputGradient, 5),
        (WeightGradient, 5),
        (WeightGradient, 0),
    ]
    assert [task.again for task in done if isinstance(task, InputGradient)] == [False, True, True]
    assert relay.iteration.claims.held == {0, 4, 5}


def test_all_that_a_microbatch_asks_counts_with_its_weight_gradient() -> None:
    """A relay's is taken to last as long as its forward; of a head's pass, forward and both gradients, a
    third."""
    relay, head = Neighbour(forward_s=1.0, backward_s=1.5), Neighbour(forward_s=2.0)
    assert (relay.work_s, relay.pass_s) == (3.5, 1.25)
    assert (head.work_s, head.pass_s) == (3.0, 2.0)


def test_the_plan_has_room_where_slots_are() -> None:
    """Capacity 12, and as much again whose forward is computed again; the batch of 20 fits."""
    ctx = Relay(recompute=1.0).ctx
    ctx.run.membership.members["r"] = msgspec.structs.replace(ctx.run.membership.members["r"], forward_s=0.1)
    assert PlanShare(ctx).places() == 20 + 4  # and a quarter to choose by links
    short = Relay().ctx
    assert PlanShare(short).places() == 12


def test_a_microbatch_that_came_two_ways_goes_back_both() -> None:
    """Each upstream peer lost another one further back, or beside it, and waits for the gradient: whoever
    asked first would do so until it asks again after many seconds."""
    relay = Relay()
    relay.forward("a", 0)
    relay.iteration.on_want("b", Want(relay.ctx.fence(1, "base"), 0, True, 7))
    relay.compute()
    relay.back("a", 0)
    relay.ctx.outbox.effects.clear()
    relay.compute()
    sends = [effect for effect in relay.ctx.outbox.effects if isinstance(effect, Send)]
    back = {send.peer: send.payload for send in sends if isinstance(send.message, Backward)}
    assert back == {"b": b"y", "a": b"y"}


def test_who_was_removed_waits_for_nothing() -> None:
    relay = Relay()
    relay.forward("a", 0)
    relay.iteration.on_want("b", Want(relay.ctx.fence(1, "base"), 0, True, 7))
    relay.ctx.run.membership.apply(Members(2, removed={"a": "gone"}))
    relay.iteration.peer_removed("a", 0, "gone")
    assert relay.iteration.units[0].others == {}
