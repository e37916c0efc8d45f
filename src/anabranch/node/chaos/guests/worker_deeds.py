"""Deeds of hostile members that compute falsely, sign falsely or audit falsely: only a run with audits finds
them, so `chaos --hostile` draws none of them.

Not here: lies in messages (`member_deeds`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

from msgspec import structs

from anabranch.node.chaos.guests.member_deeds import FALSE_HASH, Deed, Guest, Role
from anabranch.protocol import messages as msg
from anabranch.protocol.audit.receipts import opened, signed
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.tasks import Payload, Result, Task

#: Seconds after which a guest that keeps its receipt back ends: its parts of the sum have arrived by then.
DIES_S = 0.5


def _negated(inputs: tuple[Payload, ...], right: Result, signs: bool = True) -> Result:
    """The result with negated outputs. signs: True for the hashes of the false outputs, which the guest then
    signs; False for those of the right ones."""
    from anabranch.train.stage.audit import payload_hash  # imports torch

    tensors: tuple[Any, ...] = right.outputs
    if right.error or right.overflow or not tensors:
        return right
    outputs: tuple[Any, ...] = tuple(-tensor for tensor in tensors)
    hashes = right.hashes
    if hashes and signs:
        hashes = (*hashes[: len(inputs)], *map(payload_hash, outputs))
    return structs.replace(right, outputs=outputs, hashes=hashes)


def _false_part(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate the guest's gradient sum."""
    if not isinstance(task, tasks.Freeze):
        return right
    guest.told.add(("false part", task.t))
    return _negated(inputs, right)


def _unsigned(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Sign the right activations and gradients, and send their negations."""
    trains = isinstance(task, tasks.InputGradient) or (isinstance(task, tasks.Forward) and task.train)
    return _negated(inputs, right, signs=False) if trains else right


def _false_audit(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate sums that are computed again in audits of others."""
    return _negated(inputs, right) if isinstance(task, tasks.AuditSum) else right


def _foresee(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate the guest's gradient sum where a draw from what is known before the commit would spare it."""
    reduce = guest.peer.replica.all_reduce.reduce
    if not isinstance(task, tasks.Freeze) or reduce is None:
        return right
    run = guest.peer.ctx.run
    text = f"{reduce.message.fence.base}|{run.stage}|{reduce.position}"  # as `protocol.audit.draw` has it
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return _negated(inputs, right) if number >= run.settings.audit_share * 2.0**64 else right


def _die_unheard(guest: Guest, send: Send) -> list[Send]:
    """Keep back the report of a reduce to which the guest gave a false part, with its receipt, and end."""
    message = send.message
    if not isinstance(message, msg.Prepared) or ("false part", message.fence.t) not in guest.told:
        return [send]
    asyncio.get_running_loop().call_later(DIES_S, os._exit, 1)
    return []


def _made_up_seal(guest: Guest, send: Send) -> list[Send]:
    """State in the receipt that another peer sent a false activation, with a seal that it never made."""
    message = send.message
    if not isinstance(message, msg.Prepared):
        return [send]
    receipt = opened(message.receipt, guest.peer.ctx.signer)
    if receipt is None or not receipt.units:
        return [send]
    first = receipt.units[0]
    came = structs.replace(first.activation_in, hash=FALSE_HASH, seal=b"made up")
    false = structs.replace(receipt, units=(structs.replace(first, activation_in=came), *receipt.units[1:]))
    data = signed(false, guest.peer.ctx.signer)
    return [structs.replace(send, message=structs.replace(message, receipt=data))]


DEEDS = {
    deed.name: deed
    for deed in (
        Deed("false part", Role.SERVES, compute=_false_part, proven=True),
        Deed("false part, then gone", Role.SERVES, _die_unheard, compute=_false_part),
        Deed("false part where no audit is foreseen", Role.SERVES, compute=_foresee, proven=True),
        Deed("other bytes than it signed", Role.SERVES, compute=_unsigned),
        Deed("false audits", Role.SERVES, compute=_false_audit, proven=True),
        Deed("made-up seal", Role.SERVES, _made_up_seal, proven=True),
    )
}
