"""What a replica does with results that are not what it hoped for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from anabranch.protocol.attempting import Reduce
from anabranch.protocol.cells import cells_of
from anabranch.protocol.core import Core
from anabranch.protocol.cover import plausible
from anabranch.protocol.messages import Attempt, AttemptId
from anabranch.protocol.records import Commit, Member, Members, StageCommit
from anabranch.protocol.replica import PENDING_MAX, Replica
from anabranch.protocol.settings import Settings
from anabranch.protocol.tasks import Apply, Result


def replica(fell_behind: Callable[[int], None] = lambda step: None) -> tuple[Replica, Core, list[int]]:
    core = Core("a", 1, 1, Settings("run", 1, 1, 2, 10), "d0")
    members = (Member("d0", 0, 1, "c", 4), Member("a", 1, 1, "c", 4), Member("b", 1, 1, "c", 4))
    core.membership.apply(Members(1, members, {"d0": 1, "a": 1, "b": 1}))
    applied: list[int] = []
    made = Replica(core, lambda t, base, fingerprint: applied.append(t), fell_behind)
    made.t = 0
    return made, core, applied


def commit(digest: str, t: int = 1) -> Commit:
    stage = StageCommit("", digest, {}, ("a",), ("c",), (0, 0))
    return Commit("run", 1, 1, t, "", "", "step", 8, (), (stage, stage), 1.0, 1.0, 0.1, 0.1, 0.05, 1)


@pytest.mark.parametrize("result", [Result(overflow="w"), Result(error="lengths"), Result()])
def test_a_reduce_that_fails_is_not_prepared(result: Result) -> None:
    made, core, _ = replica()
    attempt = Attempt(core.fence(1, "base"), 1, AttemptId(1, 1), 1, ("a", "b"), (0, 1))
    made.reduce = Reduce(attempt, 0, cells_of(2, 2))
    made._assembled(made.reduce, result)
    assert made.prepared is None


def test_a_step_that_cannot_be_taken_is_not_applied() -> None:
    made, core, applied = replica()
    made.pending[1] = (commit("wanted"), "base 1")
    made._take(made._apply_task(made.pending[1][0]))
    job = core.queue.next()
    assert job is not None and isinstance(job[0], Apply) and job[0].digest == "wanted"
    then = core.queue.finish(job[0])
    assert then is not None
    then(Result(error="the reduced gradient at hand is not the one of step 1"))
    assert made.t == 0 and not applied
    assert 1 in made.pending, "it is fetched from another replica instead"
    assert made.deadline() < math.inf


def test_who_learns_of_more_steps_than_it_remembers_fetches_the_state() -> None:
    """It was cut off, and is told of all that was chosen meanwhile at once."""
    behind: list[int] = []
    made, _, _ = replica(behind.append)
    for t in range(1, PENDING_MAX + 11):
        made.commit(commit("wanted", t), f"base {t}")
        assert len(made.pending) <= PENDING_MAX
    assert made.t == -1 and behind == [2], "from before the second step no state is of use any more"
    assert list(made.pending) == list(range(11, PENDING_MAX + 11))


def test_the_step_that_is_being_taken_is_remembered() -> None:
    behind: list[int] = []
    made, core, applied = replica(behind.append)
    made.pending[1] = (commit("wanted"), "base 1")
    made._take(made._apply_task(made.pending[1][0]))
    job = core.queue.next()
    assert job is not None
    for t in range(2, PENDING_MAX + 3):
        made.commit(commit("wanted", t), f"base {t}")
        assert len(made.pending) <= PENDING_MAX
    then = core.queue.finish(job[0])
    assert then is not None
    then(Result(fingerprint="taken"))
    assert applied == [1] and behind == [4] and made.t == -1


def test_who_takes_long_over_a_state_with_kept_gradients_remembers_no_more_steps_for_that() -> None:
    """A stage goes on while somebody comes to it who was told of kept gradients, and does not get the state;
    what was told is all remembered, however much it is."""
    for told in (2, PENDING_MAX + 5):
        made, _, _ = replica()
        made.t = -1
        made.commit(commit("old", 1), "base 1")
        made.take_again(3, {t: (commit("wanted", t), f"base {t}") for t in range(4, 4 + told)}, ("k",))
        assert list(made.pending) == list(range(4, 4 + told))
        for t in range(4 + told, 200):
            made.commit(commit("wanted", t), f"base {t}")
            assert len(made.pending) <= max(PENDING_MAX, told)
        assert max(made.pending) == 199 and made.lacking.keepers == ("k",)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e308])
def test_squares_that_no_gradient_has_are_refused(value: float) -> None:
    assert not plausible({"w": value, "v": 1.0})
    assert plausible({"w": 2.0, "v": 0.0})


@pytest.mark.parametrize("names", [["w" * 300_000], ["\x00" * 9], [f"{n}" for n in range(9_000)]])
def test_squares_that_no_line_of_the_log_holds_are_refused(names: list[str]) -> None:
    assert not plausible(dict.fromkeys(names, 1.0))
    assert plausible({f"blocks.{n}.attention.wq.weight": 1.0 for n in range(4_000)})
