"""Order of a worker's tasks, and next hops of microbatches."""

from __future__ import annotations

import random

import pytest

from anabranch.flow.dispatch.next_hop_policies import Candidate, Choice
from anabranch.flow.policies.registry import make_policy
from anabranch.protocol.context.task_queue import TaskPriority, WorkQueue
from anabranch.protocol.interface.tasks import (
    Apply,
    CheckState,
    Forward,
    Freeze,
    Head,
    InputGradient,
    Result,
    StepAhead,
    Task,
    WeightGradient,
)

ORDER: list[tuple[TaskPriority, Task]] = [
    (TaskPriority.STEP, Freeze(3, 2)),
    (TaskPriority.GRADIENT, InputGradient(3, 1)),
    (TaskPriority.GRADIENT, InputGradient(3, 4)),
    (TaskPriority.FORWARD, Forward(3, 0, True)),
    (TaskPriority.FORWARD, Forward(4, 0, True)),
    (TaskPriority.WEIGHTS, WeightGradient(3, 0)),
    (TaskPriority.EVALUATION, Head(3, 9, False)),
]


def index_of(task: Task) -> int:
    return int(getattr(task, "index", getattr(task, "unit", 0)))


def filled(seed: int, done: list[Task]) -> WorkQueue:
    queue, jobs = WorkQueue(), list(ORDER)
    random.Random(seed).shuffle(jobs)
    for rank, task in jobs:
        queue.submit(rank, task, (), lambda result, task=task: done.append(task), index_of(task))  # type: ignore[misc]
    return queue


def run_all(queue: WorkQueue) -> list[Task]:
    started: list[Task] = []
    while (job := queue.next()) is not None:
        assert queue.next() is None  # only a single job runs
        started.append(job[0])
        then = queue.finish(job[0])
        assert then is not None
        then(Result())
    return started


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_work(seed: int) -> None:
    done: list[Task] = []
    assert run_all(filled(seed, done)) == [task for _, task in ORDER] == done



def test_steps_ahead_come_last_until_their_result_is_to_be_applied() -> None:
    """Then those of its iteration go first, in order, and are not dropped with the iteration's other work."""
    queue = WorkQueue()

    def order() -> list[Task]:
        found = []
        while (following := queue.next()) is not None:
            found.append(following[0])
            queue.finish(following[0])
        return found

    ahead = [StepAhead(3, 2, 1), StepAhead(3, 2, 2), StepAhead(4, 0, 1)]
    for hurried in (False, True):
        for task in ahead:
            queue.submit(TaskPriority.AHEAD, task, (), lambda result: None, task.index)
        queue.submit(TaskPriority.BACKGROUND, CheckState(2, 1), (), lambda result: None)
        if hurried:
            queue.hurry(3)
            queue.drop(3)
        queue.submit(TaskPriority.STEP, Apply(3, 0.1, 1.0, 1.0, 1.0), (), lambda result: None)
        kinds = [(type(task).__name__, task.t) for task in order()]
        first = [("StepAhead", 3)] * 2 if hurried else []
        last = [("StepAhead", 4)] if hurried else [("StepAhead", 3), ("StepAhead", 3), ("StepAhead", 4)]
        assert kinds == [*first, ("Apply", 3), ("CheckState", 2), *last]


def test_a_committed_iteration_drops_its_work_and_ignores_what_is_running() -> None:
    done: list[Task] = []
    queue = WorkQueue()
    first = Forward(3, 0, True)
    queue.submit(TaskPriority.FORWARD, first, (), lambda result: done.append(first))
    job = queue.next()
    assert job is not None
    for rank, task in ORDER:
        queue.submit(rank, task, (), lambda result, task=task: done.append(task), index_of(task))  # type: ignore[misc]
    queue.drop(3)
    then = queue.finish(job[0])
    assert then is not None
    then(Result())
    assert run_all(queue) == done == [Freeze(3, 2), Forward(4, 0, True)]


def test_a_step_is_not_dropped_while_it_runs() -> None:
    done: list[Task] = []
    queue = WorkQueue()
    apply = Apply(3, 1.0, 1.0, 1.0, 1.0)
    queue.submit(TaskPriority.STEP, apply, (), lambda result: done.append(apply))
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


