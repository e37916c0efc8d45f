"""Parts of the auction: the state that links carry, the ranking of next hops, the search for a way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents.interface import CostChanged, PeerUp, Received, Send, Setup, Side, Wake
from anabranch.flow.auction import AuctionAgent
from anabranch.flow.auction.link_state import InLink, Link, OutLink
from anabranch.flow.auction.market import FINENESS_MAX, Market, Ranking
from anabranch.flow.auction.messages import Answer, Finding, Offer, Search
from anabranch.flow.auction.residual_search import Explorer

PRICE = 3.0


def waits(link: Link) -> bool:
    """True if a letter or an answer of this end is due."""
    return link.dirty or link.owes or link.asks


@given(steps=st.lists(st.sampled_from(["push", "return", "lose", "carry"]), max_size=60), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_two_ends_of_a_line_agree_once_letters_pass(steps: list[str], data: st.DataObject) -> None:
    """Letters are lost, overtaken and doubled; then each end repeats what it must, and both agree."""
    out, into = OutLink("b", 1.0, PRICE, to_data=False), InLink("a", 1.0)
    wire: list[Offer | Answer] = []

    def speak(now: float) -> None:
        if out.dirty or out.owes or out.repeat_at <= now:
            wire.append(out.letter(now, 0))
        if into.dirty or into.owes or into.repeat_at <= now:
            wire.append(into.letter(now, 0, PRICE))

    def hear(letter: Offer | Answer) -> None:
        if isinstance(letter, Offer) and into.receive(letter):
            into.pushed = letter.pushed
        elif isinstance(letter, Answer) and out.receive(letter):
            out.returned = letter.returned

    now = 0.0
    for step in steps:
        now += 0.1
        if step == "push":
            out.pushed += 1
            out.dirty = True
        elif step == "return" and into.units:
            into.returned += 1
            into.dirty = True
        elif step == "lose" and wire:
            wire.pop(data.draw(st.integers(0, len(wire) - 1)))
        elif step == "carry" and wire:
            hear(wire[data.draw(st.integers(0, len(wire) - 1))])
        speak(now)
    for _ in range(200):
        now += 1.0
        speak(now)
        letters, wire[:] = list(wire), []
        for letter in letters:
            hear(letter)
    assert (out.pushed, out.returned) == (into.pushed, into.returned)
    assert not waits(out) and not waits(into)
    assert not wire


def test_a_question_and_its_answer_are_two_letters() -> None:
    out, into = OutLink("b", 1.0, PRICE, to_data=False), InLink("a", 1.0)
    out.pushed, out.dirty = 2, True
    question = out.letter(0.0, 0)
    assert question.ask and into.receive(question)
    into.pushed = question.pushed
    into.returned, into.dirty = 1, True
    answer = into.letter(0.1, 0, PRICE)
    assert not answer.ask  # if it is lost, the question comes again
    assert out.receive(answer)
    assert not waits(out) and not waits(into)
    assert not into.receive(question)
    assert into.owes  # a question that comes again is answered again
    assert into.letter(2.0, 0, PRICE).returned == 1


def test_an_answer_that_tells_a_new_price_is_not_said_twice() -> None:
    news: dict[Link, None] = {}
    into = InLink("a", 1.0)
    into.changed, into.sent_price = news, PRICE
    into.receive(Offer(1, 0, True, (), (), 0, 1, 0, 9.0, ()))
    answer = into.letter(0.1, 0, PRICE + 1.0)
    assert (answer.seq, answer.price) == (1, PRICE + 1.0)
    assert not waits(into) and not news


def test_a_price_that_fell_after_a_version_is_told_by_the_next() -> None:
    """A repetition of a version says nothing new: the other end knows that version and does not read it."""
    out, into = OutLink("b", 1.0, PRICE, to_data=False), InLink("a", 1.0)
    into.dirty = True
    assert out.receive(into.letter(0.0, 0, PRICE + 5.0))
    again = into.letter(3.0, 0, PRICE)
    assert not out.receive(again) and again.price == into.sent_price == PRICE + 5.0
    into.dirty = True  # as `Market.tell_fall` does, for a link whose other end knows a higher price
    assert out.receive(told := into.letter(4.0, 0, PRICE)) and told.price == PRICE


def test_costs_that_are_lost_in_rounding_make_no_small_epsilon() -> None:
    """As if they were 0: a price would rise towards a dear link in steps that never get there."""
    levels = []
    for cheap in (0.0, 1e-45, 1e-14):
        market = Market(Setup("r", 1, 2, capacity=2, relays=3, cost_max=1.0))
        for name, cost in (("a", cheap), ("b", cheap), ("c", 1.0)):
            market.outs[name] = link = OutLink(name, cost, 0.0, to_data=False)
            market.ranking.put(link)
        market.start()
        levels.append(market.epsilon)
    assert levels == [1.0 / FINENESS_MAX] * 3


def test_a_lull_is_longer_the_longer_nothing_has_changed_from_outside() -> None:
    agent = AuctionAgent(Setup("r", 1, 2, capacity=2, relays=3, cost_max=9.0), CounterRng(0))
    agent.handle(PeerUp("d", Side.PREVIOUS, 2.0), 0.0)
    agent.handle(PeerUp("x", Side.NEXT, 4.0), 0.0)
    agent.handle(Received("x", Side.NEXT, _price(5.0)), 0.1)
    agent.handle(Wake(), 2.0)
    agent.handle(Received("d", Side.PREVIOUS, Offer(1, 1, False, (), (), 0, 1, 0, 30.0, ())), 600.0)
    agent.handle(Wake(), 600.2)
    answer = Answer(2, 1, False, (), (), 0, 0, 5.0, (), ())
    agent.handle(Received("x", Side.NEXT, answer), 600.4)
    for now in (602.0, 611.0):  # acknowledged; what stands has followed
        agent.handle(Wake(), now)
    repair_at = agent.deadline()
    assert repair_at is not None and repair_at > 880.0


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.just(float("inf")), st.integers(0, 9).map(float)))
    )
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_ranking_is_that_of_a_sort(changes: list[tuple[int, float]]) -> None:
    lines = [OutLink(f"r{at}", 1.0, float("inf"), to_data=False) for at in range(5)]
    ranking = Ranking()
    for line in lines:
        ranking.put(line)
    for at, price in changes:
        lines[at].price = price
        ranking.put(lines[at])
        levels = sorted(line.level for line in lines)
        best, first, second = ranking.best_two()
        assert (first, second) == (levels[0], levels[1])
        assert best is None or best.level == first
    ranking.remove(lines[0])
    assert ranking.best_two()[1] == min(line.level for line in lines[1:])


def test_a_relay_tells_its_price_once_it_knows_those_of_all_next_hops() -> None:
    agent = AuctionAgent(Setup("r", 1, 2, capacity=1, relays=3, cost_max=9.0), CounterRng(0))
    sent: list[Send] = []
    for peer, side, cost in [("d", Side.PREVIOUS, 2.0), ("x", Side.NEXT, 4.0), ("y", Side.NEXT, 1.0)]:
        sent += agent.handle(PeerUp(peer, side, cost), 0.0)
    sent += agent.handle(Received("x", Side.NEXT, _price(1.0)), 0.1)
    sent += agent.handle(Wake(), 1.0)
    assert not [send for send in sent if send.side is Side.PREVIOUS]
    sent += agent.handle(Received("y", Side.NEXT, _price(2.0)), 1.0)
    sent += agent.handle(Wake(), 2.0)
    told = [send.message for send in sent if send.side is Side.PREVIOUS]
    assert [message.price for message in told if isinstance(message, Answer)] == [3.0]
    assert agent.price() == 3.0


def test_a_source_tries_again_while_the_flow_further_on_is_still_moving() -> None:
    """It has long come to rest itself, so nothing tells it when the way is free."""
    agent = AuctionAgent(Setup("d", 0, 1, demand=1, relays=1, cost_max=9.0), CounterRng(0))
    agent.handle(PeerUp("r", Side.NEXT, 1.0), 0.0)
    answers, now = 0, 0.1
    letter = _price(2.0)
    for _ in range(2000):
        sent = agent.handle(Received("r", Side.NEXT, letter), now) if letter else agent.handle(Wake(), now)
        offers = [send.message for send in sent if isinstance(send.message, Offer)]
        letter = None
        if offers:
            answers += 1
            whole = offers[-1].wants if now > 4000.0 else ()
            letter = Answer(1 + answers, offers[-1].seq, False, (), (), 0, 0, 2.0, whole, ())
        now = now + 0.2 if letter else agent.deadline() or now
    assert now > 4000.0
    assert len(agent.standing()) == 1


def _searches(changes: list[float], rises: list[float]) -> list[float]:
    """When a source searches: its only next hop refuses a unit at each time of `rises`, at a price that is
    higher by more than an epsilon, and says of each search that there is a way; the link's cost changes, by
    hardly anything, at each of `changes`."""
    agent = AuctionAgent(Setup("d", 0, 1, demand=1, relays=1 << 22, cost_max=250.0), CounterRng(0))
    agent.handle(PeerUp("r", Side.NEXT, 100.0), 0.0)
    agent.handle(Received("r", Side.NEXT, _price(100.0)), 0.1)
    seq, price, found = 1, 100.0, 0
    times: list[float] = []
    for now in sorted({*changes, *rises}):
        offers = [send.message for send in agent.handle(Wake(), now) if isinstance(send.message, Offer)]
        if offers and offers[-1].searches and offers[-1].searches[0].number > found:
            found = offers[-1].searches[0].number
            times.append(now)
        if now in changes:
            agent.handle(CostChanged("r", Side.NEXT, 100.0 + 1e-6 * now), now)
        if now in rises and offers and offers[-1].pushed > offers[-1].recalled:
            price, seq, pushed = price + 20.0, seq + 1, offers[-1].pushed
            finding = (Finding("d", found, True),) if found else ()
            answer = Answer(seq, offers[-1].seq, False, (), finding, 0, pushed, price, (), ())
            agent.handle(Received("r", Side.NEXT, answer), now)
    return times


def test_a_source_searches_less_and_less_often_where_changes_never_cease() -> None:
    """Each search goes through the whole swarm, and there is a way each time."""
    seconds = [float(n) for n in range(1, 3000)]
    times = _searches(changes=seconds[::20], rises=seconds)
    assert 3 <= len(times) <= 20
    assert times[-1] - times[-2] > 200.0 > 20.0 > times[1] - times[0]


def test_where_changes_never_cease_a_first_search_waits_as_long_as_from_cold() -> None:
    seconds = [float(n) for n in range(1, 200)]
    times = _searches(changes=seconds[::5], rises=[1.0, *seconds[80:]])
    assert times[0] - 81.0 > 15.0


def test_after_a_rest_a_source_searches_soon_after_a_change() -> None:
    rises = [float(n) for n in range(1, 200)]
    later = [400.0 + n for n in range(1, 200)]
    times = _searches(changes=[30.0, 400.0], rises=[*rises, *later])
    after = [time for time in times if time > 400.0]
    assert after[0] - 400.0 < 10.0 < times[0]
    assert max(second - first for first, second in pairwise(after)) < 25.0


def test_a_fall_is_told_only_when_the_price_it_comes_from_is_confirmed() -> None:
    """Prices rise in silence: what the next hop said last may be long past."""
    agent = AuctionAgent(Setup("r", 1, 2, capacity=2, relays=3, cost_max=9.0), CounterRng(0))
    agent.handle(PeerUp("d", Side.PREVIOUS, 2.0), 0.0)
    agent.handle(PeerUp("x", Side.NEXT, 4.0), 0.0)
    agent.handle(Received("x", Side.NEXT, _price(5.0)), 0.1)
    agent.handle(Wake(), 2.0)
    agent.handle(Received("d", Side.PREVIOUS, Offer(1, 1, True, (), (), 0, 1, 0, 30.0, ())), 2.1)
    agent.handle(Wake(), 3.2)
    agent.handle(Received("x", Side.NEXT, Answer(2, 1, False, (), (), 0, 0, 1.0, (), ())), 3.5)
    now, asked = 3.5, 0
    for _ in range(20):
        now = max(now, agent.deadline() or now) + 0.01
        for send in agent.handle(Wake(), now):
            assert not isinstance(send.message, Answer) or send.message.price == 9.0
            if isinstance(send.message, Offer) and send.message.seq > 1:
                asked = send.message.seq
        if asked:
            break
    assert asked
    sent = list(
        agent.handle(Received("x", Side.NEXT, Answer(3, asked, False, (), (), 0, 0, 1.0, (), ())), now)
    )
    sent += agent.handle(Wake(), now + 0.2)
    assert [send.message.price for send in sent if isinstance(send.message, Answer)] == [5.0]


def _price(price: float) -> Answer:
    return Answer(1, 0, True, (), (), 0, 0, price, (), ())


@pytest.mark.parametrize("found_first", [False, True])
def test_a_finding_reaches_others_when_the_first_who_asked_is_gone(found_first: bool) -> None:
    """The answer is on its way to one previous hop; when that dies, those told "nothing" hear of it."""
    market = Market(Setup("r", 1, 2, capacity=1))
    first, second = InLink("a", 1.0), InLink("b", 1.0)
    beyond = market.outs["c"] = OutLink("c", 1.0, PRICE, to_data=False)
    explorer = Explorer(market, Search("d", 1, 0.0), is_data=False)
    explorer.reached(first)
    explorer.reached(second)
    assert second.findings["d"] == Finding("d", 1, False)
    steps = [lambda: explorer.forget(first), lambda: explorer.found(beyond, True)]
    for step in reversed(steps) if found_first else steps:
        step()
    assert second.findings["d"] == Finding("d", 1, True)
