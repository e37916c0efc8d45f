"""Contributions on record: units of work in committed steps by peer and stage, summed by person and ticket.

The commit log alone says whose work counted: units of commits that a rollback made void count for nobody.
The event log adds what audits found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.observe.events import Audit
from anabranch.observe.wording import NAME_MAX, plain
from anabranch.protocol.log.hash_chain import Position, follow
from anabranch.protocol.log.records import (
    Commit,
    Genesis,
    Member,
    Members,
    Revoke,
    Rollback,
    entry_hash,
)
from anabranch.protocol.rounds.plan import Plan

#: Version of the JSON object.
LEDGER_VERSION = 1
#: Verdicts of audits, in the order in which they are shown.
VERDICTS = ("same", "different", "withheld", "unable", "expired")
#: Replicas that have to find work wrong before its peer is convicted (protocol.coordinator.audit_cases).
ACCUSERS = 2


@dataclass(frozen=True)
class Source:
    """Origin of work: a peer, the name that its owner chose, its ticket's key, and its stage."""

    peer: str
    name: str
    ticket: str
    stage: int


@dataclass
class Contribution:
    """Recorded work of one source, or of several added up. A unit is a microbatch at one stage; a slot of a
    round counts as many as its inner steps took. units: stage -> number of units in committed steps. tokens:
    target tokens of these microbatches; at stage 0, where a microbatch has two units, only the head's count.
    steps: iterations in which units counted. signed: units whose owner's receipt has its hash in the commit.
    audited: units that an auditor computed again and found the same. verdicts: verdict -> number of findings,
    also about void commits. revoked: reason why the source's key or ticket was revoked ("": it was not).
    convicted: True if it was found to compute falsely."""

    sources: list[Source]
    units: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    steps: set[int] = field(default_factory=set)
    signed: int = 0
    audited: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    revoked: str = ""
    convicted: bool = False

    @property
    def total(self) -> int:
        """Number of units at all stages together."""
        return self.units.total()

    @property
    def peers(self) -> list[str]:
        return list(dict.fromkeys(source.peer for source in self.sources))

    @property
    def state(self) -> str:
        """Standing of the source as a word: "convicted" (by two auditors, or one that the owner trusts),
        "revoked", or ""."""
        return "convicted" if self.convicted else "revoked" if self.revoked else ""

    def add(self, other: Contribution) -> None:
        """Add the work of `other`, which does not change, to this contribution, with its sources and
        findings."""
        self.sources += other.sources
        self.units.update(other.units)
        self.tokens += other.tokens
        self.steps |= other.steps
        self.signed += other.signed
        self.audited += other.audited
        self.verdicts.update(other.verdicts)
        self.revoked = self.revoked or other.revoked
        self.convicted = self.convicted or other.convicted


@dataclass
class Ledger:
    """Contributions to a run, whose id is `run`. steps: commits that count, skipped iterations included.
    skipped: number of those iterations. rolled_back: number of commits made void. stage_units: stage -> units
    that count. rows: one contribution per source, by stage, most units first."""

    run: str
    steps: int
    skipped: int
    rolled_back: int
    stage_units: Counter[int]
    rows: list[Contribution]

    def people(self) -> list[Contribution]:
        """Contributions summed by name and ticket, those with most units first, as new objects. Peers of one
        name that came with two tickets are two people; a peer without a name is one of its own."""
        return _summed(self.rows, lambda source: (source.name or source.peer, source.ticket))

    def tickets(self) -> list[Contribution]:
        """Contributions summed by ticket key ("": no ticket), those with most units first, as new objects."""
        return _summed(self.rows, lambda source: source.ticket)

    def shares(self, contribution: Contribution) -> dict[int, float]:
        """{stage: share (0 to 1) of all units of the stage that count} of a row of the ledger, or of a sum of
        rows. Stages where it has none are left out."""
        units = sorted(contribution.units.items())
        return {stage: count / self.stage_units[stage] for stage, count in units if count}


def _summed(rows: Iterable[Contribution], key: Callable[[Source], object]) -> list[Contribution]:
    """Contributions, one for each value of `key(source)` over the rows' sources, most units first. They are
    new objects; the rows do not change."""
    sums: dict[object, Contribution] = {}
    for row in rows:
        sums.setdefault(key(row.sources[0]), Contribution([])).add(row)
    return sorted(sums.values(), key=lambda each: (-each.total, each.sources[0].name, each.peers))


