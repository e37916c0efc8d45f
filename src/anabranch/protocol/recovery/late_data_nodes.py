"""Data nodes that hold a step up: they lose their seats, so that other data nodes get their microbatches
(R2).

Only the log can give the microbatches of a data node to others, by its removal. A data node may be heard, and
begin none of its microbatches, or claim none. Nobody can see that at first hand, so it is judged by the
others: once all that another data node began is claimed everywhere, and only microbatches of this one lack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.tasks import head_unit

#: Stalls of a step with only microbatches of late data nodes lacking, after which these are removed. Relays
#: that withhold claims are mended by the second (`repair.UNCLAIMED_REPORTS`). Plain choice: one more, as each
#: takes twice as long as the one before it.
LATE_STALLS = 3
#: Times as many, and times as long, where only held-out windows lack, which relays may keep, and a relay can
#: be moved to look (after four or five stalls, `witnesses.HELD_STALLS`): that costs nobody a seat.
WINDOWS = 2
#: Stalls of a step, and one more for each relay stage, after which a data node has had its turn to send anew
#: what came back to it and lacks at a later stage (`repair.UNCLAIMED_REPORTS`, `repair.FURTHER_REPORTS`).
TURNS = 2
#: Times what a step usually takes, and least time (s), from when others were done until one is removed. Plain
#: choices: one whose line became several times slower stays, and one that is restarted.
OVERDUE, LATE_S = 12.0, 50.0
#: Iterations for which a removal is remembered. A plain choice: an accident long afterwards is no misconduct.
REMEMBERED = 50


class LateDataNodes:
    """Search for data nodes that hold up the step of the open iteration (`stalled`), with a memory of those
    that were removed for it. `admission` removes them: others then get their microbatches. One that was
    removed for that shortly before may be expelled."""

    def __init__(self, ctx: PeerContext, admission: Admission) -> None:
        self.ctx = ctx
        self._admission = admission
        self._removed: dict[str, int] = {}
        """Data node -> iteration of its last removal for being late."""
        self._opened_at = math.nan
        """Time (s) at which the iteration of what follows was opened."""
        self._others_at = math.inf
        """Time (s) of the last news before the first stall in which only microbatches of late ones lacked."""
        self._stalls = Counter[str]()
        """Late data node -> such stalls."""

    def _windows(self, t: int) -> range:
        """Indices of the held-out windows that are evaluated in iteration t."""
        run = self.ctx.run
        first, evaluated = run.settings.microbatches, run.settings.evaluates(t - 1, run.steps)
        return range(first, first + run.settings.windows * evaluated)

    def lacking_heads(self, t: int, reported: Collection[int]) -> tuple[int, ...]:
        """Head units of the held-out windows of iteration t whose loss is not among those `reported`."""
        return tuple(head_unit(index) for index in self._windows(t) if index not in reported)

    def stalled(
        self, t: int, opened_at: float, lacking: Mapping[int, Collection[int]], news_at: float, step_s: float,
        known: bool,
    ) -> None:  # fmt: skip
        """Note a stall of the step of iteration t, and remove data nodes that are late: in LATE_STALLS stalls
        only microbatches of theirs lacked, while those of others were done; in WINDOWS times as many if
        these are held-out windows alone, and a relay can be moved to the stage that may keep them. A data
        node is expelled if it was removed for that within the last REMEMBERED iterations and is late with all
        its microbatches, those to train among them. Nothing while no microbatch lacks or some of every data
        node's do; never this peer. opened_at: time (s) at which the step was opened. lacking: stage -> units
        that nobody claims, with the heads of held-out windows. news_at: time of the last news (s). step_s:
        seconds that a step should take. known: True if this leader saw one; else they are at least those that
        the other data nodes' microbatches took."""
        run = self.ctx.run
        if opened_at != self._opened_at:
            self._opened_at, self._others_at, self._stalls = opened_at, math.inf, Counter()
        holder = run.membership.assignment(t, self._windows(t)).holder
        crews = run.settings.rounds.pipeline and run.settings.rounds.has(t)
        if t <= run.steps and not crews:  # a crew's data node waits for its relays
            holder = {**holder, **run.membership.assignment(t, run.batch(t)).holder}
        late = {unit if stage else unit // 2 for stage, units in lacking.items() for unit in units}
        nodes = {holder[index] for index in late if index in holder}
        if not nodes or nodes >= set(holder.values()):
            return
        self._others_at = min(self._others_at, news_at)
        usual_s = step_s if known else max(step_s, self._others_at - opened_at)
        waited_s = self.ctx.clock.now - self._others_at
        counts = [run.membership.count(stage, t) for stage in range(1, run.settings.stages + 1)]
        moves = len(counts) > 1 and max(counts) > 1
        for peer in sorted(nodes - {self.ctx.me}):
            own = {index for index, node in holder.items() if node == peer}
            lacks = own & late
            evaluates = min(lacks) >= run.settings.microbatches
            self._stalls[peer] += 1
            times = WINDOWS if evaluates and moves else 1
            early = waited_s < times * max(LATE_S, OVERDUE * usual_s)
            if early or self._stalls[peer] < times * LATE_STALLS:
                continue
            reason = f"iteration {t} lacks {len(lacks)} microbatches of this data node, and none of another's"
            again = t <= self._removed.get(peer, -REMEMBERED) + REMEMBERED
            idle = again and lacks == own and not evaluates
            (self._admission.expel if idle else self._admission.remove)(peer, reason)
            self._removed[peer] = t
