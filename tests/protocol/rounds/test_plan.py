"""Plans of rounds: who fills which slot, for how many inner steps, and from which one on."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocol.interface.rounds import MOST_RATE, Rounds
from anabranch.protocol.log.records import Crew, Slot
from anabranch.protocol.rounds.plan import (
    active,
    crews_of,
    even_plan,
    freed,
    next_plan,
    plan_hash,
    plan_problem,
    units_of,
)

ROUNDS = Rounds(start=2, inner=10, slots=4)
PIPELINES = Rounds(start=2, inner=10, slots=4, pipeline=True)
NAMES = [f"r{n}" for n in range(7)]
RATES = st.dictionaries(st.tuples(st.sampled_from(NAMES)), st.floats(0.01, 100.0), min_size=1)


def test_iterations_and_optimizer_steps() -> None:
    assert [ROUNDS.has(t) for t in (1, 2, 3)] == [False, False, True]
    assert [ROUNDS.progress(t) for t in (1, 2, 3, 5)] == [1, 2, 12, 32]
    assert [ROUNDS.iterations(steps) for steps in (1, 2, 3, 12, 13)] == [1, 2, 3, 3, 4]
    assert [t for t in range(1, 8) if ROUNDS.passes(t, 20)] == [4, 6]
    assert [t for t in range(1, 8) if Rounds().passes(t, 3)] == [3, 6]


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 20), st.integers(0, 9))
def test_lengths_of_rounds_add_up(start: int, inner: int, first: int, rounds: int) -> None:
    """Short rounds first, synchronous steps after the last round: progress and iterations are inverse."""
    one = Rounds(start, inner, 4, first=min(first, inner), last=start + rounds if rounds else 0)
    done = [one.progress(t) for t in range(25)]
    for t in range(1, 25):
        assert done[t] - done[t - 1] == (one.length(t) if one.has(t) else 1)
        assert one.has(t) == (t > start and (not rounds or t <= start + rounds))
    for steps in range(1, done[-1]):
        assert one.iterations(steps) == next(t for t in range(25) if done[t] >= steps)


@given(RATES, st.lists(RATES, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_slot_counts_exactly_the_steps_that_were_accepted(first, later, random) -> None:  # type: ignore[no-untyped-def]
    plan = next_plan(even_plan(ROUNDS), {}, ROUNDS, first)
    done = [0] * ROUNDS.slots
    for rates in later:
        assert [slot.first for slot in plan] == done
        accepted = {slot: plan[slot].crew for slot in active(plan) if random.random() < 0.7}
        done = [n + plan[k].steps * (k in accepted) for k, n in enumerate(done)]
        before, plan = plan, next_plan(plan, accepted, ROUNDS, rates)
        holders = [slot.crew for slot in plan if slot.steps]
        assert len(set(holders)) == len(holders) == min(len(rates), ROUNDS.slots)
        stays = [k for k, slot in enumerate(before) if slot.crew and slot.crew in holders]
        assert all(plan[k].crew == before[k].crew for k in stays)


def test_quick_machines_take_more_steps_and_all_end_together() -> None:
    plan = next_plan(even_plan(ROUNDS), {}, ROUNDS, {("a",): 1.0, ("b",): 2.0, ("c",): 5.0})
    steps = {slot.peer: slot.steps for slot in plan if slot.steps}
    assert abs(sum(steps.values()) - 30) <= 1 and steps["c"] > steps["b"] > steps["a"]
    times = [steps[peer] / rate for peer, rate in (("a", 1.0), ("b", 2.0), ("c", 5.0))]
    assert max(times) / min(times) < 1.1


def test_machines_with_thin_lines_take_fewer_steps_and_all_have_sent_together() -> None:
    """b sends for 6 s and takes 6 s less; d would send for longer than all others compute and send."""
    rates: dict[Crew, float] = {(peer,): 1.0 for peer in "abcd"}
    rounds = Rounds(start=1, inner=10, slots=4)
    plan = next_plan(even_plan(rounds), {}, rounds, rates, sends_s={("b",): 6.0, ("d",): 60.0})
    steps = {slot.peer: slot.steps for slot in plan}
    assert steps == {"a": 15, "b": 9, "c": 15, "d": 1}


@given(
    st.dictionaries(st.integers(0, 60), st.tuples(st.floats(0.0, 1e9), st.floats(0.0, 1e9)), min_size=1),
    st.integers(1, 40),
)
def test_no_line_makes_a_slot_longer_than_connections_allow(
    machines: dict[int, tuple[float, float]], slots: int
) -> None:
    rounds = Rounds(start=1, inner=10, slots=slots)
    rates = {(f"r{k}",): rate for k, (rate, _) in machines.items()}
    sends_s = {(f"r{k}",): send_s for k, (_, send_s) in machines.items()}
    plan = next_plan(even_plan(rounds), {}, rounds, rates, sends_s=sends_s)
    assert all(rounds.least <= slot.steps <= rounds.most_steps for slot in plan if slot.peer)
    assert plan_problem(rounds, 2, plan, 1) == ""


def test_a_slot_goes_on_after_the_steps_that_it_took_ahead() -> None:
    """Steps ahead in proportion to a slot's steps; a machine that became slow still has one more to take, and
    a slot that begins anew has none of them."""
    rounds = Rounds(start=2, inner=10, slots=2, carries=True, overlap=6, proportional=True)
    assert [rounds.ahead(steps) for steps in (1, 2, 10, 18)] == [0, 1, 6, 10]
    before = (Slot(0, 18, "a"), Slot(0, 2, "b"))
    now_slow: dict[Crew, float] = {("a",): 1.0, ("b",): 9.0}
    going_on = next_plan(before, {0: ("a",), 1: ("b",)}, rounds, now_slow, 3)
    assert [(slot.steps, slot.carried) for slot in going_on] == [(11, 3), (18, 3)]
    anew = next_plan(before, {1: ("b",)}, rounds, now_slow, 3)
    assert [(slot.steps, slot.carried) for slot in anew] == [(2, 0), (18, 3)]


def test_a_boast_is_not_believed() -> None:
    rates = {("a",): 1.0, ("b",): 1.0, ("c",): 1.0, ("liar",): 1e12}
    steps = {slot.peer: slot.steps for slot in next_plan(even_plan(ROUNDS), {}, ROUNDS, rates)}
    assert steps["liar"] <= MOST_RATE * steps["a"] + MOST_RATE and steps["a"] >= 1
    assert all(slot <= ROUNDS.most_steps for slot in steps.values())


@given(st.dictionaries(st.integers(0, 60), st.floats(0.0, 1e9), min_size=1), st.integers(1, 40))
def test_no_slot_is_longer_than_connections_allow(rates: dict[int, float], slots: int) -> None:
    rounds = Rounds(start=1, inner=10, slots=slots)
    plan = next_plan(even_plan(rounds), {}, rounds, {(f"r{k}",): rate for k, rate in rates.items()})
    assert max(slot.steps for slot in plan) <= rounds.most_steps


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 9.0)), min_size=2, max_size=4))
def test_crews_have_one_machine_of_each_stage_and_stay_together(of_stages: list[dict[str, float]]) -> None:
    rates = [{f"{peer}.{stage}": rate for peer, rate in of.items()} for stage, of in enumerate(of_stages)]
    kept, crews, failed = crews_of((), (), rates, ["d0", "d1"], 3)
    assert not kept and not failed
    assert len(crews) == min(map(len, rates))
    assert all(peer in of for crew in crews for peer, of in zip(crew[:-1], rates, strict=True))
    assert [crew[-1] for crew in crews] == [f"d{k % 2}" for k in range(len(crews))]
    assert len({peer for crew in crews for peer in crew[:-1]}) == len(crews) * len(rates)
    for one, other in pairwise(crews):
        assert all(of[a] >= of[b] for of, a, b in zip(rates, one, other, strict=False))
    plan = next_plan(even_plan(ROUNDS), {}, PIPELINES, dict.fromkeys(crews, 1.0))
    if crews:
        assert [slot.crew for slot in plan if slot.steps] == sorted(crews)[: ROUNDS.slots]
        gone = crews[0][0]
        left = [{peer: rate for peer, rate in of.items() if peer != gone} for of in rates]
        kept, new, failed = crews_of(plan, active(plan), left, ["d0", "d1"], 4)
        assert set(kept) == {slot.crew for slot in plan if slot.steps} - {crews[0]} and not failed
        assert len(kept) + len(new) == min(map(len, left))
        # Machines of crews that failed though nobody left come last, and meet others in time.
        kept, new, failed = crews_of(plan, (), rates, ["d0", "d1"], 4)
        seats = {peer for slot in plan for peer in slot.crew[:-1]}
        assert not kept and len(new) + len(failed) == len(crews)
        assert all(seats.isdisjoint(crew[:-1]) for crew in new)
        assert all(seats.intersection(crew[:-1]) for crew in failed)


def test_machines_of_crews_that_failed_meet_others() -> None:
    rates = [{f"{peer}{stage}": 1.0 for peer in "abc"} for stage in (1, 2, 3)]
    crews = crews_of((), (), rates, ["d0"], 3).new
    assert [crew[:-1] for crew in crews] == [("a1", "a2", "a3"), ("b1", "b2", "b3"), ("c1", "c2", "c3")]
    plan = next_plan(even_plan(ROUNDS), {}, PIPELINES, dict.fromkeys(crews, 1.0))
    again = (crews_of(plan, (), rates, ["d0"], t).failed for t in range(9))
    met = {crew[1:-1] for failed in again for crew in failed if crew[0] == "a1"}
    assert met == {("a2", "a3"), ("b2", "c3"), ("c2", "b3")}


def test_a_relay_takes_a_second_seat_where_one_is_away() -> None:
    rates = [{f"a{stage}": 3.0, f"b{stage}": 2.0, f"c{stage}": 1.0} for stage in (1, 2, 3)]
    crews = crews_of((), (), rates, ["d0"], 3).new
    plan = next_plan(even_plan(ROUNDS), {}, PIPELINES, dict.fromkeys(crews, 1.0))
    of_a = next(slot for slot, each in enumerate(plan) if each.peer == "a1")
    away = [{peer: rate for peer, rate in of.items() if peer != "a2"} for of in rates]
    counted = set(active(plan)) - {of_a}
    assert len(crews_of(plan, counted, away, ["d0"], 4).kept) == 2
    able = [["a1", "b1", "c1"], ["c2", "b2"], ["a3", "b3", "c3"]]
    kept, new, failed = crews_of(plan, counted, away, ["d0"], 4, able)
    assert len(kept) == 2 and new == [("a1", "c2", "a3", "d0")] and not failed
    assert not crews_of(plan, counted, away, ["d0"], 4, [["a1"], [], ["a3"]]).new

    # The crew with the second seat stays together, until there is another machine: then it is put together
    # anew, from the machine that is back.
    crews = dict.fromkeys([*kept, *new], 1.0)
    plan = next_plan(plan, {k: plan[k].crew for k in counted}, PIPELINES, crews, 4)
    assert plan_problem(PIPELINES, 5, plan, 3) == ""
    quick = [away[0], {"b2": 1.0, "c2": 9.0}, away[2]]
    again = crews_of(plan, active(plan), quick, ["d0"], 5, [able[0], ["b2", "c2"], able[2]])
    assert set(again.kept) == set(crews) and not again.new, "what it carries is that of the same machines"
    back = crews_of(plan, active(plan), rates, ["d0"], 5, able)
    seats = [peer for crew in (*back.kept, *back.new) for peer in crew[:-1]]
    assert len(back.kept) == 2 and sorted(seats) == sorted(peer for of in rates for peer in of)

    # No second seat for a relay of which one crew failed, and the other did not.
    of_two = [slot for slot in active(plan) if "c2" in plan[slot].crew]
    failing = crews_of(plan, set(active(plan)) - {of_two[1]}, away, ["d0"], 5, able)
    assert len(failing.kept) == 2 and len(of_two) == 2
    assert [crew[1] for crew in (*failing.new, *failing.failed)] == ["b2"]

    # No second seat for a relay whose crew failed, and no crew whose seats are mostly second ones.
    failing = crews_of(plan, (), away, ["d0"], 5, able)
    assert not failing.kept and len(failing.failed) == 2
    few = [{f"{peer}{stage}": 1.0 for peer in peers} for stage, peers in ((1, "abc"), (2, "ab"), (3, "ab"))]
    assert len(crews_of((), (), few, ["d0"], 3, [list(of) for of in few]).new) == 2


def test_no_relay_has_three_seats_or_seats_at_two_stages() -> None:
    def problem(*crews: tuple[str, ...]) -> str:
        plan = tuple(Slot(0, 4, crew[0], others=crew[1:]) for crew in crews)
        return plan_problem(PIPELINES, 5, (plan + (Slot(0, 0),) * PIPELINES.slots)[: PIPELINES.slots], 2)

    assert problem(("a1", "a2", "d"), ("b1", "a2", "d")) == ""
    assert "seats" in problem(("a1", "a2", "d"), ("b1", "a2", "d"), ("c1", "a2", "d"))
    assert "seats" in problem(("a1", "a1", "d")) and "seats" in problem(("a1", "x", "d"), ("x", "a2", "d"))


def test_units_and_hashes() -> None:
    assert units_of(0, [1]) == {2, 3} and units_of(1, [1]) == {1}
    plan = (Slot(0, 3, "a"), Slot(3, 0))
    assert active(plan) == (0,) and plan_hash(plan) == plan_hash(freed(plan))
    assert plan_hash(plan) != plan_hash((Slot(1, 3), Slot(3, 0)))
