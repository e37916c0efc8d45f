"""Help for pipeline islands of which no slot counts in several rounds running, though nobody leaves: the
leader moves a relay from the stage with most replicas to the one with fewest.

Nobody can tell which machine of a crew is at fault. If all replicas of a stage are, each crew has one of
them, and no round counts ever again. A relay from another stage makes a crew without them, if the stage that
it comes to is theirs; it need not be.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import STRANDED, Commit, Members

#: Rounds in a row without any slot that counts, after which a relay is moved, and again after as many. Plain
#: choice: crews are put together anew after the first.
STRANDED_MOST = 2
#: Times as many rounds after which a relay is moved though no stage has more than another. A plain choice.
EVEN = 2


class StrandedCrews:
    """Count, at the leader, of the rounds running without a slot that counts; a new leader counts from zero.
    move(stage, t, least, why): record that moves a relay to `stage` from the one with most replicas, if that
    has at least `least`; None if nobody can be moved."""

    def __init__(self, ctx: PeerContext, move: Callable[[int, int, int, str], Members | None]) -> None:
        self.ctx, self._move = ctx, move
        self._rounds = 0

    def committed(self, record: Commit) -> None:
        """Note the record of an iteration."""
        stranded = record.witness is not None and record.witness.tensor == STRANDED
        self._rounds = self._rounds + 1 if stranded else 0

    def decide(self, t: int) -> Members | None:
        """Record that moves a relay to the stage with fewest replicas, if STRANDED_MOST rounds in a row had
        no slot that counts; then the count begins anew. Where all stages have as many, after EVEN times as
        many rounds, as there are fewer crews then, and lines may just be slow. The caller must log it. None
        before that, if nobody can be moved or a stage has no replica, and in runs without pipeline islands.
        t: last committed iteration."""
        settings = self.ctx.run.settings
        if self._rounds < STRANDED_MOST or not settings.rounds.pipeline:
            return None
        counts = {s: self.ctx.run.membership.count(s, t + 1) for s in range(1, settings.stages + 1)}
        stage = min(counts, key=lambda s: (counts[s], s))
        if not counts[stage]:
            return None  # a lost stage is restored first (`stage_recovery`)
        if counts[stage] == max(counts.values()) and self._rounds < EVEN * STRANDED_MOST:
            return None
        self._rounds = 0
        return self._move(stage, t, 2, "as no crew filled its slot in the last rounds")
