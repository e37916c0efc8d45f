"""The sending half: asks, slots that are handed back, and units that are held back for a better peer."""

from __future__ import annotations

import math

import pytest

from anabranch.protocol.context.early_buffer import EARLY_PAYLOADS_MAX
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.interface.events import Send
from anabranch.protocol.log.records import Member, Members, Slot
from anabranch.protocol.messages import Ask, CallBack, Forward, Return, Want
from anabranch.protocol.pipeline.outgoing import OutgoingMicrobatch, OutgoingState
from anabranch.protocol.pipeline.repair import Repairs
from anabranch.protocol.pipeline.sender import OVERDUE_FLOOR_S, Sender
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from support.sender_node import Node


def test_who_was_given_its_slot_back_is_asked_again() -> None:
    node = Node("static")
    node.sender.submit(0, b"x", ("d",), True)
    node.lose("a")
    node.ctx.links.suspects.discard("a")
    node.sender.pump()
    node.slots("b", 1)
    assert node.sent(Return) == ["b"]
    node.lose("a")
    node.remove("a")
    assert node.sent(Ask) == ["a", "b", "b"]


def test_whose_slot_another_took_asks_again() -> None:
    """The other's own ask was with a peer that died."""
    node = Node("greedy")
    node.sender.submit(0, b"x", ("d",), True)  # asks a
    node.sender.submit(1, b"x", ("d",), True)  # asks b
    assert node.sent(Ask) == ["a", "b"]
    node.slots("b", 1)
    assert node.sent(Forward) == ["b"] and node.sender.items[0].peer == "b"
    node.remove("a")
    assert node.sent(Ask)[2:] == ["a", "b"]


def test_a_unit_is_held_back_for_a_better_peer_only_as_long_as_it_is_better() -> None:
    node = Node("auction", b_hop_s=0.5, compute_s=1.0)
    node.slots("b", 4, standing=4)
    node.sender.submit(0, b"x", ("d",), True)
    assert node.sent(Forward) == [] and node.sent(Ask) == ["a"]
    assert 0.0 < node.sender.deadline() <= 0.5
    node.ctx.clock.now = node.sender.deadline()
    node.sender.tick()
    assert node.sent(Forward) == ["b"]
    assert node.sender.deadline() > node.ctx.clock.now


def test_units_that_are_held_back_for_a_peer_count_as_its_queue() -> None:
    node = Node("auction", b_hop_s=0.5, compute_s=1.0)
    node.slots("b", 4, standing=4)
    for index in range(3):
        node.sender.submit(index, b"x", ("d",), True)
    assert node.sent(Forward) == ["b"]
    assert sorted(item.held_for or "" for item in node.sender.items.values()) == ["", "a", "a"]


def test_a_held_unit_goes_at_once_when_the_better_peer_has_a_slot_or_is_gone() -> None:
    for gone in (False, True):
        node = Node("auction", b_hop_s=0.5, compute_s=1.0)
        node.slots("b", 4, standing=4)
        node.sender.submit(0, b"x", ("d",), True)
        if gone:
            node.lose("a")
        else:
            node.slots("a", 1)
        assert node.sent(Forward) == ["b" if gone else "a"]
        assert math.isfinite(node.sender.deadline()), "it is asked after, not held"


def test_who_asks_once_more_after_a_crash_is_granted_a_slot() -> None:
    """It had asked b, went to a, and another took what b granted. When a dies that ask is long answered."""
    node = Node("greedy")
    node.sender.submit(0, b"x", ("d",), True)
    node.sender.items[0].repair = True
    node.sender.items[0].asked = {("b", True)}
    node.slots("a", 1)
    assert node.sent(Forward) == ["a"]
    node.lose("a")
    assert node.sent(Ask)[-1] == "b"


def test_a_foreseen_credit_is_used_once_however_it_is_reported() -> None:
    """The report that the receiver makes when it opens the round adds nothing. After a broken link its own
    count holds again."""
    node = Node("static")
    node.ctx.run.membership.active_from.update(dict.fromkeys("ab", 0))  # they served in the iteration before
    node.sender.foresee({"a": 1, "b": EARLY_PAYLOADS_MAX + 2})
    assert node.sender.credits["a"].free == 1 and node.sender.credits["b"].free == EARLY_PAYLOADS_MAX
    node.sender.submit(0, b"x", ("d",), True)
    assert node.sent(Forward) == ["a"] and not node.sent(Ask)
    node.slots("a", 1, standing=1)
    assert node.sender.credits["a"].free == 0 and not node.sent(Return)
    node.sender.link_down("a")
    assert node.sender.credits["a"].free == 0
    node.slots("a", 1, standing=1)  # the forward was lost with the link
    assert node.sender.credits["a"].free == 1


