"""Store of receipts of audited contributions and of the payloads they were computed from, for auditors to
fetch.

The peer that made a contribution keeps all of it; its neighbours keep what they sent it, so that an audit
does not depend on its subject.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.rate_limits_and_bans import RECEIPT_BYTES
from anabranch.protocol.interface.tasks import AUDIT_STEPS, Payload
from anabranch.protocol.messages import FetchWork, Work, WorkItem

RECEIPT = WorkItem("receipt")


class KeptWork:
    """Store of pieces of contributions by step and audited peer, for the last AUDIT_STEPS steps. A request
    about a step whose commit this peer does not have yet waits for it."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._kept: dict[tuple[int, str], tuple[bytes, Mapping[WorkItem, Payload]]] = {}
        self._committed = -1
        self._early: dict[str, FetchWork] = {}
        """Peer -> its newest request about a later step."""

    def keep(self, t: int, subject: str, receipt: bytes, items: Mapping[WorkItem, Payload]) -> None:
        """Store pieces of the contribution of replica `subject` to step t beside those that are stored of it,
        with its signed receipt if this peer has it (else b""). What is stored of steps too old to be audited
        is dropped."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] > t - AUDIT_STEPS}
        former, pieces = self._kept.get((t, subject), (b"", {}))
        self._kept[t, subject] = receipt or former, {**pieces, **items}

    def own(self, t: int, subject: str, item: WorkItem) -> Payload | None:
        """Stored piece of a contribution; None if this peer does not have it."""
        return self._kept.get((t, subject), (b"", {}))[1].get(item)

    def committed(self, t: int) -> None:
        """Note that step t is committed: answer the requests about it that waited."""
        self._committed = t
        early, self._early = self._early, {}
        for peer, message in early.items():
            self.on_fetch(peer, message)

    def clear(self) -> None:
        self._kept.clear()
        self._early.clear()
        self._committed = -1

    def on_fetch(self, peer: str, message: FetchWork, known: bytes = b"") -> str | None:
        """Send `peer` the piece of a contribution that it requests, or the answer that this peer does not
        have it. A request about a step of which this peer has no commit yet waits for that; only the newest
        one of a peer is kept. Returns the reason if the request is refused (work of another stage), else
        None. known: receipt of the contribution, if this peer leads and has it (b"": not). A requester that
        took its budget of receipts (RECEIPT_BYTES) for now is told that there is none."""
        ctx, item = self._ctx, message.item
        if ctx.run.membership.stage_of(peer) != message.stage:
            return "the work of another stage"
        if message.t > self._committed and not known:
            self._early[peer] = message
            return None
        about = message.t, message.stage, message.subject, item
        receipt, items = self._kept.get((message.t, message.subject), (b"", {}))
        if item == RECEIPT and (receipt := known or receipt) and self._may_take(peer, receipt):
            ctx.outbox.send(peer, Work(*about, receipt=receipt))
        elif item in items:
            ctx.outbox.send(peer, Work(*about), items[item])
        else:
            ctx.outbox.send(peer, Work(*about, held=False))
        return None

    def _may_take(self, peer: str, receipt: bytes) -> bool:
        """True if a receipt is within the requester's budget, to which it is charged."""
        return self._ctx.rate_limits.charge(peer, RECEIPT_BYTES, self._ctx.clock.now, len(receipt))
