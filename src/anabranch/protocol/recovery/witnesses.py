"""Witnesses: peers that the leader moves to a stage whose replicas are doubted.

Replicas are doubted for two reasons. All that serve a stage, one or several, may hold the open step up: by
claiming what they do not give back they can do so for ever. Or one of two does not get the state after the
last step that the other reported. Nobody can tell who is at fault, so all keep their seats, and a peer of
another stage is moved there. It serves, or it shows who gives nothing: the suspects lose their seats if as
many other members want the stage's state as they are, and get it from none of them; where it is the word of
one of two, if more do. (Most of a stage that does not get a state needs no witness: `stage_recovery`.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.log.records import Members
from anabranch.protocol.recovery.last_states import LONG_S, LONG_STEPS, LastStates
from anabranch.protocol.recovery.relay_moves import RelayMoves

#: Stalls of a step after which a stage whose only replica may hold it up is doubted; one more for a stage of
#: several. A plain choice: as for data nodes (`late_data_nodes`).
HELD_STALLS = 4
#: Times LONG_S for which a stage may hold up a step while no step's duration is known: the first one that a
#: leader opens may be as long. (A stage's only replica has no longer than LONG_S in a run's first step: no
#: work is lost there by a move, and everyone has the state.) A plain choice.
FIRST_STEP = 12.0
#: Times as long as the state may take for which replicas that lack it keep their seats (`fetching`): one that
#: is silent is asked three times before they say that they cannot get it. A plain choice.
FETCHING = 2.0


class Phase(Enum):
    """Phase of a stage's doubt in one step. CLEAR: no ground, or none any more. SEEN: there is ground, for
    less time than honest replicas may take. DOUBTED: for longer; a witness is to come. AWAITED: members of
    the stage, a witness or others, wait for its state."""

    CLEAR = "clear"
    SEEN = "seen"
    DOUBTED = "doubted"
    AWAITED = "awaited"


#: Phase -> phases that may follow it.
FOLLOWING = {
    Phase.CLEAR: {Phase.SEEN},
    Phase.SEEN: {Phase.CLEAR, Phase.DOUBTED},
    Phase.DOUBTED: {Phase.CLEAR, Phase.AWAITED},
    Phase.AWAITED: {Phase.CLEAR, Phase.DOUBTED},
}


@dataclass
class Doubt:
    """Doubt of a stage's replicas in the open step. at: time (s) at which its phase began. replicas: number
    that served the stage when it was doubted first; 0: it was not. witnesses: peers moved there for it."""

    phase: Phase = Phase.CLEAR
    at: float = 0.0
    replicas: int = 0
    witnesses: set[str] = field(default_factory=set)

    @property
    def stands(self) -> bool:
        """True in phases in which the leader acts on it."""
        return self.phase in (Phase.DOUBTED, Phase.AWAITED)

    def advance(self, phase: Phase, at: float) -> None:
        """Enter another phase at a time (s); raises ValueError if it cannot follow."""
        if phase not in FOLLOWING[self.phase]:
            raise ValueError(f"{phase} cannot follow {self.phase}")
        self.phase, self.at = phase, at


class Witnesses:
    """Doubted stages of the open step, and the peers (witnesses) that the leader moves there."""

    def __init__(self, ctx: PeerContext, admission: Admission, states: LastStates, moves: RelayMoves) -> None:
        self.ctx = ctx
        self._admission, self._states, self._moves = admission, states, moves
        self._doubts: dict[int, Doubt] = {}
        self._held_up: list[int] = []
        """Stages that may hold the open step up, the most likely first."""

    # --- grounds -------------------------------------------------------------------------------

    def stalled(self, held_up: Sequence[int], stalls: int) -> None:
        """Note that the replicas of the relay stages `held_up` (the most likely first) may hold the open step
        up, after `stalls` stalls running. A stage is doubted at a later call, if it is named for longer than
        honest replicas may take and the step has stalled often enough: HELD_STALLS times, once more for a
        stage with several replicas, when all else was tried, and once more for each witness that serves
        there. Stages that are not named any more are no longer doubted."""
        self._held_up = list(held_up)
        self._clear()
        for stage in held_up:
            doubt, count = self._doubts.setdefault(stage, Doubt()), self._count(stage)
            if doubt.phase is Phase.CLEAR:
                doubt.advance(Phase.SEEN, self.ctx.clock.now)
                continue
            serving = len(doubt.witnesses & self.ctx.run.membership.active_from.keys())
            tried = stalls >= HELD_STALLS + (count > 1) + serving
            if tried and self.ctx.clock.now >= doubt.at + self._held_s(count):
                self._doubt(doubt, count)

    def _held_s(self, count: int) -> float:
        """Seconds for which `count` replicas, all of their stage, may hold a step up before they are
        doubted."""
        if not self._states.step_s and (count > 1 or self._states.t):
            return FIRST_STEP * LONG_S
        return max(LONG_S, LONG_STEPS * self._states.step_s)

    def _given_s(self, stage: int, t: int) -> float:
        """Seconds within which the replicas of a stage give its state after iteration t: as long as they may
        hold a step up at least, for their machines may be busy with it."""
        return max(self._states.fetch_s(stage, t), self._held_s(self._count(stage)))

    def _count(self, stage: int) -> int:
        """Number of replicas that serve a stage in the open iteration."""
        return self.ctx.run.membership.count(stage, self.ctx.run.membership.opening.t)

    def _look(self, t: int) -> None:
        """Doubt the stages with two replicas of which one has not got the state after iteration t, which the
        other reported, for longer than it may take."""
        if self.ctx.clock.now < self._states.since + LONG_S:
            return
        for stage in filter(self._is_divided, range(1, self.ctx.run.settings.stages + 1)):
            doubt = self._doubts.setdefault(stage, Doubt())
            if doubt.phase is Phase.CLEAR:
                doubt.advance(Phase.SEEN, max(doubt.at, self._states.since))
            if self.ctx.clock.now >= doubt.at + self._given_s(stage, t):
                self._doubt(doubt, 2)

    def _clear(self) -> None:
        """End the doubts for which there is no ground any more."""
        for stage, doubt in self._doubts.items():
            grounds = stage in self._held_up or self._is_divided(stage)
            if doubt.phase is not Phase.CLEAR and not grounds:
                doubt.advance(Phase.CLEAR, self.ctx.clock.now)

    def _is_divided(self, stage: int) -> bool:
        """True if one of two replicas of a stage, another than this peer, reported its state after the last
        step, and the other, which is heard, did not."""
        membership, t = self.ctx.run.membership, self._states.t
        having = self._states.having(stage, t) if membership.count(stage, t + 1) == 2 else []
        if len(having) != 1 or self.ctx.me in having:
            return False
        return self._admission.absent.silent().isdisjoint(membership.live(stage, t + 1))

    def _doubt(self, doubt: Doubt, replicas: int) -> None:
        if doubt.phase is Phase.SEEN:
            doubt.advance(Phase.DOUBTED, self.ctx.clock.now)
            doubt.replicas = max(doubt.replicas, replicas)

    def begin(self) -> None:
        """Forget all doubts: another step is open, or the log went back."""
        self._doubts, self._held_up = {}, []

    def forget(self, peer: str) -> None:
        """Forget a former member: it is no suspect and no witness any more."""
        self._moves.suspects.discard(peer)
        for doubt in self._doubts.values():
            doubt.witnesses.discard(peer)

    # --- questions -----------------------------------------------------------------------------

    def doubts(self, stage: int) -> bool:
        """True if all replicas that serve a stage are doubted in the open step. Then what they say about the
        stage's state keeps no joiner out, nor is their proof of it needed. False once another one serves
        there."""
        doubt = self._doubts.get(stage)
        return doubt is not None and 0 < self._count(stage) <= doubt.replicas

    def sent(self, peer: str) -> bool:
        """True if this leader moved `peer` to its stage in the open step since the replicas there are
        doubted."""
        return any(peer in doubt.witnesses for doubt in self._doubts.values())

    def fetching(self, stage: int, t: int) -> Collection[str]:
        """Replicas of a stage that must not be removed for want of its state after iteration t, as they may
        still be fetching it from those that reported it. They are the ones that did not report, if they are
        more than half, or if a witness serves to tell who of two is at fault; and only as long as fetching
        may take, or while they are outvoted (`LastStates.outvoted`: then the log goes back). Empty if nobody
        reported the state."""
        states, doubt = self._states, self._doubts.get(stage)
        having, live = states.having(stage, t), self.ctx.run.membership.live(stage, t + 1)
        without = [peer for peer in live if peer not in having]
        witnessed = doubt is not None and doubt.stands and bool(doubt.witnesses)
        if states.t != t or not having or not (witnessed or 2 * len(without) > len(live)):
            return ()
        since = doubt.at if doubt is not None and witnessed else states.since
        fetches = self.ctx.clock.now < since + FETCHING * states.fetch_s(stage, t)
        return without if fetches or states.outvoted(stage, t) else ()

    # --- decisions -----------------------------------------------------------------------------

    def decide(self, t: int) -> Members | None:
        """Record that moves a witness to a doubted stage, for the caller to log; None: there is no such
        stage, nobody can be moved, or somebody waits for the state there. Has replicas removed that gave
        their state to none of those that waited for it for as long as it may take. t: last committed
        iteration."""
        self._clear()
        self._look(t)
        now = self.ctx.clock.now
        for stage in (*self._held_up, *(other for other in self._doubts if other not in self._held_up)):
            doubt = self._doubts[stage]
            suspects, waiting = self._suspects(stage, t), self._waiting(stage, t)
            if not doubt.stands or not suspects or waiting is None:
                continue
            if not self.doubts(stage):
                doubt.advance(Phase.CLEAR, now)  # another one serves there now
                continue
            if bool(waiting) != (doubt.phase is Phase.AWAITED):
                doubt.advance(Phase.AWAITED if waiting else Phase.DOUBTED, now)
            if not waiting or now >= doubt.at + self._given_s(stage, t):
                moved = self._judge(stage, doubt, t, suspects, waiting)
                if moved is not None:
                    return moved
            elif len(suspects) > 1:
                return None  # the next stage may lack what this one lacks
        return None

    def _waiting(self, stage: int, t: int) -> list[str] | None:
        """Members of a stage that do not serve it yet, all of which wait for its state after iteration t; []
        if there are none. None if one of them has that state, and so begins to serve. (One that may serve
        from a later iteration may have an older state only.)

        While one of two replicas has the state, it is not agreed, and nobody can begin to serve with it: then
        the word of a witness that it got it is enough. That of others, which may be accomplices, is not:
        these neither have the state nor wait for it."""
        membership = self.ctx.run.membership
        others = sorted(set(membership.replicas(stage)) - set(membership.live(stage, t + 1)))
        if any(self._admission.has_state(peer, t) for peer in others):
            return None
        if not self._is_divided(stage):
            return others
        got = {peer for peer in others if self._states.got(peer, t)}
        if got & self._doubts[stage].witnesses:
            return None
        return [peer for peer in others if peer not in got]

    def _suspects(self, stage: int, t: int) -> list[str]:
        """Replicas that are doubted: the one that reported the state after iteration t, if one of two did;
        else all but those that say that they cannot get it."""
        live, states = self.ctx.run.membership.live(stage, t + 1), self._states
        if self._is_divided(stage):
            return states.having(stage, t)
        lacking = states.lacking(live, t)
        return [peer for peer in live if peer not in lacking]

    def _judge(
        self, stage: int, doubt: Doubt, t: int, suspects: Collection[str], waiting: Collection[str]
    ) -> Members | None:
        """Record that moves the next witness to a stage; None if enough came, or nobody can be moved. Then
        the suspects are removed, if as many members wait for the state in vain and another peer can restore
        the stage; if two replicas are divided, one of which may be slow, only once a witness came. waiting:
        members of the stage that wait for the state."""
        divided = self._is_divided(stage)
        enough = self._enough(waiting, suspects)
        if not (enough and doubt.witnesses):
            moved = self._move(stage, doubt, t, suspects, divided)
            if moved is not None:
                return moved
        fair = self.ctx.me not in suspects and (doubt.witnesses or not divided)
        if enough and fair and self._moves.replaceable(suspects, t):
            for peer in suspects:
                reason = f"iteration {t + 1} waits for it, and nobody gets the state of its stage from it"
                self._admission.remove(peer, reason)
        return None

    @staticmethod
    def _enough(waiting: Collection[str], suspects: Collection[str]) -> bool:
        """True if at least as many members wait for the state in vain as are suspected of giving it to
        nobody."""
        return len(waiting) >= len(suspects)

    def _move(
        self, stage: int, doubt: Doubt, t: int, suspects: Collection[str], divided: bool
    ) -> Members | None:
        """Record that moves a witness to a stage, from another one with at least three replicas; or with two,
        if no witness serves there yet. None: nobody can be moved. divided: True if one of two replicas does
        not get the state from the other (tells the reason in the log)."""
        why = f"whose {'only replica' if len(suspects) == 1 else 'replicas'} may hold the step up"
        if divided:
            why = "one of whose two replicas does not get the state from the other"
        live = self.ctx.run.membership.live(stage, t + 1)
        stay = self._moves.suspects.union(*(each.witnesses for each in self._doubts.values()))
        for least in (3, 2) if doubt.witnesses.isdisjoint(live) else (3,):
            moved = self._moves.to(stage, t, least, why, stay)
            if moved is not None:
                if len(suspects) == 1:  # two stages may look alike
                    self._moves.suspects.update(suspects)
                doubt.witnesses.update(moved.removed)
                if doubt.phase is Phase.AWAITED:
                    doubt.advance(Phase.DOUBTED, self.ctx.clock.now)
                return moved
        return None

    def deadline(self) -> float:
        """Time (s) of the next decision about a doubted stage; infinite if none is due by time."""
        if not self._doubts:
            return math.inf
        now, t = self.ctx.clock.now, self._states.t
        times = [
            doubt.at + (self._given_s(stage, t) if doubt.stands else self._held_s(self._count(stage)))
            for stage, doubt in self._doubts.items()
            if doubt.phase is not Phase.CLEAR
        ]
        return min((at for at in times if at > now), default=math.inf)