def test_no_credit_of_a_newcomer_is_foreseen() -> None:
    """A peer that serves from this iteration on, or whose process is newer than its member in the log, may
    open the round late."""
    node = Node("static")
    node.sender.foresee({"a": 1})
    assert not node.sender.credits
    node.ctx.run.membership.active_from.update(dict.fromkeys("ab", 0))
    node.ctx.links.incarnations["b"] = 2
    node.sender.foresee({"a": 1, "b": 1})
    assert list(node.sender.credits) == ["a"]


def test_what_is_done_again_spreads_over_the_replicas() -> None:
    """Its gradient was back before its holder died: it weighs on who does it again all the same."""
    node = Node("greedy", compute_s=1.0)
    node.ctx.links.up["c"] = AdaptiveTimeout(0.0, 1.0)
    node.ctx.run.membership.apply(
        Members(2, joined=(Member("c", 1, 1, "", 1, name="c"),), active_from={"c": 1})
    )
    node.ctx.costs.of("c").forward_s = 1.0
    node.slots("a", 4, 4)
    for index in range(4):
        node.sender.submit(index, b"x", ("d",), True)
        node.sender.on_backward("a", index, b"g")
    node.slots("b", 4, 4)
    node.slots("c", 4, 4)
    node.ctx.outbox.effects.clear()
    node.lose("a")
    node.remove("a")
    assert sorted(node.sent(Forward)) == ["b", "b", "c", "c"]


def test_what_is_prepared_again_has_nothing_due() -> None:
    """It was asked after in vain, in a swarm where not everybody knows everybody. With a time that is past
    the peer would be woken at once, again and again, until the activation is computed."""
    node = Node("greedy", relays="abc", picks=1)
    sender = node.sender = Sender(node.ctx, 1, "base", lambda index: None)
    repairs = node.repairs = Repairs(node.ctx, sender)
    Connections(node.ctx)
    repairs.find(0, ("d",), True, lost=("e",))
    assert math.isfinite(sender.deadline())
    node.ctx.clock.now = sender.deadline() + 1.0
    for peer in sorted(sender.items[0].finding):
        repairs.on_lack(peer, 0, False, sender.items[0].transmission)
    node.slots(node.sent(Ask)[-1], 1)
    assert sender.items[0].leg is OutgoingState.PREPARING
    assert sender.deadline() == math.inf


def test_what_waits_is_called_back_for_who_comes_into_the_open_iteration() -> None:
    """All is with a when c comes: as many are called back as end sooner at c, which is as quick."""
    node = Node("greedy", compute_s=1.0, relays="a")
    node.slots("a", 8, 8)
    for index in range(8):
        node.sender.submit(index, b"x", ("d",), True)
    node.ctx.links.up["c"] = AdaptiveTimeout(0.0, 1.0)
    node.ctx.run.membership.apply(
        Members(2, joined=(Member("c", 1, 1, "", 1, name="c"),), active_from={"c": 1})
    )
    node.ctx.costs.of("c").forward_s = 1.0
    node.slots("c", 8, 8)
    said = [effect.message for effect in node.ctx.outbox.effects if isinstance(effect, Send)]
    (call,) = [message for message in said if isinstance(message, CallBack)]
    assert node.sent(CallBack) == ["a"] and call.most == 4
    assert call.ways == {index: node.sender.items[index].transmission for index in range(8)}
    node.repairs.on_lack("a", 7, True, call.ways[7])
    assert node.sent(Forward)[8:] == ["c"]
    node.slots("c", 9, 8)
    assert node.sent(CallBack) == ["a"], "once is enough"


