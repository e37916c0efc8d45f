"""Slots never exceed the capacity and one repair; none is lost, whatever breaks (I5, R4)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.protocol.messages import Fence, Slots
from anabranch.protocol.pipeline.credits import Credit, SlotLedger, fade

FENCE = Fence(1, 1, 1, "base", 1)


class Wire:
    """Receiver and its senders, with messages that are delayed, and lost when a link breaks."""

    def __init__(self, capacity: int, senders: list[str], draw: random.Random) -> None:
        self.ledger = SlotLedger(capacity)
        self.credits = {peer: Credit() for peer in senders}
        self.up = dict.fromkeys(senders, True)
        self.to_sender: dict[str, list[Slots]] = {peer: [] for peer in senders}
        self.forwards: dict[str, list[int]] = {peer: [] for peer in senders}
        self.returns: dict[str, list[int]] = {peer: [] for peer in senders}
        self.held: list[str] = []
        self.draw = draw
        self.tell(self.ledger.deal(senders))

    def tell(self, peers: list[str]) -> None:
        for peer in peers:
            if self.up[peer]:
                self.to_sender[peer].append(self.ledger.grants[peer].told(FENCE))

    def step(self) -> None:
        peer = self.draw.choice(sorted(self.credits))
        credit = self.credits[peer]
        actions = ["hear", "send", "arrive", "release", "ask", "return", "heard", "break", "withdraw"]
        action = self.draw.choice(actions)
        if action == "hear" and self.to_sender[peer]:
            credit.told(self.to_sender[peer].pop(0), 0.0)
        elif action == "send" and self.up[peer] and credit.free > 0:
            credit.used += 1
            self.forwards[peer].append(1)
        elif action == "arrive" and self.forwards[peer]:
            self.forwards[peer].pop()
            assert self.take(peer), "a forward within its credit was refused"
        elif action == "release" and self.held:
            self.tell(self.ledger.release(self.held.pop(self.draw.randrange(len(self.held)))))
        elif action == "ask" and self.up[peer]:
            self.tell(self.ledger.ask(peer, self.draw.randrange(9), self.draw.random() < 0.3))
        elif action == "return" and self.up[peer] and min(credit.free, credit.beyond_standing) > 0:
            credit.returned += 1
            self.returns[peer].append(credit.returned)
        elif action == "heard" and self.returns[peer]:
            self.tell(self.ledger.give_back(peer, self.returns[peer].pop(0)))
        elif action == "withdraw":
            self.tell(self.ledger.withdraw())
        elif action == "break" and self.draw.random() < 0.2:
            self.break_link(peer)
        self.check()

    def take(self, peer: str) -> bool:
        """Count a forward that arrives; False if it is refused although its credit was not withdrawn."""
        withdrawn = self.ledger.grants[peer].withdrawn
        if not self.ledger.receive(peer):
            return withdrawn > 0
        self.held.append(peer)
        if self.draw.random() < 0.8:  # it may be what came another way already
            self.tell(self.ledger.use(peer))
        return True

    def break_link(self, peer: str) -> None:
        if self.up[peer]:
            self.up[peer] = False
            self.to_sender[peer], self.forwards[peer], self.returns[peer] = [], [], []
            self.credits[peer].stale = True
            self.tell(self.ledger.unlink(peer))
        else:
            self.up[peer] = True
            self.ledger.link(peer)
            self.tell([peer])

    def check(self) -> None:
        ledger = self.ledger
        granted = sum(grant.held for grant in ledger.grants.values())
        assert len(self.held) <= ledger.capacity + 1
        assert granted + ledger.pool + ledger.repair_free == ledger.capacity + 1
        assert ledger.pool >= 0
        for peer, credit in self.credits.items():
            if not credit.stale:
                grant = ledger.grants[peer]
                assert credit.used + credit.returned <= grant.granted
                assert credit.total <= grant.granted


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 10**9))
def test_none_is_lost_and_none_is_made(capacity: int, senders: int, seed: int) -> None:
    draw = random.Random(seed)
    wire = Wire(capacity, [f"u{n}" for n in range(senders)], draw)
    for _ in range(300):
        wire.step()
    # In the end everything that is held comes back.
    for peer in sorted(wire.up):
        if wire.up[peer]:
            wire.break_link(peer)
    wire.ledger.asks.clear()
    while wire.held:
        wire.ledger.release(wire.held.pop())
    wire.check()
    assert wire.ledger.repair_free
    assert wire.ledger.pool == capacity


def test_who_took_one_for_lost_that_came_after_all_has_no_credit_too_many() -> None:
    """Else it sends microbatches that are refused, as fast as the link takes them."""
    ledger, credit = SlotLedger(1), Credit()

    def tell() -> None:
        credit.told(ledger.grants["a"].told(FENCE), 0.0)

    ledger.deal(["a"])
    tell()
    credit.used += 1  # sent; it counts as lost, is sent again, and then both come
    assert ledger.receive("a") and not ledger.receive("a")
    for _ in range(20):
        tell()
        assert credit.free <= 0


class Foreseen(Wire):
    """Wire of a round: the receiver grants some credits for slots, and its senders foresee other numbers."""

    def __init__(self, capacity: int, senders: list[str], draw: random.Random) -> None:
        super().__init__(capacity, senders, draw)
        self.to_sender = {peer: [] for peer in senders}
        self.ledger = SlotLedger(capacity)
        for peer in senders:
            if count := draw.randrange(4):
                self.credits[peer] = Credit(count, standing=count, stale=False, foreseen=True)
        self.tell(self.ledger.expect({p: draw.randrange(1, 3) for p in senders if draw.random() < 0.6}))

    def tell(self, peers: list[str]) -> None:
        super().tell([peer for peer in peers if peer in self.ledger.grants])

    def step(self) -> None:
        peer = self.draw.choice(sorted(self.credits))
        if self.forwards[peer] and self.draw.random() < 0.05:
            self.credits[peer].used -= 1  # it counts as lost, and comes after all
        super().step()

    def take(self, peer: str) -> bool:
        if not self.ledger.receive(peer):
            return True
        self.held.append(peer)
        self.tell(self.ledger.use(peer))
        return True

    def check(self) -> None:
        granted = sum(grant.held for grant in self.ledger.grants.values())
        assert granted + self.ledger.pool + self.ledger.repair_free == self.ledger.capacity + 1
        assert self.ledger.pool >= 0 and len(self.held) <= self.ledger.capacity + 1

    def sent_by(self, peer: str, turns: int) -> int:
        """Number of microbatches that a peer, which asks while it has no credit, sends in so many turns;
        everything arrives at once, and others return what they need not keep."""
        sent = 0
        for _ in range(turns):
            for each, credit in self.credits.items():
                while self.to_sender[each]:
                    credit.told(self.to_sender[each].pop(0), 0.0)
                if each != peer and (spare := min(credit.free, credit.beyond_standing)) > 0:
                    credit.returned += spare
                    self.returns[each].append(credit.returned)
                while self.returns[each]:
                    self.tell(self.ledger.give_back(each, self.returns[each].pop(0)))
                while self.forwards[each]:
                    self.forwards[each].pop()
                    self.take(each)
            while self.held:
                self.tell(self.ledger.release(self.held.pop()))
            if self.credits[peer].free > 0:
                self.credits[peer].used += 1
                self.forwards[peer].append(1)
                sent += 1
            else:
                self.tell(self.ledger.ask(peer, 1, True))
                self.tell(self.ledger.ask(peer, 1, False))
        return sent


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 150), st.integers(0, 10**9))
def test_whoever_asks_gets_credits_whatever_was_foreseen_withdrawn_or_lost(
    capacity: int, senders: int, steps: int, seed: int
) -> None:
    """A credit that counts as used, or as unused, at one end alone is never used again (I4)."""
    wire = Foreseen(capacity, [f"u{n}" for n in range(senders)], random.Random(seed))
    for _ in range(steps):
        wire.step()
    for peer, up in wire.up.items():
        if not up:
            wire.break_link(peer)
    assert all(wire.sent_by(peer, 40) >= 10 for peer in wire.credits)


def test_the_capacity_is_dealt_evenly_and_the_rest_goes_to_those_who_ask() -> None:
    ledger = SlotLedger(7)
    assert ledger.deal(["a", "b", "c"]) == ["a", "b", "c"]
    assert [ledger.grants[peer].total for peer in "abc"] == [2, 2, 2]
    assert ledger.receive("b") and ledger.receive("c")
    assert ledger.ask("b", 5, repair=False) == ["b"]
    assert ledger.ask("c", 6, repair=False) == []
    assert ledger.ask("c", 1, repair=True) == ["c"]  # the repair slot


def test_where_a_plan_stands_half_is_dealt_by_it_and_one_is_left_for_those_who_ask() -> None:
    ledger = SlotLedger(8)
    ledger.deal(["a", "b"], {"a": 3})
    assert [ledger.grants[peer].standing for peer in "ab"] == [5, 2]
    assert ledger.pool == 1
    ledger.deal(["a", "b"], {"a": 6, "b": 2})
    assert [ledger.grants[peer].standing for peer in "ab"] == [3, 3]
    assert ledger.pool == 2
    single = SlotLedger(1)
    single.deal(["a", "b"], {"a": 1})
    assert single.ask("b", 0, repair=False) == ["b"]


def test_repairs_are_served_first_and_then_the_lowest_index() -> None:
    ledger = SlotLedger(1)
    ledger.deal(["a", "b"])
    assert ledger.ask("a", 9, repair=False) == ["a"]
    assert ledger.ask("b", 4, repair=True) == ["b"]
    for peer, index, repair in (("a", 3, False), ("b", 2, False), ("a", 8, True)):
        assert ledger.ask(peer, index, repair) == []
    assert ledger.receive("a") and ledger.receive("b")
    assert ledger.release("b") == ["a"]  # the repair of 8
    assert ledger.receive("a")
    assert ledger.release("a") == []  # first a slot for the next repair
    assert ledger.release("a") == ["b"]  # then 2


def test_a_slot_that_its_peer_does_not_need_is_lent_to_who_asks_and_comes_back() -> None:
    ledger = SlotLedger(4)
    ledger.deal(["a", "b"])
    assert all(map(ledger.receive, "aabb"))
    assert ledger.ask("b", 1, repair=False) == []
    assert ledger.release("a") == ["a"]  # it has no other slot left: its own comes first
    assert ledger.release("a") == ["b"]
    assert (ledger.grants["a"].held, ledger.grants["b"].held) == (1, 3)
    assert ledger.receive("b")
    assert ledger.release("b") == ["a"]
    assert (ledger.grants["a"].held, ledger.grants["b"].held) == (2, 2)


def test_a_forward_without_a_slot_is_refused() -> None:
    ledger = SlotLedger(2)
    ledger.deal(["a", "b"])
    assert ledger.receive("a")
    assert not ledger.receive("a")
    assert not ledger.receive("stranger")


def test_who_foresaw_a_credit_in_vain_uses_the_next_one() -> None:
    """It counts the refused microbatch as sent, so its receiver has to."""
    ledger, credit = SlotLedger(2), Credit(1, standing=1, stale=False)
    ledger.expect({"other": 1})
    credit.used += 1
    assert not ledger.receive("a")
    ledger.ask("a", 4, True)
    credit.told(ledger.grants["a"].told(FENCE), 0.0)
    assert credit.free == 1 and ledger.receive("a")


def test_who_was_refused_before_it_asks_gets_a_credit_as_any_newcomer_does() -> None:
    """All credits are in use, so one of a peer with guaranteed ones has to go to it once it is freed."""
    told = []
    for is_refused in (False, True):
        ledger = SlotLedger(2)
        ledger.deal(["a", "b"])
        assert ledger.receive("a") and ledger.receive("b")
        if is_refused:
            assert not ledger.receive("newcomer")
        asked = ledger.ask("newcomer", 4, False)
        told.append((asked, ledger.release("b"), ledger.release("a"), ledger.ask("newcomer", 5, False)))
    assert told[0][1] == ["newcomer"]
    assert told[0] == told[1]


def test_a_removed_peers_unused_slots_and_the_repair_slot_are_free_again() -> None:
    ledger = SlotLedger(2)
    ledger.deal(["a", "b"])
    assert ledger.receive("a")
    assert ledger.ask("a", 0, repair=True) == ["a"]
    assert not ledger.repair_free
    ledger.forget("a")
    assert ledger.repair_free and ledger.pool == 0


def test_what_was_lost_with_a_link_did_not_use_its_slot() -> None:
    credit = Credit()
    credit.told(Slots(FENCE, 3, 0, 0, 0, 2), 0.0)
    credit.used, credit.returned = 2, 1
    credit.stale = True
    assert credit.free == 0
    credit.told(Slots(FENCE, 3, 1, 0, 0, 2), 0.0)
    assert credit.free == 2


def test_who_comes_after_all_was_dealt_out_does_not_wait_for_ever() -> None:
    """The others have more standing slots than they need, and would keep them."""
    ledger, before = SlotLedger(2), Credit()
    assert ledger.deal(["before"]) == ["before"]
    before.told(ledger.grants["before"].told(FENCE), 0.0)
    assert ledger.ask("late", 5, repair=False) == ["before"]
    before.told(ledger.grants["before"].told(FENCE), 0.0)
    assert min(before.free, before.beyond_standing) == 1
    assert ledger.give_back("before", 1) == ["late"]
    assert (ledger.grants["before"].total, ledger.grants["late"].total) == (2, 1)


def test_an_old_account_gives_no_standing_slot_back() -> None:
    credit = Credit()
    for standing in (2, 1, 2):
        credit.told(Slots(FENCE, 2, 0, 0, 0, standing), 0.0)
    assert credit.standing == 1


def test_one_that_came_while_others_were_cut_off_is_not_left_without_slots() -> None:
    """Its first slot was one that a peer without a link had to give up; when that was back, it had them all
    again, used or not."""
    ledger = SlotLedger(capacity=4)
    ledger.deal(["a"])
    ledger.unlink("a")
    assert "b" in ledger.ask("b", 0, repair=False)
    assert ledger.receive("b")
    ledger.link("a")
    ledger.release("b")
    assert ledger.grants["a"].standing < 4, "it is to hand one back"
    told = ledger.ask("b", 1, repair=False)
    if "b" not in told:
        told = ledger.give_back("a", 1)
    assert "b" in told


def test_slots_of_one_that_does_not_know_of_them_do_not_keep_a_newcomer_waiting() -> None:
    """A sender that was behind never heard of its credits, and has none to return."""
    ledger = SlotLedger(capacity=4)
    ledger.deal(["a", "behind"])
    assert "new" not in ledger.ask("new", 0, repair=False)
    first = next(peer for peer, grant in ledger.grants.items() if grant.held > grant.standing)
    told = ledger.insist()
    assert set(told) == {"a", "behind"}, "the first is told again, and the other is asked as well"
    other = next(peer for peer in told if peer != first)
    assert "new" in ledger.give_back(other, 1)
    assert ledger.insist() == []


def test_nobody_is_pressed_for_one_that_has_slots_or_none_waits() -> None:
    ledger = SlotLedger(capacity=2)
    ledger.deal(["a", "b"])
    assert ledger.insist() == []
    ledger.receive("a")
    assert ledger.ask("a", 7, repair=False) == ["b"], "it is asked for what it does not use"
    assert ledger.insist() == [], "and not pressed"
    assert [grant.standing for grant in ledger.grants.values()] == [1, 0]


def test_a_slot_that_nobody_uses_is_called_in_for_one_that_waits() -> None:
    """Two have more to send than was dealt to them, and another one nothing: it hands its slots back, one for
    each that waits, and not what it needs itself."""
    ledger = SlotLedger(6)
    ledger.deal(["a", "b", "c"])
    for peer in "aabbc":
        assert ledger.receive(peer)
    assert ledger.ask("a", 3, repair=False) == ["c"]
    assert ledger.ask("b", 4, repair=False) == [], "c has one, and that is asked for"
    credit = Credit()
    credit.told(ledger.grants["c"].told(FENCE), 0.0)
    assert credit.free == 1 and credit.beyond_standing == 1
    assert ledger.give_back("c", 1) == ["a"]
    assert ledger.receive("a")
    assert ledger.ask("c", 1, repair=False) == []
    assert ledger.release("c") == ["c"], "the lowest index first"


def test_who_does_not_return_what_is_called_in_loses_it_when_the_step_lacks_units() -> None:
    """A black hole holds the only credit, and asks for more. It gets no further one until it sends something
    on the lost one, which is refused, or returns it."""
    ledger = SlotLedger(1)
    ledger.deal([])
    assert ledger.ask("hole", 0, repair=False) == ["hole"]
    assert ledger.ask("a", 3, repair=False) == []
    assert ledger.ask("hole", 1, repair=False) == []
    assert ledger.withdraw() == ["a"]
    assert ledger.receive("a")
    assert ledger.release("a") == [], "the hole's request comes first, but it is bound"
    assert not ledger.receive("hole")
    assert ledger.ask("a", 4, repair=False) == ["hole"], "it may have a credit again"
    assert ledger.withdraw() == ["a"]
    assert ledger.give_back("hole", 1) == [], "there is no credit to give back"
    assert ledger.grants["hole"].held == 0 and not ledger.grants["hole"].withdrawn


def test_nobody_loses_a_credit_to_its_own_request_or_if_it_was_not_asked_to_return_it() -> None:
    ledger = SlotLedger(2)
    ledger.deal(["a"])
    assert ledger.ask("a", 0, repair=False) == ["a"]
    assert ledger.withdraw() == []
    ledger.deal(["a", "b"])
    assert ledger.ask("a", 1, repair=False) == ["a"]
    assert ledger.withdraw() == [] and ledger.grants["b"].held == 1


def hoard(ledger: SlotLedger, hoarder: str, honest: str, repair: bool = False) -> dict[str, int]:
    """`hoarder` asks for every microbatch; the honest ones hand back what is asked for and they do not use.
    Returns who holds how many slots then."""
    for index in range(40):
        told = ledger.ask(hoarder, index, repair)
        while told:
            peer = told.pop(0)
            grant = ledger.grants[peer]
            if peer in honest and min(grant.unused, grant.called) > 0:
                told += ledger.give_back(peer, grant.returned + min(grant.unused, grant.called))
    return {peer: grant.held for peer, grant in ledger.grants.items()}


@pytest.mark.parametrize("repair", [False, True])
def test_who_uses_nothing_gets_no_more_by_asking_than_was_dealt_to_it(repair: bool) -> None:
    ledger = SlotLedger(6)
    ledger.deal(["a", "b", "h"])
    assert hoard(ledger, "h", "ab", repair) == {"a": 2, "b": 2, "h": 2}
    assert all(map(ledger.receive, "aabb"))
    assert ledger.ask("b", 50, repair=True) == ["b"], "nor is the repair slot its own"
    assert ledger.ask("a", 51, repair=False) == []
    assert ledger.release("b") == [], "it goes back to where repairs look for it"
    assert ledger.repair_free
    assert ledger.release("a") == ["a"], "its asks are not behind those of the hoarder"


def test_who_was_dealt_nothing_and_uses_nothing_gets_one() -> None:
    ledger = SlotLedger(2)
    ledger.deal(["a", "b"])
    assert hoard(ledger, "h", "ab") == {"a": 1, "b": 0, "h": 1}
    assert ledger.receive("a")
    assert ledger.release("a") == ["a"]


def test_slots_that_are_handed_back_and_asked_for_again_leave_the_others_what_is_theirs() -> None:
    """Each time one is called in for it, and goes to the pool, for which the others would have to ask."""
    ledger = SlotLedger(6)
    ledger.deal(["a", "b", "h"])
    assert ledger.receive("h")
    for index in range(20):
        for peer in ("a", "b", "h"):
            ledger.ask("h", index, repair=False)
            grant = ledger.grants[peer]
            back = min(grant.unused, grant.called)
            ledger.give_back(peer, grant.returned + back)
    assert sum(ledger.grants[peer].standing for peer in "ab") >= 3


def test_who_uses_what_it_asks_for_gets_more_each_time_and_at_most_a_quarter_beyond_its_own() -> None:
    """Asks overtake what is sent: with each that came, one more may be on its way."""
    uses: dict[str, float] = {}
    ledger = SlotLedger(8, uses=uses)
    ledger.deal([])
    for index in range(8):
        ledger.ask("a", index, repair=False)
    on_its_way = []
    for _ in range(7):
        on_its_way.append(ledger.grants["a"].unused)
        assert ledger.receive("a")
        ledger.use("a")
    assert on_its_way == [1, 2, 3, 3, 3, 3, 2]
    for left in (3, 3, 3, 3, 3, 3, 2):
        fade(uses)
        ledger = SlotLedger(8, uses=uses)
        ledger.deal([])
        for index in range(8):
            ledger.ask("a", index, repair=False)
        assert ledger.grants["a"].unused == left, "who used many may have many, and fewer with time"


def test_what_came_twice_or_cannot_be_computed_with_was_no_use() -> None:
    ledger = SlotLedger(4)
    ledger.deal([])
    for index in range(4):
        ledger.ask("h", index, repair=False)
    for _ in range(3):
        assert ledger.receive("h")
        ledger.release("h")
        assert ledger.grants["h"].unused == 1, "it was known already"
    assert ledger.receive("h")
    ledger.use("h")
    ledger.useless("h")
    ledger.release("h")
    for index in range(4, 8):
        ledger.ask("h", index, repair=False)
    assert ledger.grants["h"].unused == 1


def test_who_may_not_know_what_was_dealt_to_it_is_told_when_it_asks() -> None:
    ledger = SlotLedger(4)
    ledger.deal(["a", "b"])
    assert ledger.ask("a", 0, repair=False) == ["a"], "nothing came from it: it has two, perhaps unheard"
    assert ledger.receive("b")
    ledger.use("b")
    assert ledger.ask("b", 1, repair=False) == [], "it used what it was dealt"


def test_a_round_grants_a_credit_for_each_slot_to_its_data_node_and_only_once() -> None:
    """The rest of the capacity is for whoever asks: slots whose machine left. A slot that is done leaves its
    credit to the pool, and nobody is told."""
    ledger = SlotLedger(3)
    assert ledger.expect({"a": 1}) == ["a"]
    assert ledger.grants.keys() == {"a"}
    assert (ledger.grants["a"].total, ledger.pool) == (1, 2)
    assert ledger.receive("a")
    assert ledger.release("a") == []
    assert not ledger.receive("a")
    assert ledger.pool == 3
    assert ledger.ask("b", 4, repair=False) == ["b"]
    assert ledger.receive("b")


def test_a_slot_of_another_machine_finds_a_credit_also_where_there_is_room_for_one_only() -> None:
    """It waits for the machine's own slot, if that has begun; or gets the credit that is returned."""
    ledger = SlotLedger(1)
    ledger.expect({"a": 1})
    assert ledger.ask("b", 4, repair=False) == ["a"]  # which is to return its credit
    assert ledger.give_back("a", 1) == ["b"]
    ledger = SlotLedger(1)
    ledger.expect({"a": 1})
    assert ledger.receive("a")
    ledger.ask("b", 4, repair=False)
    assert not ledger.receive("b")
    assert ledger.release("a") == ["b"]
    assert ledger.receive("b")


def test_a_data_node_grants_a_credit_for_each_loss_however_many() -> None:
    ledger = SlotLedger(2)
    ledger.expect({"a": 1, "b": 2, "c": 1})
    assert ledger.pool == 0
    assert all(ledger.receive(peer) for peer in "abbc")
    for peer in "abbc":
        assert ledger.release(peer) == []
    assert ledger.ask("d", 1, repair=False) == ["d"]
