"""Replay of a run's whole log: its valid commits, its members, and the position after the last entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from anabranch.protocol.context.revocations import Revocations
from anabranch.protocol.context.run_view import RunCourse
from anabranch.protocol.log.hash_chain import Position, follow
from anabranch.protocol.log.records import (
    Carriers,
    Closing,
    Commit,
    Control,
    Epoch,
    Evaluation,
    Genesis,
    Members,
    Rollback,
    entry_hash,
)
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.rounds.plan import Plan


@dataclass
class LogReplay:
    """Result of replaying a log: commits that were not rolled back, in order, and the state of the run after
    the last log entry.

    bases[t]: base of the state after iteration t, the hash of a log entry. records[t]: hashes of all entries
    that lead to that state (the commit and the rollbacks to it). evaluations: held-out losses by iteration.
    position: place of the next entry, with the last one's hash. term: highest term of an entry. rolled_back:
    number of commits made void. removals: number of removed peers, without those that moved to another stage.
    stopped: True if the last entry stops the run.
    """

    genesis: Genesis | None = None
    commits: list[Commit] = field(default_factory=list)
    bases: dict[int, str] = field(default_factory=dict)
    records: dict[int, frozenset[str]] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    membership: Membership = field(default_factory=Membership)
    position: Position = field(default_factory=Position)
    term: int = 0
    rolled_back: int = 0
    removals: int = 0
    epoch: int = 0
    stopped: bool = False
    course: RunCourse = field(default_factory=RunCourse)
    revoked: Revocations = field(default_factory=Revocations)
    carriers: dict[str, str] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    """Round -> its slots."""

    @property
    def t(self) -> int:
        """Last committed iteration of the run that was not rolled back; 0: none."""
        return self.commits[-1].t if self.commits else 0

    @property
    def base(self) -> str:
        """Base of the state after the last committed iteration; "" for an empty log."""
        return self.bases.get(self.t, "")

    def plan(self, t: int, slots: Plan | UnsetType) -> None:
        """Store `slots` as the plan of round t (UNSET: t is no round), and drop the plans of later rounds."""
        self.plans = {k: plan for k, plan in self.plans.items() if k < t}
        if slots is not UNSET:
            self.plans[t] = slots

    def leads_to(self, t: int, base: str) -> bool:
        """True if a state with this base (for example a checkpoint's) is the state after iteration t."""
        return base in self.records.get(t, ())

    @property
    def adam_step(self) -> int:
        """Adam's counter after the last committed iteration: steps taken, without skipped and rolled back
        ones and rounds."""
        return self.commits[-1].adam_step if self.commits else 0


def fold(lines: Iterable[bytes]) -> LogReplay:
    """Replay the lines of a whole log, from its first. Raises LogError at an entry that cannot be decoded or
    does not follow the one before."""
    history = LogReplay()
    for line in lines:
        entry, history.position = follow(history.position, line)
        history.term = max(history.term, entry.term)
        history.stopped = False
        history.course.fold(entry.record)
        history.revoked.fold(entry.record)
        match entry.record:
            case Genesis() as genesis:
                history.genesis, history.epoch = genesis, genesis.epoch
                history.bases[0] = entry_hash(line)
                history.records[0] = frozenset([history.bases[0]])
            case Commit() as commit:
                history.commits.append(commit)
                history.bases[commit.t] = entry_hash(line)
                history.records[commit.t] = frozenset([history.bases[commit.t]])
                history.plan(commit.t + 1, commit.slots)
                if commit.evaluation is not None:
                    history.evaluations[commit.evaluation.t] = commit.evaluation
            case Closing(t, evaluation):
                history.evaluations[t] = evaluation
            case Rollback() as rollback:
                history.plan(rollback.t + 1, rollback.slots)
                kept = [commit for commit in history.commits if commit.t <= rollback.t]
                history.rolled_back += len(history.commits) - len(kept)
                history.commits = kept
                history.membership.rolled_back(rollback.t)
                history.evaluations = {t: e for t, e in history.evaluations.items() if t < rollback.t}
                history.bases = {t: base for t, base in history.bases.items() if t < rollback.t}
                base = history.bases[rollback.t] = entry_hash(line)
                history.records = {t: known for t, known in history.records.items() if t <= rollback.t}
                history.records[rollback.t] = history.records.get(rollback.t, frozenset()) | {base}
            case Members() as members:
                moved = {member.id for member in members.joined}
                history.removals += len(members.removed.keys() - moved)
                history.membership.apply(members)
            case Carriers(addresses):
                history.carriers = addresses
            case Epoch(epoch):
                history.epoch = epoch
            case Control("stop", _):
                history.stopped = True
    return history
