"""What a worker does next, and where a microbatch goes next."""

from __future__ import annotations

import random

import pytest

from anabranch.flow.policy import Candidate, Choice, make_policy
from anabranch.protocol.tasks import Apply, Forward, Freeze, Head, InputGradient, Result, Task, WeightGradient
from anabranch.protocol.work import Rank, WorkQueue

ORDER: list[tuple[Rank, Task]] = [
    (Rank.STEP, Freeze(3, 2)),
    (Rank.GRADIENT, InputGradient(3, 1)),
    (Rank.GRADIENT, InputGradient(3, 4)),
    (Rank.FORWARD, Forward(3, 0, True)),
    (Rank.FORWARD, Forward(4, 0, True)),
    (Rank.WEIGHTS, WeightGradient(3, 0)),
    (Rank.EVALUATION, Head(3, 9, False)),
]


def index_of(task: Task) -> int:
    return int(getattr(task, "index", getattr(task, "unit", 0)))


def filled(seed: int, done: list[Task]) -> WorkQueue:
    queue, jobs = WorkQueue(), list(ORDER)
    random.Random(seed).shuffle(jobs)
    for rank, task in jobs:
        queue.push(rank, index_of(task), task, (), lambda result, task=task: done.append(task))  # type: ignore[misc]
    return queue


def run_all(queue: WorkQueue) -> list[Task]:
    started: list[Task] = []
    while (job := queue.next()) is not None:
        assert queue.next() is None  # one at a time
        started.append(job[0])
        then = queue.finish(job[0])
        assert then is not None
        then(Result())
    return started


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_work(seed: int) -> None:
    done: list[Task] = []
    assert run_all(filled(seed, done)) == [task for _, task in ORDER] == done


def test_a_committed_iteration_drops_its_work_and_ignores_what_is_running() -> None:
    done: list[Task] = []
    queue = WorkQueue()
    queue.push(Rank.FORWARD, 0, Forward(3, 0, True), (), lambda result: done.append(Forward(3, 0, True)))
    job = queue.next()
    assert job is not None
    for rank, task in ORDER:
        queue.push(rank, index_of(task), task, (), lambda result, task=task: done.append(task))  # type: ignore[misc]
    queue.drop(3)
    then = queue.finish(job[0])
    assert then is not None
    then(Result())
    assert run_all(queue) == done == [Freeze(3, 2), Forward(4, 0, True)]


def test_a_step_is_not_dropped_while_it_runs() -> None:
    done: list[Task] = []
    queue = WorkQueue()
    apply = Apply(3, 1.0, 1.0, 1.0, 1.0)
    queue.push(Rank.STEP, 0, apply, (), lambda result: done.append(apply))
    queue.next()
    queue.drop(3)
    then = queue.finish(apply)
    assert then is not None
    then(Result())
    assert done == [apply]


def test_only_what_was_started_can_end() -> None:
    queue = WorkQueue()
    with pytest.raises(RuntimeError, match="was not running"):
        queue.finish(Freeze(1, 1))


def candidate(peer: str, **changes: object) -> Candidate:
    fields: dict[str, object] = {"link_s": 0.1, "compute_s": 1.0, "outstanding": 0, "free": True}
    return Candidate(peer, **{**fields, **changes})  # type: ignore[arg-type]


def test_greedy_takes_the_least_cost_among_those_with_a_free_slot() -> None:
    greedy = make_policy("greedy")
    near, far = candidate("near"), candidate("far", link_s=0.5)
    assert greedy.choose(0, [far, near]) == Choice("near")
    assert greedy.choose(0, [far, candidate("near", outstanding=1)]) == Choice("far")
    assert greedy.choose(0, [far, candidate("near", free=False)]) == Choice("far")
    assert greedy.choose(0, [candidate("near", free=False)]) is None
    assert greedy.prefer(0, [far, candidate("near", free=False)]) == "near"
    assert greedy.prefer(0, []) is None


def test_a_peer_without_a_slot_is_waited_for_as_long_as_it_is_worth_it() -> None:
    auction = make_policy("auction")
    busy, idle = candidate("busy", outstanding=1), candidate("idle", free=False)
    assert auction.choose(0, [busy, idle]) == Choice("idle", hold_s=pytest.approx(1.0))
    assert auction.choose(0, [busy, idle], waited_s=0.75) == Choice("idle", hold_s=pytest.approx(0.25))
    assert auction.choose(0, [busy, idle], waited_s=1.0) == Choice("busy")
    assert auction.choose(0, [candidate("busy", outstanding=1, free=False), idle]) is None


def test_a_peer_that_should_long_have_had_a_slot_is_waited_for_no_longer() -> None:
    auction = make_policy("auction")
    dear, stuck = candidate("dear", price=1e6), candidate("stuck", free=False, price=0.0)
    first = auction.choose(0, [dear, stuck])
    assert first is not None and first.peer == "stuck" and first.hold_s < 3.0
    assert auction.choose(0, [dear, stuck], waited_s=first.hold_s) == Choice("dear")


def test_static_waits_for_its_own() -> None:
    static = make_policy("static")
    both = [candidate("a"), candidate("b", free=False)]
    assert [static.choose(i, both) for i in range(3)] == [Choice("a"), None, Choice("a")]
    assert static.prefer(1, both) == "b"
    assert static.choose(0, []) is None


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no routing policy 'best'; there are .*greedy.*static"):
        make_policy("best")
