"""Initial assignment of relays to stages by measured links, once before the first step.

A relay that asks for any stage first gets one by compute rates, since its links are not measured yet. Before
the first step a move is cheap: every stage's state is made from the seed. So where the run file asks for it
(`deal = "links"`) all members link with each other, measure every link with a payload
(`routing.bandwidth_probes`) and report the results to the leader. When all have reported, or the wait is
over, the leader searches for a better assignment (`placement.local_search`) and logs it as one `Members`
record. A relay whose owner chose its stage stays there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.log.records import Members
from anabranch.protocol.placement.cost_model import CostModel, Deal, cost_model_of
from anabranch.protocol.placement.join_placement import KEPT_FIRST
from anabranch.protocol.placement.local_search import bettered
from anabranch.protocol.placement.rates import SEARCHED
from anabranch.protocol.telemetry.estimators import plausible

#: Least share by which another assignment must shorten an iteration: measured links are not exact.
GAIN = 0.05
#: Heartbeat intervals that the run waits for reports, from when it could begin.
WAIT_HEARTBEATS = 12
#: Greatest number of changes of a search, and least and greatest number of candidates for each change: LOOKS
#: over the square of the number of members. A search takes the leader a few tenths of a second.
STEPS, TRIED = 32, (40, 300)
LOOKS = 100_000
#: Random assignments from which the search also starts, in swarms of at most FEW members: from one alone it
#: ends where no single change helps.
DRAWN, FEW = 5, 24


class InitialAssignment:
    """Initial assignment of relays to stages by one coordinator. done: True if the run wants none, or once it
    is decided."""

    def __init__(self, ctx: PeerContext, admission: Admission) -> None:
        self.ctx = ctx
        self.admission = admission
        self.done = ctx.run.settings.deal != "links"
        self._reported: dict[str, Collection[str]] = {}
        """Member -> peers to which it has reported a bandwidth."""
        self._until = math.inf
        """Time until which reports are waited for (s); inf: the run could not begin yet."""
        self._moved: frozenset[str] = frozenset()

    def told(self, peer: str, links: Mapping[str, tuple[float, float]]) -> None:
        """Enter a member's report of its links (receiver -> (round trip in s, bits per second to it)) in
        place of its last one; ignored if it is empty, of a stranger, or the run does not await such reports,
        as it has begun or deals no stages by links (`RunView.deals`)."""
        if self.ctx.run.deals and links and peer in self.ctx.run.membership.members:
            self.admission.ways.told(peer, links)
            self._reported[peer] = frozenset(other for other, (_, bps) in links.items() if plausible(bps))

    def removed(self, peer: str) -> None:
        """Drop the link report of a peer that was removed or moved. One that `decide` moved is no longer
        ready to serve: its report that it was ready may have been of its old stage."""
        self._reported.pop(peer, None)
        if peer in self._moved:
            self.admission.ready.pop(peer, None)

    def deadline(self) -> float:
        """Time (s) at which the wait for link measurements ends; infinite if there is none."""
        waits = not self.done and self._until > self.ctx.clock.now
        return self._until if waits else math.inf

    def decide(self, t: int) -> Members | None:
        """Record of a better assignment, which the caller logs, or None: it is too early, or the present one
        stays. To be called while the run could begin, until `done` is True. The first call begins the wait
        for members' link measurements. t: last committed iteration."""
        ctx, members = self.ctx, self.ctx.run.membership.members
        asked = any(peer in members for peer in self.admission.anywhere)
        if t > 0 or ctx.run.membership.begun or len(members) > SEARCHED or not asked:
            self.done = True
            return None
        if self._until == math.inf:
            self._until = ctx.clock.now + WAIT_HEARTBEATS * ctx.run.settings.heartbeat_s
            ctx.outbox.note(
                "waiting", reason="waiting for members to measure their links: they are dealt by them"
            )
        if ctx.clock.now < self._until and not self._all_reported():
            return None
        self.done = True
        return self._reassigned([peer for peer in members if self._movable(peer)])

    def _movable(self, peer: str) -> bool:
        """True if the peer, another one than this, may be assigned to another stage: it asked for any, has
        the state of its present one, and can be reached."""
        asked = peer in self.admission.anywhere and peer != self.ctx.me
        return asked and peer in self.admission.ready and self.ctx.reachable(peer)

    def _all_reported(self) -> bool:
        """True if every member, auditors left out, has reported its bandwidth to every other one."""
        membership = self.ctx.run.membership
        members = membership.members.keys() - membership.auditors.keys()
        return all(members - {peer} <= set(self._reported.get(peer, ())) for peer in members)

    def _reassigned(self, movable: Collection[str]) -> Members | None:
        """Record of the best assignment found, if that is better than the present one by GAIN; else None. The
        outcome is noted, unless no link is measured or there is no data node. movable: relays that may change
        stages."""
        ctx, settings = self.ctx, self.ctx.run.settings
        members = [member for member in ctx.run.membership.members.values() if not member.is_auditor]
        if not any(member.stage == 0 for member in members):
            return None
        model = cost_model_of(members, settings, self.admission.ways, settings.spare == "links")
        if model is None:
            return None  # no link is measured
        before = model.deal
        deal = self._best(model, before, movable)
        seconds = model.seconds(before), model.seconds(deal)
        if not seconds[1] < (1.0 - GAIN) * seconds[0]:
            ctx.outbox.note(
                "note", text="the stages stay as they came about: no deal is shorter by a twentieth"
            )
            return None
        ctx.outbox.note(
            "note",
            text=f"the stages are dealt anew by links: {seconds[1]:.1f} s an iteration by arithmetic, not "
            f"{seconds[0]:.1f} s",
        )
        return self._record(before, deal)

    def _best(self, model: CostModel, before: Deal, movable: Collection[str]) -> Deal:
        """Quickest assignment that the search finds, from the present one (`before`) and in small swarms from
        random ones too; `before` if none is quicker."""
        ctx, best = self.ctx, before
        count = len(ctx.run.membership.members)
        tried = min(max(LOOKS // count**2, TRIED[0]), TRIED[1])
        keeps = max(KEPT_FIRST, ctx.run.settings.min_replicas)
        for start in [before, *self._drawn(before, sorted(movable), DRAWN if count <= FEW else 0)]:
            *_, deal = [start, *bettered(model, start, movable, ctx.rng, STEPS, tried, keeps)]
            if model.seconds(deal) < model.seconds(best):
                best = deal
        return best

    def _drawn(self, before: Deal, movable: Sequence[str], count: int) -> Iterator[Deal]:
        """Yield `count` random assignments to search from: the movable relays permuted over their stages."""
        stages = [before[peer] for peer in movable]
        for _ in range(count):
            self.ctx.rng.shuffle(stages)
            yield before | dict(zip(movable, stages, strict=True))

    def _record(self, before: Deal, deal: Deal) -> Members:
        """Record that moves each relay whose stage differs between the assignments `before` and `deal`; these
        relays are noted as moved."""
        membership = self.ctx.run.membership
        self._moved = frozenset(peer for peer in deal if deal[peer] != before[peer])
        moved = [msgspec.structs.replace(membership.members[peer], stage=deal[peer]) for peer in self._moved]
        moved.sort(key=lambda member: membership.order[member.id])
        reasons = {member.id: f"is dealt to stage {member.stage}, by its links" for member in moved}
        return Members(membership.number + 1, removed=reasons, joined=tuple(moved))
