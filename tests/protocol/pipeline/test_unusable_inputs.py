"""Activations that cannot be used: who is blamed for one, and how many of one sender are computed."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.events import Note, Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Result, WeightGradient
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Forward, Lack, Want
from anabranch.protocol.pipeline.microbatches import UNUSABLE_MAX, Iteration
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout


class Relay:
    """`a`, alone at stage 1, with the data nodes `d` and `e`. Its worker cannot use the payload b"bad"."""

    def __init__(self) -> None:
        self.ctx = make_context("a", 1, 1, Settings("r", 1, 1, 8, 1), "d")
        members = tuple(Member(name, int(name == "a"), 1, "", 8, name=name) for name in "ade")
        self.ctx.run.membership.apply(Members(1, joined=members, active_from=dict.fromkeys("ade", 1)))
        self.ctx.links.up = {peer: AdaptiveTimeout(0.0, 1.0) for peer in "de"}
        self.iteration = Iteration(self.ctx, 1, "base", 8, 0, True)
        self.used: list[bytes] = []
        self._way = 0

    def forward(self, peer: str, payload: bytes = b"good", repair: bool = False, index: int = 0) -> None:
        """Take an activation of a microbatch."""
        self._way += 1
        message = Forward(self.ctx.fence(1, "base"), index, (peer,), True, repair, True, self._way)
        assert self.iteration.on_forward(peer, message, payload) is None

    def compute(self) -> None:
        """Do the waiting tasks."""
        while (job := self.ctx.tasks.next()) is not None:
            self.used += [payload for payload in job[1] if isinstance(payload, bytes)]
            then = self.ctx.tasks.finish(job[0])
            assert then is not None
            then(Result(error="unusable") if b"bad" in job[1] else Result(outputs=(b"y",)))

    def blamed(self) -> list[str]:
        notes = [each for each in self.ctx.outbox.effects if isinstance(each, Note)]
        return [str(note.fields["subject"]) for note in notes if note.kind == "refused"]

    def lacks(self) -> list[str]:
        sent = [each for each in self.ctx.outbox.effects if isinstance(each, Send)]
        return [each.peer for each in sent if isinstance(each.message, Lack)]


def test_a_sender_of_unusable_activations_is_not_taken_any_more_and_keeps_nobody_out() -> None:
    """`d` sent them again and again, and nearly always one was here when the right one of `e` came, which was
    dropped then (seed 9400762)."""
    relay = Relay()
    for _ in range(UNUSABLE_MAX):
        relay.forward("d", b"bad")
        relay.compute()
    assert relay.used == [b"bad"] * UNUSABLE_MAX and relay.lacks() == ["d"] * UNUSABLE_MAX
    relay.forward("d", b"bad")
    assert not relay.iteration.units and relay.lacks() == ["d"] * UNUSABLE_MAX, "without an answer"
    relay.forward("e")
    relay.compute()
    assert relay.used[UNUSABLE_MAX:] == [b"good"] and relay.iteration.units[0].upstream == "e"
    assert set(relay.blamed()) == {"d"}


def test_a_peer_whose_activation_was_dropped_is_not_blamed_for_the_one_that_was_used() -> None:
    relay = Relay()
    relay.forward("d", b"bad")
    relay.forward("e")
    assert relay.iteration.units[0].upstream == "e"
    relay.compute()
    assert relay.blamed() == ["d"] and sorted(relay.lacks()) == ["d", "e"], "both may send it again"
    for _ in range(UNUSABLE_MAX - 1):
        relay.forward("d", b"bad")
        relay.forward("e")
        relay.compute()
    relay.forward("d", b"bad")
    relay.forward("e")
    relay.compute()
    assert relay.used == [b"bad"] * UNUSABLE_MAX + [b"good"]


def test_a_peer_whose_gradient_came_early_is_not_blamed_for_the_activation() -> None:
    """The microbatch is sent again; the next stage had it already, and gave its gradient at once."""
    relay = Relay()
    relay.forward("d", b"bad", repair=True)
    relay.iteration._gradient_arrived("e", 0, b"gradient")
    relay.compute()
    assert relay.used == [b"bad"] and relay.blamed() == ["d"]


def test_only_another_senders_activation_takes_the_place_of_one_that_overflowed() -> None:
    """Its gradient had come early; its sender sends it once more, and asks after it."""
    relay = Relay()
    relay.forward("d", b"huge", repair=True)
    relay.iteration._gradient_arrived("e", 0, b"gradient")
    job = relay.ctx.tasks.next()
    assert job is not None
    then = relay.ctx.tasks.finish(job[0])
    assert then is not None
    then(Result(overflow="wq"))
    relay.forward("d", b"huge")
    relay.compute()
    assert relay.used == [] and relay.iteration.units[0].spoilt
    relay.forward("e")
    relay.compute()
    assert relay.used == [b"good"]


def test_a_microbatch_that_fails_after_its_gradient_went_back_is_one_load_less_once() -> None:
    """Its weight gradient cannot be computed; another microbatch of the same sender is still at work."""
    relay = Relay()
    relay.forward("d")
    relay.forward("d", index=1)
    relay.compute()
    grant = relay.iteration.credits.ledger.grants["d"]
    assert grant.at_work == 2
    relay.iteration._gradient_arrived("e", 0, b"gradient")
    while (job := relay.ctx.tasks.next()) is not None:
        then = relay.ctx.tasks.finish(job[0])
        assert then is not None
        then(Result(error="broken") if isinstance(job[0], WeightGradient) else Result(outputs=(b"dx",)))
    assert list(relay.iteration.units) == [1] and grant.at_work == 1


def test_a_forger_does_not_become_the_upstream_peer_of_a_microbatch_that_is_here() -> None:
    """Another peer sent it: the forger neither gets the gradient for its own activation nor when it asks."""
    relay = Relay()
    relay.forward("e")
    relay.ctx.links.forged("d")
    relay.forward("d", b"bad")
    assert relay.iteration.on_want("d", Want(relay.ctx.fence(1, "base"), 0, True, 9)) is None
    assert relay.lacks() == ["d", "d"] and relay.iteration.units[0].upstream == "e"
    grant = relay.iteration.credits.ledger.grants["d"]
    assert grant.received == grant.released == 1, "its credit is free again"
