"""Messages to join a run, to become an active member, and to leave."""

from __future__ import annotations

import msgspec

from anabranch.protocol.log.records import Genesis, Member, Slot
from anabranch.protocol.messages.common import (
    Apart,
    Count,
    CountOrNone,
    Hash,
    Id,
    Message,
    Remark,
    StageNumber,
    StageOrNone,
    Text,
)


class Enquire(Message, frozen=True, tag=38):
    """Request for the run's description; a joiner's first message to the leader, answered by About. address:
    addresses at which the joiner can be dialled, by its own account, which the leader tries."""

    address: Text = ""


class About(Message, frozen=True, tag=39):
    """Description of the run for a joiner, which then measures its machine. doors: further peers (id,
    address) that the joiner can ask for the leader."""

    genesis: Genesis
    doors: tuple[tuple[Id, Text], ...] = ()


class Reached(Message, frozen=True, tag=92):
    """Leader's message to a joiner whose addresses it dialled. addresses: those that answered with the
    joiner's key, joined by commas ("": none; others reach it through a carrier). reason: why others
    failed."""

    addresses: Text
    reason: Remark


class JoinRequest(Message, frozen=True, tag=40):
    """Application of a peer with a valid ticket to serve `stage` (-1: any stage). model_hash: of the model's
    shape; "": not stated. corpus_fingerprint: of its corpus, which only a data node needs ("": none)."""

    member: Member
    stage: StageOrNone
    protocol_version: Count
    model_hash: Hash
    corpus_fingerprint: Hash


class Welcome(Message, frozen=True, tag=41):
    """Admission to `stage`, with the run's present state and the member's certificate.

    members, active_from, number: current membership, iteration from which each serving member serves, and
    number of the latest membership record. next_index, last_hash: position in the log. t, base, adam_step,
    fingerprint: last committed iteration, hash of its log entry, optimizer's step count, hash of the stage's
    state ("": not agreed yet). term: of the leader. voters: ids of the log's voters. skips: steps that
    overflows skipped in a row. steps: optimizer steps of the run, if a `Control` record set them (0: as in
    the run file). held: iteration after which the run pauses (-1: none). revoked: revoked peers and tickets,
    with the reasons. carriers: dedicated carriers, with their addresses. slots: plan of the next iteration,
    if it is a round. If the next iteration is delayed its base follows in `base`, after a space.
    """

    stage: StageNumber
    members: tuple[Member, ...]
    active_from: dict[str, int]
    number: Count
    next_index: Count
    last_hash: Hash
    base: Hash
    t: Count
    adam_step: Count
    term: Count
    fingerprint: Hash
    certificate: bytes
    voters: tuple[Id, ...] = ()
    skips: Count = 0
    steps: Count = 0
    held: CountOrNone = -1
    revoked: dict[Id, Text] = msgspec.field(default_factory=dict)
    carriers: dict[Id, Text] = msgspec.field(default_factory=dict)
    slots: tuple[Slot, ...] = ()


class Refused(Message, frozen=True, tag=42):
    """Rejection of a joiner or exclusion of a member, with a reason that says what to do. again: True if the
    receiver may join again with the same ticket, after a while."""

    reason: Text
    again: bool = False


class Ready(Message, frozen=True, tag=43):
    """Report that the sender has its stage's state after iteration t (R14). A replica that serves, and
    fetched that state as it had been away, asks so whether it is the run's; it sends no proof.

    apart: members of its stage that it cannot reach. links: as in `Applied`, sent before the first iteration
    of a run whose stages are assigned by links. proof: hash of the state keyed by the hash of the log entry
    that led to it ("" for the initial state, which anyone can make).
    """

    t: Count
    stage: StageNumber
    fingerprint: Hash
    apart: Apart = ()
    links: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    proof: Hash = ""


class Leave(Message, frozen=True, tag=44):
    """Notice to the leader that the sender wants to leave the run."""

    reason: Remark


class Carry(Message, frozen=True, tag=91):
    """Offer of a dedicated carrier, which listens at `address`, to forward the bytes of members. Sent to the
    leader again and again."""

    address: Text


class Elsewhere(Message, frozen=True, tag=65):
    """Redirect of a joiner or carrier to the log's leader and its address; both are "" if the sender does not
    know the leader as a member."""

    leader: Id
    address: Text
