"""Log application at one peer: folds each committed entry into the shared state and returns a typed change.

It calls no other part; `reactions` hands the changes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from anabranch.protocol.context.outbox import Outbox
from anabranch.protocol.context.run_view import RunView
from anabranch.protocol.log.hash_chain import follow
from anabranch.protocol.log.records import (
    AnyRecord,
    Carriers,
    Closing,
    Commit,
    Control,
    Epoch,
    Genesis,
    Members,
    Revoke,
    Rollback,
    Voters,
)
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.rounds.plan import Plan


class Removal(NamedTuple):
    """Removal of a member, or of its former process. stage, incarnation: those of the member that is removed;
    -1 and 0 if `peer` was none. joins_again: True if the same record admits a new process of `peer`."""

    peer: str
    reason: str
    stage: int
    incarnation: int
    joins_again: bool


class MembersChanged(NamedTuple):
    """Members joined, left, or begin to serve. own_stage: stage to which this peer is moved, or None."""

    record: Members
    removals: tuple[Removal, ...]
    own_stage: int | None


@dataclass(frozen=True)
class RolledBack:
    """The run returns to the state after an earlier iteration. base: hash of the rollback's entry.
    void_bases: all bases known before, on which messages are void."""

    record: Rollback
    base: str
    void_bases: frozenset[str]


#: Change that parts react to; a record, if the record alone says what changes.
Change = MembersChanged | RolledBack | Voters | Epoch | Commit | Closing | Control | Revoke | Carriers


class AppliedEntry(NamedTuple):
    """Committed entry that was folded. base: hash of the entry. change: None if no part has to react. wrong:
    reason why no honest leader plans the next round so, "" if one might."""

    term: int
    record: AnyRecord
    base: str
    change: Change | None
    wrong: str = ""


def note_record(outbox: Outbox, run: RunView, record: AnyRecord, base: str, plan: Plan) -> None:
    """Write a step, evaluation, rollback or control record to the event log; other records are not written.
    base: hash of its entry. plan: of the iteration, if the record is that of a round."""
    if isinstance(record, Commit | Closing) and record.evaluation is not None:
        outbox.note("evaluation", t=record.evaluation.t, evaluation=record.evaluation)
    if isinstance(record, Commit):
        outbox.note("step", record=record, base=base, plan=plan)
    elif isinstance(record, Rollback):
        outbox.note("rollback", t=record.t, reason=record.reason)
    elif isinstance(record, Control):
        iterations = run.settings.rounds.iterations(record.steps)
        t = iterations if record.action == "steps" else record.steps
        outbox.note("control", action=record.action, t=t)


class LogApplication:
    """Writer of the state that follows from the log: progress, summary, pause and length of the run, members,
    voters, revocations, carriers, plans of rounds."""

    def __init__(self, shared: SharedParts) -> None:
        self._ctx, self._progress, self._summary = shared.ctx, shared.progress, shared.summary

    def apply(self, line: bytes) -> AppliedEntry:
        """Apply the next committed log line to the state that follows from the log. Raises AlreadyApplied if
        it was applied before, LogError if it does not follow the last applied line; nothing changes then."""
        ctx = self._ctx
        entry, position = follow(self._progress.position, line)
        record, base = entry.record, position.previous
        self._progress.position = position
        if isinstance(record, Members):  # most lines of a large swarm's log
            return AppliedEntry(entry.term, record, base, self._members(record))
        ctx.run.course.fold(record)
        ctx.run.revoked.fold(record)
        stepped = isinstance(record, Commit) and ctx.run.settings.snapshots_at(record.t - 1)
        self._summary.fold(record, stepped)
        change, wrong = self._fold(record, base), ""
        if isinstance(record, Commit | Rollback):
            wrong = ctx.run.plan_round(record.t + 1, record.slots)
        return AppliedEntry(entry.term, record, base, change, wrong)

    def split_next_batch(self) -> None:
        """Fix which data node embeds which microbatches of the next iteration, and of a delayed one after it
        (R2). Called for each entry once all parts have reacted to it: the members that it changed may be data
        nodes."""
        run = self._ctx.run
        t, delay = self._progress.committed + 1, run.settings.delay
        run.membership.open(t, run.settings.stages, delay.has(t))
        if delay.has(t + 1):
            run.membership.open(t + 1, run.settings.stages, True)

    def _fold(self, record: AnyRecord, base: str) -> Change | None:
        progress = self._progress
        match record:
            case Genesis():
                progress.rebase(base, 0)
            case Voters(ids) | Epoch(_, ids):
                self._ctx.log.elect(ids)
                return record
            case Commit():
                progress.rebase(base, record.t)
                return record
            case Rollback():
                progress.rebase(base, record.t)
                progress.closed = False
                self._ctx.run.membership.rolled_back(record.t)
                return RolledBack(record, base, frozenset(progress.bases) - {base})
            case Closing():
                progress.closed = True
                return record
            case Carriers(addresses):
                self._ctx.run.use_carriers(addresses)
                return record
            case Control("stop", _) | Revoke():
                return record
        return None

    def _members(self, record: Members) -> MembersChanged:
        membership = self._ctx.run.membership
        again = {member.id: member.stage for member in record.joined if member.id in record.removed}
        removals = []
        for peer, reason in record.removed.items():
            member = membership.members.get(peer)
            stage, incarnation = (member.stage, member.incarnation) if member is not None else (-1, 0)
            removals.append(Removal(peer, reason, stage, incarnation, peer in again))
        membership.apply(record)
        return MembersChanged(record, tuple(removals), again.get(self._ctx.me))