def test_nothing_is_called_back_from_who_would_be_done_sooner() -> None:
    node = Node("greedy", compute_s=1.0, relays="a")
    node.slots("a", 8, 8)
    node.sender.submit(0, b"x", ("d",), True)
    node.ctx.links.up["c"] = AdaptiveTimeout(0.0, 1.0)
    node.ctx.run.membership.apply(
        Members(2, joined=(Member("c", 1, 1, "", 1, name="c"),), active_from={"c": 1})
    )
    node.ctx.costs.of("c").forward_s = 3.0
    node.slots("c", 8, 8)
    assert node.sent(CallBack) == []


def test_who_had_it_and_was_lost_is_told_to_the_next_as_well() -> None:
    """Whoever comes in the place of two that were lost asks those who may have it from either: what was found
    from the first one's neighbours is not near the second."""
    node = Node("greedy", relays="abc")
    for peer in "abc":
        node.slots(peer, 4, 4)
    node.sender.submit(0, b"x", ("d",), True)
    first = node.sent(Forward)[-1]
    node.lose(first)
    second = node.sent(Forward)[-1]
    node.lose(second)
    said = [effect.message for effect in node.ctx.outbox.effects if isinstance(effect, Send)]
    forwards = [message for message in said if isinstance(message, Forward)]
    assert [forward.lost for forward in forwards] == [(), (first,), (second, first)]


def test_neighbours_of_all_who_were_lost_are_asked() -> None:
    node = Node("greedy", relays="abcdefgh".replace("d", ""), picks=1)
    sender = node.sender = Sender(node.ctx, 1, "base", lambda index: None)
    repairs = node.repairs = Repairs(node.ctx, sender)
    Connections(node.ctx)
    near = {one: set(node.ctx.run.near.active_neighbours(1, 0, 1, one)) for one in ("x", "y", "z", "w", "v")}
    one, other = next((a, b) for a in near for b in near if near[a] - near[b] and near[b] - near[a])
    repairs.find(0, ("d",), True, lost=(one, other))
    asked = sender.items[0].finding
    assert near[one] | near[other] <= asked


def found(
    removed: str = "", lack: str = "", silent: str = "", followed: bool = True
) -> tuple[list[str], Forward]:
    """A data node comes in the place of x, of its stage: whom it asks, and what it sends on when some answer
    that they do not have the microbatch, and others fall silent. followed: whether it was there when the log
    removed x."""
    node = Node("greedy", relays="abc")
    if followed:
        node.ctx.run.membership.apply(Members(2, (Member("x", 0, 1, "", 1),)))
        node.ctx.run.membership.apply(Members(3, removed={"x": "gone"}))
    for peer in removed:
        node.ctx.run.membership.apply(Members(4, removed={peer: "gone"}))
        del node.ctx.links.up[peer]
    for peer in "abc":
        if peer not in removed:
            node.slots(peer, 4, 4)
    node.repairs.find(0, ("x", "d"), True, lost=("x",))
    asked = node.sent(Want)
    for peer in lack:
        node.repairs.on_lack(peer, 0, refused=False, transmission=node.sender.items[0].transmission)
    for peer in silent:
        node.lose(peer)
    node.sender.provide(0, b"x")
    said = [effect.message for effect in node.ctx.outbox.effects if isinstance(effect, Send)]
    return asked, next(message for message in said if isinstance(message, Forward))


def test_what_nobody_has_at_the_next_stage_is_not_looked_for_beyond_it() -> None:
    """All who may have it say that they do not: it went no further, and who gets it now need not ask."""
    asked, forward = found(lack="abc")
    assert asked == ["a", "b", "c"]
    assert not forward.repair and forward.lost == ()


def test_it_is_looked_for_beyond_who_may_have_had_it_and_is_gone() -> None:
    """Two in a row were lost: who comes in the place of the second one is told of it, and asks its
    neighbours."""
    asked, forward = found(removed="b", lack="ac")
    assert asked == ["a", "c"]
    assert forward.repair and forward.lost == ("b",)
    asked, forward = found(lack="ab", silent="c")
    assert asked == ["a", "b", "c"]
    assert forward.repair and forward.lost == ("c",)


def test_who_came_after_the_removals_looks_further() -> None:
    """A stage is lost and refilled while its iteration is open: who comes then does not know whom the log had
    removed before, at its own stage and at the next one."""
    asked, forward = found(lack="abc", followed=False)
    assert asked == ["a", "b", "c"]
    assert forward.repair


