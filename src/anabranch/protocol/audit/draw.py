"""Draw of the contributions that are audited, from the hash of the commit that counted them.

Nobody knows that hash before all contributions are counted, so nobody can tell which of them will be looked
at. Who audits is drawn from the same hash.

All units of a contribution are drawn together: only their sum is signed. So a contribution of many units is
drawn a little more often than the share says (`chance`), to find a rare lie as soon as if each unit were
drawn by itself.

An auditor of the stage, which the owner trusts (`protocol.fleet.auditors`), comes before all replicas.

The leader can name one contribution of each stage and step that is audited although the draw spares it: one
that is far off the others' (`contribution_monitor`).

In a round of islands only auditors compute a slot again: a machine that did would be late with its own.

Nobody answers for a walk-in (`protocol.fleet.walk_ins`): while it is on probation all of its contributions
are audited, and walk-ins audit only what no invited replica can.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from anabranch.protocol.log.records import Commit, Dispute, Member

#: Iterations for which a walk-in is on probation, from the first that it serves. A choice: it computes for
#: some minutes before a lie has a chance to pass.
PROBATION_STEPS = 50
#: Replicas that have to find a difference before a relay is convicted: more than half of those in the reduce,
#: the relay itself counted, but no more than this many. A choice: a pair of liars convicts nobody in a stage
#: of five or more, and each replica of the jury keeps weights.
CONVICTS = 3
#: Share of false units that draws are made for: a relay that computes a tenth of its units falsely, or fewer,
#: is out within n of them with probability 1 - (1 - pq)^n, for a share p of audits and q of lies (acceptance
#: of issue 22). The 0.02 above that make up for the step until the verdict.
LIES = 0.12
#: Most units of a contribution that its draw takes into account. A choice between power and cost: with eight
#: a share of 0.05 draws 0.073, with 32 it would draw 0.18.
COUNTED = 8
_NONE: Mapping[str, int] = MappingProxyType({})
_NOBODY: Mapping[str, Member] = MappingProxyType({})


@dataclass(frozen=True)
class Drawn:
    """Contribution of the replica `subject` to step t at `stage`, drawn for an audit. base: hash of the
    step's log entry. position: rank of the subject among the members of the reduce. receipt: hash of its
    receipt. auditors: the other members, in the order in which they are asked to audit; () in a round.
    trusted: auditor of the stage and of the subject's numerics class, which is asked before them ("": there
    is none). disputed: its results that another receipt contradicts."""

    t: int
    base: str
    stage: int
    subject: str
    position: int
    receipt: str
    auditors: tuple[str, ...]
    trusted: str = ""
    disputed: tuple[Dispute, ...] = ()

    @property
    def first(self) -> str:
        """Peer that begins the audit when the step is committed; "" if nobody can."""
        return self.trusted or (self.auditors[0] if self.auditors else "")

    @property
    def convicts(self) -> int:
        """Number of replicas that have to find a difference for a conviction. If as many find none (the
        subject's own word counts as one), those that found a difference are wrong."""
        return convicts(len(self.auditors) + 1)

    @property
    def jury(self) -> tuple[str, ...]:
        """Replicas that may be asked to audit, and keep the weights for it, in order: the first audits, the
        others if it finds a difference or cannot tell. () in a round, and if no other replica took part in
        the reduce."""
        return self.auditors[: 2 * self.convicts - 2]


def convicts(members: int) -> int:
    """Number of replicas whose findings decide about one of them, in a reduce of `members` replicas: more
    than half of them, at most CONVICTS."""
    return min(members // 2 + 1, CONVICTS)


def chance(share: float, units: int) -> float:
    """Probability to draw a contribution of so many units. A relay that computes LIES of its units falsely is
    found in it as likely as if each unit were drawn with probability `share`: one audit finds several lies
    only once, so it is `share` for one unit, and more for more, up to COUNTED. Products, not powers: all
    peers have to draw alike, and powers may differ between machines."""
    count = max(1, min(units, COUNTED))
    by_unit, together = math.prod([1.0 - share * LIES] * count), math.prod([1.0 - LIES] * count)
    return share if count == 1 else (1.0 - by_unit) / (1.0 - together)


def _number(*parts: object) -> int:
    """64-bit number drawn from the hash of `parts`."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def drawn(
    record: Commit,
    base: str,
    share: float,
    walk_ins: Mapping[str, int] = _NONE,
    auditors: Mapping[str, Member] = _NOBODY,
    in_round: bool = False,
) -> list[Drawn]:
    """Contributions of relays to a step that are audited: a random draw, all with a disputed result, those
    far off the others', and all of walk-ins on probation. Contributions without a receipt, and those of data
    nodes, never are. base: hash of the commit's log entry, which seeds the draw. share: probability that one
    unit is drawn (`chance`). walk_ins: walk-in -> first iteration that it serves, with which its probation
    begins. auditors: members that only audit, by id. in_round: True for the commit of a round, which these
    alone audit."""
    found = []
    for stage, commit in enumerate(record.stages[1:], start=1):  # data nodes only give receipts
        for position, receipt in enumerate(commit.receipts):
            subject = commit.members[position]
            proven = record.t >= walk_ins.get(subject, -PROBATION_STEPS) + PROBATION_STEPS
            disputed = tuple(each for each in commit.disputed if each.position == position)
            spared = _number(base, stage, position) >= chance(share, commit.owners.count(position)) * 2.0**64
            chosen = bool(disputed) or position == commit.far_off or not proven
            if not receipt or (spared and not chosen):
                continue
            others = [peer for peer in commit.members if peer != subject and not in_round]
            others.sort(key=lambda peer: (peer in walk_ins, _number(base, stage, position, peer)))
            about = stage, commit.classes[position]
            able = [peer for peer, each in auditors.items() if (each.stage, each.numerics_class) == about]
            trusted = min(able, key=partial(_number, base, stage, position), default="")
            asked = tuple(others), trusted, disputed
            found.append(Drawn(record.t, base, stage, subject, position, receipt, *asked))
    return found
