"""Receipts: a peer's signed statement of what it received and sent in one step, for each unit that counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from anabranch.protocol.audit.seals import (
    ACTIVATION,
    GRADIENT,
    PART,
    REDUCED,
    STATED_MAX,
    Seals,
    hashes_of,
    part_name,
    seal_text,
)
from anabranch.protocol.interface.signatures import Signer
from anabranch.protocol.messages import Attempt
from anabranch.protocol.messages.audit import Transfer
from anabranch.protocol.messages.common import Count, Hash, Id, Index, Seal, StageNumber


class UnitReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Entry of a `Receipt` for one microbatch: hashes of the activation and gradient received, and of those
    sent on."""

    unit: Index
    activation_in: Transfer
    gradient_in: Transfer
    activation_out: Hash
    gradient_out: Hash


class EndReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Entry of a `Receipt` for one unit of a data node: what the unit received (`came`). The head of a
    microbatch receives an activation from the last stage, its embedding a gradient from stage 1. unit:
    `head_unit` or `embed_unit`."""

    unit: Index
    came: Transfer


class SumReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Entry of a `Receipt` for a part of the gradient that the signer added up: hashes of the members' parts
    by position, and of the sum."""

    part: Index
    inputs: tuple[tuple[Index, Transfer], ...]
    output: Hash


class Receipt(msgspec.Struct, array_like=True, frozen=True):
    """Statement of what `peer` received and sent at `stage` in step t on `base`, for reduce attempt (term,
    number). units: of a relay. parts: hashes of the parts of its own gradient sum. sums: parts that it added
    up for all members. reduced: hashes of the parts of the whole gradient, as it received them. ends: units
    of a data node. others: results of a relay that it may have sealed and that are not those of `units`: of
    microbatches that others own, or from other inputs. Where only the forward was computed, the hashes of
    the gradients are ""."""

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
    ends: tuple[EndReceipt, ...] = ()
    others: tuple[UnitReceipt, ...] = ()


class SignedReceipt(msgspec.Struct, array_like=True, frozen=True):
    """Encoded receipt and its signature."""

    body: bytes
    signature: Seal


_encoder = msgspec.msgpack.Encoder()
_decoder, _body_decoder = msgspec.msgpack.Decoder(SignedReceipt), msgspec.msgpack.Decoder(Receipt)
_PURPOSE = b"anabranch receipt|"


def signed(receipt: Receipt, signer: Signer) -> bytes:
    """Bytes of a receipt with its signature by this peer (`signer`)."""
    body = _encoder.encode(receipt)
    return _encoder.encode(SignedReceipt(body, signer.sign(_PURPOSE + body)))


def opened(data: bytes, signer: Signer) -> Receipt | None:
    """Decode a signed receipt; None if it cannot be decoded, or was not signed by the peer that it names."""
    try:
        envelope = _decoder.decode(data)
        receipt = _body_decoder.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    good = signer.verify(receipt.peer, _PURPOSE + envelope.body, envelope.signature)
    return receipt if good else None


def receipt_hash(data: bytes) -> str:
    """Hash (32 hex characters) of a signed receipt, by which the log refers to it; "" for no receipt."""
    return hashlib.sha256(data).hexdigest()[:32] if data else ""


def unit_receipts(seals: Seals, units: Collection[int]) -> tuple[UnitReceipt, ...]:
    """Entries (unsigned) of a receipt for the microbatches `units`, sorted. This relay must have computed
    them all (KeyError else). seals: what it received and sent."""
    came, made = seals.received, seals.computed
    return tuple(
        UnitReceipt(
            unit, came[ACTIVATION, unit], came[GRADIENT, unit], made[ACTIVATION, unit], made[GRADIENT, unit]
        )
        for unit in sorted(units)
    )


def other_receipts(seals: Seals, owned: Collection[UnitReceipt]) -> tuple[UnitReceipt, ...]:
    """Entries (unsigned) of a receipt for the results that this relay may have sealed beside those in `owned`
    (entries for its own units): of microbatches that others own, or of its own from other inputs. seals: what
    it received and sent."""
    own = {
        u.unit: hashes_of((u.activation_in, u.gradient_in, u.activation_out, u.gradient_out)) for u in owned
    }
    found = []
    for index, results in sorted(seals.stated.items()):
        of_unit = own.get(index, ())
        forward = (of_unit[0], "", of_unit[2], "") if of_unit else ()
        found += [UnitReceipt(index, *each) for each in results if hashes_of(each) not in (of_unit, forward)]
    return tuple(found)


