"""Trace of a contradiction between receipts: the relay that is at its end, and what shows that.

A relay that sent on another activation or gradient than the owner of the microbatch either computed it
falsely or was given another input, which its own receipt then shows with the seal of its sender. Going on
from sender to sender ends at a relay that signed two results of one input, at two relays with different
results of one input (their work is computed again), at one whose receipt is lacking or does not list what it
sealed, or at a data node: one that signed two results of one microbatch, or two whose results differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.protocol.audit.receipts import (
    Mismatch,
    Receipt,
    UnitReceipt,
    inputs_of,
    is_sealed,
    mismatch_of,
    mismatches,
    output_of,
)
from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT
from anabranch.protocol.interface.signatures import Signer


@dataclass(frozen=True)
class DisputedResult:
    """Result of microbatch `index` that `peer` of `stage` states and another relay says differs. output: its
    hash."""

    stage: int
    peer: str
    index: int
    output: str


@dataclass
class Traces:
    """Ends of the traces of all contradictions. liars: relay or data node -> reason. disputed: results to
    compute again. unlisted: (stage, relay) that sealed what its receipt does not list, or gave no receipt ->
    name of that. apart: pairs of results that should be the same and differ, each as (kind, ((data node that
    sent it, relay that got it), the same of the other result)). One of the two is false, or a relay lied
    about the activation from which its gradient follows."""

    liars: dict[str, str] = field(default_factory=dict)
    disputed: list[DisputedResult] = field(default_factory=list)
    unlisted: dict[tuple[int, str], str] = field(default_factory=dict)
    apart: list[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=list)


def traced(receipts: Sequence[Receipt], signer: Signer) -> Traces:
    """Trace all contradictions about activations and gradients between the receipts of one step. No
    contradiction: empty `Traces`."""
    tracer = _Tracer(receipts, signer)
    for wrong in mismatches(receipts):
        tracer.follow(wrong)
    return tracer.found


class _Tracer:
    def __init__(self, receipts: Sequence[Receipt], signer: Signer) -> None:
        self.found = Traces()
        self._signer = signer
        self._owners = {(r.stage, unit.unit): (r, unit) for r in receipts for unit in r.units}
        self._receipts = {(r.stage, r.peer): r for r in receipts}
        self._followed: set[tuple[object, ...]] = set()

    def follow(self, wrong: Mismatch) -> None:
        """Go on from a payload that differs from its owner's to the result from which its sender made it. If
        the receiver's seal for it is false, the receiver is a liar; if the sender's receipt does not list
        such a result, it is unlisted. Nothing for a payload that was followed before."""
        key = wrong.receiver.stage, wrong.receiver.peer, wrong.kind, wrong.index, wrong.came
        if key in self._followed:
            return
        self._followed.add(key)
        came, name = wrong.came, f"{wrong.kind} of microbatch {wrong.index}"
        if not is_sealed(wrong.receiver, came, wrong.kind, str(wrong.index), self._signer):
            self.found.liars.setdefault(wrong.receiver.peer, f"its receipt has a false seal of {name}")
            return
        sender = self._receipts.get((came.stage, came.sender))
        listed = () if sender is None else (*sender.units, *sender.others)
        made = [u for u in listed if u.unit == wrong.index and output_of(u, wrong.kind) == came.hash]
        if sender is None or not made:
            self.found.unlisted[came.stage, came.sender] = name
            return
        for unit in made:
            self._compare(wrong, sender, unit, name)

    def _compare(self, wrong: Mismatch, sender: Receipt, unit: UnitReceipt, name: str) -> None:
        """Compare the result `unit` of the sender with that of the owner (`wrong.unit`). From different
        inputs: go on with those that are not their owners'. From the same inputs one of the results is false:
        of one peer, it is a liar; of two, both are computed again."""
        used = inputs_of(unit) if wrong.kind == GRADIENT else inputs_of(unit)[:1]
        owners = {ACTIVATION: wrong.unit.activation_in.hash, GRADIENT: wrong.unit.gradient_in.hash}
        differ = [(kind, came) for kind, came in used if came.hash != owners[kind]]
        if differ:
            for kind, came in differ:
                before = mismatch_of(self._owners, sender, came, kind, wrong.index)
                if not came.stage:
                    self._compare_ends(wrong, sender, unit, kind)
                elif before is not None:
                    self.follow(before)
        elif sender.peer == wrong.owner.peer:
            self.found.liars.setdefault(sender.peer, f"it signed two results of one input as {name}")
        else:
            self._dispute(wrong, sender, (wrong.came.hash, output_of(wrong.unit, wrong.kind)))

    def _dispute(self, wrong: Mismatch, sender: Receipt, outputs: tuple[str, str]) -> None:
        """Enter two results of one input, the sender's and the owner's, to be computed again. outputs: hashes
        of the two, in this order."""
        for peer, output in zip((sender.peer, wrong.owner.peer), outputs, strict=True):
            result = DisputedResult(sender.stage, peer, wrong.index, output)
            if result not in self.found.disputed:
                self.found.disputed.append(result)

    def _compare_ends(self, wrong: Mismatch, sender: Receipt, unit: UnitReceipt, kind: str) -> None:
        """Compare the payloads of data nodes that the sender and the owner say they received, and that
        differ. Data nodes sign what they got, not what they sent, so only their seals tell. Whose receipt
        shows a false seal is a liar. A data node that signed two embeddings of one microbatch is a liar. Two
        gradients may both be right if the relays sent two activations: then the activations are computed
        again if they are from one input, and nothing is entered if they are not. Any other pair is entered in
        `apart`."""
        name = f"{kind} of microbatch {wrong.index}"
        ends = [(sender, unit), (wrong.owner, wrong.unit)]
        came = [each.activation_in if kind == ACTIVATION else each.gradient_in for _, each in ends]
        forged = [
            receipt.peer
            for (receipt, _), each in zip(ends, came, strict=True)
            if not is_sealed(receipt, each, kind, str(wrong.index), self._signer)
        ]
        for peer in forged:
            self.found.liars.setdefault(peer, f"its receipt has a false seal of {name}")
        if forged:
            return
        if kind == GRADIENT and unit.activation_out != wrong.unit.activation_out:
            if unit.activation_in.hash == wrong.unit.activation_in.hash:
                self._dispute(wrong, sender, (unit.activation_out, wrong.unit.activation_out))
        elif kind == ACTIVATION and came[0].sender == came[1].sender:
            self.found.liars.setdefault(came[0].sender, f"it signed two results as {name}")
        else:
            relays = [receipt.peer for receipt, _ in ends]
            pairs = zip((each.sender for each in came), relays, strict=True)
            self.found.apart.append((kind, tuple(pairs)))