def test_a_quick_peer_gets_no_more_than_its_line_passes() -> None:
    """The line takes 0.4 s for an activation, the far peer computes in 0.1 s; the near one takes 0.25 s."""
    auction = make_policy("auction")
    sent = {"far": 0, "near": 0}
    for index in range(48):
        both = [
            candidate("far", compute_s=0.1, line_s=0.4, outstanding=sent["far"]),
            candidate("near", compute_s=0.25, line_s=0.01, outstanding=sent["near"]),
        ]
        choice = auction.choose(index, both)
        assert choice is not None and not choice.hold_s
        sent[choice.peer] += 1
    assert sent["far"] * 0.4 == pytest.approx(sent["near"] * 0.25, rel=0.1)
    crowded = candidate("far", compute_s=0.1, line_s=0.4, others=5)
    assert auction.choose(0, [candidate("near", outstanding=2, compute_s=0.3), crowded]) == Choice("far")


def test_a_peer_behind_a_slow_line_is_waited_for_as_long_as_the_line_needs() -> None:
    auction = make_policy("auction")
    dear = candidate("dear", price=1e6)
    thin = candidate("thin", line_s=4.0, outstanding=1, free=False, price=0.0)
    assert auction.choose(0, [dear, thin]) == Choice("thin", hold_s=pytest.approx(0.1 + 2.0 * 2 * 4.0))


def test_static_waits_for_its_own() -> None:
    static = make_policy("static")
    both = [candidate("a"), candidate("b", free=False)]
    assert [static.choose(i, both) for i in range(3)] == [Choice("a"), None, Choice("a")]
    assert static.prefer(1, both) == "b"
    assert static.choose(0, []) is None


def test_gwtf_sends_as_the_plan_says_and_beyond_it_as_greedy() -> None:
    gwtf = make_policy("gwtf")
    near, far = candidate("near", planned=1), candidate("far", link_s=0.5, planned=3)
    assert gwtf.choose(0, [far, near]) == Choice("near")
    assert gwtf.choose(0, [far, candidate("near", planned=1, outstanding=1)]) == Choice("far")
    assert gwtf.choose(0, [candidate("far", link_s=0.5, planned=3, free=False), near]) == Choice("near")
    full = [candidate("far", link_s=0.5, planned=3, outstanding=3), candidate("near", outstanding=1)]
    assert gwtf.choose(0, full) == make_policy("greedy").choose(0, full)
    assert gwtf.choose(0, []) is None


def test_swarm_gives_quick_peers_more() -> None:
    """Virtual time: by turns, each as often as it is quick."""
    swarm = make_policy("swarm")
    peers = [candidate("quick", link_s=0.0), candidate("slow", link_s=1.0, compute_s=2.0)]
    took: list[str] = []
    for index in range(400):
        choice = swarm.choose(index, peers)
        assert choice is not None and not choice.hold_s
        took.append(choice.peer)
        swarm.returned(index)
    assert took.count("quick") == pytest.approx(320, abs=4)  # 1 s there, 4 s with the slow one


def test_swarm_waits_for_the_peer_it_called_until_the_deadline() -> None:
    swarm = make_policy("swarm")
    first = swarm.choose(0, [candidate("a", free=False), candidate("b", free=False)])
    assert first is not None and first.hold_s == 30.0
    both = [candidate("a", free=first.peer != "a"), candidate("b", free=first.peer != "b")]
    assert swarm.choose(0, both, waited_s=29.0) == Choice(first.peer, hold_s=1.0)
    other = swarm.choose(0, both, waited_s=30.0)
    assert other is not None and other.peer != first.peer and not other.hold_s


def test_swarm_bans_whose_link_broke_unless_nobody_is_left() -> None:
    swarm = make_policy("swarm")
    both = [candidate("a"), candidate("b")]
    swarm.lost("a", now=100.0)
    assert [swarm.choose(i, both, now=200.0) for i in range(3)] == [Choice("b")] * 3
    assert swarm.choose(3, [candidate("a")], now=200.0) == Choice("a")
    chosen = {swarm.choose(i, both, now=400.0) for i in range(4, 8)}
    assert chosen == {Choice("a"), Choice("b")}


def test_swarm_forgets_who_is_gone() -> None:
    swarm = make_policy("swarm")
    for round_ in range(50):
        peers = [f"p{round_}", f"q{round_}"]
        swarm.opened(peers)
        swarm.choose(0, [candidate(peer) for peer in peers])
        swarm.returned(0)
        swarm.lost(peers[0], 0.0)
    tables = [value for value in vars(swarm).values() if isinstance(value, dict)]
    assert len(tables) == 5 and all(len(table) <= 2 for table in tables)


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no routing policy 'best'; there are .*greedy.*static"):
        make_policy("best")
