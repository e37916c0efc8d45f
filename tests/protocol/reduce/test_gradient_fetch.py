"""The gradient of a step that a replica missed: from whom it is fetched, and when from another as well.

Rules: R10.
"""

from __future__ import annotations

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Commit, Member, Members, StageCommit
from anabranch.protocol.messages import FetchGradient, Gradient
from anabranch.protocol.reduce.gradient_fetch import GradientFetch
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout

#: 80 Mbit of a reduced gradient.
SIZES = {"block_bytes": 25_000_000, "sums_bytes": 15_000_000}


#: 20 Mbit of a stage's part of a round's result, which is half of the model's.
ROUNDS = {
    "rounds": Rounds(inner=10, slots=2),
    "round_bytes": (1_000_000.0, 5_000_000.0),
    "ends_bytes": 25_000_000,
}


class Replica:
    """`a`, which lacks the gradient of step 1, with others of its stage; rates: what each says that it sends
    to `a` (bits per second). settings: further ones of the run."""

    def __init__(self, rates: dict[str, float], settings: dict[str, object] | None = None) -> None:
        known = Settings("run", 1, 1, 2, 10, **SIZES, **settings or {})  # type: ignore[arg-type]
        self.ctx = ctx = make_context("a", 1, 1, known, "d")
        members = [Member("d", 0, 1, "c", 4), *(Member(name, 1, 1, "c", 4) for name in ["a", *rates])]
        ctx.run.membership.apply(Members(1, tuple(members), {member.id: 1 for member in members}))
        for peer, bps in rates.items():
            ctx.links.up[peer] = AdaptiveTimeout(0.0, 1.0)
            ctx.costs.told(peer, 0.0, 0.0, bps, 0.0)
        stage = StageCommit("", "wanted", {}, ("b",), ("c",), (0, 0))
        record = Commit("run", 1, 1, 1, "", "", "step", 8, (), (stage, stage), 1.0, 1.0, 0.1, 0.1, 0.05, 1)
        self.lacking = GradientFetch(
            ctx, lambda: record, lambda t: False, lambda record: None, lambda t: None
        )
        self.lacking.seek(soon=False)

    def asks(self, until_s: float) -> list[str]:
        """Peers that it asks until then."""
        self.ctx.outbox.effects.clear()
        while self.lacking.deadline() <= until_s:
            self.ctx.clock.now = self.lacking.deadline()
            self.lacking.tick()
        sent = [effect for effect in self.ctx.outbox.effects if isinstance(effect, Send)]
        return [effect.peer for effect in sent if isinstance(effect.message, FetchGradient)]


def test_another_is_asked_only_when_it_should_have_come_from_the_first() -> None:
    """Both send it over their own lines, and the second copy is for nothing."""
    replica = Replica({"b": 8e6, "c": 2e6})
    assert replica.asks(9.0) == ["b"]
    assert replica.asks(20.0) == ["c"]


def test_the_result_of_a_round_is_expected_in_its_packed_form() -> None:
    """A quarter of the bits in floats: who has not sent it in a quarter of the time is not waited for."""
    replica = Replica({"b": 8e6, "c": 2e6}, ROUNDS)
    assert replica.asks(2.4) == ["b"]
    assert replica.asks(9.0) == ["c"]


def test_another_is_asked_soon_where_the_link_to_the_first_breaks_or_it_has_nothing() -> None:
    replica = Replica({"b": 8e6, "c": 2e6, "e": 1e6})
    assert replica.asks(1.0) == ["b"]
    del replica.ctx.links.up["b"]
    replica.lacking.link_down("b")
    assert replica.asks(6.0) == ["c"]
    replica.lacking.received("c", Gradient(1, 1), None)
    assert replica.asks(11.0) == ["e"]


def test_who_sent_a_false_gradient_is_asked_where_no_other_has_it() -> None:
    """The other one, which did not have it, was asked again and again."""
    replica = Replica({"b": 8e6, "c": 2e6})
    replica.lacking._false.add("b")
    assert replica.asks(1.0) == ["c"]
    replica.lacking.received("c", Gradient(1, 1), None)
    assert replica.asks(6.0) == ["b"]
