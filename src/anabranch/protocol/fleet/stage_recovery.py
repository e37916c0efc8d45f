"""Recovery of a stage that lost all its replicas, or whose last one may hold a step up: the leader's part.

When no member can have the stage's state after the last commit, the leader logs a `Rollback` to the newest
restore point of which every stage's state is available. Each replica goes back to its own snapshot; a joiner,
or a peer moved from the stage with most replicas, fetches the lost stage's snapshot from its keepers; the
iterations since are computed again, exactly. A stage that is down to one replica gets another one.

The log goes back, too, where most replicas of a stage cannot get a state that others of it reported, though
they had the time: who gives it to nobody is passed over, and removed when that happens again. Of two replicas
the leader has one word each, so it moves a peer there: if that one does not get the state either, the replica
that has it is removed.

A stage whose only replica may hold a step up gets another one, too: by claiming what it does not give back it
can do so for ever. Nobody can tell if it or the stage before is at fault, so it keeps its seat, unless the
peer that the leader moves there does not get the stage's state from it either. Several replicas can do so
together; a stage with several waits longer, and gets one such peer at a time.
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
#: Stalls of a step, times what a step usually takes, and least time (s) since the first of these stalls,
#: after which a stage whose only replica may hold the step up gets a peer of another stage. Plain choices:
#: those for data nodes (`late_sources`). Without need it costs the other stage a replica, and nobody a seat.
HELD_STALLS, HELD_STEPS, HELD_S = 4, 12.0, 50.0
#: Times as long as a stage's state takes over links like the leader's, after which nobody waits for it any
#: more. A plain choice: volunteers' lines may be several times slower.
FETCHED = 8.0
#: Times that long for which most of a stage may be fetching a state: one that is silent is asked three times
#: before they say that they cannot get it. A plain choice.
FETCHING = 2.0
#: Rollbacks on a replica's word that it cannot get a state, each within so many iterations of the one before,
#: with which the replica is removed, and with more of them expelled, where another can take its place. Plain
#: choices: an accident may happen twice, and one that says so without end let the run go no further.
BEHIND_MOST, BEHIND_REMEMBERED = 3, 64
#: Such rollbacks on the word of most of a stage, with which those are removed from which they did not get the
#: state. A plain choice: a line may fail once.
WITHHELD_MOST = 2


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
        self._passed_over: dict[str, tuple[int, int]] = {}
        """Replica from which most of its stage did not get a state -> number of rollbacks for that, and
        iteration of the last one."""
        self._committed = (-1, 0.0)
        """Last committed iteration, and time (s) since which this peer knows it."""
        self._sent: dict[int, tuple[str, float]] = {}
        """Stage of two, one of which does not get the last state from the other -> peer that was moved there,
        to see if that one gives it, and when (s)."""
        self._outvoted: set[int] = set()
        """Stages most of which cannot get a state that others of it have."""
        self._lost: dict[int, float] = {}
        """Lost stage -> since when (s)."""
        self._most_live: dict[int, int] = {}
        """Stage -> greatest number of active replicas so far."""
        self._looked: tuple[int, int] | None = None
        """Last commit and membership for which the lost stages are known; None: look again."""
        self._alone: list[int] = []
        """Stages that had several replicas and have one."""
        self._held_up: dict[int, float] = {}
        """Stage whose replicas may hold the open step up -> time (s) of the first such stall."""
        self._held_due: list[int] = []
        """Those of them that have done so for long."""
        self._doubted: dict[int, tuple[int, int]] = {}
        """Stage that was among them -> last such iteration, and replicas that served it."""
        self._step_s = 0.0
        """Usual seconds of a step; 0: not known."""
        self._awaited: dict[int, float] = {}
        """Such a stage with another replica that does not get the state -> since when (s)."""
        self._suspects: set[str] = set()
        """Replicas to whose stage a peer was moved since they may hold it up: they are not moved."""
        self._heirs: set[str] = set()
        """Peers that were moved there."""
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

    def outvoted(self, stage: int, t: int) -> bool:
        """True if more than half of those that serve a stage say that they cannot get its state after
        iteration t, which others of it reported, and there is a snapshot to go back to."""
        live = self.ctx.run.membership.live(stage, t + 1) if self._behind else []
        most = 2 * len(self.lacking(live, t)) > len(live) and self._having(stage, t)
        return bool(most) and self.ctx.run.settings.snapshot_every > 0 and self.catalog.newest(t) is not None

    def _having(self, stage: int, t: int) -> list[str]:
        """Replicas of a stage that reported its state after iteration t, the last committed one."""
        applied = self._applied.get(stage, ())
        return [peer for peer in self.ctx.run.membership.live(stage, t + 1) if peer in applied]

    def fetching(self, stage: int, t: int) -> Collection[str]:
        """Replicas of a stage that are not removed for want of its state after iteration t, which others of
        it reported: those that did not, if they are more than half, as long as they may be fetching it, or
        say that they cannot get it (then the log goes back); also one of two, while a peer that was moved
        there tries to get it."""
        (known_t, since), now = self._committed, self.ctx.clock.now
        live = self.ctx.run.membership.live(stage, t + 1)
        having = self._having(stage, t)
        without = [peer for peer in live if peer not in having]
        if known_t != t or len(without) == len(live):
            return ()
        if stage in self._sent:
            return without if now < self._sent[stage][1] + FETCHING * self._state_s(stage, t) else ()
        if 2 * len(without) <= len(live):
            return ()
        fetches = now < since + FETCHING * self._state_s(stage, t)
        return without if fetches or self.outvoted(stage, t) else ()

    def forget(self, peer: str) -> None:
        """Forget the report of `peer` that it cannot get its stage's state: it has applied the last step, or
        was removed."""
        self._behind.pop(peer, None)
        if peer not in self.ctx.run.membership.members:
            self._suspects.discard(peer)
            self._heirs.discard(peer)

    def rolled_back(self) -> None:
        """Forget all reports after a rollback."""
        self._behind.clear()
        self._held_up, self._held_due, self._awaited = {}, [], {}
        self._committed, self._outvoted, self._sent = (-1, 0.0), set(), {}

    def stalled(self, held_up: Collection[int], stalls: int, step_s: float) -> None:
        """Note the relay stages whose only replica, or all of whose replicas, may hold the open step up
        (`held_up`, the most likely first), after `stalls` stalls without news between them. Those with
        several are due one stall later, when all else was tried. step_s: usual seconds of a step; 0: not
        known."""
        now, self._step_s = self.ctx.clock.now, step_s
        self._held_up = {stage: self._held_up.get(stage, now) for stage in held_up}
        long_s = max(HELD_S, HELD_STEPS * step_s)
        membership, t = self.ctx.run.membership, self.ctx.run.membership.opening.t
        counts = {stage: membership.count(stage, t) for stage in self._held_up}
        of_several_s = long_s if step_s else HELD_STEPS * HELD_S  # a run's first step may be as long
        waits_s = {stage: of_several_s if count > 1 else long_s for stage, count in counts.items()}
        due = (stage for stage, at in self._held_up.items() if now >= at + waits_s[stage])
        self._held_due = [stage for stage in due if stalls >= HELD_STALLS + (counts[stage] > 1)]
        self._doubted.update({stage: (t, counts[stage]) for stage in self._held_due})
        self._awaited = {stage: at for stage, at in self._awaited.items() if stage in self._held_due}

    def doubts(self, stage: int) -> bool:
        """True if a stage's only replica, or all its replicas, have held the open step up for long, as far as
        anybody can tell, so that nobody is kept out by their word about the stage's state, or for want of it.
        So it is where one of two does not get that state from the other."""
        if stage in self._sent:
            return True
        membership, (t, count) = self.ctx.run.membership, self._doubted.get(stage, (-1, 0))
        return t == membership.opening.t and 0 < membership.count(stage, t) <= count

    def sent(self, peer: str) -> bool:
        """True if this leader moved `peer` to its stage since the replicas there may hold the step up."""
        return peer in self._heirs

    # --- decisions -----------------------------------------------------------------------------

    def decide(
        self, t: int, quiet: bool, applied: Mapping[int, Collection[str]]
    ) -> Rollback | Members | None:
        """Rollback for a lost stage, or move of a peer to a stage with one replica or none; None: nothing to
        log (always, before the run has begun; where no snapshots are kept, but for a stage that holds the
        step up). t: last committed iteration. quiet: True if moving a peer now loses no work. applied: stage
        -> peers that reported step t."""
        membership, self._applied = self.ctx.run.membership, applied
        if self._committed[0] != t:
            self._committed, self._sent = (t, self.ctx.clock.now), {}
        if not membership.begun:
            return None
        if (moved := self._reinforced(t)) is not None:
            return moved
        if self.ctx.run.settings.snapshot_every == 0:
            return None
        if self._behind or self._looked != (t, membership.version):
            self._look(t)
        due = [stage for stage, since in self._lost.items() if self.ctx.clock.now >= since + GRACE_S]
        gone = [s for s in due if not self.catalog.has(t, s)]
        if gone:
            return self._rollback(t, gone)
        if withheld := self._withheld_long(t):
            return self._pass_over(t, withheld)
        if (moved := self._witness(t)) is not None:
            return moved
        for stage, since in self._lost.items():
            if self.ctx.clock.now >= since + MOVE_AFTER_S and not membership.replicas(stage):
                moved = self._move(stage, t, 2, "which lost all its replicas")
                if moved is not None:
                    return moved
        if quiet and self._alone:
            return self._move(self._alone[0], t, 3, "which is down to one replica")
        return None

    def _reinforced(self, t: int) -> Members | None:
        """Record that moves a peer to a stage whose replicas may hold the step up for long, where nobody
        else came to serve; None: there is no such stage, nobody can be moved, or who was moved waits for the
        state, or serves beside several. If that one waits too long, the only replica that has it is removed;
        several are not, by the word of the one that was moved."""
        membership = self.ctx.run.membership
        for stage in filter(self.doubts, self._held_due):  # the step may have been skipped since
            live = {*membership.live(stage, t + 1)}
            others = set(membership.replicas(stage)) - live
            waits = others and not self._waited(stage, t)
            sent = others & self._heirs or (len(live) > 1 and live & self._heirs)
            moved = None if waits or sent else self._reinforcement(stage, t)
            if moved is not None:
                return moved
            if others and not waits and len(live) == 1:
                self._remove_withholding(live, t)
            if len(live) > 1 and others & self._heirs:
                return None  # the next stage may lack what this one lacks
        return None

    def _reinforcement(self, stage: int, t: int, why: str = "") -> Members | None:
        """Record that moves a peer to the stage, from one with three replicas or else with two. why: reason
        for the log ("": the replicas there may hold the step up)."""
        live, former = self.ctx.run.membership.live(stage, t + 1), set(self._suspects)
        why = why or f"whose {'only replica' if len(live) == 1 else 'replicas'} may hold the step up"
        self._suspects.update(live if len(live) == 1 else ())  # two stages may look alike
        moved = self._move(stage, t, 3, why, self._heirs) or self._move(stage, t, 2, why, self._heirs)
        if moved is None:
            self._suspects = former
        else:
            self._heirs.update(moved.removed)
            self._awaited.pop(stage, None)
        return moved

    def _waited(self, stage: int, t: int) -> bool:
        """True if those that are to serve a stage have waited for its state after iteration t for as long as
        it may take, or as long as the steps since the newest restore point."""
        if any(peer in self.admission.ready for peer in self.ctx.run.membership.replicas(stage)):
            return False
        since = self._awaited.setdefault(stage, self.ctx.clock.now)
        return self.ctx.clock.now >= since + self._state_s(stage, t)

    def _state_s(self, stage: int, t: int) -> float:
        """Seconds that a replica may take to get its stage's state after iteration t: as long as the steps
        since the newest restore point, or as the state takes over a slow line."""
        point = self.catalog.newest(t + 1)
        state_s = FETCHED * self.ctx.costs.reduce_s(self.ctx.run.settings.state_bytes_of(stage))
        steps = max(HELD_STEPS, t + 1 - point.t if point is not None else 0)
        return max(HELD_S, steps * self._step_s, state_s)

    def _withheld_long(self, t: int) -> list[int]:
        """Stages most of which could not get their state after iteration t for as long as it may take."""
        stages = range(1, self.ctx.run.settings.stages + 1) if self._behind else ()
        self._outvoted = {stage for stage in stages if self.outvoted(stage, t)}
        since = self._committed[1]
        return [s for s in sorted(self._outvoted) if self.ctx.clock.now >= since + self._state_s(s, t)]

    def _pass_over(self, t: int, stages: list[int]) -> Rollback | None:
        """Record of a rollback from iteration t for `stages`, most replicas of which cannot get their state.
        Those that have it are removed with the rollback number WITHHELD_MOST."""
        self._passed_over = {p: w for p, w in self._passed_over.items() if t <= w[1] + BEHIND_REMEMBERED}
        for stage in stages:
            for peer in self._having(stage, t):
                count = self._passed_over.get(peer, (0, t))[0] + 1
                self._passed_over[peer] = count, t
                if count >= WITHHELD_MOST and peer != self.ctx.me:
                    reason = f"most of its stage did not get the state after iteration {t} from it, once more"
                    self.admission.remove(peer, reason)
        which = " and ".join(f"stage {stage}" for stage in stages)
        return self._back(t, f"most of {which} cannot get its state after iteration {t} from the others")

    def _remove_withholding(self, having: Collection[str], t: int) -> None:
        """Remove the only replica of a stage that has the state after iteration t (`having`), from which
        nobody gets it, if another state can be had without it: the stage is lost then. It may come back."""
        for peer in having:
            if peer != self.ctx.me and math.isfinite(self.worth_s(peer, t, 1.0)):
                reason = f"iteration {t + 1} waits for it, and nobody gets the state of its stage from it"
                self.admission.remove(peer, reason)

    def _witness(self, t: int) -> Members | None:
        """Record that moves a peer to a stage of two replicas, one of which is heard and has not got the
        state after iteration t from the other for as long as that may take; None: there is no such stage,
        nobody can be moved, or somebody was. If that one does not get it either in that time, who has it is
        removed."""
        membership, now = self.ctx.run.membership, self.ctx.clock.now
        if now < self._committed[1] + HELD_S:
            return None
        for stage in range(1, self.ctx.run.settings.stages + 1):
            having = self._having(stage, t) if membership.count(stage, t + 1) == 2 else []
            if len(having) != 1 or now < self._committed[1] + self._state_s(stage, t):
                continue
            peer, at = self._sent.get(stage, ("", 0.0))
            if not peer and self.admission.absent.silent().isdisjoint(membership.live(stage, t + 1)):
                why = "one of whose two replicas does not get the state from the other"
                moved = self._reinforcement(stage, t, why) if self.ctx.me not in having else None
                if moved is not None:
                    self._sent[stage] = next(iter(moved.removed)), now
                    return moved
            came = peer in self.admission.ready or peer in membership.active_from
            if membership.stage_of(peer) == stage and not came and now >= at + self._state_s(stage, t):
                self._remove_withholding(having, t)
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
        back = self._back(t, f"nobody has the state of {which} after iteration {t} any more")
        if back is None:
            self._note(f"nobody has the state of {which} any more, and no snapshot of it is complete")
            return None
        for stage in lost:
            self._remove_behind(sorted(self.lacking(self.ctx.run.membership.of(stage), t)), t)
        return back

    def _back(self, t: int, reason: str) -> Rollback | None:
        """Record of a rollback to the newest restore point before iteration t; None if there is none."""
        point = self.catalog.newest(t)
        if point is None:
            return None
        self._note(f"{reason}; going back to the snapshot of iteration {point.t}")
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

    def _move(
        self, stage: int, t: int, least: int, why: str, stay: Collection[str] = ()
    ) -> Members | None:
        """Record that moves a peer to `stage` from the stage with most replicas, if that has at least
        `least`; None: no peer can be moved. why: reason for the log. stay: peers that are not moved."""
        peer = self._movable(stage, t, least, stay)
        if peer is None:
            return None
        membership = self.ctx.run.membership
        moved = msgspec.structs.replace(membership.members[peer], stage=stage)
        reason = f"moves to stage {stage}, {why}"
        return Members(membership.number + 1, removed={peer: reason}, joined=(moved,))

    def _movable(self, stage: int, t: int, least: int, stay: Collection[str] = ()) -> str | None:
        """Peer to move to `stage` from the stage with most replicas, but none of `stay`. In this order of
        preference it is: no walk-in; no voter; a keeper of the needed state; the slowest. It is None if that
        stage has fewer than `least` replicas, and for stage 0, as a data node needs the corpus.

        For a lost stage (`least` 2) replicas that do not serve yet count. For one that is down to its last
        replica only reachable ones do: what killed the others may have killed more.
        """
        if stage == 0:
            return None
        membership = self.ctx.run.membership
        relays = range(1, self.ctx.run.settings.stages + 1)
        there = [other for other in relays if other != stage and other not in self._lost]
        live = {other: membership.live(other, t + 1) for other in there}
        if least > 2:
            live = {other: [p for p in peers if self.ctx.reachable(p)] for other, peers in live.items()}
        else:
            live = {other: sorted(filter(self._knows, membership.of(other))) for other in live}
        richest = max(live, key=lambda other: (len(live[other]), -other), default=0)
        bound = {self.ctx.me, *self._suspects, *stay}
        willing = [p for p in live.get(richest, []) if p not in bound and self.ctx.reachable(p)]
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
        if not (self._lost or self._outvoted or self._sent):
            return math.inf
        now, (t, committed_at) = self.ctx.clock.now, self._committed
        times = [since + wait for since in self._lost.values() for wait in (GRACE_S, MOVE_AFTER_S)]
        times += [committed_at + self._state_s(stage, t) for stage in self._outvoted]
        times += [at + self._state_s(stage, t) for stage, (_, at) in self._sent.items()]
        return min((at for at in times if at > now), default=math.inf)
