"""Membership according to the log: the members, their stages, and the iterations from which they serve
(R3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from anabranch.addresses import direct_addresses
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.membership.assignment import Assignment
from anabranch.protocol.membership.rendezvous_graph import RendezvousGraph

#: Answers of `live` and of `graph` kept for each stage. A choice: two or three iterations are asked about at
#: a time.
ANSWERS_KEPT = 32

#: Source of version numbers, unique in a process: different memberships have different versions, too.
_versions = count(1)


@dataclass(frozen=True)
class Opening:
    """Data nodes among which the microbatches of iteration t were split when it opened. handed_on: those of
    them that were removed since, in order, each with the data nodes that were left then and took its
    microbatches over."""

    t: int
    data_nodes: tuple[str, ...]
    handed_on: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def without(self, peer: str) -> Opening:
        """This opening after the removal of `peer`, whose microbatches go to the data nodes left; if there
        are none, the new opening `is_lost`. The same object if `peer` is none of its data nodes, or was
        removed before."""
        gone = {former for former, _ in self.handed_on}
        if peer not in self.data_nodes or peer in gone:
            return self
        left = tuple(p for p in self.data_nodes if p != peer and p not in gone)
        return Opening(self.t, self.data_nodes, (*self.handed_on, (peer, left)))

    @property
    def is_lost(self) -> bool:
        """True if all of its data nodes were removed."""
        return bool(self.handed_on) and not self.handed_on[-1][1]


#: Opening of no iteration.
NOT_OPEN = Opening(0, ())


class Membership:
    """Members of the run after the log's Members records so far.

    A member is *active* (live) at iteration t if the log says from which iteration it serves and t has
    reached it. Containers are replaced by each change, never altered: a reader may keep them. All attributes
    are read-only for others.

    number: number of the latest Members record. members: by id, in the order of joining. active_from: peer ->
    iteration from which it serves. order: peer -> rank in the order of joining. begun: True once every stage
    has had an active member. opening: open iteration, with the data nodes over which its microbatches are
    split (`NOT_OPEN`: none). reopened_t: last iteration that lost all data nodes that it was opened with (0:
    none). former: opening of the iteration before, if both are in flight because `opening` is delayed. gone:
    peers removed since the open iteration (`former`, if two are in flight) was opened -> their stage and
    region. walk_ins: peers that came with an open ticket, removed ones too -> iteration from which they serve
    or served. auditors: members that only audit, of all stages. version: changes with every change. widest:
    number of members of the stage with most members.
    """

    __slots__ = (
        *("number", "members", "active_from", "order", "begun", "opening", "former", "reopened_t", "gone"),
        *("version", "_versions", "_stages", "_seats", "_live", "_graphs", "_former", "_long_gone", "widest"),
        *("walk_ins", "auditors", "_regional", "_splits"),
    )

    def __init__(self) -> None:
        self.number = 0
        self.members: dict[str, Member] = {}
        self.active_from: dict[str, int] = {}
        self.order: dict[str, int] = {}
        self.begun = False
        self.opening = NOT_OPEN
        self.reopened_t = 0
        self.gone: dict[str, tuple[int, str]] = {}
        self.former: Opening | None = None
        self.walk_ins: dict[str, int] = {}
        self.auditors: dict[str, Member] = {}
        self._long_gone = 0
        """Number of peers in `gone` that were removed before `opening` was opened."""
        self.version = 0
        self._versions: dict[int, int] = {}
        """Stage -> version of its latest change."""
        self._stages: dict[int, list[str]] = {}
        self.widest = 0
        self._seats = 0
        """Number of members entered so far."""
        self._live: dict[int, dict[int, list[str]]] = {}
        """Stage -> iteration -> answer of `live`."""
        self._graphs: dict[tuple[int, int, int, int], RendezvousGraph] = {}
        self._regional: dict[tuple[int, int], list[str]] = {}
        """(Stage, iteration) -> answer of `by_region`."""
        self._splits: dict[tuple[int, tuple[int, ...]], Assignment] = {}
        """(Iteration, indices) -> answer of `assignment`."""
        self._former: dict[str, int] = {}
        """Former member, or member with a lower incarnation now -> highest incarnation seen."""

    def adopt(self, other: Membership) -> None:
        """Become a copy of `other`, but keep the incarnations that this membership has seen."""
        self.number, self.members, self.active_from = other.number, other.members, other.active_from
        self.order, self.begun, self.gone = other.order, other.begun, other.gone
        self.opening, self.former, self.reopened_t = other.opening, other.former, other.reopened_t
        self.version, self._versions, self._stages = other.version, other._versions, other._stages
        self.widest, self._seats, self._long_gone = other.widest, other._seats, other._long_gone
        self._live, self._graphs, self.walk_ins = other._live, other._graphs, other.walk_ins
        self.auditors, self._regional, self._splits = other.auditors, other._regional, other._splits

    # --- changes -------------------------------------------------------------------------------

    def apply(self, record: Members) -> None:
        """Apply a Members record of the log: removals, then admissions, then who serves from when."""
        before = self._seen_of((*record.removed, *[member.id for member in record.joined]))
        self._change(("apply", record), lambda: self._apply(record))
        self._remember(before)

    def enter(self, members: Sequence[Member], active_from: Mapping[str, int], number: int) -> None:
        """Take over another peer's view: its `members` in the order of joining, `active_from` as the
        attribute, and the `number` of its latest Members record. Members that this membership has and
        `members` has not stay."""
        before = self._seen_of([member.id for member in members])
        self._change(None, lambda: self._enter(members, active_from, number))
        self._remember(before)

    def open(self, t: int, stages: int, delayed: bool = False) -> None:
        """Fix the data nodes among which the microbatches of iteration t are split (R2). Nothing if they are
        fixed already, or a stage has no member active at t.

        Called after every record, with the iteration that follows the last commit, so that all peers compute
        the same split. If all these data nodes are removed the iteration is opened again, with the data nodes
        that serve next. stages: number of relay stages. delayed: True if the iteration before it is in
        flight, too.
        """
        if not self.is_split(t) and all(self._active(stage, t) for stage in range(stages + 1)):
            self._change(("open", t), lambda: self._open(t, delayed))

    def rolled_back(self, t: int) -> None:
        """Follow a rollback to the state after iteration t: members that were to become active later serve
        from t + 1 on, and no iteration is open until the next `open`."""
        self._change(("roll back", t), lambda: self._roll_back(t))

    def remember(self, other: Membership) -> None:
        """Add the incarnations that another membership of this run has seen."""
        self._remember(other._seen_of(other.ever()))

    def _change(self, key: tuple[object, ...] | None, change: Callable[[], None]) -> None:
        """Make a change on copies of all containers. key: identifies the change among those of this
        membership (None: nothing does), by which the simulator's subclass shares the results."""
        self.version = next(_versions)
        self.members, self.order = self.members.copy(), self.order.copy()
        self.active_from, self.gone = self.active_from.copy(), self.gone.copy()
        self.walk_ins, self.auditors = self.walk_ins.copy(), self.auditors.copy()
        self._stages, self._versions = self._stages.copy(), self._versions.copy()
        self._live, self._graphs = self._live.copy(), {}
        self._regional, self._splits = {}, {}
        change()
        self.widest = max(map(len, self._stages.values()), default=0)

    def _apply(self, record: Members) -> None:
        self.number = record.number
        for peer in record.removed:
            self._hand_on(peer)
            former = self.members.get(peer)
            if former is not None and self.begun:  # before that nothing is under way
                self.gone.pop(peer, None)
                self.gone[peer] = former.stage, former.region
            self._remove(peer)
        for member in record.joined:
            self._seat([member])
        self._activate({peer: t for peer, t in record.active_from.items() if peer in self.members})

    def _enter(self, members: Sequence[Member], active_from: Mapping[str, int], number: int) -> None:
        self._seat({member.id: member for member in members}.values())
        self._activate(active_from)
        self.number = number

    def _open(self, t: int, delayed: bool) -> None:
        if self.opening.t == t + 1:  # t lost all data nodes, and the iteration after it, in flight, has some
            self.former = Opening(t, tuple(self._active(0, t)))
            return
        self.former = self.opening if delayed and self.opening.t == t - 1 else None
        self.opening = Opening(t, tuple(self._active(0, t)))
        gone = list(self.gone.items())[self._long_gone :] if self.former is not None else []
        self.gone, self._long_gone, self.begun = dict(gone), len(gone), True

    def _roll_back(self, t: int) -> None:
        self._activate({peer: min(since, t + 1) for peer, since in self.active_from.items()})
        self._changed(list(self._stages))
        self.opening, self.former = NOT_OPEN, None

    def _changed(self, stages: Iterable[int]) -> None:
        for stage in stages:
            self._live.pop(stage, None)
            self._versions[stage] = self.version

    def _seat(self, members: Iterable[Member]) -> None:
        """Add `members` at the end of the order of joining; a known one is moved there."""
        joined: dict[int, list[str]] = {}
        for member in members:
            self._remove(member.id)
            self._seats += 1
            self.members[member.id], self.order[member.id] = member, self._seats
            joined.setdefault(member.stage, []).append(member.id)
            if member.is_auditor:
                self.auditors[member.id] = member
        for stage, peers in joined.items():
            self._stages[stage] = [*self._stages.get(stage, ()), *peers]
        self._changed(joined)

    def _remove(self, peer: str) -> None:
        former = self.members.pop(peer, None)
        if former is not None:
            self._stages[former.stage] = [other for other in self._stages[former.stage] if other != peer]
            self._changed((former.stage,))
        self.order.pop(peer, None)
        self.active_from.pop(peer, None)
        self.auditors.pop(peer, None)

    def _activate(self, active_from: Mapping[str, int]) -> None:
        for peer, since in active_from.items():
            self.active_from.pop(peer, None)  # the latest stand last
            self.active_from[peer] = since
            if peer in self.members and self.members[peer].walk_in is True:
                self.walk_ins[peer] = since
        self._changed({self.members[peer].stage for peer in active_from if peer in self.members})

    def _hand_on(self, peer: str) -> None:
        """Note in `opening` and `former` that a data node is removed, and which ones take its microbatches
        over; nothing for any other peer. An iteration that loses its last data node becomes `reopened_t` and
        is no longer open (`NOT_OPEN`; `former`: None)."""
        self.opening = self.opening.without(peer)
        if self.former is not None:
            self.former = self.former.without(peer)
            if self.former.is_lost:  # so are the later one's, or its data nodes are new
                self.reopened_t, self.former = self.former.t, None
        if self.opening.is_lost:
            self.reopened_t, self.opening = self.opening.t, NOT_OPEN

    # --- incarnations --------------------------------------------------------------------------

    def incarnation(self, peer: str) -> int:
        """Highest incarnation (process number) seen of a peer; 0: it never was a member."""
        former, member = self._former.get(peer, 0), self.members.get(peer)
        return former if member is None or member.incarnation < former else member.incarnation

    def knew(self, peer: str) -> bool:
        """True if the peer is a member or was one."""
        return peer in self.members or peer in self._former

    def ever(self) -> Collection[str]:
        """All peers that are or were members."""
        return self.members.keys() | self._former.keys()

    def _seen_of(self, peers: Iterable[str]) -> dict[str, int]:
        return {peer: self.incarnation(peer) for peer in peers if self.knew(peer)}

    def _remember(self, incarnations: Mapping[str, int]) -> None:
        for peer, incarnation in incarnations.items():
            member = self.members.get(peer)
            if member is None or member.incarnation < incarnation:
                self._former[peer] = max(incarnation, self._former.get(peer, 0))
            else:
                self._former.pop(peer, None)

    # --- stages --------------------------------------------------------------------------------

    def version_of(self, stage: int) -> int:
        """Value of `version` at the latest change of a stage's members, or of when they serve; 0: there was
        none."""
        return self._versions.get(stage, 0)

    def live(self, stage: int, t: int) -> list[str]:
        """Active members of `stage` at iteration t, sorted by id: a list of its own, which the caller may
        change."""
        return list(self._active(stage, t))

    def count(self, stage: int, t: int) -> int:
        """Number of active members of `stage` at iteration t."""
        return len(self._active(stage, t))

    def _active(self, stage: int, t: int) -> list[str]:
        """Active members of `stage` at iteration t, sorted; the cached list, which must not be altered."""
        known = self._live.get(stage)
        if known is None:
            known = self._live[stage] = {}
        found = known.get(t)
        if found is None:
            if len(known) > ANSWERS_KEPT:
                known.clear()
            since, later = self.active_from, t + 1
            found = known[t] = sorted([p for p in self._stages.get(stage, ()) if since.get(p, later) <= t])
        return found

    def by_region(self, stage: int, t: int) -> list[str]:
        """Active members of `stage` at iteration t, sorted by region and id; the cached list, which must not
        be altered."""
        found = self._regional.get((stage, t))
        if found is None:
            members = self.members
            active = sorted(self._active(stage, t), key=lambda peer: members[peer].region)
            found = self._regional[stage, t] = active
        return found

    def is_live(self, peer: str, stage: int, t: int) -> bool:
        """True if the peer is an active member of `stage` at iteration t."""
        member = self.members.get(peer)
        return member is not None and member.stage == stage and self.active_from.get(peer, t + 1) <= t

    def serving(self, stage: int) -> list[str]:
        """Active members of `stage` in the open iteration. If none is open (after a rollback, or the loss of
        all data nodes), members that become active later are included. [] before the run has begun."""
        return self.live(stage, self.opening.t if self.opening.t or not self.begun else 1 << 40)

    def of(self, stage: int) -> Collection[str]:
        """Members of `stage`, active or not, in no particular order."""
        return self._stages.get(stage, ())

    def replicas(self, stage: int) -> Collection[str]:
        """Members of `stage` that serve or are to serve, in no particular order: all but auditors."""
        here = self.of(stage)
        return [peer for peer in here if peer not in self.auditors] if self.auditors else here

    def stage_of(self, peer: str) -> int | None:
        """Stage of a member; None if `peer` is no member."""
        member = self.members.get(peer)
        return None if member is None else member.stage

    def graph(
        self, stage: int, own: int, t: int, picks: int, edges: Callable[[], RendezvousGraph]
    ) -> RendezvousGraph:
        """Result of `edges()`, which makes the neighbour graph of the active members of stages `stage` and
        `own` at iteration t, or the one cached for these arguments."""
        key = (stage, own, t, picks)
        found = self._graphs.get(key)
        if found is None:
            if len(self._graphs) > ANSWERS_KEPT * (len(self._stages) + 1):
                self._graphs.clear()
            found = self._graphs[key] = edges()
        return found

    # --- removed peers -------------------------------------------------------------------------

    def regions(self, peers: Iterable[str]) -> tuple[str, ...]:
        """Regions of the given peers, in their order ("": not known); those of peers removed since the open
        iteration was opened are known, too."""
        members, gone = self.members, self.gone
        return tuple([members[p].region if p in members else gone.get(p, (0, ""))[1] for p in peers])

    def followed(self, peer: str) -> bool:
        """True if `peer` is a member, or was removed since the open iteration was opened (`gone`)."""
        return peer in self.members or peer in self.gone

    def gone_from(self, stage: int) -> list[str]:
        """Peers removed from a stage since the open iteration began (the one before it, if both are in
        flight), the latest first; those that moved to another stage or came back included. A peer that was
        removed more than once counts for the stage of its last removal alone. Empty before the run has begun.
        """
        return [peer for peer, (former_stage, _) in reversed(self.gone.items()) if former_stage == stage]

    # --- duties --------------------------------------------------------------------------------

    def assignment(self, t: int, indices: Sequence[int]) -> Assignment:
        """Data node of each of the microbatches `indices` of iteration t, after all removals. While t is not
        split, as it would be now: over the data nodes that are active at t. The caller may change the result,
        a copy."""
        key = t, tuple(indices)
        found = self._splits.get(key)
        if found is None:
            found = self._splits[key] = self._assignment(*key)
        return found.copy()

    def _assignment(self, t: int, indices: Sequence[int]) -> Assignment:
        if not self.is_split(t):
            return Assignment(indices, self.live(0, t))
        opening = self._opening_of(t)
        assignment = Assignment(indices, opening.data_nodes)
        for peer, remaining in opening.handed_on:
            assignment.remove(peer, remaining)
        return assignment

    def is_split(self, t: int) -> bool:
        """True if it is fixed which data node begins which microbatches of iteration t."""
        return t == self._opening_of(t).t

    def is_reopened(self, t: int) -> bool:
        """True if iteration t, in flight, may have been begun by data nodes that are all removed: t was
        opened again for that reason, or the iteration after t was (both are in flight if that one is
        delayed)."""
        return self.reopened_t - 1 <= t <= self.reopened_t

    def handed(self, t: int) -> Sequence[tuple[str, tuple[str, ...]]]:
        """Data nodes of open iteration t that were removed since, each with those that took its microbatches
        over."""
        return self._opening_of(t).handed_on

    def _opening_of(self, t: int) -> Opening:
        return self.former if self.former is not None and t == self.former.t else self.opening

    def dials(self, me: str, other: str) -> bool:
        """True if `me` has to dial `other` to make the link between them. The member that is harder to reach
        (`_reach`) dials the other; of two alike, the one that joined later."""
        mine, theirs = self.members.get(me), self.members.get(other)
        if mine is not None and theirs is not None and mine.address != theirs.address:
            own, others = _reach(mine.address), _reach(theirs.address)
            if own != others:
                return others > own
        return self.order.get(me, 0) > self.order.get(other, 0)


def _reach(addresses: str) -> int:
    """Rank of a member's addresses, by which `dials` decides who of two dials: 0 if there is none; 1 if none
    is a plain host:port, so that all need a carrier or iroh; 2 with a plain one."""
    if "/" not in addresses:
        return 2 if addresses else 0
    return 2 if direct_addresses(addresses) else 1
