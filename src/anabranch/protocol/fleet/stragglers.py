"""Stragglers: members that a stage's reduce leaves out, because the coordinator does not hear them (R7).

A reduce needs min(2, live) replicas of a stage. If so many others are left, a silent replica is left out: the
others redo the microbatches that only it had added. It stays a member. When it is heard again it catches up
on the steps that it missed, and takes part again once it has; over a slow link it would be late for ever, so
the steps wait for it as soon as others have given it a later state, unless steps waited for it more than
WAITING_SHARE of the time lately. Stage 0 leaves nobody out: the log says which data node has an index (R2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.failure_detection.indirect_probes import IndirectProbes

#: Time (s) that a broken link gets to be made again before the member counts as silent.
BACK_S = 1.0
#: Time (s) that members have to report their last step to a new leader.
REPORTED_S = 5.0
#: Greatest share of the time for which steps wait for a member that was left out.
WAITING_SHARE = 0.1


@dataclass
class LostMember:
    """Member whose link is down. reason: why. since: time when it went down (s). patience_s: the member's
    silence timeout. until: time of the next verdict (s). dial_at: time of the next dial (s). waits: between
    dials."""

    reason: str
    since: float
    patience_s: float
    until: float
    waits: Backoff
    dial_at: float = math.inf


class Stragglers:
    """Record of stragglers: members that a reduce is ordered without, since they are silent, and that later
    steps wait for again once they have caught up. Kept by the coordinator."""

    def __init__(self, ctx: PeerContext, indirect_probes: IndirectProbes, lost: Mapping[str, LostMember],
        going: Callable[[], Collection[str]] = tuple, waits_for: Callable[[int], bool] = lambda stage: True,
    ) -> None:
        """lost: members whose link is down, with since when; after BACK_S they are silent, unless a member
        hears them. going(): members whose removal is planned or logged; they are left out like silent ones.
        waits_for(stage): True if the open step still waits for something from the stage; only `needed` asks
        that."""
        self.ctx = ctx
        self._indirect_probes = indirect_probes
        self._lost = lost
        self._without: dict[str, int] = {}
        """Member left out -> first iteration without it."""
        self._awaited: dict[str, float] = {}
        """Member that the steps wait for again after it had been left out -> since when (s)."""
        self._not_before: dict[str, float] = {}
        """Member -> earliest time at which the steps may wait for it again (s)."""
        self._unheard: set[str] = set()
        """Active members that have not reported their last step to this new leader."""
        self._reported_by = math.inf
        self._going = going
        self._waits_for = waits_for

    def take_over(self) -> None:
        """Begin as a new leader: every other active member has to report the last step that it applied,
        within REPORTED_S; later it counts as silent until it does."""
        self._unheard = self.ctx.run.membership.active_from.keys() - {self.ctx.me}
        self._reported_by = self.ctx.clock.now + REPORTED_S

    def silent(self) -> frozenset[str]:
        """Members that a reduce should leave out if it can: those silent, those left out before, those whose
        report to a new leader is late, and those about to be removed."""
        late = self._unheard if self._unheard and self.ctx.clock.now >= self._reported_by else set()
        going = self._going()
        if not (self._without or self._lost or self.ctx.links.suspects or late or going):
            return frozenset()
        silent = filter(self._silent, {*self._lost, *self.ctx.links.suspects})
        return frozenset({*self._without, *silent, *late, *going})

    def present(self, stage: int, t: int) -> list[str]:
        """Members of a stage that take part in its reduce of iteration t: those not silent if at least min(2,
        live) of them are left, else all. The silent ones are then recorded as left out. At stage 0 the silent
        ones take part."""
        live = self.ctx.run.membership.live(stage, t)
        silent = self.silent() if stage else frozenset(self._without)
        if not silent:
            return live
        present = [peer for peer in live if peer not in silent]
        if len(present) < min(2, len(live)) or not present:
            return live
        for peer in silent.intersection(live):
            self._without.setdefault(peer, t)
            self._end_wait(peer)
        return present

    def jury(self, replicas: Sequence[str]) -> set[str]:
        """Replicas of a stage more than half of which have to agree on a result, so that a few liars that
        agree decide nothing: those that are heard, without standbys, which get the gradient later."""
        return set(self.ctx.standby_view.working(replicas)) - self.silent()

    def heard(self, replicas: Collection[str]) -> set[str]:
        """Replicas of a stage whose reports of their state are waited for: all but those that count as silent
        (`silent`). Those that are linked and only late to report to a new leader are waited for: otherwise a
        few quick liars would be all that decide."""
        late = {peer for peer in replicas if peer in self._unheard and self.ctx.reachable(peer)}
        return set(replicas) - (self.silent() - late.difference(self._going()))

    def without(self, t: int) -> set[str]:
        """Members left out of reduces since iteration t, not those left out since an earlier one. They may
        have computed a part of iteration t before, which others compute again."""
        return {peer for peer, since in self._without.items() if since == t}

    def lacks(self, peer: str) -> bool:
        """True if `peer` may lack the last step: it was left out and has not caught up, or has not reported
        to this new leader."""
        return peer in self._without or peer in self._awaited or peer in self._unheard

    def needed(self, peer: str) -> bool:
        """True if the open step waits for `peer`: its stage is not done, and its reduce does not leave `peer`
        out. False for a stranger. Like `present`, a call may record silent members as left out."""
        membership = self.ctx.run.membership
        stage = membership.stage_of(peer)
        if stage is None or not self._waits_for(stage):
            return False
        return peer in self.present(stage, membership.opening.t)

    def back(self, peer: str) -> None:
        """Note that `peer` takes part in the open iteration again, or has reported to this new leader: no
        step goes on without it, and none waits for it to catch up."""
        self._without.pop(peer, None)
        self._unheard.discard(peer)
        self._end_wait(peer)

    def _end_wait(self, peer: str) -> None:
        """End the steps' wait for `peer` to catch up, if they wait, and note how long it took: they do not
        wait for it again until that is WAITING_SHARE of the time."""
        since = self._awaited.pop(peer, None)
        if since is not None:
            self._not_before[peer] = self.ctx.clock.now + (self.ctx.clock.now - since) / WAITING_SHARE

    def removed(self, peer: str) -> None:
        """Forget a former member."""
        self.back(peer)
        self._not_before.pop(peer, None)

    def has(self, peer: str, t: int) -> None:
        """Note that `peer` has the state after iteration t, an earlier one than the last. If it was left out
        from an iteration before t, it got that state from others: then it is left out no more, and the next
        step waits for it as for a joiner, unless steps waited for it too long lately."""
        now = self.ctx.clock.now
        if t > self._without.get(peer, t) and now >= self._not_before.get(peer, now):
            del self._without[peer]
            self._awaited.setdefault(peer, now)

    def deadline(self) -> float:
        """Time (s) at which members count as late that have not reported to this new leader; infinite if
        there are none, or that time is over."""
        return self._reported_by if self._unheard and self.ctx.clock.now < self._reported_by else math.inf

    def _silent(self, peer: str) -> bool:
        """True if this leader does not hear `peer` (its link is suspected, or down for BACK_S), nor does any
        member that was asked."""
        ctx = self.ctx
        down = peer in self._lost and ctx.clock.now >= self._lost[peer].since + BACK_S
        out = down or peer in ctx.links.suspects
        return out and not self._indirect_probes.account(peer).heard
