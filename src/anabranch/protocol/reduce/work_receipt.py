"""Receipt of one reduce attempt at one replica: seals of the parts that it sends and gets, sums, signature.
Also the leader's check of what another's receipt says about the parts (`refused_sums`).

Not here: the exchange of the parts (`all_reduce`), what a receipt contains (`protocol.audit.receipts`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from anabranch.protocol.audit.receipts import (
    Receipt,
    SumReceipt,
    end_receipts,
    other_receipts,
    signed,
    unit_receipts,
)
from anabranch.protocol.audit.seals import PART, REDUCED, Seals, part_name
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import Moments, Payload, Result
from anabranch.protocol.messages import Attempt
from anabranch.protocol.messages.audit import Transfer
from anabranch.protocol.reduce.hierarchy import cells_of
from anabranch.protocol.reduce.partial_sums import collectors, contributors, over_parts


class WorkReceipt:
    """Receipt of this replica's work in one reduce attempt, collected while the attempt runs, and signed at
    the end. In runs without audit, calls have no effect and seals are empty.

    sum_inputs: part that this replica summed -> the members' parts of which it made that sum, for an auditor.
    """

    def __init__(self, ctx: PeerContext, seals: Seals, message: Attempt, flat: bool) -> None:
        """seals: seals of this iteration. message: order of the attempt. flat: False in a stage of several
        cells (groups of members), whose sums have no receipts."""
        self._ctx = ctx
        self._flat = flat
        self._listed = 0
        """`Seals.statements` when the receipt was signed last."""
        self._seals = seals
        self._message = message
        self._parts: tuple[str, ...] = ()
        self._came: dict[tuple[str, int, str], bytes] = {}
        """(kind, part, sender) -> seal of what came."""
        self._sums: dict[int, SumReceipt] = {}
        self._reduced: tuple[Transfer, ...] = ()
        self._moments: dict[int, tuple[Moments, ...]] = {}
        self._made: dict[tuple[str, int], bytes] = {}
        self.sum_inputs: dict[int, tuple[Payload, ...]] = {}

    @property
    def on(self) -> bool:
        return self._seals.on

    def _name(self, part: int) -> str:
        return part_name(self._message.attempt.term, self._message.attempt.number, part)

    def _seal(self, kind: str, part: int, payload_hash: str) -> bytes:
        key = kind, part
        if key not in self._made:
            self._made[key] = self._seals.sign(kind, self._name(part), payload_hash)
        return self._made[key]

    # --- sending -------------------------------------------------------------------------------

    def frozen(self, hashes: tuple[str, ...]) -> None:
        """Note the hashes of the parts into which the Freeze task cut this replica's sum."""
        self._parts = hashes

    def part_seal(self, part: int) -> bytes:
        """Seal of a part of this replica's sum, once the sum is cut (`frozen`); b"" before, and without
        audit."""
        return self._seal(PART, part, self._parts[part]) if self._parts else b""

    def reduced_seal(self, part: int) -> bytes:
        """Seal of a part that this replica summed; b"" if it has no receipt for the sum."""
        total = self._sums.get(part)
        return self._seal(REDUCED, part, total.output) if total is not None else b""

    @property
    def moments(self) -> tuple[Moments, ...]:
        """Moments of the contributions, in the order of their members, over all parts that this replica
        summed; () if there are none."""
        return over_parts(self._moments.values())

    # --- receiving -----------------------------------------------------------------------------

    def came(self, kind: str, part: int, sender: str, seal: bytes) -> None:
        """Note the seal of a part that came from `sender`; a second one of the same part is ignored. kind:
        PART (of a member's sum) or REDUCED. The seal is checked once the part's hash is known."""
        if self.on:
            self._came.setdefault((kind, part, sender), seal)

    def _transfer(self, kind: str, part: int, sender: str, payload_hash: str) -> Transfer | None:
        """Receipt's entry for a part that came from `sender`, with its seal; None if the seal is wrong."""
        own = sender == self._ctx.me
        seal = self._seal(kind, part, payload_hash) if own else self._came.get((kind, part, sender), b"")
        if not own and not self._seals.part_is_sealed(kind, sender, self._name(part), payload_hash, seal):
            return None
        return Transfer(payload_hash, sender, self._message.stage, seal)

    def summed(
        self, part: int, senders: Sequence[int], inputs: tuple[Payload, ...], result: Result
    ) -> str | None:
        """Note what the sum of `part` was made of; return the first member (peer id) whose part does not have
        that member's seal, and then nothing is noted, or None. senders: positions of the members, in the
        order of `inputs`. result: of the sum; nothing is noted if its hashes were not made."""
        hashes = result.hashes
        if not self.on or not self._flat or not hashes:
            return None
        transfers = []
        for position, part_hash in zip(senders, hashes, strict=False):
            peer = self._message.members[position]
            transfer = self._transfer(PART, part, peer, part_hash)
            if transfer is None:
                return peer
            transfers.append((position, transfer))
        self._sums[part] = SumReceipt(part, tuple(transfers), hashes[-1])
        self._moments[part] = result.moments
        self.sum_inputs[part] = inputs
        return None

    def assembled(self, collectors: Sequence[str], hashes: tuple[str, ...]) -> str | None:
        """Note the reduced parts; return the first peer whose part does not have that peer's seal, and then
        nothing is noted, or None. collectors: peer that summed each part. hashes: of the parts, in their
        order."""
        if not self.on or not self._flat or len(hashes) < len(collectors):
            return None
        transfers = []
        for part, (peer, part_hash) in enumerate(zip(collectors, hashes, strict=False)):
            transfer = self._transfer(REDUCED, part, peer, part_hash)
            if transfer is None:
                return peer
            transfers.append(transfer)
        self._reduced = tuple(transfers)
        return None

    @property
    def outdated(self) -> bool:
        """True if the receipt that was signed last lacks results that this relay computed since; before the
        first one, if there is any result."""
        return self._seals.statements > self._listed

    def signed(self, t: int, base: str, units: Collection[int]) -> bytes:
        """Encoded and signed receipt of this peer's work on its `units` up to now, which may be signed again
        when there is more; b"" without audit. t, base: iteration."""
        run, message = self._ctx.run, self._message
        if not self.on:
            return b""
        of_attempt = (message.stage, self._ctx.me, message.attempt.term, message.attempt.number)
        work = unit_receipts(self._seals, units if run.stage else ()), self._parts
        ends = end_receipts(self._seals, () if run.stage else units)
        others = other_receipts(self._seals, work[0])
        self._listed = self._seals.statements
        sums = tuple(total for _, total in sorted(self._sums.items()))
        receipt = Receipt(run.settings.run, base, t, *of_attempt, *work, sums, self._reduced, ends, others)
        return signed(receipt, self._ctx.signer)


