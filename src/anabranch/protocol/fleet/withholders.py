"""Relays that hold up steps: they take microbatches, are heard, and give nothing back.

Each sender finds out for itself who keeps its microbatches too long (`pipeline.repair`), and each waits for
it. The coordinator sees the whole: a step was late, and nothing of it was done by a relay that served and was
heard. Such a relay becomes a standby for so long that steps wait for it in a small share of the time. It
keeps its seat: a machine that hangs for a moment does the same. Not here: the announcement (`standbys`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.log.records import Commit

#: Steps running of which a relay owns nothing, the last of them late, after which it withholds. A choice: by
#: chance a quick relay gets nothing of one step.
STEPS = 2
#: Greatest share of the time for which steps wait for a relay that withholds. A plain choice.
SHARE = 0.05
#: Time (s) that senders wait for other replicas before they use a relay that withholds: as for standbys.
WAIT_S = 5.0


class Withholders:
    """Record of relays that held up steps lately, kept by the coordinator."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._idle: dict[str, int] = {}
        """Relay -> last steps running in which it served and owned nothing, although others of its stage
        did."""
        self._until: dict[str, float] = {}
        """Relay -> time (s) from which it gets microbatches again."""

    def committed(self, record: Commit, current: Round, silent: Collection[str]) -> None:
        """Note which relays owned nothing of the step that `record` ended, and whether one of them held it
        up: if it was late, those that were heard and owned nothing of the one before either. silent: members
        that are not heard. current: the step's round. Nothing in a round of islands, which does not wait for
        late slots."""
        if current.slots or record.verdict != "step":
            return
        membership, before, self._idle = self.ctx.run.membership, self._idle, {}
        for stage, part in enumerate(record.stages[1:], 1):
            owners = {part.members[owner] for owner in part.owners if owner >= 0}
            for peer in membership.live(stage, record.t) if owners else ():
                if peer not in owners:
                    self._idle[peer] = before.get(peer, 0) + 1
        if not current.late:
            return
        now, wait_s = self.ctx.clock.now, current.waited_s / SHARE
        for peer, steps in self._idle.items():
            if steps >= STEPS and peer not in silent and self._until.get(peer, 0.0) <= now:
                self._until[peer] = now + wait_s
                text = f"iteration {record.t} was late, and {peer[:8]} has done nothing in {steps} iterations"
                self.ctx.outbox.note("note", text=f"{text}: others get its microbatches for {wait_s:.0f} s")

    def removed(self, peer: str) -> None:
        """Forget a former member: a machine that comes back may have been mended."""
        self._until.pop(peer, None)

    def waits(self) -> Mapping[str, float]:
        """Relays that get no microbatches now while others of their stage can take them -> seconds that a
        sender waits for those others."""
        now = self.ctx.clock.now
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        return dict.fromkeys(sorted(self._until), WAIT_S)
