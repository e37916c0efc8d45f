"""Recovery of a stage that lost all its replicas: the leader's part.

When no member can have the stage's state after the last commit, the leader logs a `Rollback` to the newest
restore point of which every stage's state is available. Each replica goes back to its own snapshot; a joiner,
or a peer moved from the stage with most replicas, fetches the lost stage's snapshot from its keepers; the
iterations since are computed again, exactly. A stage that is down to one replica gets another one.

The log goes back, too, where most replicas of a stage cannot get a state that others of it reported, though
they had the time: who gives it to nobody is passed over, and removed when that happens again. Where as many
words stand against each other, witnesses decide (`witnesses`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.log.records import Members, Rollback
from anabranch.protocol.recovery.last_states import LastStates
from anabranch.protocol.recovery.relay_moves import RelayMoves
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog, rollback
from anabranch.protocol.recovery.witnesses import Witnesses

#: Time (s) that a stage must be lost before the rollback is logged: a joiner may still report its state.
GRACE_S = 2.0
#: Time (s) without any member of a lost stage after which a peer of another stage is moved there. (Where
#: members wait to serve, it is the time that they may take to fetch a state: one may never do it.)
MOVE_AFTER_S = 5.0
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
        self.states = LastStates(ctx, admission, catalog)
        self._lost: dict[int, float] = {}
        """Lost stage -> since when (s)."""
        self.moves = RelayMoves(ctx, catalog, self.states, self._lost)
        self.witnesses = Witnesses(ctx, admission, self.states, self.moves)
        self._went_back: dict[str, tuple[int, int]] = {}
        """Replica -> number of rollbacks on its word, and iteration of the last one."""
        self._passed_over: dict[str, tuple[int, int]] = {}
        """Replica from which most of its stage did not get a state -> number of rollbacks for that, and
        iteration of the last one."""
        self._outvoted: set[int] = set()
        """Stages most of which cannot get a state that others of it have."""
        self._most_live: dict[int, int] = {}
        """Stage -> greatest number of active replicas so far."""
        self._looked: tuple[int, int] | None = None
        """Last commit and membership for which the lost stages are known; None: look again."""
        self._alone: list[int] = []
        """Stages that had several replicas and have one."""
        self._noted = ""

    # --- reports -------------------------------------------------------------------------------

    def forget(self, peer: str) -> None:
        """Forget the report of `peer` that it cannot get its stage's state: it has applied the last step, or
        was removed. If it is no member any more, it is no witness or suspect either."""
        self.states.forget(peer)
        if peer not in self.ctx.run.membership.members:
            self.witnesses.forget(peer)

    def rolled_back(self) -> None:
        """Forget all reports and doubts after a rollback."""
        self.states.rolled_back()
        self.witnesses.begin()
        self._outvoted = set()

    # --- decisions -----------------------------------------------------------------------------

    def decide(
        self, t: int, quiet: bool, applied: Mapping[int, Collection[str]], step_s: float
    ) -> Rollback | Members | None:
        """Record to log next: a rollback for a lost stage, or the move of a peer to a stage with one replica
        or none. None: nothing to log; always so before the run has begun, while this peer hears nobody, and
        in runs without snapshots, but for a stage whose replicas hold the step up. May remove replicas that
        withhold a state, or that had the log go back too often. t: last committed iteration. quiet: True if
        moving a peer now loses no work. applied: stage -> peers that reported step t. step_s: usual seconds
        of a step; 0: not known."""
        membership = self.ctx.run.membership
        if self.states.look(t, applied, step_s):
            self.witnesses.begin()
        if self.ctx.hears_nobody():  # its own line may be down: all have their time anew after that
            self.states.since = self.ctx.clock.now
            self.witnesses.begin()
            return None
        if not membership.begun:
            return None
        if (moved := self.witnesses.decide(t)) is not None:
            return moved
        if self.ctx.run.settings.snapshot_every == 0:
            return None
        if self.states.lacked or self._looked != (t, membership.version):
            self._look(t)
        due = [stage for stage, since in self._lost.items() if self.ctx.clock.now >= since + GRACE_S]
        gone = [s for s in due if not self.catalog.has(t, s)]
        if gone:
            return self._rollback(t, gone)
        if withheld := self._withheld_long(t):
            return self._pass_over(t, withheld)
        for stage, since in self._lost.items():
            if self.ctx.clock.now >= since + self._move_after_s(stage):
                moved = self.moves.to(stage, t, 2, "which lost all its replicas")
                if moved is not None:
                    self._lost[stage] = self.ctx.clock.now
                    return moved
        if quiet and self._alone:
            return self.moves.to(self._alone[0], t, 3, "which is down to one replica")
        return None

    def _move_after_s(self, stage: int) -> float:
        """Seconds for which a stage has to be lost before a peer is moved to it: MOVE_AFTER_S, or if members
        serve or are to serve there (auditors do not), as long as these may be fetching a state
        (`LastStates.fetch_s`, LONG_S at least)."""
        if self.ctx.run.membership.replicas(stage):
            return self.states.fetch_s(stage, self.states.t)
        return MOVE_AFTER_S

    def _withheld_long(self, t: int) -> list[int]:
        """Relay stages of which most replicas say that they cannot get their state after iteration t, and
        have said so for as long as fetching it may take."""
        stages = range(1, self.ctx.run.settings.stages + 1) if self.states.lacked else ()
        self._outvoted = {stage for stage in stages if self.states.outvoted(stage, t)}
        since = self.states.since
        return [s for s in sorted(self._outvoted) if self.ctx.clock.now >= since + self.states.fetch_s(s, t)]

    def _pass_over(self, t: int, stages: list[int]) -> Rollback | None:
        """Record of a rollback from iteration t for `stages`, most replicas of which cannot get their state;
        None if there is no snapshot. Each call counts against those that have the state, even if it returns
        None: with the WITHHELD_MOST-th, each at most BEHIND_REMEMBERED iterations after the one before, they
        are removed, except this peer."""
        self._passed_over = {p: w for p, w in self._passed_over.items() if t <= w[1] + BEHIND_REMEMBERED}
        for stage in stages:
            for peer in self.states.having(stage, t):
                count = self._passed_over.get(peer, (0, t))[0] + 1
                self._passed_over[peer] = count, t
                if count >= WITHHELD_MOST and peer != self.ctx.me:
                    reason = f"most of its stage did not get the state after iteration {t} from it, once more"
                    self.admission.remove(peer, reason)
        which = " and ".join(f"stage {stage}" for stage in stages)
        return self._back(t, f"most of {which} cannot get its state after iteration {t} from the others")

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
        self._looked = (t, membership.version) if all_served and not self.states.lacked else None

    def _is_lost(self, stage: int, t: int) -> bool:
        """True if no member can have the stage's state after iteration t, except in a snapshot of another
        stage's peer; also if nobody is of the stage."""
        membership = self.ctx.run.membership
        able = membership.live(stage, t + 1) or [p for p in membership.of(stage) if self.states.knows(p)]
        return len(self.states.lacking(able, t)) == len(able)

    def _rollback(self, t: int, lost: list[int]) -> Rollback | None:
        """Record of a rollback, which is noted, to the newest restore point before the last committed
        iteration t; None, with a note, if there is none. A rollback counts against the replicas of the lost
        stages that say that they cannot get their state, some of which are removed or expelled then
        (`_remove_behind`). lost: stages whose state nobody has."""
        which = " and ".join(f"stage {stage}" for stage in lost)
        back = self._back(t, f"nobody has the state of {which} after iteration {t} any more")
        if back is None:
            self._note(f"nobody has the state of {which} any more, and no snapshot of it is complete")
            return None
        for stage in lost:
            self._remove_behind(sorted(self.states.lacking(self.ctx.run.membership.of(stage), t)), t)
        return back

    def _back(self, t: int, reason: str) -> Rollback | None:
        """Record of a rollback to the newest restore point before iteration t, noted with `reason`; None if
        there is none."""
        point = self.catalog.newest(t)
        if point is None:
            return None
        self._note(f"{reason}; going back to the snapshot of iteration {point.t}")
        return rollback(self.ctx.run, point, reason)

    def _remove_behind(self, peers: Collection[str], t: int) -> None:
        """Count a rollback from iteration t on the word of `peers`. Those that caused BEHIND_MOST are
        removed, and with more of them expelled, where other peers can restore the stage; never this peer."""
        self._went_back = {p: was for p, was in self._went_back.items() if t <= was[1] + BEHIND_REMEMBERED}
        for peer in peers:
            count = self._went_back.get(peer, (0, t))[0] + 1
            self._went_back[peer] = count, t
            if count < BEHIND_MOST or peer == self.ctx.me or not self.moves.replaceable([peer], t):
                continue
            reason = f"the log went back {count} times as it could not get a state, and others can look"
            (self.admission.remove if count == BEHIND_MOST else self.admission.expel)(peer, reason)

    def _note(self, text: str) -> None:
        if text != self._noted:
            self._noted = text
            self.ctx.outbox.note("note", text=text)

    def deadline(self) -> float:
        """Time (s) of the next decision about a lost or doubted stage."""
        if not (self._lost or self._outvoted):
            return self.witnesses.deadline()
        now, states = self.ctx.clock.now, self.states
        times = [since + GRACE_S for since in self._lost.values()]
        times += [since + self._move_after_s(stage) for stage, since in self._lost.items()]
        times += [states.since + states.fetch_s(stage, states.t) for stage in self._outvoted]
        return min([self.witnesses.deadline(), *(at for at in times if at > now)])
