"""Consistency checks of a commit log's contents: record order, and each unit counted once per step.

Needs no tensor and no corpus; `log_comparison.py` compares the log with a replay. The hash chain is checked
by `protocol.log.hash_chain.follow`, which `read_log` calls for each line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.errors import UserError, os_errors_named
from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.interface.tasks import unit_count
from anabranch.protocol.log import records as log
from anabranch.protocol.log.hash_chain import LogError, Position, follow
from anabranch.protocol.log.records import (
    STRANDED,
    Commit,
    Evaluation,
    Genesis,
    Member,
    Members,
    Rollback,
    Slot,
    StageCommit,
)
from anabranch.protocol.membership.view import Membership
from anabranch.protocol.reduce.coverage import plausible
from anabranch.protocol.rounds.plan import Plan, active, counted, filled, next_plan_problem, units_of


@dataclass
class LoggedRun:
    """Contents of a commit log that was read to its end, and what contradicts itself in it (`problems`)."""

    genesis: Genesis
    history: LogReplay
    """Fold of the log; its commits do not include steps that were rolled back."""
    rollbacks: int
    classes: tuple[str, ...]
    """Numerics classes of all owners of units in the steps of `history`."""
    problems: list[str]
    """Contradictions within the log, as sentences that name line, step and stage."""
    states: dict[int, tuple[str, ...]]
    """Iteration -> logged fingerprint of each stage's state after it."""
    bases: frozenset[str]
    """Hashes of all base records (genesis, commit, rollback), those of rolled-back steps included."""
    torn_bytes: int
    """Length in bytes of a last line that a crash cut off; it is not part of the log."""


def read_log(path: Path) -> LoggedRun:
    """Read and check a commit log. Contradictions in its contents become `problems` of the result. Raises
    UserError for an unreadable or empty file, a first record that is no genesis, and a line that is damaged
    or breaks the hash chain."""
    lines, torn_bytes = log_lines(path)
    checker = _LogChecker()
    position = Position()
    for number, line in enumerate(lines, start=1):
        try:
            entry, position = follow(position, line)
        except LogError as error:
            raise UserError(f"{path}: line {number} is damaged: {error}") from None
        checker.check(number, entry.term, entry.record, log.entry_hash(line))
    if checker.genesis is None:
        raise UserError(f"{path}: the log is empty; no step of this run was committed yet")
    history = fold(lines)
    owners = {t: checker.owners[t] for t in (commit.t for commit in history.commits) if t in checker.owners}
    return LoggedRun(
        genesis=checker.genesis,
        history=history,
        rollbacks=checker.rollbacks,
        classes=tuple(sorted(set().union(*owners.values()))),
        problems=checker.problems,
        states=checker.states,
        bases=frozenset(checker.bases),
        torn_bytes=torn_bytes,
    )


def contradictions(lines: Sequence[bytes]) -> list[str]:
    """Contradictions within these first lines of a log, as sentences; [] if there are none. The hash chain is
    not checked (`fold` does that). Raises UserError if the first record is no genesis."""
    checker = _LogChecker()
    for number, line in enumerate(lines, start=1):
        entry = log.decode_entry(line)
        checker.check(number, entry.term, entry.record, log.entry_hash(line))
    return checker.problems


def log_lines(path: Path) -> tuple[list[bytes], int]:
    """(entries of a log file as lines, bytes of an incomplete last line). A crash cuts such a line off, and
    it is not among the entries (0: there is none); a last line that lacks only its newline is among them.
    Raises UserError if the file cannot be read."""
    with os_errors_named(f"cannot read the commit log {path}"):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise UserError(
                f"{path}: there is no commit log here: no step of this run was committed yet, or its log is "
                "kept on the machine that leads it"
            ) from None
    *lines, rest = data.split(b"\n")
    if not rest:
        return lines, 0
    try:
        log.decode_entry(rest)
    except ValueError:
        return lines, len(rest)
    return [*lines, rest], 0


