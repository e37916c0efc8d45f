"""Operator control of a running run: pause, continue, change the number of steps (`Control` records), and
revoke peers and tickets (`Revoke` records).

The log alone decides. A pause names the last iteration that is opened: the open one when the pause is logged,
or the second of two in flight, so that its step still commits. Every peer that applied the log to this record
knows of the pause before it could open the next iteration. Nor is the run made to end before that iteration.
"""

from __future__ import annotations

import msgspec

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import AnyRecord, Control, Revoke
from anabranch.protocol.messages import REMARK_MAX, Wish

#: Actions of the operator, and time (s) for which the founder repeats a request while no peer leads.
PAUSE, CONTINUE, STEPS, REVOKE = "pause", "continue", "steps", "revoke"
WISH_S = 60.0


class FounderRequests:
    """Operator's requests that the founder has sent to the leader and repeats until they are logged: one that
    pauses, continues or limits the run, and any number of revocations."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._own: Wish | None = None
        self._until = float("inf")
        self._revocations: dict[str, Wish] = {}
        """Requested revocations by target; never given up, since a revoked ticket must not work again."""

    @property
    def open(self) -> bool:
        """True if a request is not fulfilled yet."""
        return self._own is not None or bool(self._revocations)

    def wish(self, action: str, steps: int = 0, target: str = "", reason: str = "") -> None:
        """Start a request (arguments as in `Wish`), which `repeat` sends to the leader until it is in the
        log. A revocation is never given up, and none is started for a target that is revoked; others are
        given up after WISH_S seconds, and when a later one replaces them."""
        wish = Wish(action, steps, target=target, reason=reason)
        if action != REVOKE:
            self._own, self._until = wish, self._ctx.clock.now + WISH_S
        elif target not in self._ctx.run.revoked:
            self._revocations[target] = wish

    def repeat(self) -> None:
        """Send the pending requests again, to the present leader as far as this peer knows it; give all but
        revocations up after WISH_S seconds, with a note. Nothing without a request."""
        ctx = self._ctx
        for wish in self._revocations.values():
            ctx.outbox.send(ctx.log.leader, wish)
        if self._own is None:
            return
        if ctx.clock.now > self._until:
            ctx.outbox.note("note", text=f"nobody leads the run: {_words(self._own)} was not done")
            self._own = None
        else:
            ctx.outbox.send(ctx.log.leader, self._own)

    def folded(self, record: AnyRecord) -> None:
        """End the operator's request that the log record `record` fulfils; called for each record as it is
        applied."""
        own = self._own
        if isinstance(record, Revoke):
            self._revocations.pop(record.id, None)
        if isinstance(record, Control) and own is not None and record.action == own.action:
            self._own = None if own.action != STEPS or own.steps == record.steps else own

    def answered(self, wish: Wish) -> None:
        """End the request `wish`, for which the leader has nothing to log. Nothing if it is pending no more,
        or another has replaced it."""
        if wish.action == REVOKE:
            self._revocations.pop(wish.target, None)
        elif self._own == Wish(wish.action, wish.steps):
            self._own = None


def control_record(ctx: PeerContext, wish: Wish, t: int, opened: bool) -> Control | None:
    """`Control` record that fulfils the operator's request `wish` to pause, continue or change the number of
    steps, made at the coordinator; None if nothing has to be logged.

    t: last committed iteration; opened: True if t + 1 is open. Without a record the founder is told so, and
    stops repeating the request: the run is so already, or the steps named have begun (noted in the event
    log).
    """
    paused, begun = ctx.run.course.held >= 0, _last_begun(ctx, t, opened)
    iterations = ctx.run.settings.rounds.iterations(wish.steps)
    if wish.action == STEPS and iterations != ctx.run.steps:
        if t < ctx.run.steps and t < iterations >= begun:
            return Control(STEPS, wish.steps)
        why = f"step {begun} has begun" if iterations > t else f"step {t} is committed"
        why = "all steps are committed" if t >= ctx.run.steps else why
        ctx.outbox.note("note", text=f"{_words(wish)} was not done: {why}")
    elif wish.action == PAUSE and not paused:
        return Control(PAUSE, begun)
    elif wish.action == CONTINUE and paused:
        return Control(CONTINUE)
    ctx.outbox.send(ctx.run.founder, Wish(wish.action, wish.steps, done=True))
    return None


def _last_begun(ctx: PeerContext, t: int, opened: bool) -> int:
    """Last iteration that any peer may have open, at least t, which is committed: with a delay one more may
    be in flight. opened: True if t + 1 is open."""
    delay, steps = ctx.run.settings.delay, ctx.run.steps
    if not opened:
        return t + (delay.has(t + 1) and t < steps)
    return t + 1 + (delay.has(t + 2) and t + 2 <= steps)


class RevocationRequests:
    """Revocations requested by the founder or after a conviction, and not logged yet."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._asked: dict[str, Wish] = {}

    def ask(self, wish: Wish) -> None:
        self._asked[wish.target] = wish

    def revoke(self, target: str, reason: str) -> None:
        """Ask that the log revokes a key or a ticket, as its holder was convicted."""
        self.ask(Wish(REVOKE, target=target, reason=reason[:REMARK_MAX]))

    def record(self) -> Revoke | None:
        """Next `Revoke` record to log; its request is dropped, so the caller must log it. None if there is no
        request that needs one: the founder is told of those that do not (the target is revoked already, is
        the founder, or is ""), and they are dropped."""
        ctx = self._ctx
        while self._asked:
            target = next(iter(self._asked))
            wish = self._asked.pop(target)
            if target and target not in ctx.run.revoked and target != ctx.run.founder:
                return Revoke(target, wish.reason or "no reason given")
            if target == ctx.run.founder:
                ctx.outbox.note("note", text="the run's owner cannot be expelled from the run")
            ctx.outbox.send(ctx.run.founder, msgspec.structs.replace(wish, done=True))
        return None


def _words(wish: Wish) -> str:
    return f"steps = {wish.steps}" if wish.action == STEPS else wish.action
