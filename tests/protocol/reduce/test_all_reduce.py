"""Failed results of a replica's reduce and apply tasks (R7, R8, R10)."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from anabranch.protocol.audit.seals import Seals
from anabranch.protocol.context.peer_context import PeerContext, make_context
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import (
    Apply,
    Assemble,
    Freeze,
    Recount,
    Result,
    Skip,
    SumPart,
    Task,
    WeightGradient,
)
from anabranch.protocol.log.records import Commit, Member, Members, StageCommit
from anabranch.protocol.messages import (
    Attempt,
    AttemptId,
    FetchGradient,
    Gradient,
    ReducedPart,
    ReducePart,
    Spared,
)
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.reduce.attempt import ReduceAttempt
from anabranch.protocol.reduce.coverage import SQUARES_BYTES, plausible, squares_bytes
from anabranch.protocol.reduce.helper import ReduceHelper
from anabranch.protocol.reduce.hierarchy import cells_of
from anabranch.protocol.reduce.partial_sums import PARTS_LARGEST, TOO_LARGE
from anabranch.protocol.reduce.step_apply import PENDING_MAX, StepApply
from anabranch.protocol.reduce.work_receipt import WorkReceipt
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout


def replica(
    relays: str = "ab", fell_behind: Callable[[int], None] = lambda step: None
) -> tuple[StepApply, PeerContext, list[int]]:
    ctx = make_context("a", 1, 1, Settings("run", 1, 1, 2, 10), "d0")
    members = (Member("d0", 0, 1, "c", 4), *(Member(name, 1, 1, "c", 4) for name in relays))
    ctx.run.membership.apply(Members(1, members, {member.id: 1 for member in members}))
    ctx.links.up = {member.id: AdaptiveTimeout(0.0, 1.0) for member in members if member.id != "a"}
    applied: list[int] = []
    made = StepApply(ctx, lambda t, base, fingerprint: applied.append(t), fell_behind)
    made.t = 0
    return made, ctx, applied


def commit(digest: str, t: int = 1) -> Commit:
    stage = StageCommit("", digest, {}, ("a",), ("c",), (0, 0))
    return Commit("run", 1, 1, t, "", "", "step", 8, (), (stage, stage), 1.0, 1.0, 0.1, 0.1, 0.05, 1)


@pytest.mark.parametrize("result", [Result(overflow="w"), Result(error="lengths"), Result()])
def test_a_reduce_that_fails_is_not_prepared(result: Result) -> None:
    made, ctx, _ = replica()
    attempt = Attempt(ctx.fence(1, "base"), 1, AttemptId(1, 1), 1, ("a", "b"), (0, 1))
    receipt = WorkReceipt(made.all_reduce.ctx, Seals(made.all_reduce.ctx, "base"), attempt, flat=True)
    made.all_reduce.reduce = ReduceAttempt(attempt, receipt, 0, cells_of(2, 2))
    made.all_reduce._assembled(made.all_reduce.reduce, result)
    assert made.all_reduce.prepared is None


def test_a_step_that_cannot_be_taken_is_not_applied() -> None:
    made, ctx, applied = replica()
    made.pending[1] = (commit("wanted"), "base 1")
    made._take(made._apply_task(made.pending[1][0]))
    job = ctx.tasks.next()
    assert job is not None and isinstance(job[0], Apply) and job[0].digest == "wanted"
    then = ctx.tasks.finish(job[0])
    assert then is not None
    then(Result(error="the reduced gradient at hand is not the one of step 1"))
    assert made.t == 0 and not applied
    assert 1 in made.pending, "it is fetched from another replica instead"
    assert made.deadline() < math.inf


@pytest.mark.parametrize("summed_first", [True, False])
def test_who_sums_a_part_and_lacks_another_tells_those_who_are_spared_of_it(summed_first: bool) -> None:
    """The step is chosen while a part is on its way to `a` over a slow link; `a` then takes it by what
    somebody else tells it, and the reduce is over for it: whoever is spared would wait for its part in
    vain."""
    made, ctx, applied = replica("absc")
    ctx.standby_view.announced(1, Spared(1, {"s": 60.0}))
    iteration = Iteration(ctx, 1, "base", 4, 0, True)
    made.all_reduce.open(iteration)
    iteration.claims.held.add(0)
    fence = ctx.fence(1, "base")
    attempt = Attempt(fence, 1, AttemptId(1, 1), 1, ("a", "b", "s"), (0, 1), (), (0, 1))
    assert made.all_reduce.on_attempt(attempt) is None
    done(ctx, Freeze, Result(outputs=(b"mine", b"mine")))
    made.all_reduce.on_part("b", ReducePart(fence, 1, attempt.attempt, 0), b"theirs")
    if summed_first:
        done(ctx, SumPart, Result(outputs=(b"sum",)))
    assert "s" not in told(ctx)
    made.commit(commit("wanted"), "base 1")
    if not summed_first:
        done(ctx, SumPart, Result(outputs=(b"sum",)))
    made.lacking.received("stranger", Gradient(1, 1), b"gradient")  # nobody asked it
    made.lacking._awaited["c"] = 60.0
    made.lacking.received("c", Gradient(1, 1), b"gradient")
    done(ctx, Assemble, Result(outputs=(b"gradient",), digest="wanted"))
    assert not ctx.tasks.waits((Assemble,))
    done(ctx, Apply, Result(fingerprint="after"))
    assert applied == [1]
    assert sorted(told(ctx)) == ["b", "s"]


def test_a_reduce_that_waited_for_work_does_not_begin_once_the_step_is_skipped() -> None:
    """The worker has no sum of the step any more, and the unit that others own cannot be taken out of it."""
    made, ctx, _ = replica()
    iteration = Iteration(ctx, 1, "base", 4, 0, True)
    made.all_reduce.open(iteration)
    iteration.claims.held |= {0, 1}
    ctx.tasks.submit(TaskPriority.WEIGHTS, added := WeightGradient(1, 1), (), lambda result: None)
    ctx.tasks.next()
    attempt = Attempt(ctx.fence(1, "base"), 1, AttemptId(1, 1), 1, ("a", "b"), (0, 1))
    assert made.all_reduce.on_attempt(attempt) is None
    made.commit(msgspec.structs.replace(commit("none"), verdict="skip"), "base 1")
    ctx.tasks.finish(added)
    made.all_reduce.resume()
    assert not ctx.tasks.waits((Recount, Freeze))
    done(ctx, Skip, Result(fingerprint="after"))
    made.all_reduce.resume()
    assert not ctx.tasks.waits((Recount, Freeze))


@pytest.mark.parametrize("runs", [True, False])
def test_a_step_that_is_being_taken_from_a_state_that_proves_false_is_given_up(runs: bool) -> None:
    """The state is replaced; what the worker says of the step then is about the false one."""
    behind: list[int] = []
    made, ctx, applied = replica(fell_behind=behind.append)
    made.commit(msgspec.structs.replace(commit("none"), verdict="skip"), "base 1")
    job = ctx.tasks.next() if runs else None
    made.start_anew()
    if job is not None:
        then = ctx.tasks.finish(job[0])
        assert then is not None
        then(Result(fingerprint="of a false state"))
    assert behind == [0] and made.t == -1 and not applied
    assert not ctx.tasks.waiting
    made.loaded(0, "base", "true")
    made.advance()
    done(ctx, Skip, Result(fingerprint="after"))
    assert applied == [1] and made.fingerprint == "after"


@pytest.mark.parametrize("kind", [ReducePart, ReducedPart])
def test_a_member_sends_no_more_bytes_than_the_parts_of_a_reduce_take(
    kind: type[ReducePart | ReducedPart],
) -> None:
    """Parts that come before the attempt begins count, and one that is repeated counts once (I5)."""
    made, ctx, _ = replica()
    iteration = Iteration(ctx, 1, "base", 4, 0, True)
    made.all_reduce.open(iteration)
    iteration.claims.held.add(0)
    fence, sums = ctx.fence(1, "base"), (int(kind is ReducedPart),) * 4
    attempt = Attempt(fence, 1, AttemptId(1, 1), 1, ("a", "b"), (0, 1), (), sums)
    parts = [kind(fence, 1, attempt.attempt, part) for part in range(4)]
    share = 0.4 * PARTS_LARGEST
    early = [made.all_reduce.on_part("b", part, b"theirs", share) for part in (parts[0], parts[1], parts[2])]
    assert early == [None, None, TOO_LARGE]
    assert made.all_reduce.on_attempt(attempt) is None
    done(ctx, Freeze, Result(outputs=(b"mine",) * 4))
    again = [made.all_reduce.on_part("b", part, b"theirs", share) for part in parts]
    assert again == [None, None, TOO_LARGE, TOO_LARGE]
    assert made.all_reduce.on_part("b", parts[3], b"theirs", 0.2 * PARTS_LARGEST) is None


def test_a_helper_takes_no_more_bytes_of_a_member_than_the_parts_of_a_reduce() -> None:
    _, ctx, _ = replica()
    ctx.run.assign_stage(2)
    helper = ReduceHelper(ctx)
    fence = ctx.fence(1, "base")
    attempt = Attempt(fence, 1, AttemptId(1, 1), 1, ("b", "c"), (0, 1), ("a",), (2, 2, 2))
    assert helper.on_attempt(attempt) is None
    parts = [ReducePart(fence, 1, attempt.attempt, part) for part in range(3)]
    taken = [helper.on_part("b", part, b"theirs", 0.4 * PARTS_LARGEST) for part in (*parts, parts[0])]
    assert taken == [None, None, TOO_LARGE, None]


def test_who_is_spared_waits_for_the_parts_that_it_is_told_late() -> None:
    made, ctx, _ = replica()
    members = [Member(name, 1, 1, "c", 4) for name in "bc"]
    ctx.run.membership.apply(Members(2, tuple(members), {"b": 1, "c": 1}))
    ctx.links.up["c"] = AdaptiveTimeout(0.0, 1.0)
    ctx.standby_view.announced(1, Spared(1, {"a": 60.0}))
    made.all_reduce.open(Iteration(ctx, 1, "base", 4, 0, True))
    fence = ctx.fence(1, "base")
    attempt = Attempt(fence, 1, AttemptId(1, 1), 1, ("a", "b", "c"), (1, 2), (), (1, 2))
    assert made.all_reduce.on_attempt(attempt) is None
    done(ctx, Freeze, Result(outputs=(b"", b"")))
    ctx.clock.now = 10.0
    made.commit(commit("wanted"), "base 1")
    for second in range(11, 40):
        ctx.clock.now = float(second)
        made.tick()
    assert not asked(ctx)
    ctx.clock.now = 42.0
    made.tick()
    assert asked(ctx), "it takes longer than three times what the reduce took"


def asked(ctx: PeerContext) -> list[str]:
    """Peers that were asked for a gradient."""
    sent = [effect for effect in ctx.outbox.effects if isinstance(effect, Send)]
    return [effect.peer for effect in sent if isinstance(effect.message, FetchGradient)]


def done(ctx: PeerContext, kind: type[Task], result: Result) -> None:
    """The worker does what is next, of this kind."""
    job = ctx.tasks.next()
    assert job is not None and isinstance(job[0], kind)
    then = ctx.tasks.finish(job[0])
    assert then is not None
    then(result)


def told(ctx: PeerContext) -> list[str]:
    """Peers that were sent a reduced part."""
    sent = [effect for effect in ctx.outbox.effects if isinstance(effect, Send)]
    return [effect.peer for effect in sent if isinstance(effect.message, ReducedPart)]


def test_who_learns_of_more_steps_than_it_remembers_fetches_the_state() -> None:
    """It was cut off, and is told of all that was chosen meanwhile at once."""
    behind: list[int] = []
    made, _, _ = replica(fell_behind=behind.append)
    for t in range(1, PENDING_MAX + 11):
        made.commit(commit("wanted", t), f"base {t}")
        assert len(made.pending) <= PENDING_MAX
    assert made.t == -1 and behind == [2], "from before the second step no state is of use any more"
    assert list(made.pending) == list(range(11, PENDING_MAX + 11))


def test_the_step_that_is_being_taken_is_remembered() -> None:
    behind: list[int] = []
    made, ctx, applied = replica(fell_behind=behind.append)
    made.pending[1] = (commit("wanted"), "base 1")
    made._take(made._apply_task(made.pending[1][0]))
    job = ctx.tasks.next()
    assert job is not None
    for t in range(2, PENDING_MAX + 3):
        made.commit(commit("wanted", t), f"base {t}")
        assert len(made.pending) <= PENDING_MAX
    then = ctx.tasks.finish(job[0])
    assert then is not None
    then(Result(fingerprint="taken"))
    assert applied == [1] and behind == [4] and made.t == -1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e308])
def test_squares_that_no_gradient_has_are_refused(value: float) -> None:
    assert not plausible({"w": value, "v": 1.0}, 100)
    assert plausible({"w": 2.0, "v": 0.0}, 100)


def test_squares_of_all_stages_fit_a_line_of_the_log() -> None:
    """A name of quotes takes twice its length in the log: the line was longer than any message, and the
    leader could not send it."""
    blocks = (1, 40)
    lines = [squares_bytes(stage, blocks) for stage in range(3)]
    assert sum(lines) <= SQUARES_BYTES and lines[0] == lines[1] // 2 == lines[2] // 41
    for names in (['"' * 6000], ["\x00" * 9], [f"{n}" for n in range(1500)], ["w" * 12_000]):
        assert not plausible(dict.fromkeys(names, 1.0), lines[0])
    tensors = [f"blocks.{block}.attention.wq.weight.{n}" for block in range(40) for n in range(14)]
    assert plausible(dict.fromkeys(tensors, 1.2345678901234567e-100), lines[2])


def test_a_model_of_five_hundred_blocks_fits_a_line_of_the_log() -> None:
    tensors = {f"blocks.{n}.feed_forward.w_gate": 1.2345678901234567e-100 for n in range(9)}
    assert plausible(tensors, squares_bytes(1, (1,) * 500))
