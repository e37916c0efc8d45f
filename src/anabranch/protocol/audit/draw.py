"""Draw of the contributions that are audited, from the hash of the commit that counted them.

Nobody knows that hash before all contributions are counted, so nobody can tell which of them will be looked
at. Who audits is drawn from the same hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from anabranch.protocol.log.records import Commit


@dataclass(frozen=True)
class Drawn:
    """Contribution of the replica `subject` to step t at `stage`, drawn for an audit. base: hash of the
    step's log entry. position: rank of the subject among the members of the reduce. receipt: hash of its
    receipt. auditors: the other members, in the order in which they are asked to audit."""

    t: int
    base: str
    stage: int
    subject: str
    position: int
    receipt: str
    auditors: tuple[str, ...]


def _number(*parts: object) -> int:
    """64-bit number drawn from the hash of `parts`."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def drawn(record: Commit, base: str, share: float) -> list[Drawn]:
    """Contributions of relays to a step that are audited, drawn at random. base: hash of the commit's log
    entry, which seeds the draw. share: probability that a contribution is drawn."""
    found = []
    for stage, commit in enumerate(record.stages[1:], start=1):  # data nodes only give receipts
        for position, receipt in enumerate(commit.receipts):
            if not receipt or _number(base, stage, position) >= share * 2.0**64:
                continue
            subject = commit.members[position]
            others = [peer for peer in commit.members if peer != subject]
            others.sort(key=lambda peer: _number(base, stage, position, peer))
            found.append(Drawn(record.t, base, stage, subject, position, receipt, tuple(others)))
    return found