def end_receipts(seals: Seals, units: Collection[int]) -> tuple[EndReceipt, ...]:
    """Entries (unsigned) of a receipt for what each of the units `units` of stage 0 received, sorted by unit.
    This data node must have computed them all (KeyError else). seals: what it received."""
    return tuple(EndReceipt(unit, seals.received[end_of(unit)]) for unit in sorted(units))


def end_of(unit: int) -> tuple[str, int]:
    """Kind of payload that a unit of stage 0 receives (activation for a head, gradient for an embedding), and
    the unit's microbatch."""
    index, embeds = divmod(unit, 2)
    return (GRADIENT if embeds else ACTIVATION), index


def mismatch(receipt: Receipt, peer: str, attempt: Attempt, run: str, stages: int) -> str | None:
    """Reason why `receipt` cannot be that of `peer` for this reduce attempt: it names another step, reduce or
    run, other units than the peer owns there, or inputs that are not of adjacent stages; None: it can. `peer`
    must be a member of the attempt (ValueError else). Seals are not looked at. stages: number of relay
    stages."""
    fence, position = attempt.fence, attempt.members.index(peer)
    about = (receipt.run, receipt.base, receipt.t, receipt.stage, receipt.peer)
    if about != (run, fence.base, fence.t, attempt.stage, peer):
        return "a receipt of other work"
    if (receipt.term, receipt.number) != (attempt.attempt.term, attempt.attempt.number):
        return "a receipt of another reduce"
    owned = [unit for unit, owner in enumerate(attempt.owners) if owner == position]
    relay, data = (owned, []) if attempt.stage else ([], owned)
    if [unit.unit for unit in receipt.units] != relay or [end.unit for end in receipt.ends] != data:
        return "a receipt of other units than it owns"
    if not all(unit.activation_out and unit.gradient_out for unit in receipt.units):
        return "a receipt of a unit that was not computed"
    strange = any(e.came.stage != (1 if end_of(e.unit)[0] == GRADIENT else stages) for e in receipt.ends)
    before, after = attempt.stage - 1, (attempt.stage + 1) % (stages + 1)
    if strange or any((u.activation_in.stage, u.gradient_in.stage) != (before, after) for u in receipt.units):
        return "a payload that is not of an adjacent stage"
    if receipt.others and not attempt.stage:
        return "results of a relay from a data node"
    listed = Counter(other.unit for other in receipt.others)
    stated = {
        (u.unit, u.activation_in.hash, u.gradient_in.hash, u.activation_out, u.gradient_out)
        for u in receipt.others
    }
    if len(stated) < len(receipt.others) or any(count > STATED_MAX for count in listed.values()):
        return "more results of a microbatch than it takes inputs of"
    for other in receipt.others:
        gradient = other.gradient_in.stage if other.gradient_out else after
        if (other.activation_in.stage, gradient) != (before, after):
            return "a payload that is not of an adjacent stage"
    return None


def broken_seal(receipt: Receipt, signer: Signer) -> str | None:
    """Words for the first activation or gradient in a relay's receipt whose seal is not its sender's
    signature; None: all are valid. Seals of parts of a reduce, and those in a data node's receipt, are not
    looked at."""
    for unit in (*receipt.units, *receipt.others):
        for kind, came in inputs_of(unit):
            if not is_sealed(receipt, came, kind, str(unit.unit), signer):
                return f"seal of the {kind} of microbatch {unit.unit}"
    return None


def inputs_of(unit: UnitReceipt) -> list[tuple[str, Transfer]]:
    """Inputs of a result with their kinds: the activation, and the gradient if that was used."""
    forward = [(ACTIVATION, unit.activation_in)]
    return [*forward, (GRADIENT, unit.gradient_in)] if unit.gradient_out else forward


def is_sealed(receiver: Receipt, came: Transfer, kind: str, name: str, signer: Signer) -> bool:
    """True if the sender of a payload signed the seal that the receipt `receiver` shows for it (`came`).
    kind: as in `seals`. name: number of the microbatch, or `part_name`."""
    text = seal_text(receiver.run, receiver.base, came.stage, kind, name, came.hash)
    return signer.verify(came.sender, text, came.seal)