@dataclass
class _LogChecker:
    """Checker of a log, record by record, which adds contradictions to `problems`. It keeps the values that
    the next record must agree with. owners: iteration -> numerics classes of its units' owners."""

    genesis: Genesis | None = None
    rollbacks: int = 0
    problems: list[str] = field(default_factory=list)
    states: dict[int, tuple[str, ...]] = field(default_factory=dict)
    owners: dict[int, set[str]] = field(default_factory=dict)
    bases: set[str] = field(default_factory=set)
    _t: int = 0
    _base: str = ""
    _epoch: int = 0
    _term: int = 0
    _adam: dict[int, int] = field(default_factory=lambda: {0: 0})
    _membership: Membership = field(default_factory=Membership)
    _leaving: dict[str, list[tuple[Member, int]]] = field(default_factory=dict)
    """Peers removed since the last step, maybe still in the next one's reduce: for each removal the member
    and the first iteration that it served. A peer may have joined again and been removed again since."""
    _where: str = ""
    _plan: Plan = ()
    """Plan of the next round; () if the next iteration is none."""
    _plans: dict[int, Plan] = field(default_factory=dict)

    def check(self, line: int, term: int, record: log.AnyRecord, hashed: str) -> None:
        self._where = f"log line {line}"
        self._expect(term >= self._term, f"term {term} comes after term {self._term}")
        self._term = term
        if self.genesis is None and not isinstance(record, Genesis):
            raise UserError(f"{self._where}: a log begins with a genesis record, not {type(record).__name__}")
        match record:
            case Genesis():
                self._check_genesis(record)
            case Commit():
                self._where += f", step {record.t}"
                self._check_commit(record, term)
                self._t = record.t
            case Rollback():
                self._where += f", rollback to step {record.t}"
                self._check_rollback(record)
                self._t = record.t
            case Members():
                self._change_members(record)
            case log.Epoch():
                self._expect(record.epoch == self._epoch + 1, f"epoch {record.epoch} follows {self._epoch}")
                self._epoch = record.epoch
            case log.Closing():
                self._where += f", closing record of step {record.t}"
                self._expect(record.t == self._t, f"the log stands at step {self._t}")
                self._check_evaluation(record.evaluation, record.t)
        if isinstance(record, Genesis | Commit | Rollback):
            self._base = hashed
            self.bases.add(hashed)
            self._leaving = {}

    def _expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(f"{self._where}: {problem}")

    def _check_genesis(self, genesis: Genesis) -> None:
        self._expect(self.genesis is None, "a second genesis record")
        self._expect(len(genesis.fingerprints) == genesis.stages + 1, "a fingerprint of each stage is needed")
        weights = hashlib.sha256("".join(genesis.fingerprints).encode()).hexdigest()
        self._expect(
            weights.startswith(genesis.initial_weights_hash) and bool(genesis.initial_weights_hash),
            "the hash of the initial weights is not that of the fingerprints",
        )
        self.genesis, self._epoch = genesis, genesis.epoch
        self.states[0] = genesis.fingerprints

    def _change_members(self, members: Members) -> None:
        known = self._membership
        for peer in members.removed:
            if peer in known.members:
                since = known.active_from.get(peer)
                if since is not None:
                    self._leaving.setdefault(peer, []).append((known.members[peer], since))
        known.apply(members)

    def _check_rollback(self, rollback: Rollback) -> None:
        self.rollbacks += 1
        self._expect(0 <= rollback.t <= self._t, f"the log stands at step {self._t}")
        self._expect(rollback.adam_step == self._adam.get(rollback.t), "another number of Adam's steps")
        known = self.states.get(rollback.t, rollback.fingerprints)
        self._expect(rollback.fingerprints == known, "the state is not the one that the log had there")
        self.states = {t: state for t, state in self.states.items() if t < rollback.t}
        self.states[rollback.t] = rollback.fingerprints
        self._adam = {t: step for t, step in self._adam.items() if t < rollback.t}
        self._adam[rollback.t] = rollback.adam_step
        self._membership.rolled_back(rollback.t)
        plan = rollback.slots or ()
        plans = plan, self._plans.get(rollback.t, ())
        inner, known_inner = ([(slot.done, slot.steps) for slot in each] for each in plans)
        self._expect(inner == known_inner, "the next round is another one than the log had there")
        self._plan = plan

    def _check_commit(self, commit: Commit, term: int) -> None:
        genesis = self.genesis
        assert genesis is not None, "check() requires genesis first"
        self._expect(commit.run == genesis.run, f"is of run {commit.run}, not {genesis.run}")
        self._expect(commit.epoch == self._epoch, f"epoch {commit.epoch}, not {self._epoch}")
        self._expect(commit.term == term, f"says term {commit.term} in an entry of term {term}")
        self._expect(commit.t == self._t + 1, f"does not follow step {self._t}")
        self._expect(commit.previous_base == self._base, "its base is not the record before it")
        slots = self._plan
        self._check_plan(commit)
        taken = self._adam.get(commit.t - 1, 0) + (commit.verdict == "step" and not slots)
        self._expect(commit.adam_step == taken, f"Adam's counter is {commit.adam_step}, not {taken}")
        self._adam[commit.t] = commit.adam_step
        self.owners[commit.t] = set()
        if commit.evaluation is not None:
            self._check_evaluation(commit.evaluation, commit.t - 1)
        if commit.verdict == "skip":
            self._expect(not commit.stages and not commit.loss_sums, "is skipped but has stages or losses")
            if commit.witness is None:
                self._expect(False, "is skipped without a witness")
            elif not 0 <= commit.witness.index < genesis.microbatches:
                self._expect(False, f"is skipped for microbatch {commit.witness.index}, which does not exist")
            elif commit.witness.tensor == STRANDED:
                # For want of machines: nobody could fill some of the slots, and the others were late. That
                # crews were late is the leader's word.
                stranded = any(self._is_lost(slots[k], commit.t) for k in active(slots)) or genesis.stages > 1
                self._expect(bool(slots), "is skipped for want of machines for slots, but is no round")
                self._expect(
                    stranded or not slots, "is skipped for want of machines, but its slots could be filled"
                )
            return  # a delayed run's state has other predicted weights then: only a replay knows them
        self._expect(commit.verdict == "step", f"has the unknown verdict {commit.verdict!r}")
        microbatches = len(slots) or genesis.microbatches
        self._expect(len(commit.loss_sums) == microbatches, "does not have a loss per microbatch")
        self._expect(len(commit.stages) == genesis.stages + 1, "does not have an entry per stage")
        before = tuple(stage.fingerprint_before for stage in commit.stages)
        known = self.states.setdefault(commit.t - 1, before)
        for stage, (logged, expected) in enumerate(zip(before, known, strict=False)):
            self._expect(
                logged == expected, f"stage {stage} starts from another state than step {commit.t - 1} left"
            )
        for stage, entry in enumerate(commit.stages):
            self._check_owners(commit.t, stage, entry, microbatches, slots)
        if slots and len(commit.stages) > 1:
            idle = set(range(microbatches)).difference(counted(commit.stages[1].owners))
            lossless = all(loss == 0.0 for k, loss in enumerate(commit.loss_sums) if k in idle)
            self._expect(lossless, "has the loss of a slot that does not count")
            data, *islands = commit.stages[0].owners[::2], *(part.owners for part in commit.stages[1:])
            same = all(set(counted(data)) == set(counted(owners)) for owners in islands)
            self._expect(same, "the slots of its stages differ")
            if same and any(slot.others for slot in slots):
                crews = all(slots[k].crew == crew for k, crew in filled(slots, commit.stages).items())
                self._expect(crews, "a slot counts of another crew than that of its plan")

    def _is_lost(self, slot: Slot, t: int) -> bool:
        """True if nobody could fill a slot in round t. A pipeline island's slot is lost if it has no crew or
        one of the crew has left; another one if the slot carries state, and its machine has left."""
        assert self.genesis is not None, "check() requires genesis first"
        crews, seats = self.genesis.stages > 1, slot.seats()
        if seats and all(self._membership.is_live(peer, stage, t - 1) for stage, peer in seats):
            return False
        return crews or slot.carried > 0

    def _check_plan(self, commit: Commit) -> None:
        """Check that the slots that `commit` plans for the next round follow from the plan of this one; the
        new plan becomes the one that the next commit is checked with."""
        plan = commit.slots or ()
        wrong = next_plan_problem(self._plan, plan, commit)
        self._expect(not wrong, f"the next round is another one: {wrong}")
        self._expect(all(slot.steps >= 0 for slot in plan), "a slot of the next round has no number of steps")
        self._plan = self._plans[commit.t] = plan

    def _check_evaluation(self, evaluation: Evaluation, t: int) -> None:
        """Check that a logged evaluation is of the state after step t, and of at least one window."""
        self._expect(evaluation.t == t, f"holds an evaluation of step {evaluation.t}, not {t}")
        self._expect(bool(evaluation.loss_sums), "holds an evaluation of no window")

    def _check_owners(
        self, t: int, stage: int, entry: StageCommit, microbatches: int, slots: Plan = ()
    ) -> None:
        """Check the entry of one stage in the commit of step t against invariant I1: every unit has exactly
        one owner, an active member of the stage; in a round, units of a slot that does not count have none.
        Also check that no member is named twice, that each has the numerics class with which it joined, and
        that the sums of squares are possible. Adds the owners' numerics classes to `owners[t]`. slots: plan
        of the round; () if t is none."""
        where, self._where = self._where, f"{self._where}, stage {stage}"
        members, units = entry.members, unit_count(stage, microbatches)
        self._expect(len(entry.owners) == units, f"{len(entry.owners)} owners for {units} units")
        self._expect(plausible(entry.squares), "has sums of squares that no gradient has")
        self._expect(len(set(members)) == len(members), "a member is named twice")
        self._expect(len(entry.classes) == len(members), "does not have a numerics class per member")
        if slots:
            counts = {unit for unit, owner in enumerate(entry.owners) if owner != -1}
            self._expect(bool(counts), "no slot counts")
            self._expect(counts <= units_of(stage, active(slots)), "a slot counts that is not in the plan")
            self._expect(bool(stage) or all((u ^ 1) in counts for u in counts), "half of a slot counts")
        if entry.contributions:
            self._expect(bool(slots and stage), "has digests of contributions, but is no round")
            some = [unit for unit, digest in enumerate(entry.contributions) if digest]
            counts = {unit for unit, owner in enumerate(entry.owners) if owner != -1}
            self._expect(set(some) <= counts, "has the digest of a contribution that does not count")
        for unit, owner in enumerate(entry.owners):
            if not (0 <= owner < len(members) or (slots and owner == -1)):
                self._expect(False, f"unit {unit} belongs to none of the {len(members)} members")
        owning = {members[owner] for owner in entry.owners if 0 <= owner < len(members)}
        for member, named in zip(members, entry.classes, strict=False):
            actual = self._class_of(member, stage, t)
            self._expect(actual is not None, f"{member[:16]} was no active member of the stage")
            removed = named == "removed" and member in self._leaving
            self._expect(
                actual in (None, named) or removed, f"{member[:16]} joined with another numerics class"
            )
            if member in owning:
                self.owners[t].add(actual or named)
        self._where = where

    def _class_of(self, peer: str, stage: int, t: int) -> str | None:
        """Numerics class of `peer` if it was an active member of the stage at iteration t, else None. A peer
        that was removed since step t - 1 still counts: it may have taken part in step t."""
        if self._membership.is_live(peer, stage, t):
            return self._membership.members[peer].numerics_class
        for member, since in self._leaving.get(peer, ()):
            if member.stage == stage and since <= t:
                return member.numerics_class
        return None