# --- reading --------------------------------------------------------------------------------------------


@dataclass
class _Counted:
    """Committed step that counts. plan: slots of the round that it ended; () if it was none. base: hash of
    its log entry. sources: (stage, peer) -> source of each of its members."""

    commit: Commit
    plan: Plan
    base: str
    sources: dict[tuple[int, str], Source]


class _Accounts:
    """Rows of the ledger, one for each source (a peer at one stage, with its name and ticket), while they are
    filled. The caller calls `count` for each of `counted` (adds units), then `audits` (adds findings and
    convictions), then `revocations` (adds reasons; no unit is taken away). run: the run's id; "" without a
    genesis record. counted: the commits that count. rolled_back: number of those made void. by_source:
    recorded work of each source. stage_units: stage -> units counted so far."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        """Read the whole log; no work is recorded yet. Raises LogError at the first line that does not follow
        the one before."""
        self.run = ""
        self.counted: list[_Counted] = []
        self.rolled_back = 0
        self.by_source: dict[Source, Contribution] = {}
        self.stage_units: Counter[int] = Counter()
        self._members: dict[str, Member] = {}
        """Each peer that ever was a member, as it came last."""
        self._revoked: dict[str, str] = {}
        self._units: dict[tuple[str, int, str], tuple[Source, int]] = {}
        """(commit, stage, peer) -> source and its units."""
        position = Position()
        plan: Plan = ()
        for line in lines:
            entry, position = follow(position, line)
            match entry.record:
                case Genesis() as genesis:
                    self.run = self.run or genesis.run
                case Members(_, joined):
                    self._members |= {member.id: member for member in joined}
                case Revoke(target, reason):
                    self._revoked.setdefault(target, reason)
                case Commit() as commit:
                    places = [(s, peer) for s, part in enumerate(commit.stages) for peer in part.members]
                    sources = {(stage, peer): self._source(peer, stage) for stage, peer in places}
                    self.counted.append(_Counted(commit, plan, entry_hash(line), sources))
                    plan = commit.slots or ()
                case Rollback() as rollback:
                    kept = [each for each in self.counted if each.commit.t <= rollback.t]
                    self.rolled_back += len(self.counted) - len(kept)
                    self.counted = kept
                    plan = rollback.slots or ()

    def _source(self, peer: str, stage: int) -> Source:
        """Source of the work of `peer` at `stage`, with the name and ticket with which the peer came last, in
        the log read so far; both "" for a peer that never was a member."""
        member = self._members.get(peer)
        name = plain(member.name, NAME_MAX) if member is not None else ""
        return Source(peer, name, member.ticket if member is not None else "", stage)

    def _row(self, source: Source) -> Contribution:
        return self.by_source.setdefault(source, Contribution([source]))

    def count(self, each: _Counted, unit_tokens: int, inner: int) -> None:
        """Add the units of a committed step to the rows of their owners; those of a round's slot once for
        each microbatch of its inner steps. Units that nobody owns are left out. unit_tokens: target tokens of
        a microbatch. inner: microbatches of an inner step."""
        for stage, part in enumerate(each.commit.stages):
            for unit, owner in enumerate(part.owners):
                if not 0 <= owner < len(part.members):
                    continue
                slot = unit if stage else unit // 2
                count = max(0, each.plan[slot].weight) * inner if slot < len(each.plan) else 1
                source = each.sources[stage, part.members[owner]]
                row, key = self._row(source), (each.base, stage, source.peer)
                row.units[stage] += count
                row.tokens += count * unit_tokens if stage or unit % 2 == 0 else 0
                row.steps.add(each.commit.t)
                row.signed += count if owner < len(part.receipts) and part.receipts[owner] else 0
                self.stage_units[stage] += count
                self._units[key] = source, self._units.get(key, (source, 0))[1] + count

    def audits(self, audits: Sequence[Audit]) -> None:
        """Add the findings of audits to the rows; repeated reports count once. A revoked peer is marked as
        convicted if `ACCUSERS` auditors found its work in one commit wrong or withheld, or a member that only
        audits, whom the owner trusts, did."""
        accusers: dict[tuple[str, str], set[str]] = {}
        passed = set()
        # Auditors repeat their reports to a new leader.
        told = {(each.base, each.stage, each.subject, each.auditor, each.verdict): each for each in audits}
        for audit in told.values():
            key = audit.base, audit.stage, audit.subject
            source, units = self._units.get(key) or (self._source(audit.subject, audit.stage), 0)
            row = self._row(source)
            row.verdicts[audit.verdict if audit.verdict in VERDICTS else "unable"] += 1
            if audit.verdict == "same" and key not in passed:
                passed.add(key)
                row.audited += units
            elif audit.verdict in ("different", "withheld"):
                accusers.setdefault((audit.base, audit.subject), set()).add(audit.auditor)
        trusted = {member.id for member in self._members.values() if member.is_auditor}
        wrong = {
            subject
            for (_, subject), auditors in accusers.items()
            if len(auditors) >= ACCUSERS or auditors & trusted
        }
        for source, row in self.by_source.items():
            row.convicted = source.peer in wrong and source.peer in self._revoked

    def revocations(self) -> None:
        """Write into the rows why their peers or tickets were revoked; a revoked peer without work gets a
        row, too."""
        revoked = self._revoked
        for member in self._members.values():
            if member.id in revoked and not any(source.peer == member.id for source in self.by_source):
                self._row(self._source(member.id, member.stage))
        for source, row in self.by_source.items():
            row.revoked = plain(revoked.get(source.peer) or revoked.get(source.ticket, ""))


def ledger(lines: Iterable[bytes], audits: Sequence[Audit], unit_tokens: int, inner: int = 1) -> Ledger:
    """Contributions to a run, from the lines of its commit log and the `audit` events of its event log.

    lines: encoded log entries from the first on. unit_tokens: target tokens of a microbatch. inner:
    microbatches of an inner step, in a run with rounds. Raises LogError for a broken log.
    """
    read = _Accounts(lines)
    for each in read.counted:
        read.count(each, unit_tokens, inner)
    read.audits(audits)
    read.revocations()
    ordered = sorted(read.by_source.values(), key=lambda row: (row.sources[0].stage, -row.total, row.peers))
    skipped = sum(each.commit.verdict == "skip" for each in read.counted)
    return Ledger(read.run, len(read.counted), skipped, read.rolled_back, read.stage_units, ordered)


# --- showing --------------------------------------------------------------------------------------------


def as_dict(found: Ledger, ticket_names: Mapping[str, str]) -> dict[str, Any]:
    """The ledger as plain values, for JSON: its people, tickets and rows. ticket_names: ticket key -> name
    that the owner gave it (missing: "")."""

    def plainly(each: Contribution) -> dict[str, Any]:
        shares = found.shares(each)
        return {
            "units": each.total,
            "tokens": each.tokens,
            "stages": {str(s): {"units": each.units[s], "share": share} for s, share in shares.items()},
            "steps": len(each.steps),
            "first_step": min(each.steps, default=None),
            "last_step": max(each.steps, default=None),
            "signed_units": each.signed,
            "audited_units": each.audited,
            "verdicts": {verdict: each.verdicts[verdict] for verdict in VERDICTS},
            "revoked": each.revoked,
            "convicted": each.convicted,
        }

    def named(source: Source) -> dict[str, Any]:
        return {"name": source.name, **ticket(source)}

    def ticket(source: Source) -> dict[str, Any]:
        return {"ticket": source.ticket, "ticket_name": ticket_names.get(source.ticket, "")}

    people = [(each, named(each.sources[0])) for each in found.people()]
    tickets = [(each, ticket(each.sources[0])) for each in found.tickets()]
    rows = [(each, each.sources[0]) for each in found.rows]
    return {
        "version": LEDGER_VERSION,
        "run_id": found.run,
        "steps": found.steps,
        "skipped": found.skipped,
        "rolled_back": found.rolled_back,
        "stage_units": {str(stage): count for stage, count in sorted(found.stage_units.items())},
        "people": [{**who, "peers": each.peers, **plainly(each)} for each, who in people],
        "tickets": [{**who, "peers": each.peers, **plainly(each)} for each, who in tickets],
        "contributions": [
            {"peer": who.peer, **named(who), "stage": who.stage, **plainly(each)} for each, who in rows
        ],
    }