@dataclass(frozen=True)
class Mismatch:
    """Payload that `receiver` got of microbatch `index`, and that differs from what the microbatch's owner at
    the sender's stage made. came: payload with its sender and seal. kind: activation or gradient. owner:
    receipt of that owner, `unit` its part about the microbatch."""

    receiver: Receipt
    came: Transfer
    kind: str
    index: int
    owner: Receipt
    unit: UnitReceipt


def mismatches(receipts: Sequence[Receipt]) -> list[Mismatch]:
    """All activations and gradients that the units in these receipts of one step received, and that differ
    from what the owner of the microbatch made."""
    owners = {(r.stage, unit.unit): (r, unit) for r in receipts for unit in r.units}
    found = []
    for receipt in receipts:
        came = [(kind, unit.unit, each) for unit in receipt.units for kind, each in inputs_of(unit)]
        came += [(*end_of(end.unit), end.came) for end in receipt.ends]
        for kind, index, each in came:
            if (wrong := mismatch_of(owners, receipt, each, kind, index)) is not None:
                found.append(wrong)
    return found


def mismatch_of(
    owners: Mapping[tuple[int, int], tuple[Receipt, UnitReceipt]],
    receiver: Receipt,
    came: Transfer,
    kind: str,
    index: int,
) -> Mismatch | None:
    """Mismatch of one payload with its owner's receipt; None if they agree, or the owner is not known.
    owners: (stage, microbatch) -> receipt of its owner, and the part of it about the microbatch."""
    owner, unit = owners.get((came.stage, index), (None, None))
    if owner is None or unit is None or output_of(unit, kind) == came.hash:
        return None
    return Mismatch(receiver, came, kind, index, owner, unit)


def contradictions(receipts: Sequence[Receipt], signer: Signer) -> dict[str, str]:
    """Peers that the receipts of one step prove to be liars -> reason. There are two kinds. A peer sealed
    another part of its sum, or of the reduced gradient that it summed, than its receipt states. Or a peer's
    receipt, which contradicts that of another one about a payload, shows a seal for it that the sender never
    made."""
    found: dict[str, str] = {}

    def blame(receiver: Receipt, owner: str, came: Transfer, kind: str, name: str) -> None:
        """Enter the liar, if it can be found, behind two receipts that differ: that of `receiver` states
        another hash of a payload than that of `owner`, who computed it. It is the receiver if the payload's
        sender did not sign the seal that the receipt shows (`came`); the owner, if it signed that seal
        itself, for a part of a reduce."""
        if not is_sealed(receiver, came, kind, name, signer):
            what = f"its receipt has a seal that the sender of {kind} {name} never made"
            found.setdefault(receiver.peer, what)
        elif came.sender == owner and kind in (PART, REDUCED):
            found.setdefault(owner, f"it sent another {kind} of {name} than its receipt says")
        # An honest relay may have sealed two activations of a microbatch: who sent it the first one lied,
        # took the microbatch back, and sent another. `tracing` tells them apart.

    for wrong in mismatches(receipts):
        blame(wrong.receiver, wrong.owner.peer, wrong.came, wrong.kind, str(wrong.index))
    by_peer = {(r.stage, r.peer): r for r in receipts}
    for receipt in receipts:
        for total in receipt.sums:
            name = part_name(receipt.term, receipt.number, total.part)
            for _, came in total.inputs:
                sender = by_peer.get((receipt.stage, came.sender))
                if sender is None or total.part >= len(sender.parts):
                    continue
                if came.hash != sender.parts[total.part]:
                    blame(receipt, came.sender, came, PART, name)
        for part, came in enumerate(receipt.reduced):
            summer = by_peer.get((receipt.stage, came.sender))
            outputs = {total.part: total.output for total in summer.sums} if summer is not None else {}
            if came.hash != outputs.get(part, came.hash):
                name = part_name(receipt.term, receipt.number, part)
                blame(receipt, came.sender, came, REDUCED, name)
    return found


def output_of(unit: UnitReceipt, kind: str) -> str:
    """Hash of the activation or gradient that a relay's receipt states for a microbatch."""
    return unit.activation_out if kind == ACTIVATION else unit.gradient_out