def test_what_a_peer_had_that_moves_to_another_stage_goes_elsewhere() -> None:
    """In a large swarm the record that removes it may let it in elsewhere at once: it is a member again, and
    of no next stage, when its removal is heard of."""
    node = Node("greedy", relays="abcefghi", picks=2)
    assert node.ctx.run.near.crowded
    for peer in "abcefghi":
        node.slots(peer, 1, 1)
    node.sender.submit(0, b"x", ("d",), True)
    [first] = node.sent(Forward)
    moved = Member(first, 0, 2, "", 1, name=first)
    node.ctx.run.membership.apply(Members(2, removed={first: "moves"}, joined=(moved,)))
    node.repairs.peer_removed(first, "moves")
    assert len(node.sent(Forward)) == 2


def test_an_acknowledgement_is_of_the_first_of_two_transmissions_over_one_link() -> None:
    """A slow link delivers what was taken for lost. Were its time counted from the second transmission, the
    link would be taken to be a hundred times faster, and all that is still on its way for lost, too."""
    node = Node("greedy")
    sender, costs, now = node.sender, node.ctx.costs, node.ctx.clock.now
    costs.activation_bytes = 1_000_000
    node.slots("a", 4, standing=4)
    sender.submit(0, b"x", ("d",), True)
    node.ctx.clock.now = now + 80.0
    node.repairs._repair(sender.items[0], "it does not have the microbatch")
    assert node.sent(Forward) == ["a", "a"]
    node.ctx.clock.now = now + 81.0
    sender.on_got("a", 0)
    assert costs.of("a").link.out_bps(1_000_000) == pytest.approx(8e6 / 81.0)
    node.ctx.clock.now = now + 160.0
    sender.on_got("a", 0)
    assert costs.of("a").link.out_bps(1_000_000) == pytest.approx(8e6 / 81.0)


def test_what_was_on_its_way_when_the_link_broke_says_nothing_about_the_next_one() -> None:
    node = Node("greedy")
    node.ctx.costs.activation_bytes = 1_000_000
    node.slots("a", 4, standing=4)
    node.sender.submit(0, b"x", ("d",), True)
    node.ctx.clock.now += 80.0
    node.repairs.link_down("a", "broken")
    node.sender.on_got("a", 0)
    assert node.ctx.costs.of("a").link.out_bps(1_000_000) is None


def test_who_grants_no_credit_is_not_waited_for() -> None:
    """`a` was asked and says nothing: another replica is asked, and `a` gets nothing for some iterations
    (seeds 5212214, 5302382). `b`, which reported credits and has none to spare, is only passed over."""
    for silent in (True, False):
        node = Node("static")
        node.ctx.costs.usual_s = 0.1
        if not silent:
            node.slots("a", 0)
        node.sender.submit(0, b"x", ("d",), True)
        assert node.sent(Ask) == ["a"] and node.sender.deadline() == OVERDUE_FLOOR_S
        node.ctx.clock.now = OVERDUE_FLOOR_S
        node.sender.tick()
        assert node.sent(Ask) == ["a", "b"]
        assert bool(node.ctx.costs.avoided("a", 2)) is silent
        node.slots("b", 1)
        assert node.sent(Forward) == ["b"]


def test_one_late_gradient_does_not_make_the_usual_time() -> None:
    """It was the first of its iteration, and a black hole then had eight times as long (seed 12000145)."""
    node = Node("static")
    node.ctx.costs.usual_s = 1.0
    node.slots("a", 4, 4)
    node.slots("b", 4, 4)
    for index in range(2):
        node.sender.submit(index, b"x", ("d",), True)
    assert node.sent(Forward) == ["a", "b"]
    node.ctx.clock.now = 11.0
    node.sender.on_backward("a", 0, b"g")
    assert node.ctx.costs.usual_s == pytest.approx(3.0)
    assert node.sender.overdue_at(node.sender.items[1]) == pytest.approx(36.0)


def test_a_microbatch_goes_to_the_peer_that_failed_with_it_least_often() -> None:
    """Both are avoided, `b` since the stage after it withholds; `a` is the one that has credits to spare."""
    node = Node("static")
    node.ctx.costs.usual_s = 0.1
    for peer in ("a", "b"):
        node.ctx.costs.missed(peer, 1)
    node.slots("a", 4, 4)
    node.sender.submit(0, b"x", ("d",), True)
    assert node.sent(Forward) == ["a"]
    node.ctx.clock.now = node.sender.overdue_at(node.sender.items[0])
    node.repairs.tick()
    assert node.sent(Forward) == ["a"] and node.sent(Ask)[-1] == "b"
    node.slots("b", 1)
    assert node.sent(Forward) == ["a", "b"]


