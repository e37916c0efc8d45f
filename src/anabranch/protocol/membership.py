"""Who takes part: a fold of the log's Members records. No one's opinion changes it (R3)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from anabranch.protocol.records import Member, Members

#: Answers of `live` that are remembered of a stage, between two changes of it.
LIVE_KEPT = 32


class Membership:
    """Members in the latest Members record. A member is *active* at iteration t if the log says from which
    iteration it serves and t has reached it; only active members hold slots and count as live."""

    def __init__(self) -> None:
        self.number = 0
        self.members: dict[str, Member] = {}
        self.active_from: dict[str, int] = {}
        self.order: dict[str, int] = {}
        self.incarnations: dict[str, int] = {}
        self.begun = False
        """Whether every stage has had a member that serves."""
        self.opening_t = 0
        self.opening: list[str] = []
        self.handed_on: list[tuple[str, tuple[str, ...]]] = []
        self.reopened_t = 0
        """The iteration that lost all data nodes that it was opened with."""
        self.gone: dict[str, tuple[int, str]] = {}
        """Whom the log removed since the iteration that is open, or is to be, was begun: stage and region."""
        self.version = 0
        """Rises with every change of who is a member, or serves."""
        self._seen = 0
        self._stages: dict[int, list[str]] = {}
        self._live: dict[int, dict[int, list[str]]] = {}
        """Stage -> iteration -> who serves it."""
        self._versions: dict[int, int] = {}

    def version_of(self, stage: int) -> int:
        """Rises with every change of who is a member of this stage, or serves it."""
        return self._versions.get(stage, 0)

    def _changed(self, stages: Iterable[int]) -> None:
        self.version += 1
        for stage in stages:
            self._live.pop(stage, None)
            self._versions[stage] = self.version

    def _stages_of(self, peers: Iterable[str]) -> set[int]:
        return {self.members[peer].stage for peer in peers if peer in self.members}

    def apply(self, record: Members) -> None:
        self._changed(self._stages_of(record.removed))
        self.number = record.number
        for peer in record.removed:
            self._hand_on(peer)
            self._leave_stage(peer)
            if peer in self.members:
                self.gone.pop(peer, None)
                self.gone[peer] = self.members[peer].stage, self.members[peer].region
            self.members.pop(peer, None)
            self.active_from.pop(peer, None)
            self.order.pop(peer, None)
        for member in record.joined:
            self.restore(member)
        self.serve({p: t for p, t in record.active_from.items() if p in self.members})

    def serve(self, active_from: Mapping[str, int]) -> None:
        """From which iteration members serve."""
        self._changed(self._stages_of(active_from))
        self.active_from.update(active_from)

    def open(self, t: int, stages: int) -> None:
        """Called after every record, with the iteration that follows the last commit: its indices are split
        over the data nodes of the first record after which every stage can serve it (R2). Every peer
        computes the same split, whatever was removed before it came to open the iteration. Where all those
        data nodes were removed, it is opened anew, with whoever serves next."""
        if t == self.opening_t or not all(self.count(stage, t) for stage in range(stages + 1)):
            return
        self.opening_t, self.opening, self.handed_on = t, self.live(0, t), []
        self.gone.clear()
        self.begun = True

    def rolled_back(self, t: int) -> None:
        """The run goes on from the state after iteration t: whoever served, or was to serve later, serves
        from the next iteration on."""
        self._changed(list(self._stages))
        self.active_from = {peer: min(since, t + 1) for peer, since in self.active_from.items()}
        self.opening_t, self.opening, self.handed_on = 0, [], []

    def _hand_on(self, peer: str) -> None:
        gone = {former for former, _ in self.handed_on}
        if peer in self.opening and peer not in gone:
            remaining = [p for p in self.opening if p != peer and p not in gone]
            self.handed_on.append((peer, tuple(remaining)))
            if not remaining:
                self.reopened_t, self.opening_t, self.opening, self.handed_on = self.opening_t, 0, [], []

    def assignment(self, t: int, indices: Sequence[int]) -> Assignment:
        """Who admits each of `indices` of iteration t, removals included."""
        if t != self.opening_t:
            return Assignment(indices, self.live(0, t))
        assignment = Assignment(indices, self.opening)
        for peer, remaining in self.handed_on:
            assignment.remove(peer, remaining)
        return assignment

    def restore(self, member: Member) -> None:
        """Enter a member (again); its place in the order of joining is at the end."""
        self._changed({member.stage, *self._stages_of((member.id,))})
        self._seen += 1
        self._leave_stage(member.id)
        self._stages.setdefault(member.stage, []).append(member.id)
        self.members[member.id] = member
        self.order[member.id] = self._seen
        self.incarnations[member.id] = max(member.incarnation, self.incarnations.get(member.id, 0))
        self.active_from.pop(member.id, None)

    def _leave_stage(self, peer: str) -> None:
        former = self.members.get(peer)
        if former is not None:
            self._stages[former.stage].remove(peer)

    def live(self, stage: int, t: int) -> list[str]:
        """Active members of `stage` at iteration t, by id."""
        return list(self._alive(stage, t))

    def count(self, stage: int, t: int) -> int:
        """How many they are."""
        return len(self._alive(stage, t))

    def _alive(self, stage: int, t: int) -> list[str]:
        known = self._live.setdefault(stage, {})
        found = known.get(t)
        if found is None:
            if len(known) > LIVE_KEPT:
                known.clear()
            since, later = self.active_from, t + 1
            found = known[t] = sorted([p for p in self.of(stage) if since.get(p, later) <= t])
        return found

    def of(self, stage: int) -> Collection[str]:
        """Members of `stage`, whether they serve or not, in no order."""
        return self._stages.get(stage, ())

    def widest(self) -> int:
        """Members of the stage that has most."""
        return max(map(len, self._stages.values()), default=0)

    def serving(self, stage: int) -> list[str]:
        """Active members of `stage` in the iteration that is open, or is to be opened after a rollback."""
        return self.live(stage, self.opening_t if self.opening_t or not self.begun else 1 << 40)

    def regions(self, peers: Iterable[str]) -> tuple[str, ...]:
        """Of each of them ("" where that is not known)."""
        members, gone = self.members, self.gone
        return tuple([members[p].region if p in members else gone.get(p, (0, ""))[1] for p in peers])

    def gone_from(self, stage: int) -> list[str]:
        """Who was removed from it since the iteration that is open was begun, the last one first."""
        return [peer for peer, (of, _) in reversed(self.gone.items()) if of == stage]

    def is_live(self, peer: str, stage: int, t: int) -> bool:
        member = self.members.get(peer)
        return member is not None and member.stage == stage and self.active_from.get(peer, t + 1) <= t

    def stage_of(self, peer: str) -> int | None:
        member = self.members.get(peer)
        return None if member is None else member.stage

    def dials(self, me: str, other: str) -> bool:
        """Whether I am the one who dials `other`: the later member dials the earlier one, unless only the
        later one can be dialled."""
        mine, theirs = self.members.get(me), self.members.get(other)
        if mine is not None and theirs is not None and bool(mine.address) != bool(theirs.address):
            return bool(theirs.address)
        return self.order.get(me, 0) > self.order.get(other, 0)


def split_indices(count: int, data_nodes: Sequence[str]) -> dict[str, range]:
    """Contiguous index ranges for data nodes sorted by id (R2); sizes differ by at most one."""
    nodes = sorted(data_nodes)
    if not nodes:
        return {}
    base, extra = divmod(count, len(nodes))
    ranges, start = {}, 0
    for rank, node in enumerate(nodes):
        end = start + base + (1 if rank < extra else 0)
        ranges[node] = range(start, end)
        start = end
    return ranges


class Assignment:
    """Which data node admits each index of an iteration. When one is removed only its indices are split
    again, over those that remain (R2)."""

    def __init__(self, indices: Sequence[int], data_nodes: Sequence[str]) -> None:
        self.holder: dict[int, str] = {}
        for node, positions in split_indices(len(indices), data_nodes).items():
            for position in positions:
                self.holder[indices[position]] = node

    def remove(self, node: str, remaining: Sequence[str]) -> list[int]:
        """Split the indices of `node` over `remaining`; returns them."""
        orphans = sorted(index for index, holder in self.holder.items() if holder == node)
        for heir, positions in split_indices(len(orphans), remaining).items():
            for position in positions:
                self.holder[orphans[position]] = heir
        return orphans

    def of(self, node: str) -> list[int]:
        return sorted(index for index, holder in self.holder.items() if holder == node)
