"""Choice of the relay that moves to a stage in need, and of how long the last replica of a stage is waited
for."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import Members
from anabranch.protocol.recovery.last_states import LastStates
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog


class RelayMoves:
    """Choice of relays that move to stages in need. lost: stages that lost all their replicas, from which
    nobody moves. suspects: replicas that were doubted (`witnesses`); others move rather than these."""

    def __init__(
        self, ctx: PeerContext, catalog: SnapshotCatalog, states: LastStates, lost: Collection[int]
    ) -> None:
        self.ctx = ctx
        self._catalog, self._states, self._lost = catalog, states, lost
        self.suspects: set[str] = set()

    def to(self, stage: int, t: int, least: int, why: str, stay: Collection[str] = ()) -> Members | None:
        """Record that moves a peer to `stage` from the stage with most replicas, for the caller to log; None:
        no peer can be moved. t: last committed iteration. least: replicas that the other stage must have
        before the move. why: words for the log, after "moves to stage ...,". stay: peers that are not moved;
        this peer, and those out of reach, never are."""
        peer = self._movable(stage, t, least, stay)
        if peer is None:
            return None
        membership = self.ctx.run.membership
        moved = msgspec.structs.replace(membership.members[peer], stage=stage)
        reason = f"moves to stage {stage}, {why}"
        return Members(membership.number + 1, removed={peer: reason}, joined=(moved,))

    def _movable(self, stage: int, t: int, least: int, stay: Collection[str] = ()) -> str | None:
        """Peer to move to `stage` from the stage with most replicas among those that can spare one
        (`_willing`; lost stages cannot). The peer is chosen in this order of preference: no suspect; no
        walk-in; no voter; a keeper of the needed state; the slowest. None if there is nobody, and for stage
        0, as a data node needs the corpus. t, least, stay: as of `to`."""
        membership = self.ctx.run.membership
        relays = range(1, self.ctx.run.settings.stages + 1) if stage else ()
        there = [other for other in relays if other != stage and other not in self._lost]
        spared = {other: self._willing(other, t, least, {self.ctx.me, *stay}) for other in there}
        _, willing = max(spared.values(), key=lambda found: found[0], default=(0, []))
        if not willing:
            return None
        keepers, votes = set(self._catalog.holders(t, stage)), self.ctx.log.keeps_log

        def order(peer: str) -> tuple[bool, bool, bool, bool, float, str]:
            free = peer not in self.suspects, peer not in membership.walk_ins, not votes(peer)
            return *free, peer in keepers, membership.members[peer].forward_s, peer

        return max(willing, key=order)

    def _willing(self, stage: int, t: int, least: int, stay: Collection[str]) -> tuple[int, list[str]]:
        """(Number of replicas of a stage, those of them that can be moved): reachable ones outside `stay`,
        but not the last one that has applied step t. (0, []) if nobody can be moved, or the stage has fewer
        than `least`.

        With `least` 2 all members of the stage that have or once had its state count, out of reach or not yet
        serving too. With a greater `least` only reachable ones that serve count: what killed the other
        replicas of the stage in need may have killed more.
        """
        membership = self.ctx.run.membership
        if least > 2:
            live = [p for p in membership.live(stage, t + 1) if self.ctx.reachable(p)]
        else:
            live = sorted(filter(self._states.knows, membership.of(stage)))
        willing = [p for p in live if p not in stay and self.ctx.reachable(p)]
        # A replica that serves only from now on may still have to fetch step t from one that has applied it.
        able = [p for p in live if p in self._states.applied.get(stage, ())]
        if len(able) == 1 or (not able and least > 2):
            willing = [p for p in willing if able and p not in able]
        return (len(live), willing) if len(live) >= least and willing else (0, [])

    def worth_s(self, peer: str, t: int, step_s: float) -> float:
        """Seconds to wait for `peer`, the last replica of its stage: as long as it would take to compute the
        iterations again that would be lost with it (the ski-rental rule); infinite if no other peer could
        replace it or no restore point is in reach. t: last committed iteration. step_s: seconds of a step."""
        point = self._point_without([peer], t)
        return math.inf if point is None else (t + 1 - point.t) * step_s

    def replaceable(self, peers: Collection[str], t: int) -> bool:
        """True if a stage could be restored without `peers`, its last replicas: others could serve it, and a
        restore point is in reach. t: last committed iteration."""
        return self._point_without(peers, t) is not None

    def _point_without(self, peers: Collection[str], t: int) -> RestorePoint | None:
        """Newest restore point for which others than `peers`, of one stage, have all states, if one of them
        could serve that stage; None: there is none, as in runs without snapshots, or if no member is among
        `peers`."""

        def in_reach(other: str) -> bool:
            return other not in peers and self.ctx.reachable(other)

        membership = self.ctx.run.membership
        stage = next((membership.stage_of(peer) for peer in peers), None)
        if stage is None or self.ctx.run.settings.snapshot_every == 0:
            return None
        members = membership.replicas(stage)
        heirs = any(map(in_reach, members)) or self._movable(stage, t, 2) is not None
        return self._catalog.newest(t + 1, in_reach) if heirs else None