def test_of_peers_that_were_late_one_that_gave_something_back_is_preferred() -> None:
    node = Node("static")
    for peer in ("a", "b"):
        node.ctx.costs.missed(peer, 1)
    node.ctx.costs.returned("b", 1.0, 1.0)
    node.slots("a", 4, 4)
    node.slots("b", 4, 4)
    node.sender.submit(0, b"x", ("d",), True)  # the first of two peers, by its index
    assert node.sent(Forward) == ["b"]


def test_who_grants_credits_to_others_of_this_sender_is_waited_for() -> None:
    node = Node("static", relays="a")
    node.ctx.costs.usual_s = 0.1
    node.sender.submit(0, b"x", ("d",), True)
    node.sender.submit(1, b"x", ("d",), True)
    node.ctx.clock.now = 2.0
    node.slots("a", 1)
    assert node.sent(Forward) == ["a"]
    assert node.sender.overdue_at(node.sender.items[1]) == 2.0 + OVERDUE_FLOOR_S


def test_without_a_usual_time_the_leaders_reports_tell_what_is_overdue() -> None:
    """A data node that is new gave its first microbatch to a black hole, and waited for ever (seed 5211405).
    In the first iteration of a run nobody knows how long a step takes."""
    for t in (1, 2):
        node = Node("static")
        sender = Sender(node.ctx, t, "base", None)
        node.sender, node.repairs = sender, Repairs(node.ctx, sender)
        node.slots("a", 1, 1)
        sender.submit(0, b"x", ("d",), True)
        assert node.sent(Forward) == ["a"] and sender.overdue_at(sender.items[0]) == math.inf
        for node.ctx.clock.now in (5.0, 15.0):
            sender.reported({1: (0,)})
            node.repairs.tick()
        assert (sender.items[0].peer is None) is (t == 2)
        assert bool(node.ctx.costs.avoided("a", t + 1)) is (t == 2)


def test_a_search_does_not_wait_for_who_never_answers() -> None:
    """A replica that never opens the iteration does not answer (seed 5302312)."""
    node = Node("static")
    node.repairs.find(0, ("d",), True)
    node.repairs.on_lack("b", 0, False, node.sender.items[0].transmission)
    assert node.sender.items[0].leg is OutgoingState.FINDING
    node.ctx.clock.now = node.sender.deadline()
    node.repairs.tick()
    assert node.sender.items[0].leg is OutgoingState.WAITING
    assert node.sender.items[0].lost == ("a",) and node.sender.items[0].further


def test_a_gradient_that_cannot_be_used_is_computed_by_another() -> None:
    """The policy sent the microbatch to the same liar again, 1386 times in one step (seed 5300480)."""
    node = Node("static")
    node.slots("a", 4, 4)
    node.slots("b", 4, 4)
    node.sender.submit(0, b"x", ("d",), True)
    node.sender.on_backward("a", 0, b"g")
    node.repairs.reject(0, "it has a scale that no tensor has")
    assert node.sent(Forward) == ["a", "b"]


def test_whose_gradient_could_not_be_used_gives_no_other_and_is_still_named() -> None:
    """It claims what it computed: the leader is told that it was sent the microbatch."""
    node = Node("static")
    node.sender.submit(0, b"x", ("d",), True)
    node.slots("a", 2)
    assert node.sender.on_backward("a", 0, b"g") == (True, None)
    node.repairs.reject(0, "out of memory")
    assert node.sender.on_backward("a", 0, b"g")[1] is not None
    assert node.sender.holders() == {"a": ((), (0,))}
    node.repairs.find(0, ("d",), True)
    assert node.sender.on_backward("a", 0, b"g") == (True, None)


