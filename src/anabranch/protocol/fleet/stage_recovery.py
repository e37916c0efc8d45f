"""Recovery of a stage that lost all its replicas, and of one that is down to its last: the leader's part.

When no member can have the stage's state after the last commit, the leader logs a `Rollback` to the newest
restore point of which every stage's state is available. Each replica goes back to its own snapshot; a joiner,
or a peer moved from the stage with most replicas, fetches the lost stage's snapshot from its keepers; the
iterations since are computed again, exactly. A stage that is down to one replica gets another one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.snapshot_catalog import SnapshotCatalog, rollback
from anabranch.protocol.log.records import Members, Rollback
from anabranch.protocol.messages import Behind, Holders, WhoHas

#: Time (s) that a stage must be lost before the rollback is logged: a joiner may still report its state.
GRACE_S = 2.0
#: Time (s) without any member of a lost stage after which a peer of another stage is moved there.
MOVE_AFTER_S = 5.0
#: Rollbacks on a replica's word that it cannot get a state, each within so many iterations of the one before,
#: with which the replica is removed, and with more of them expelled, where another can take its place. Plain
#: choices: an accident may happen twice, and one that says so without end let the run go no further.
BEHIND_MOST, BEHIND_REMEMBERED = 3, 64


class StageRecovery:
    """Detection of stages that lost their replicas, and the records that restore them."""

    def __init__(self, ctx: PeerContext, admission: Admission, catalog: SnapshotCatalog) -> None:
        self.ctx = ctx
        self.admission = admission
        self.catalog = catalog
        self._behind: dict[str, int] = {}
        """Replica that cannot get its stage's state -> last iteration of the state that it lacks."""
        self._went_back: dict[str, tuple[int, int]] = {}
        """Replica -> number of rollbacks on its word, and iteration of the last one."""
        self._lost: dict[int, float] = {}
        """Lost stage -> since when (s)."""
        self._most_live: dict[int, int] = {}
        """Stage -> greatest number of active replicas so far."""
        self._looked: tuple[int, int] | None = None
        """Last commit and membership for which the lost stages are known; None: look again."""
        self._alone: list[int] = []
        """Stages that had several replicas and have one."""
        self._noted = ""
        self._applied: Mapping[int, Collection[str]] = {}

    # --- reports -------------------------------------------------------------------------------

    def on_behind(self, peer: str, message: Behind) -> None:
        """Enter a replica's report that it cannot get what it needs to apply step message.t (R12); ignored
        unless the peer is a member of message.stage."""
        if self.ctx.run.membership.stage_of(peer) != message.stage:
            return
        self._behind[peer] = message.t

    def on_who_has(self, peer: str, message: WhoHas, t: int) -> None:
        """Answer a peer's question which peers hold a stage's state after an iteration (none named: after t,
        the last committed one). If that is no restore point, the answer has no fingerprint and names
        nobody."""
        wanted = message.t if message.t >= 0 else t
        point = self.catalog.points.get(wanted)
        if point is None or message.stage >= len(point.fingerprints):
            self.ctx.outbox.send(peer, Holders(message.stage, wanted, "", ()))
            return
        fingerprint = point.fingerprints[message.stage]
        holders = [p for p in self.catalog.holders(wanted, message.stage) if p != peer or point.on_disk]
        self.ctx.outbox.send(peer, Holders(message.stage, wanted, fingerprint, tuple(holders)))

    def lacking(self, peers: Collection[str], t: int) -> list[str]:
        """Those of `peers` whose last report says that they cannot get the state after iteration t itself."""
        return [peer for peer in peers if self._behind.get(peer) == t]

    def forget(self, peer: str) -> None:
        """Forget the report of `peer` that it cannot get its stage's state: it has applied the last step, or
        was removed."""
        self._behind.pop(peer, None)

    def rolled_back(self) -> None:
        """Forget all reports after a rollback."""
        self._behind.clear()

    # --- decisions -----------------------------------------------------------------------------

    def decide(
        self, t: int, quiet: bool, applied: Mapping[int, Collection[str]]
    ) -> Rollback | Members | None:
        """Rollback for a lost stage, or move of a peer to a stage with one replica or none; None: nothing to
        log (always, before the run has begun and where no snapshots are kept). t: last committed iteration.
        quiet: True if moving a peer now loses no work. applied: stage -> peers that reported step t."""
        membership, self._applied = self.ctx.run.membership, applied
        if self.ctx.run.settings.snapshot_every == 0 or not membership.begun:
            return None
        if self._behind or self._looked != (t, membership.version):
            self._look(t)
        due = [stage for stage, since in self._lost.items() if self.ctx.clock.now >= since + GRACE_S]
        gone = [s for s in due if not self.catalog.has(t, s)]
        if gone:
            return self._rollback(t, gone)
        for stage, since in self._lost.items():
            if self.ctx.clock.now >= since + MOVE_AFTER_S and not membership.replicas(stage):
                moved = self._move(stage, t, 2, "which lost all its replicas")
                if moved is not None:
                    return moved
        if quiet and self._alone:
            return self._move(self._alone[0], t, 3, "which is down to one replica")
        return None

    def _look(self, t: int) -> None:
        """Update the sets of lost stages and of stages with one replica. If every stage is served and no
        replica is behind, this is not repeated until the next commit or change of members."""
        membership, all_served = self.ctx.run.membership, True
        for stage in range(self.ctx.run.settings.stages + 1):
            live = membership.count(stage, t + 1)
            all_served &= live > 0
            self._most_live[stage] = max(live, self._most_live.get(stage, 0))
            if self._is_lost(stage, t):
                self._lost.setdefault(stage, self.ctx.clock.now)
            else:
                self._lost.pop(stage, None)
        relays = range(1, self.ctx.run.settings.stages + 1)
        alone = (s for s in relays if membership.count(s, t + 1) == 1 == len(membership.replicas(s)))
        self._alone = [stage for stage in alone if self._most_live[stage] > 1]
        self._looked = (t, membership.version) if all_served and not self._behind else None

    def _is_lost(self, stage: int, t: int) -> bool:
        """True if no member can have the stage's state after iteration t, except in a snapshot of another
        stage's peer; also if nobody is of the stage."""
        membership = self.ctx.run.membership
        able = membership.live(stage, t + 1) or [p for p in membership.of(stage) if self._knows(p)]
        return len(self.lacking(able, t)) == len(able)

    def _knows(self, peer: str) -> bool:
        """True if `peer` has or had its stage's state: it reported ready, or the log says from which
        iteration it serves."""
        return peer in self.admission.ready or peer in self.ctx.run.membership.active_from

    def _rollback(self, t: int, lost: list[int]) -> Rollback | None:
        """Record of a rollback to the newest restore point with the states of all stages; None if there is
        none. lost: stages that lost all replicas."""
        which = " and ".join(f"stage {stage}" for stage in lost)
        point = self.catalog.newest(t)
        if point is None:
            self._note(f"nobody has the state of {which} any more, and no snapshot of it is complete")
            return None
        reason = f"nobody has the state of {which} after iteration {t} any more"
        self._note(f"{reason}; going back to the snapshot of iteration {point.t}")
        for stage in lost:
            self._remove_behind(sorted(self.lacking(self.ctx.run.membership.of(stage), t)), t)
        return rollback(self.ctx.run, point, reason)

    def _remove_behind(self, peers: Collection[str], t: int) -> None:
        """Count a rollback from iteration t on the word of `peers`, and remove those that caused BEHIND_MOST,
        where other peers can restore the stage."""
        self._went_back = {p: was for p, was in self._went_back.items() if t <= was[1] + BEHIND_REMEMBERED}
        for peer in peers:
            count = self._went_back.get(peer, (0, t))[0] + 1
            self._went_back[peer] = count, t
            if count < BEHIND_MOST or peer == self.ctx.me or not math.isfinite(self.worth_s(peer, t, 1.0)):
                continue
            reason = f"the log went back {count} times as it could not get a state, and others can look"
            (self.admission.remove if count == BEHIND_MOST else self.admission.expel)(peer, reason)

    def _note(self, text: str) -> None:
        if text != self._noted:
            self._noted = text
            self.ctx.outbox.note("note", text=text)

    def _move(self, stage: int, t: int, least: int, why: str) -> Members | None:
        """Record that moves a peer to `stage` from the stage with most replicas, if that has at least
        `least`; None: no peer can be moved. why: reason for the log."""
        peer = self._movable(stage, t, least)
        if peer is None:
            return None
        membership = self.ctx.run.membership
        moved = msgspec.structs.replace(membership.members[peer], stage=stage)
        reason = f"moves to stage {stage}, {why}"
        return Members(membership.number + 1, removed={peer: reason}, joined=(moved,))

    def _movable(self, stage: int, t: int, least: int) -> str | None:
        """Peer to move to `stage` from the stage with most replicas. In this order of preference it is: no
        walk-in; no voter; a keeper of the needed state; the slowest. It is None if that stage has fewer than
        `least` replicas, and for stage 0, as a data node needs the corpus.

        For a lost stage (`least` 2) replicas that do not serve yet count. For one that is down to its last
        replica only reachable ones do: what killed the others may have killed more.
        """
        if stage == 0:
            return None
        membership = self.ctx.run.membership
        relays = range(1, self.ctx.run.settings.stages + 1)
        live = {other: membership.live(other, t + 1) for other in relays if other not in self._lost}
        if least > 2:
            live = {other: [p for p in peers if self.ctx.reachable(p)] for other, peers in live.items()}
        else:
            live = {other: sorted(filter(self._knows, membership.of(other))) for other in live}
        richest = max(live, key=lambda other: (len(live[other]), -other), default=0)
        willing = [p for p in live.get(richest, []) if p != self.ctx.me and self.ctx.reachable(p)]
        # A replica that serves only from now on may still have to fetch step t from one that has applied it.
        able = [p for p in live.get(richest, []) if p in self._applied.get(richest, ())]
        if len(able) == 1 or (not able and least > 2):
            willing = [p for p in willing if able and p not in able]
        if len(live.get(richest, [])) < least or not willing:
            return None
        keepers, votes, walk_ins = self.catalog.holders(t, stage), self.ctx.log.keeps_log, membership.walk_ins
        speed_s = {p: membership.members[p].forward_s for p in willing}
        return max(willing, key=lambda p: (p not in walk_ins, not votes(p), p in keepers, speed_s[p], p))

    def worth_s(self, peer: str, t: int, step_s: float) -> float:
        """Seconds to wait for `peer`, the last replica of its stage: as long as it would take to compute the
        iterations again that would be lost with it (the ski-rental rule); infinite if no other peer could
        replace it or no restore point is in reach. t: last committed iteration. step_s: seconds of a step."""

        def in_reach(other: str) -> bool:
            return other != peer and self.ctx.reachable(other)

        stage = self.ctx.run.membership.stage_of(peer)
        if stage is None or self.ctx.run.settings.snapshot_every == 0:
            return math.inf
        point = self.catalog.newest(t + 1, in_reach)
        members = self.ctx.run.membership.replicas(stage)
        heirs = any(map(in_reach, members)) or self._movable(stage, t, 2) is not None
        return (t + 1 - point.t) * step_s if point is not None and heirs else math.inf

    def deadline(self) -> float:
        """Time (s) of the next decision about a lost stage."""
        if not self._lost:
            return math.inf
        now = self.ctx.clock.now
        times = [since + wait for since in self._lost.values() for wait in (GRACE_S, MOVE_AFTER_S)]
        return min((at for at in times if at > now), default=math.inf)
