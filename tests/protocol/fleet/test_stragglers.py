"""Waits of steps for stragglers that were left out before, and their number."""

from __future__ import annotations

from anabranch.protocol.consensus.raft_node import SavedVoterState, Voter
from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.coordinator.step_receipts import StepReceipts
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.fleet.operator_control import RevocationRequests
from anabranch.protocol.fleet.stragglers import WAITING_SHARE, Stragglers
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Missing, Prepared
from support.admission import DATA_TICKETS


def stage_of_three() -> tuple[PeerContext, Stragglers]:
    ctx = make_context("d", 1, 0, Settings("run", 1, 1, 4, 100), "d")
    joined = tuple(Member(name, 1, 1, "", 4, name=name) for name in ("a", "b", "c"))
    ctx.run.membership.apply(Members(1, joined=joined))
    ctx.run.membership.apply(Members(2, active_from=dict.fromkeys(("a", "b", "c"), 1)))
    Connections(ctx)
    return ctx, Stragglers(ctx, Connections(ctx).indirect_probes, {})


def test_one_that_was_given_a_later_state_is_waited_for_but_not_again_and_again() -> None:
    ctx, absent = stage_of_three()
    ctx.links.suspects.add("c")
    assert absent.present(1, 5) == ["a", "b"] and absent.lacks("c")
    ctx.links.suspects.clear()
    absent.has("c", 5)  # so far it could come by itself
    assert absent.present(1, 8) == ["a", "b"]
    absent.has("c", 6)
    assert absent.present(1, 8) == ["a", "b", "c"] and absent.lacks("c")
    ctx.clock.now = 20.0
    absent.back("c")  # they waited for twenty seconds
    ctx.links.suspects.add("c")
    assert absent.present(1, 9) == ["a", "b"]
    ctx.links.suspects.clear()
    ctx.clock.now = 20.0 + 20.0 / WAITING_SHARE - 1.0
    absent.has("c", 30)
    assert absent.present(1, 31) == ["a", "b"]
    ctx.clock.now += 1.0
    absent.has("c", 31)
    assert absent.present(1, 32) == ["a", "b", "c"]


def test_whoever_has_said_nothing_to_a_new_leader_is_not_counted_on() -> None:
    ctx, absent = stage_of_three()
    absent.take_over()
    assert absent.lacks("a") and absent.present(1, 5) == ["a", "b", "c"]
    absent.back("a")
    absent.back("b")
    ctx.clock.now = absent.deadline()
    assert absent.present(1, 5) == ["a", "b"] and absent.without(5) == {"c"}


def test_what_only_one_has_that_is_to_be_removed_is_done_again_before_the_log_says_so() -> None:
    """In a large swarm removals are logged at certain times. Once all else of its stage is done somebody
    waits for its part; until then there is time."""
    ctx, _ = stage_of_three()
    ctx.run.membership.apply(Members(3, joined=(Member("d", 0, 1, "", 4, name="d"),), active_from={"d": 1}))
    admission = Admission(
        ctx, Connections(ctx), "", "", "", lambda member: None, DATA_TICKETS, lambda *_: None
    )
    receipts = StepReceipts(ctx, admission, Convictions(ctx, RevocationRequests(ctx).revoke))
    voter = Voter(ctx, SavedVoterState(), print, print, bool, bool)
    reducing = ReduceAttempts(ctx, voter, admission, receipts, lambda attempt: None)
    current = Round(1, "base", 0.0)
    current.claims[1] = {"a": frozenset({0}), "b": frozenset({2}), "c": frozenset({3})}

    def missed() -> list[Missing]:
        sent = [effect.message for effect in ctx.outbox.effects if isinstance(effect, Send)]
        told = [message for message, _ in ctx.outbox.to_self]
        return [message for message in [*sent, *told] if isinstance(message, Missing)]

    admission.remove("c", "connection refused")
    assert admission.absent.present(1, 1) == ["a", "b"]
    reducing.attempt(current)
    assert missed() == [], "1 is under way yet"
    current.claims[1]["a"] = frozenset({0, 1})
    current.reported[1] = 1
    reducing.attempt(current)
    assert [message.units for message in missed()] == [{1: (3,)}]
    reducing.attempt(current)
    assert len(missed()) == 1, "it is said once"


def test_a_reduce_that_lost_somebody_stands_until_another_one_can_be_ordered() -> None:
    """It may have sent all that it had to send. If not its units are done again, and the others reduce."""
    ctx, _ = stage_of_three()
    ctx.run.membership.apply(Members(3, joined=(Member("e", 1, 1, "", 4, name="e"),)))
    ctx.run.membership.apply(Members(4, active_from={"e": 1}))
    admission = Admission(
        ctx, Connections(ctx), "", "", "", lambda member: None, DATA_TICKETS, lambda *_: None
    )
    receipts = StepReceipts(ctx, admission, Convictions(ctx, RevocationRequests(ctx).revoke))
    voter = Voter(ctx, SavedVoterState(), print, print, bool, bool)
    reducing = ReduceAttempts(ctx, voter, admission, receipts, lambda attempt: None)
    current = Round(1, "base", 0.0)
    current.claims[1] = {"a": frozenset({0}), "b": frozenset({2}), "c": frozenset({3})}
    current.claims[1]["e"] = frozenset({1})
    reducing.attempt(current)
    first = current.attempts[1]
    assert first.members == ("a", "b", "c", "e")
    ctx.run.membership.apply(Members(5, removed={"c": "gone"}))
    current.claims[1].pop("c")
    reducing.attempt(current)
    assert current.attempts[1] is first and reducing.prepared(current, 1) is None
    for peer in "abe":
        assert reducing.prepared(current, 1) is None, "e would have to fetch the gradient"
        current.prepared[1][peer] = Prepared(ctx.fence(1, "base"), 1, first.attempt, "digest", {})
    assert reducing.prepared(current, 1) is not None, "all had been sent"
    current.prepared[1].clear()
    current.agreed.clear()
    current.claims[1]["b"] = frozenset({2, 3})
    current.reported[1] = 1
    reducing.attempt(current)
    assert current.attempts[1].members == ("a", "b", "e") and current.attempts[1].attempt > first.attempt
    assert 1 not in current.torn
