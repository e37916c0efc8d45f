"""Witnessed reduces: reduces that failed are repeated with all parts summed by the coordinator (R7, R8).

If a reduce is stuck, or its members report different results, nobody can tell from their words who is at
fault: a member may withhold its part from one other, or claim that it cannot reach it. So all members send
their parts to the coordinator, which they all reach, and get the sums back from it. It then knows at first
hand who sent nothing, whose contribution is no gradient, and what the result is. So only members at fault are
removed. Members that merely cannot reach each other keep their seats, and their stage is reduced in this way
for a while. A member whose part or report is late may be honest and slow: it is given more time, once in
WITNESSED_FOR iterations, unless the reduce is a repeated one, whose time is doubled already.

If members said beforehand that they cannot reach each other, the first reduce is not waited for so long. So
its members are given more time in the repeated one, too, but for those that alone say so of others: they had
no reason to wait, and one that withholds its part would say so to be waited for longer.

Not here: whether a contribution is the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.reduce_schedule import ReducePlan
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.tasks import Moments
from anabranch.protocol.messages import Attempt, Prepared
from anabranch.protocol.reduce.partial_sums import PARTS, ReduceAccount, witnessed

#: Iterations for which a stage is reduced in this way after a reduce of it failed. Plain choice: a member
#: that withholds its part again then costs one stall in so many steps.
WITNESSED_FOR = 50
#: Most bytes of sums that the coordinator takes for one reduce. Plain choice: it keeps them in memory.
MOST_BYTES = 4 << 30
#: Witnessed attempts in one iteration after which members are removed whose parts did not all come, or that
#: did not report the result. Those that sent nothing at all, or alone did not report, are removed after the
#: first. The time that a late member is given comes on top.
TRIES_LATE = 2


@dataclass(eq=False)
class WitnessedReduces:
    """Decisions about witnessed reduces. account: function that returns who sent what, and the result, of an
    attempt whose parts this peer sums all."""

    ctx: PeerContext
    admission: Admission
    account: Callable[[Attempt], ReduceAccount | None]
    _until: dict[int, int] = field(default_factory=dict)
    """Stage -> iteration up to which it is reduced in this way."""
    _late: dict[str, int] = field(default_factory=dict)
    """Member that was given more time -> iteration up to which it gets no more."""
    _cut_off: dict[str, int] = field(default_factory=dict)
    """Member that was removed without a link -> iteration up to which it is expelled for the same."""

    def failed(self, stage: int, t: int) -> None:
        """Have the stage's reduces witnessed up to iteration t + WITNESSED_FOR, as one failed in iteration
        t."""
        self._until[stage] = t + WITNESSED_FOR

    def take_up(self, stage: int) -> bool:
        """Have the stage's reduces witnessed for WITNESSED_FOR iterations from the open one on, because a
        replica is coming that another one cannot reach. False, and nothing changes, if this peer cannot sum
        them."""
        membership = self.ctx.run.membership
        t, members = membership.opening.t, membership.serving(stage)
        if not self._can_sum(stage, t, members, range(len(members) + 1)):
            return False
        self.failed(stage, t)
        return True

    def plan(self, stage: int, t: int, members: Sequence[str], owners: Collection[int]) -> ReducePlan | None:
        """Plan of a witnessed reduce in iteration t; None if the stage needs none or has fewer than two
        members, or if this peer cannot sum its parts (`_can_sum`). If the time for which the stage is reduced
        in this way is over, it begins anew while members say that they cannot reach each other. owners:
        position in `members` of each unit's owner (-1: none); only owners send parts."""
        ctx = self.ctx
        if stage not in self._until or len(members) < 2:
            return None
        if t > self._until[stage]:
            if not self.admission.parted.among(members):
                del self._until[stage]
                return None
            self.failed(stage, t)
        if not self._can_sum(stage, t, members, owners):
            return None
        if ctx.me in members:
            return ReducePlan((), (members.index(ctx.me),) * PARTS)
        return ReducePlan((ctx.me,), (len(members),) * PARTS)

    def _can_sum(self, stage: int, t: int, members: Sequence[str], owners: Collection[int]) -> bool:
        """True if this peer serves in iteration t and can sum the parts of a stage's reduce: they fit in
        MOST_BYTES, and if the stage is its own, it is one of `members`. owners: position of each unit's owner
        (-1: none)."""
        ctx, own, senders = self.ctx, self.ctx.run.stage, len(set(owners) - {-1})
        small = senders * ctx.run.settings.reduced_bytes_of(stage) <= MOST_BYTES
        return ctx.run.membership.is_live(ctx.me, own, t) and small and (own != stage or ctx.me in members)

    def parted_since(self, current: Round, stage: int) -> float:
        """Time (s) since which members of the stage's reduce in progress say that they cannot reach each
        other, although this peer hears both. Infinite if none say so, and if this peer sums the parts
        already, or cannot."""
        attempt = current.attempts[stage]
        can = self._can_sum(stage, current.t, attempt.members, attempt.owners)
        if current.retries.get(stage) or not can or witnessed(attempt, self.ctx.me):
            return math.inf
        heard = [peer for peer in attempt.members if peer == self.ctx.me or self._linked(peer)]
        return self.admission.parted.since(heard)

    def result(self, attempt: Attempt) -> tuple[bool, tuple[str, Mapping[str, float]] | None]:
        """(True if the attempt is witnessed, its result as this peer summed it: digest and sums of squares).
        None for the result of one that is not witnessed or not summed yet."""
        if not witnessed(attempt, self.ctx.me):
            return False, None
        account = self.account(attempt)
        return True, account.result if account is not None else None

    def moments(self, attempt: Attempt) -> tuple[Moments, ...]:
        """Moments of the contributions to a witnessed attempt, in the order of the members that own units, as
        this peer found them when it summed the parts for another stage; () for any other attempt, and before
        they are summed."""
        account = self.account(attempt) if witnessed(attempt, self.ctx.me) else None
        return account.moments if account is not None else ()

    def at_fault(
        self, current: Round, attempt: Attempt, prepared: Mapping[str, Prepared]
    ) -> tuple[dict[str, str], list[str]] | None:
        """Members that block a stalled witnessed attempt: (member -> reason to remove it, members that are
        given more time); None if this attempt is not witnessed; ({}, []) if this peer has not begun it.
        Nobody is removed by this: the caller does that. Each call counts as one more try. Silent members are
        judged elsewhere. Members that this peer does not hear, though others do, and those that have not
        reported the last step are named only after TRIES_LATE tries, and only if their parts did not all
        come."""
        if not witnessed(attempt, self.ctx.me):
            return None
        account, stage = self.account(attempt), attempt.stage
        tries = current.witnessed[stage] = current.witnessed.get(stage, 0) + 1
        if account is None:
            return {}, []
        silent, has_last = self.admission.absent.silent(), self.admission.has_last
        others, gone, late = bool(prepared.keys() - {self.ctx.me}), dict[str, str](), dict[str, str]()
        for peer in attempt.members:
            came, linked = account.lacking.get(peer), self._linked(peer)
            judged = (linked and has_last(peer)) or (came is not None and tries > TRIES_LATE)
            if peer == self.ctx.me or peer in silent or not judged:
                continue
            if peer in account.unusable:
                gone[peer] = f"its sum in iteration {current.t} is no gradient of stage {stage}"
            elif came is not None and (not came or tries >= TRIES_LATE):
                late[peer] = f"it sent {came} of {PARTS} parts of its sum in iteration {current.t}"
            elif account.summed and peer not in prepared and (others or tries >= TRIES_LATE):
                late[peer] = f"it was sent the whole gradient of iteration {current.t} and reported no result"
        self._late = {peer: t for peer, t in self._late.items() if t >= current.t}
        again = current.hurried.get(stage, late.keys()) if current.retries.get(stage) else frozenset[str]()
        first = sorted(late.keys() - self._late.keys() - again)
        self._late.update(dict.fromkeys(first, current.t + WITNESSED_FOR))
        return gone | {peer: why for peer, why in late.items() if peer not in first}, first

    def take_out(self, peer: str, reason: str, t: int) -> None:
        """Expel a member that blocks a witnessed reduce of iteration t. Without a link to this peer it may be
        cut off: it is only removed, the first time in WITNESSED_FOR iterations."""
        if self._linked(peer) or self._cut_off.get(peer, -1) >= t:
            self.admission.expel(peer, reason)
        else:
            self._cut_off[peer] = t + WITNESSED_FOR
            self.admission.remove(peer, reason)

    def _linked(self, peer: str) -> bool:
        """True if this peer has a link to `peer` and hears it; also for a peer found to forge, to which no
        work is sent."""
        return peer in self.ctx.links.up and peer not in self.ctx.links.suspects

    def blocking(self, attempt: Attempt, prepared: Collection[str]) -> list[str]:
        """Members of a stuck attempt that did not do their part: those whose parts lack, if this peer sums
        all of them and has not summed them yet; else those that did not report PREPARED."""
        account = self.account(attempt) if witnessed(attempt, self.ctx.me) else None
        if account is not None and not account.summed:
            return list(account.lacking)
        return [peer for peer in attempt.members if peer not in prepared]