def refused_sums(receipt: Receipt, attempt: Attempt, flat: int) -> str | None:
    """Reason to refuse what a receipt says about the parts of an attempt, or None: each member cuts its sum
    into all parts, adds up its own parts, and gets every part. flat: most members of a stage that is one
    group; a larger one is summed by groups (`hierarchy`)."""
    members = attempt.members
    cells = cells_of(len(members), len(members) if attempt.sums else flat)
    whole, senders = len(cells.bounds) == 1, contributors(attempt)
    dealt = (collectors(attempt) or members) if whole else ()
    if len(receipt.parts) != (len(dealt) or cells.parts):
        return "a receipt with another number of parts than the reduce has"
    inputs = [(sender, members[sender]) for sender in senders]
    sums = [(part, inputs) for part, peer in enumerate(dealt) if peer == receipt.peer]
    if [(total.part, [(k, came.sender) for k, came in total.inputs]) for total in receipt.sums] != sums:
        return "a receipt of other sums than it was to add up"
    if [came.sender for came in receipt.reduced] != list(dealt):
        return "a receipt without all reduced parts"
    came = [*receipt.reduced, *(part for total in receipt.sums for _, part in total.inputs)]
    if any(part.stage != attempt.stage for part in came):
        return "a part of another stage"
    return None
