"""Catalog of snapshots: which peer holds which stage's state, and to which iterations the run can go back.

Every K-th iteration becomes a restore *point* when its step is released. For each stage the leader orders
peers of other stages, the keepers, to copy the state; all peers report what they hold, and a keeper that is
gone is replaced. A point is complete when enough keepers hold every stage; only then may older ones be
dropped.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.run_view import RunView
from anabranch.protocol.log.records import Rollback
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.messages import Complete, Holders, Holds, Keep, Spoilt, WhoHas
from anabranch.protocol.rounds.plan import freed
from anabranch.protocol.state.holdings import Holdings
from anabranch.protocol.state.snapshots import KEPT_PER_STAGE

#: Time (s) after which an order is repeated to a keeper that does not hold the state yet.
ORDER_AGAIN_S = 10.0
#: Sources named in one order.
SOURCES_NAMED = 8
#: Newest restore points of which copies are ordered; what peers keep besides the last complete point.
ORDERED_POINTS = KEPT_PER_STAGE
#: Most restore points for which a keeper is passed over that did not deliver a copy: 1, then twice as many
#: each further time. Plain choice.
LONGEST_PASS = 64
#: Keepers that say that they have a copy, of which one may lie.
SURE = 2
#: Most states of each stage in a peer's report: far more than KEPT_PER_STAGE, and copies for which it had no
#: room. A plain choice.
HELD_PER_STAGE = 32
#: Greatest age (iterations) of a checkpoint whose write to disk ends.
RECENT_KEPT = 64
#: Filter of peers.
Among = Callable[[str], bool]


@dataclass
class RestorePoint:
    """Iteration t to which the run could go back, and the fingerprint of every stage's state after it.
    adam_step: Adam's counter after it. initial: True if every peer can make these states from the seed.
    on_disk: True if this leader has the run directory, with a checkpoint of it. ordered: (stage, keeper) ->
    time of the last order (s) to copy that state."""

    t: int
    fingerprints: tuple[str, ...]
    adam_step: int
    initial: bool = False
    on_disk: bool = False
    ordered: dict[tuple[int, str], float] = field(default_factory=dict)


def rollback(run: RunView, point: RestorePoint, reason: str) -> Rollback:
    """Record that returns the run to a restore point, for the caller to log. If the next iteration is a
    round, it gets the plan that it had, with its slots bound to no machine. reason: words for the log. Raises
    ValueError if that plan is not known."""
    if not run.can_open(point.t + 1):
        raise ValueError(f"the plan of round {point.t + 1} is not known")
    slots = freed(run.plan(point.t + 1)) or UNSET
    return Rollback(point.t, point.adam_step, reason, point.fingerprints, slots)


class SnapshotCatalog:
    """Catalog of restore points, of peers that hold their states ("holders"), and of ordered copies.
    complete_t: iteration of the latest complete point (-1: none). doubtful_from: returns the first iteration
    that is void or has an open audit (infinite: none)."""

    def __init__(self, ctx: PeerContext, doubtful_from: Callable[[], float] = lambda: math.inf) -> None:
        self.ctx = ctx
        self.points: dict[int, RestorePoint] = {}
        self.complete_t = -1
        self._logged: set[int] = set()
        """Points whose fingerprints the log has, so that the next leader knows them."""
        self._recent: dict[int, RestorePoint] = {}
        """The last RECENT_KEPT released iterations."""
        self._states = Holdings()
        self._reported: dict[str, int] = {}
        """Peer -> number of its latest report."""
        self._refused: set[tuple[str, int]] = set()
        """Peer, stage: the peer has no room for the stage's state."""
        self._spoilt: dict[tuple[str, int, int], str] = {}
        """(Peer, stage, iteration) of a state that the peer should hold, and delivered another -> who said so
        first."""
        self._passes: dict[str, tuple[int, int]] = {}
        """Peer that did not deliver copies -> for how many points it was passed over last, and how many of
        these are left."""
        self._changed = False
        self._again_at = math.inf
        self._doubtful_from = doubtful_from

    # --- state ------------------------------------------------------------------------------

    def begin(self, point: RestorePoint) -> None:
        """Begin with the restore point from which this coordinator continues, at its start or after a
        rollback; later points are dropped. It replaces a point of the same iteration, and keeps what was
        known of that: that every peer can make the states, or that a checkpoint of it is on disk."""
        self._logged = {t for t in self._logged if t < point.t} | {point.t}
        known = self.points.get(point.t)
        if known is not None:
            point.initial |= known.initial
            point.on_disk |= known.on_disk
        self.points = {t: other for t, other in self.points.items() if t < point.t} | {point.t: point}
        self._recent = {t: other for t, other in self._recent.items() if t < point.t}
        self.complete_t = min(self.complete_t, point.t)
        self._changed = True

    def inherit(self, points: Mapping[int, RestorePoint], first: RestorePoint) -> None:
        """Take the restore points that a new coordinator knows from the log in place of those that it had.
        first: the initial state."""
        self.points = {**points, 0: first}
        self._logged = set(self.points)
        self._changed = True

    def logged(self, point: RestorePoint) -> None:
        """Note that the log has the fingerprints of a restore point (the record of step t + 1 has those after
        iteration t), so that the next leader will know the point. A leader that took over before it applied
        that record learns the point itself by this call."""
        if self.ctx.run.settings.snapshots_at(point.t) and point.t >= self.complete_t:
            self.points.setdefault(point.t, point)
            self._logged.add(point.t)
            self._changed = True

    def begun_as_seeded(self) -> None:
        """Note that the run's initial states can be made by every peer from the seed, and that no checkpoint
        has them; nothing if iteration 0 is no restore point any more."""
        if 0 in self.points:
            self.points[0].initial, self.points[0].on_disk = True, False

    def released(self, t: int, fingerprints: tuple[str, ...], adam_step: int) -> None:
        """Note that enough replicas of every stage have applied step t, with these state fingerprints. If a
        snapshot is due after t, t becomes a restore point, and keepers that owe copies of earlier ones are
        passed over."""
        self._recent[t] = RestorePoint(t, fingerprints, adam_step)
        self._recent.pop(t - RECENT_KEPT, None)
        if self.ctx.run.settings.snapshots_at(t) and t not in self.points:
            self._pass_over()
            self.points[t] = self._recent[t]
            self._changed = True

    def leaves_sound_checkpoint(self) -> bool:
        """True if the leader's newest checkpoint, which alone stays on disk when the next one is written, is
        of a state before all doubtful steps; also if there is none."""
        newest_t = max((t for t, point in self.points.items() if point.on_disk), default=-1)
        return newest_t < self._doubtful_from()

    def written(self, t: int, sound: bool) -> None:
        """Note that the run directory, which this leader has, holds a checkpoint of iteration t now, and no
        older one but, in audited runs, the one before it. sound: False if it is one of steps that were rolled
        back, which nobody can use."""
        self._changed = True
        former = max((k for k, point in self.points.items() if point.on_disk and k < t), default=-1)
        for point in self.points.values():
            point.on_disk = self.ctx.run.settings.audits and point.t == former
        if sound and t in self._recent:
            self.points.setdefault(t, self._recent[t]).on_disk = True

    def on_holds(self, peer: str, message: Holds) -> str | None:
        """Enter a member's report of the snapshots that it holds, and of the stages for whose state it has no
        room. Returns why it is refused (longer than any could be); None if it is entered, or ignored: a later
        report came, or `peer` is no member."""
        stages = self.ctx.run.settings.stages
        most = HELD_PER_STAGE * (stages + 1)
        if len(message.states) > most or any(held.stage > stages for held in message.states):
            return "more than there is to hold"
        if message.number <= self._reported.get(peer, 0):
            return None
        self._changed = True
        if peer not in self.ctx.run.membership.members:
            return None
        self._reported[peer] = message.number
        self._states.told(peer, {(held.stage, held.t): held.fingerprint for held in message.states})
        self._refused |= {(peer, held.stage) for held in message.states if not held.fingerprint}
        return None

    def on_spoilt(self, peer: str, message: Spoilt) -> None:
        """Enter a member's report that a holder delivered another state than the one it should hold: that
        copy does not count any more. Ignored unless the member needs the state (it is of that stage, or was
        ordered to copy it), and if it named as many holders of that state as there are to be copies:
        otherwise one liar could have every state copied by all members."""
        stage, t = about = message.stage, message.t
        point, own = self.points.get(t), self.ctx.run.membership.stage_of(peer)
        if point is None or message.holder not in self.holders(t, stage):
            return
        if own is None or (own != stage and (stage, peer) not in point.ordered):
            return
        named = sum(by == peer and key[1:] == about for key, by in self._spoilt.items())
        if named < self.ctx.run.settings.snapshot_copies:
            self._spoilt[message.holder, stage, t] = peer
            self._changed = True

    def on_who_has(self, peer: str, message: WhoHas, t: int) -> None:
        """Answer a peer's question which peers hold a stage's state after an iteration (none named: after t,
        the last committed one). If that is no restore point, the answer has no fingerprint and names
        nobody."""
        wanted = message.t if message.t >= 0 else t
        point = self.points.get(wanted)
        if point is None or message.stage >= len(point.fingerprints):
            self.ctx.outbox.send(peer, Holders(message.stage, wanted, "", ()))
            return
        fingerprint = point.fingerprints[message.stage]
        holders = [p for p in self.holders(wanted, message.stage) if p != peer or point.on_disk]
        self.ctx.outbox.send(peer, Holders(message.stage, wanted, fingerprint, tuple(holders)))

    def forget(self, peer: str) -> None:
        """Drop the report of snapshots of a peer that was removed or whose link broke, unless it is a member
        (one that only moved to another stage). A peer reports again to each leader that it is linked to."""
        if peer in self.ctx.run.membership.members:
            return
        self._states.forget(peer)
        self._reported.pop(peer, None)
        self._refused = {(other, stage) for other, stage in self._refused if other != peer}

    def members_changed(self) -> None:
        """Have the next `tick` check whether copies are missing, because the members changed."""
        self._changed = True

    def holders(self, t: int, stage: int) -> list[str]:
        """Members that hold the stage's state after iteration t, sorted: its replicas and peers with a copy,
        by their own reports (`on_holds`), and this leader if it has a checkpoint. Those whose copy proved
        false are left out. [] if t is no restore point."""
        point = self.points.get(t)
        if point is None or stage >= len(point.fingerprints):
            return []
        return sorted(self._holding(point, stage))

    def _holding(self, point: RestorePoint, stage: int) -> list[str]:
        members, t = self.ctx.run.membership.members, point.t
        peers = [p for p in self._states.who(stage, t, point.fingerprints[stage]) if p in members]
        if point.on_disk and self.ctx.me not in peers:
            peers.append(self.ctx.me)
        return [p for p in peers if (p, stage, t) not in self._spoilt] if self._spoilt else peers

    def has(self, t: int, stage: int, among: Among = lambda peer: True) -> bool:
        """True if some peer that satisfies `among` has the stage's state after iteration t, or every peer can
        make it from the seed. False if t is no restore point."""
        point = self.points.get(t)
        return point is not None and (point.initial or any(map(among, self._holding(point, stage))))

    def newest(self, before: int, among: Among = lambda peer: True) -> RestorePoint | None:
        """Latest restore point before iteration `before` for which peers that satisfy `among` have every
        stage's state; None: there is none.

        A return to it ends all audits, and a false step before it would never be found. So a point after a
        step with an open audit is chosen only if there is no other. A point for whose states a single
        keeper's word has to do (`_is_sure`) is chosen only if there is no other, too; but the run's
        beginning, which every new leader knows, does not count as another once it lies more than
        ORDERED_POINTS snapshots back.
        """
        run = self.ctx.run
        stages, points = range(run.settings.stages + 1), [t for t in self.points if t < before]
        kept = [t for t in points if run.can_open(t + 1) and all(self.has(t, s, among) for s in stages)]
        if not kept:
            return None
        doubtful_from = self._doubtful_from()
        sound = [t for t in kept if t < doubtful_from] or [max(kept)]
        begun = max(sound) > ORDERED_POINTS * run.settings.snapshot_every
        near = (t for t in sound if not (begun and self.points[t].initial))
        sure = (t for t in near if all(self._is_sure(self.points[t], stage) for stage in stages))
        return self.points[max(sure, default=max(sound))]

    def _is_sure(self, point: RestorePoint, stage: int) -> bool:
        """True if a stage's state can be had although one keeper says falsely that it has a copy: every peer
        can make it from the seed, or a serving replica of the stage or this leader has it, or a second keeper
        (where no more copies than one are wanted, the one)."""
        if point.initial or point.on_disk:
            return True
        holders, membership = self._holding(point, stage), self.ctx.run.membership
        replicas = [p for p in holders if membership.stage_of(p) == stage and p in membership.active_from]
        if replicas or self.ctx.me in holders:
            return True
        return len(holders) >= min(SURE, self.ctx.run.settings.snapshot_copies)

    # --- orders --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Order the copies that are missing, announce to all members a restore point that has become
        complete, and drop older points. Nothing unless something has changed or an order is due again, and in
        runs without snapshots."""
        if not self._changed and self.ctx.clock.now < self._again_at:
            return
        self._changed, self._again_at = False, math.inf
        if self.ctx.run.settings.snapshot_every == 0:
            return
        for t in sorted(self.points, reverse=True)[:ORDERED_POINTS]:
            ordered = not self.points[t].initial and self._order(self.points[t])
            ordered = ordered and t < self._doubtful_from()
            if ordered and t > self.complete_t and (len(self.ctx.log.voters) <= 1 or t in self._logged):
                self.complete_t = t
                for peer in list(self.ctx.run.membership.members):
                    self.repeat(peer)
        stages = range(self.ctx.run.settings.stages + 1)
        gone = [t for t in sorted(self.points)[:-ORDERED_POINTS] if not all(self.has(t, s) for s in stages)]
        for t in {*gone, *(t for t in self.points if t < self.complete_t)}:
            del self.points[t]
        self._spoilt = {key: by for key, by in self._spoilt.items() if key[2] in self.points}

    def _pass_over(self) -> None:
        """Have keepers that have not delivered copies of earlier restore points passed over for this and the
        next points, twice as many each time (at most LONGEST_PASS): with them no point would ever be
        complete. Called as a new point begins."""
        self._passes = {peer: (most, left - 1) for peer, (most, left) in self._passes.items()}
        late = {
            peer
            for t, point in self.points.items()
            if t > self.complete_t
            for stage, peer in point.ordered
            if (peer, stage) not in self._refused and peer not in self._holding(point, stage)
        }
        for peer in late:
            most = min(LONGEST_PASS, 2 * self._passes.get(peer, (0, 0))[0] or 1)
            self._passes[peer] = most, most

    def _order(self, point: RestorePoint) -> bool:
        """Order the copies that a restore point lacks, also again from keepers that have not delivered. True
        if the point is complete: each stage has as many keepers as are wanted, or as there are to be had, but
        at least one."""
        membership, complete = self.ctx.run.membership, True
        load = Counter(peer for _, peer in point.ordered)
        for stage in range(self.ctx.run.settings.stages + 1):
            holders = self._holding(point, stage)
            keepers = sorted(p for p in holders if membership.stage_of(p) != stage)
            asked = [p for s, p in point.ordered if s == stage and p not in holders]
            asked = [p for p in asked if self._willing(p, stage, point.t)]
            wanted = self.ctx.run.settings.snapshot_copies
            willing: list[str] = []
            if len(keepers) < wanted:  # otherwise no further keeper is looked for
                able = [p for p in candidates(membership, stage) if self._willing(p, stage, point.t)]
                willing = [p for p in able if self._passes.get(p, (0, 0))[1] <= 0] or able
                wanted = min(wanted, max(1, len(willing)))
            complete &= len(keepers) >= wanted
            chosen = keepers + asked
            while len(chosen) < wanted and (rest := [p for p in willing if p not in chosen]):
                following = choose(membership, stage, rest, chosen, load)
                load[following] += 1
                chosen.append(following)
                asked.append(following)
            for peer in asked if holders else ():
                self._tell(point, stage, peer, sorted(holders))
        return complete

    def _willing(self, peer: str, stage: int, t: int) -> bool:
        """True if a peer can be ordered to copy the stage's state after iteration t: it is reachable, did not
        say that it has no room for that stage, and did not deliver a wrong copy of that state."""
        refuses = (peer, stage) in self._refused or (peer, stage, t) in self._spoilt
        return not refuses and self.ctx.reachable(peer)

    def _tell(self, point: RestorePoint, stage: int, peer: str, holders: list[str]) -> None:
        """Send a keeper its order to copy a state; nothing if that was done within ORDER_AGAIN_S, after which
        `tick` tries again. holders: its sources, of which those of the stage are named first."""
        said_at = point.ordered.get((stage, peer), -math.inf)
        if self.ctx.clock.now >= said_at + ORDER_AGAIN_S:
            point.ordered[stage, peer] = said_at = self.ctx.clock.now
            own = [p for p in holders if self.ctx.run.membership.stage_of(p) == stage]
            sources = tuple((own + [p for p in holders if p not in own])[:SOURCES_NAMED])
            self.ctx.outbox.send(peer, Keep(stage, point.t, point.fingerprints[stage], sources))
        self._again_at = min(self._again_at, said_at + ORDER_AGAIN_S)

    def repeat(self, peer: str) -> None:
        """Announce the latest complete restore point, if there is one, to `peer` again; it may drop older
        snapshots."""
        if self.complete_t >= 0:
            self.ctx.outbox.send(peer, Complete(self.complete_t))

    def deadline(self) -> float:
        """Time of the next `tick` (s)."""
        return self.ctx.clock.now if self._changed else self._again_at


def candidates(membership: Membership, stage: int) -> list[str]:
    """Members that may keep copies of a stage's state: members that serve another stage, or are to, reachable
    or not, sorted by id."""
    serving = membership.active_from
    return sorted(p for p, m in membership.members.items() if m.stage != stage and p in serving)


def choose(
    membership: Membership, stage: int, willing: list[str], chosen: list[str], load: Counter[str]
) -> str:
    """Next keeper of a stage among `willing` (members, at least one): preferably of another stage than the
    keepers in `chosen`, with an address that can be dialled, and with the least `load` (copies ordered); a
    hash breaks ties."""
    used = {membership.stage_of(peer) for peer in chosen}

    def order(peer: str) -> tuple[bool, bool, int, str]:
        member = membership.members[peer]
        draw = hashlib.sha256(f"{stage} {peer}".encode()).hexdigest()
        return (member.stage in used, not member.address, load[peer], draw)

    return min(willing, key=order)