def test_the_only_replica_left_is_not_passed_over_for_what_another_gave_back() -> None:
    """`a` gave the gradient back and is gone; `b` computes it again, and is the only one that can."""
    node = Node("static")
    node.sender.submit(0, b"x", ("d",), True)
    node.slots("a", 1)
    assert node.sender.on_backward("a", 0, b"g") == (True, None)
    node.remove("a")
    node.slots("b", 1)
    item = node.sender.items[0]
    assert (item.peer, item.given_by, item.redoing) == ("b", "a", True)
    for _ in range(3):
        node.repairs.recheck([0])
    assert item.peer == "b" and not item.refused_by


def test_only_who_got_a_microbatch_gives_its_gradient_back() -> None:
    """`b` sent gradients of microbatches that `a` had. They were taken for the true ones, and as it never
    claimed a microbatch, no audit looked at it."""
    node = Node("static")
    node.slots("a", 1, 1)
    node.sender.submit(0, b"x", ("d",), True)
    assert node.sent(Forward) == ["a"]
    first, refusal = node.sender.on_backward("b", 0, b"false")
    assert not first and refusal == "gradient of microbatch 0, which it was neither sent nor asked for"
    assert node.sender.on_backward("a", 0, b"g") == (True, None)


def test_only_who_is_asked_has_what_is_searched() -> None:
    node = Node("static", relays="abc")
    node.lose("b")
    node.repairs.find(0, ("d",), True)
    transmission = node.sender.items[0].transmission
    assert node.sent(Want) == ["a", "c"]
    node.repairs.on_have("b", 0, transmission)
    assert node.sender.items[0].leg is OutgoingState.FINDING
    node.repairs.on_have("c", 0, transmission)
    assert node.sender.items[0].peer == "c" and node.sender.on_backward("a", 0, b"g") == (True, None)


def test_a_slot_whose_machine_left_asks_a_machine_without_one_at_once() -> None:
    """The machine of a slot reports a credit for it by itself; one without a slot tells nobody."""
    node = Node("static", relays="abc")
    node.sender._plan, node.sender._bound = (Slot(0, 1, "a"), Slot(0, 1, "b")), True
    node.sender.submit(0, b"x", ("d",), True)
    node.sender.submit(1, b"x", ("d",), True)
    node.sender.items[0].asked.clear()
    for index, peer in ((0, "a"), (0, "c"), (1, "b")):
        node.sender._ask(node.sender.items[index], peer)
    assert set(node.sent(Ask)) == {"c"}


def carried() -> tuple[Node, Repairs, list[OutgoingMicrobatch]]:
    """A sender with two microbatches or more sent to `a` through a carrier."""
    node = Node("static")
    node.ctx.links.carriers["a"] = "carrier"
    repairs = Repairs(node.ctx, node.sender)
    for index in range(3):
        node.sender.submit(index, b"x", ("d",), True)
    node.slots("a", 3)
    items = [item for item in node.sender.items.values() if item.peer == "a"]
    assert len(items) >= 2
    return node, repairs, items


@pytest.mark.parametrize("comes", [False, True])
def test_activations_that_their_receiver_lacks_are_lost_if_none_after_them_came(comes: bool) -> None:
    """An activation that is asked after again and again is one. A link's payloads arrive in order."""
    node, repairs, items = carried()
    node.ctx.clock.now += 1e5
    for item in items[:1] * 3 + items[1:2]:
        assert not node.ctx.links.lossy
        repairs.on_lack("a", item.index, False, item.transmission)
        if comes:
            node.sender.on_got("a", items[0].index)
            items[0].unacknowledged["a"] = 0.0
    assert ("a" in node.ctx.links.lossy) != comes


def test_an_activation_that_was_acknowledged_is_not_lost() -> None:
    """Whatever its receiver says later."""
    node, repairs, items = carried()
    for item in items:
        node.sender.on_got("a", item.index)
    node.ctx.clock.now += 1e5
    for item in items:
        repairs.on_lack("a", item.index, False, item.transmission)
    assert len(items) >= 2 and not node.ctx.links.lossy


def test_peers_that_granted_nothing_are_noted_in_an_order_that_does_not_depend_on_the_process() -> None:
    """The order in which this peer reports its links follows from it, and a set has another one in each
    process."""
    node, names = Node("static"), [f"peer {number:02}" for number in range(12)]
    item = OutgoingMicrobatch(0, True, ("d",), b"x", asked={(name, False) for name in names})
    node.sender._ask_others(item)
    assert [peer for peer in node.ctx.costs.neighbours if peer in names] == names
