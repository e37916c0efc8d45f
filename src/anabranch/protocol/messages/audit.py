"""Messages of an audit: a relay's work in a committed step is computed again by another replica."""

from __future__ import annotations

import msgspec

from anabranch.protocol.messages.common import Count, Hash, Id, Message, Receipt, Remark, Seal, StageNumber


class WorkItem(msgspec.Struct, array_like=True, frozen=True):
    """Name of one thing that an audit of a contribution needs. kind: "receipt"; "activation" or "gradient",
    from which microbatch `index` was computed; or "part": part `index` of the gradient of the reduce's member
    at `position`, which the audited peer received and added up."""

    kind: Hash
    index: Count = 0
    position: Count = 0


class Transfer(msgspec.Struct, array_like=True, frozen=True):
    """Payload that a peer received: its hash ("" until computed), its sender, and the sender's seal
    (signature) and stage. Receipts consist of such."""

    hash: Hash
    sender: Id
    stage: StageNumber
    seal: Seal


class FetchWork(Message, frozen=True, tag=87):
    """Auditor's request for `item` of the contribution of peer `subject` to step t at `stage`, answered by
    Work. It goes to the subject, to the leader (for the receipt), or to a peer that exchanged the item with
    the subject."""

    t: Count
    stage: StageNumber
    subject: Id
    item: WorkItem


class Work(Message, frozen=True, tag=88):
    """Reply to FetchWork: the signed receipt, or the tensor named by `item` as payload. held: False if the
    sender of this reply does not have it."""

    t: Count
    stage: StageNumber
    subject: Id
    item: WorkItem
    held: bool = True
    receipt: Receipt = b""


class Audited(Message, frozen=True, tag=89):
    """Report of an auditor to the leader about the contribution of peer `subject` to step t at `stage`. base:
    hash of the step's log entry. receipt: the subject's, in a report of a difference; else b"".

    verdict: "same", "different" (what: the first thing that differs; found, claimed: its hash as computed
    again and in the receipt), "withheld" (no source handed over what the subject computed with) or "unable"
    (the auditor came too late, failed, or could not reach a source).
    """

    t: Count
    base: Hash
    stage: StageNumber
    subject: Id
    verdict: Hash
    what: Remark = ""
    found: Hash = ""
    claimed: Hash = ""
    receipt: Receipt = b""


class Audit(Message, frozen=True, tag=90):
    """Order of the leader to audit the contribution of peer `subject` to step t at `stage`, to a replica that
    kept the weights for it. base: hash of the step's log entry. sources: peers that may have what the
    contribution was computed from."""

    t: Count
    base: Hash
    stage: StageNumber
    subject: Id
    sources: tuple[Id, ...]
