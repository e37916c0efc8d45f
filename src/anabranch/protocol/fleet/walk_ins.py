"""Walk-ins: peers that came with an open ticket, which is no secret. What they may do, decided by the leader.

Keys cost nothing, so a walk-in may be one of many of the same person. It serves a stage like others, with
these differences: at each stage invited replicas outnumber walk-ins when one is admitted, so that a majority
stays with peers that the owner can name; it gets no vote, is no data node and is not moved to another stage;
all of its contributions are audited at first (`protocol.audit.draw`). Not here: the work that the door asks
of it (`net.door`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from anabranch.protocol.interface.events import VerifiedCredential
from anabranch.protocol.log.records import Member

#: Role of an open ticket.
ROLE = "open"


def walks_in(credential: VerifiedCredential) -> bool:
    """True for the credential of a walk-in: an open ticket, or a certificate that descends from one."""
    return credential.role == ROLE


def shared_ticket(credential: VerifiedCredential) -> str:
    """Key of the ticket whose holders are all kept out when one of them is banned; "" for an open ticket, as
    anybody could so shut everybody out."""
    return "" if walks_in(credential) else credential.ticket


def marked(member: Member) -> Member:
    """Copy of a joiner's record that is marked as a walk-in's (`walk_in`), without disk, so that it cannot
    keep the log and gets no vote."""
    return msgspec.structs.replace(member, walk_in=True, disk="")


def open_stages(members: Iterable[Member], serving: Collection[str], stages: int) -> list[int]:
    """Relay stages at which one more walk-in leaves those that serve by invitation in the majority, the
    stages with the fewest members first. members: those that stay or come. serving: ids of those that
    serve."""
    here: dict[int, list[Member]] = {stage: [] for stage in range(1, stages + 1)}
    for member in members:
        if member.stage and not member.is_auditor:
            here[member.stage].append(member)
    found = []
    for stage, present in here.items():
        walk_ins = sum(member.walk_in is True for member in present)
        invited = sum(member.walk_in is not True and member.id in serving for member in present)
        if walk_ins + 1 < invited:
            found.append(stage)
    return sorted(found, key=lambda stage: len(here[stage]))
