"""Replica of a stage: applying the committed steps in order to its state (R9-R11).

A step is applied with the gradient of this replica's own all-reduce, or with one fetched from another replica
(`gradient_fetch`). A replica that is too far behind fetches a whole state. Not here: the all-reduce itself.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Apply, ReadGradient, Result, Skip, Task
from anabranch.protocol.log.records import Commit
from anabranch.protocol.messages import FetchGradient, Gradient
from anabranch.protocol.reduce.all_reduce import AllReduce
from anabranch.protocol.reduce.gradient_fetch import GradientFetch

#: Committed steps kept until they are applied. Plain choice: nobody keeps the gradient of an older step, so a
#: replica further behind needs a whole state in any case.
PENDING_MAX = 64


class StepApply(Timer):
    """Applier of the log's committed steps, in order, to the state of one stage at one peer. t: iteration of
    the step applied last, -1 without a state. fingerprint: hash of the state then. pending: iteration ->
    committed step and hash of its log entry, not applied yet. on_applied: called with t, base and fingerprint
    after each step. on_behind: called with the step that cannot be applied, if a whole state has to be
    fetched."""

    def __init__(
        self, ctx: PeerContext, on_applied: Callable[[int, str, str], None], on_behind: Callable[[int], None]
    ) -> None:
        self.ctx = ctx
        self.t = -1
        self.base = ""
        """Hash of the log entry that led to the state."""
        self.fingerprint = ""
        self.pending: dict[int, tuple[Commit, str]] = {}
        self._taking: Task | None = None
        """Task that takes the next step, until its result is here; None: there is none."""
        self.keeps: set[int] = set()
        """Steps before which the weights are kept, as they are audited here."""
        self.all_reduce = AllReduce(ctx, lambda t: t in self.pending, self._is_taken, self.advance)
        self.lacking = GradientFetch(
            ctx, self._wanted, self.all_reduce.parts_arriving, self._fetched, self._give_up
        )
        self._on_applied = on_applied
        self._on_behind = on_behind

    def commit(self, record: Commit, base: str) -> None:
        """Store a committed step, and apply it as soon as it is its turn; one that is applied already is
        ignored. Of the step whose turn it is, standbys get the reduced parts now. base: hash of its log
        entry. Beyond PENDING_MAX pending steps the oldest are dropped."""
        if record.t > self.t:
            self.pending[record.t] = (record, base)
            if record.t == self.t + 1:
                self.all_reduce.step_committed()
            while len(self.pending) > PENDING_MAX:
                being_taken = -1 if self._taking is None else self.t + 1
                del self.pending[min(t for t in self.pending if t != being_taken)]
            self.advance()

    def advance(self) -> None:
        """Apply the next committed step if this replica has its gradient, or it is a skip; otherwise fetch
        the gradient. If the next step was dropped from `pending`, or the state proves false, a whole state is
        fetched. Nothing without a state, without a pending step, or while one is being applied."""
        if not self.pending or self._taking is not None or self.t < 0:
            return
        following = self.pending.get(self.t + 1)
        if following is None:  # more than PENDING_MAX steps were committed since, so it was dropped
            self._give_up(min(self.pending))
            return
        record, _ = following
        if self._is_false(record):
            text = f"the state that was fetched is not the run's after iteration {self.t}: another is fetched"
            self.ctx.outbox.note("note", text=text)
            self._give_up(self.t)
            return
        if record.verdict == "skip":
            self._take(Skip(record.t))
            return
        if self.all_reduce.holds_gradient(record.t, record.stages[self.ctx.run.stage].digest):
            self._take(self._apply_task(record))
        elif not self.lacking.sought:
            reduce = self.all_reduce.reduce
            self.lacking.seek(reduce is not None and reduce.message.fence.t == record.t)
            self.tick()

    def _is_false(self, following: Commit) -> bool:
        """True if this peer only audits, and its state is not the one that the log names before the step
        `following`: who gave it the state lied. A joiner's state is checked by the leader instead."""
        if following.verdict == "skip" or self.ctx.me not in self.ctx.run.membership.auditors:
            return False
        return following.stages[self.ctx.run.stage].fingerprint_before != self.fingerprint

    def _is_taken(self, t: int) -> bool:
        """True if the worker was told to apply or skip the step of iteration `t`, or has done it."""
        return t <= (self.t if self._taking is None else self._taking.t)

    def _take(self, task: Task) -> None:
        self._taking = task
        self.lacking.end()
        self.ctx.tasks.hurry(task.t)
        self.ctx.tasks.drop(task.t)
        self.ctx.tasks.submit(TaskPriority.STEP, task, (), lambda result: self._applied(task, result))

    def _applied(self, task: Task, result: Result) -> None:
        if task is not self._taking:
            return  # the state that it was taken from proved false
        self._taking = None
        if result.error:
            # The state is unchanged. The gradient, or a whole state, comes from another replica.
            self.ctx.outbox.note("note", text=f"a step could not be taken: {result.error}")
            self.all_reduce.prepared = None
            self.advance()
            return
        record, base = self.pending.pop(self.t + 1)
        self.keeps.discard(record.t)
        self.t, self.base = record.t, base
        self.fingerprint = result.fingerprint
        iteration = self.all_reduce.iteration
        if iteration is not None and iteration.t <= record.t:
            self.all_reduce.close()
        self._on_applied(record.t, base, result.fingerprint)
        self.advance()

    def loaded(self, t: int, base: str, fingerprint: str) -> None:
        """Record that the state after iteration `t` was loaded by the worker, and drop the pending steps up
        to `t`; the caller then calls `advance`, which applies the later ones. base: hash of the log entry
        after which the state stands. fingerprint: hash of the state, which this function does not check."""
        self.t, self.base, self.fingerprint = t, base, fingerprint
        self.pending = {k: v for k, v in self.pending.items() if k > t}

    def roll_back(self) -> None:
        """Give up the state, all pending steps and the open iteration: the log went back to an earlier
        iteration, or this peer was moved to another stage. The caller has another state loaded next
        (`loaded`)."""
        self.t, self.fingerprint = -1, ""
        self.pending.clear()
        self._taking = None
        self.lacking.end()
        self.all_reduce.close()

    # --- catching up ---------------------------------------------------------------------------

    def tick(self) -> None:
        self.all_reduce.tick()
        self.lacking.tick()

    def _wanted(self) -> Commit | None:
        """Next step, if it is known and not being applied; else None."""
        following = self.pending.get(self.t + 1)
        return None if following is None or self._taking is not None else following[0]

    def _fetched(self, record: Commit) -> None:
        """Apply a step whose fetched gradient is at the worker; nothing if it is no longer the next one, or
        being applied."""
        if self.t + 1 == record.t and self._taking is None:
            self._take(self._apply_task(record))

    def start_anew(self) -> None:
        """Give up the state, as it proved false, and the open iteration's reduce; have another state fetched
        (`on_behind`). Pending steps stay, also one that is being taken: what comes of that is ignored."""
        if self._taking is not None:
            self.ctx.tasks.withdraw(self._taking)
            self._taking = None
        self._give_up(self.t)

    def _give_up(self, step: int) -> None:
        """Stop applying steps one by one, drop the open iteration's reduce, and have a whole state fetched
        (`on_behind`): the gradient of `step` is not to be had, or the state is false. Pending steps stay."""
        self.lacking.end()
        self.t = -1  # nothing is applied until the state is here
        self.all_reduce.close()
        self._on_behind(step)

    def on_fetch_gradient(self, peer: str, message: FetchGradient) -> None:
        """Send `peer` the gradient of a step, or an empty answer if it is not kept any more. Only of this
        replica's stage: the caller checks that."""

        def answer(result: Result) -> None:
            payload = result.outputs[0] if result.outputs else None
            self.ctx.outbox.send(peer, Gradient(message.t, message.stage), payload)

        self.ctx.tasks.submit(TaskPriority.STEP, ReadGradient(message.t), (), answer)

    def _apply_task(self, record: Commit) -> Apply:
        """Task that takes a step (no skipped one) with the log's values (learning rate, clip factor, bias
        corrections, digest of this stage's reduced gradient), which this peer never recomputes. It also has
        the weights before the step kept, if this peer may have to audit it (`keeps`)."""
        return Apply(
            record.t,
            record.learning_rate,
            record.clip_factor,
            record.bias_correction1,
            record.bias_correction2,
            record.stages[self.ctx.run.stage].digest,
            record.t in self.keeps,
        )

    def deadline(self) -> float:
        return min(self.lacking.deadline(), self.all_reduce.deadline())
