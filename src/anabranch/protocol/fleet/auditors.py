"""Auditors: members that only compute others' work again, and that the run's owner trusts.

An auditor follows one stage's state and is never active: it has no vote, takes no microbatch, is in no
reduce, and reports no state. Its record has capacity 0, which nobody can claim (`fleet.offers`): the leader
sets it for a peer that came with a ticket of role `auditor`. Not here: which work it computes again
(`protocol.audit.draw`), what follows from its findings (`protocol.coordinator.audit_cases`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from anabranch.protocol.interface.events import VerifiedCredential
from anabranch.protocol.log.records import Member

#: Role of an auditor's ticket.
ROLE = "auditor"


def audits(credential: VerifiedCredential) -> bool:
    """True for the credential of an auditor: its ticket, or a certificate that descends from one."""
    return credential.role == ROLE


def marked(member: Member) -> Member:
    """Copy of a joiner's record for an auditor: with capacity 0, so that it gets no microbatch, and without
    disk, so that it cannot keep the log and gets no vote."""
    return msgspec.structs.replace(member, capacity=0, disk="")


def stage_to_audit(members: Iterable[Member], stages: int) -> int:
    """Stage (1 to `stages`, which is at least 1) for the next auditor: of those with the fewest auditors the
    one with the fewest replicas, as few replicas settle a dispute least. members: all that stay or come,
    auditors included."""
    auditors, replicas = dict.fromkeys(range(1, stages + 1), 0), dict.fromkeys(range(1, stages + 1), 0)
    for member in members:
        if member.stage:
            counts = auditors if member.is_auditor else replicas
            counts[member.stage] += 1
    return min(auditors, key=lambda stage: (auditors[stage], replicas[stage], stage))
