"""Receipts: a relay's signed statement of what it received and sent in one step, for each unit that counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, PART, REDUCED, Seals, part_name, seal_text
from anabranch.protocol.interface.signatures import Signer
from anabranch.protocol.messages import Attempt
from anabranch.protocol.messages.common import Count, Hash, Id, Index, Seal, StageNumber


class Transfer(msgspec.Struct, array_like=True, frozen=True):
    """Payload received: its hash, its sender and the stage that this served, and its seal."""

    hash: Hash
    sender: Id
    stage: StageNumber
    seal: Seal


class UnitReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Microbatch computed: activation and gradient received, hashes of activation and gradient sent on."""

    unit: Index
    activation_in: Transfer
    gradient_in: Transfer
    activation_out: Hash
    gradient_out: Hash


class SumReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Part of the gradient that the signer added up: the members' parts by position, hash of the sum."""

    part: Index
    inputs: tuple[tuple[Index, Transfer], ...]
    output: Hash


class Receipt(msgspec.Struct, array_like=True, frozen=True):
    """Work of `peer` at `stage` in step t on `base`, in reduce attempt (term, number). parts: hashes of the
    parts of its gradient sum. sums: parts that it added up. reduced: parts of the whole gradient, as they
    came."""

    run: str
    base: Hash
    t: Count
    stage: StageNumber
    peer: Id
    term: Count
    number: Count
    units: tuple[UnitReceipt, ...]
    parts: tuple[Hash, ...]
    sums: tuple[SumReceipt, ...]
    reduced: tuple[Transfer, ...]


class SignedReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Encoded receipt and its signature."""

    body: bytes
    signature: Seal


_encoder = msgspec.msgpack.Encoder()
_decoder, _body_decoder = msgspec.msgpack.Decoder(SignedReceipt), msgspec.msgpack.Decoder(Receipt)
_PURPOSE = b"anabranch receipt|"


def signed(receipt: Receipt, signer: Signer) -> bytes:
    """Encoded receipt with its signature."""
    body = _encoder.encode(receipt)
    return _encoder.encode(SignedReceipt(body, signer.sign(_PURPOSE + body)))


def opened(data: bytes, signer: Signer) -> Receipt | None:
    """Receipt in `data`; None unless its peer signed it."""
    try:
        envelope = _decoder.decode(data)
        receipt = _body_decoder.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    good = signer.verify(receipt.peer, _PURPOSE + envelope.body, envelope.signature)
    return receipt if good else None


def receipt_hash(data: bytes) -> str:
    """Hash (32 hex characters) of a signed receipt, by which the commit log refers to it."""
    return hashlib.sha256(data).hexdigest()[:32] if data else ""


def unit_receipts(seals: Seals, units: Collection[int]) -> tuple[UnitReceipt, ...]:
    """Receipts of the microbatches `units`, which were all computed."""

    def came(kind: str, unit: int) -> Transfer:
        received = seals.received[kind, unit]
        return Transfer(received.hash, received.sender, received.stage, received.seal)

    return tuple(
        UnitReceipt(
            unit,
            came(ACTIVATION, unit),
            came(GRADIENT, unit),
            seals.computed[ACTIVATION, unit],
            seals.computed[GRADIENT, unit],
        )
        for unit in sorted(units)
    )


def mismatch(receipt: Receipt, peer: str, attempt: Attempt, run: str, stages: int) -> str | None:
    """Reason why a receipt does not belong to `peer` in this attempt, or None."""
    fence, position = attempt.fence, attempt.members.index(peer)
    about = (receipt.run, receipt.base, receipt.t, receipt.stage, receipt.peer)
    if about != (run, fence.base, fence.t, attempt.stage, peer):
        return "a receipt of other work"
    if (receipt.term, receipt.number) != (attempt.attempt.term, attempt.attempt.number):
        return "a receipt of another reduce"
    owned = [unit for unit, owner in enumerate(attempt.owners) if owner == position]
    if [unit.unit for unit in receipt.units] != owned:
        return "a receipt of other units than it owns"
    before, after = attempt.stage - 1, (attempt.stage + 1) % (stages + 1)
    if any((u.activation_in.stage, u.gradient_in.stage) != (before, after) for u in receipt.units):
        return "a payload that is not of an adjacent stage"
    return None


def broken_seal(receipt: Receipt, signer: Signer) -> str | None:
    """First transfer of a receipt whose seal is not its sender's signature, or None."""
    for unit in receipt.units:
        for kind, came in ((ACTIVATION, unit.activation_in), (GRADIENT, unit.gradient_in)):
            text = seal_text(receipt.run, receipt.base, came.stage, kind, str(unit.unit), came.hash)
            if not signer.verify(came.sender, text, came.seal):
                return f"seal of the {kind} of microbatch {unit.unit}"
    return None


def contradictions(receipts: Sequence[Receipt], signer: Signer) -> dict[str, str]:
    """Peers that contradict themselves in the receipts of one step -> what they signed twice. A relay that
    sealed another part of a sum than its receipt has, or whose receipt has a seal that its sender never
    made."""
    found: dict[str, str] = {}
    by_unit = {(r.stage, unit.unit): (r, unit) for r in receipts for unit in r.units}
    by_peer = {(r.stage, r.peer): r for r in receipts}
    for receipt in receipts:
        for unit in receipt.units:
            name = str(unit.unit)
            before = by_unit.get((receipt.stage - 1, unit.unit))
            after = by_unit.get((receipt.stage + 1, unit.unit))
            if before is not None:
                owner, sent = before[0].peer, before[1].activation_out
                _compare(found, signer, receipt, owner, unit.activation_in, sent, ACTIVATION, name)
            if after is not None:
                owner, sent = after[0].peer, after[1].gradient_out
                _compare(found, signer, receipt, owner, unit.gradient_in, sent, GRADIENT, name)
        for total in receipt.sums:
            name = part_name(receipt.term, receipt.number, total.part)
            for _, came in total.inputs:
                sender = by_peer.get((receipt.stage, came.sender))
                if sender is None or total.part >= len(sender.parts):
                    continue
                _compare(found, signer, receipt, came.sender, came, sender.parts[total.part], PART, name)
        for part, came in enumerate(receipt.reduced):
            summer = by_peer.get((receipt.stage, came.sender))
            outputs = {total.part: total.output for total in summer.sums} if summer is not None else {}
            if part in outputs:
                name = part_name(receipt.term, receipt.number, part)
                _compare(found, signer, receipt, came.sender, came, outputs[part], REDUCED, name)
    return found


def _compare(
    found: dict[str, str],
    signer: Signer,
    receiver: Receipt,
    owner: str,
    came: Transfer,
    sent: str,
    kind: str,
    name: str,
) -> None:
    """Compare what `receiver` says it got with what the receipt of `owner` says was sent."""
    if came.sender != owner or came.hash == sent:
        return  # it came from another replica, which computed the same before, or it is what was sent
    text = seal_text(receiver.run, receiver.base, came.stage, kind, name, came.hash)
    if not signer.verify(owner, text, came.seal):
        found.setdefault(receiver.peer, f"its receipt has a seal that the sender of {kind} {name} never made")
    elif kind in (PART, REDUCED):
        found.setdefault(owner, f"it sent another {kind} of {name} than its receipt says")
    # An honest relay may have sealed two activations of a microbatch: who sent it the first one lied, took
    # the microbatch back, and sent another. It proves nothing (`unlinked` finds it).
