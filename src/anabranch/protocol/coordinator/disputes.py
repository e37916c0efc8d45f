"""Disputes: replicas of a stage that report different states after the same step, without a majority (I2).

Nobody can tell from the reports which replica is wrong, so none is removed on the word of one other, and no
reported state becomes the run's. The log goes back to the newest snapshot that all agreed on, and the steps
since are computed again. A dispute that returns is settled by a third replica or by the owner, who can expel
one; until then the waits between two rollbacks grow.
"""

from __future__ import annotations

import math

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import LogTip
from anabranch.protocol.log.records import Rollback
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog, rollback

#: First and longest wait (s) before a dispute is rolled back again. Plain choices: a joiner can be ready in
#: the first, and an owner who looks once an hour sees the run going on as soon as one side is expelled.
AGAIN_S = (30.0, 3600.0)


class Disputes:
    """Decision when the log goes back because replicas report different states: at once, or after a wait that
    doubles each time. It does not judge which replica is wrong."""

    def __init__(self, ctx: PeerContext, tip: LogTip, catalog: SnapshotCatalog) -> None:
        self.ctx = ctx
        self.tip = tip
        self.catalog = catalog
        self._wait_s, self._next_at = AGAIN_S[0], 0.0
        self._noted = ""
        self._called: set[str] = set()
        """Members that waited to serve when the log went back: each could have been the third replica. For a
        new one it goes back at once."""

    def decide(self, dispute: tuple[int, list[str]] | None) -> Rollback | None:
        """Record that ends a dispute by going back to the newest snapshot from before the last step, for the
        caller to log; None if there is no dispute, no such snapshot, or the return is not due yet
        (`go_back`). It is due at once if a joiner of the stage came since the last return, as that can be the
        third replica. dispute: stage, and its replicas with different states after the last step."""
        if dispute is None:
            return None
        stage, peers = dispute
        waiting = self._waiting(stage)
        who = " and ".join(peer[:8] for peer in sorted(peers))
        reason = f"{who} report different states of stage {stage} after iteration {self.tip.t}"
        self._called &= self.ctx.run.membership.members.keys()
        new = waiting - self._called
        record = self.go_back(reason, "lend a third replica, or expel one of them", settled=bool(new))
        if record is not None:
            self._called |= waiting
        return record

    def _waiting(self, stage: int) -> set[str]:
        """Members of a stage that do not serve yet, auditors left out: each could be its third replica."""
        membership = self.ctx.run.membership
        members = (member for member in membership.members.values() if member.stage == stage)
        return {m.id for m in members if m.id not in membership.active_from and not m.is_auditor}

    def go_back(
        self, reason: str, advice: str, before: int | None = None, settled: bool = False
    ) -> Rollback | None:
        """Record that returns the run to its newest snapshot of an iteration before `before` (None: before
        the last step), for the caller to log; None if there is none, or the wait since the last return is not
        over. Either is noted. reason, advice: words for the event log: why, and what would end the dispute.
        settled: True if the cause is gone or somebody new can decide, so that the return is due at once; else
        the wait until the next one doubles."""
        point = self.catalog.newest(self.tip.t if before is None else before)
        now = self.ctx.clock.now
        if point is None or (now < self._next_at and not settled):
            if self._noted != reason:
                self._noted = reason
                text = f"{reason}: {advice}"
                self.ctx.outbox.note("waiting", reason=text)
            return None
        if not settled:
            self._next_at, self._wait_s = now + self._wait_s, min(2.0 * self._wait_s, AGAIN_S[1])
        self._noted = ""
        self.ctx.outbox.note("note", text=f"{reason}; going back to the snapshot of iteration {point.t}")
        return rollback(self.ctx.run, point, reason)

    def deadline(self) -> float:
        """Time (s) from which the log may go back for a dispute again; infinite if it may now."""
        return self._next_at if self._next_at > self.ctx.clock.now else math.inf
