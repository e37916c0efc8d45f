"""Deeds of hostile guests that `anabranch chaos --hostile` does not draw: some hold a step up for a dozen
times its usual duration, others compute, sign or audit falsely, which only a run with audits finds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from anabranch.node.chaos.guests.member_deeds import (
    AGAIN_S,
    FALSE_HASH,
    FETCH_NOTHING,
    NEVER_READY,
    Deed,
    Guest,
    Role,
    withhold,
)
from anabranch.protocol import messages as msg
from anabranch.protocol.audit.receipts import Receipt, opened, signed
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Received, Send
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload, Result, Task
from anabranch.protocol.peer.shared_state import Step
from anabranch.protocol.state.vouchers import VOUCHED_KEPT
from support.lying_peer import WorkerDeed

#: Activation or gradient of which no norm is finite in single precision.
HUGE = 3e38
#: Loss (nats) that is finite, as two of it together are not.
LOSS = 1.7e308
#: Parts of a made-up reduce that a guest sends at once, bytes of each (a piece of a state, nearly the largest
#: payload of a small run, and two are allowed), and iterations between two times.
LARGE_PARTS, LARGE_BYTES, LARGE_EVERY = 3, PIECE_BYTES, 4
#: Length of a tensor's name that no line of the log has room for.
NAME = 600_000
#: Times that a guest calls each microbatch back.
CALLS = 8
#: Seconds after which a guest that keeps its receipt back ends: its parts of the sum have arrived by then.
DIES_S = 0.5

def _send_huge(guest: Guest, send: Send) -> list[Send]:
    """Send relays activations and gradients that overflow where they are used."""
    message, membership = send.message, guest.peer.ctx.run.membership
    relay = send.peer in membership.members and membership.members[send.peer].stage > 0
    if not isinstance(message, msg.Forward | msg.Backward) or send.payload is None or not relay:
        return [send]
    payload: Any = send.payload
    return [structs.replace(send, payload=payload.new_full(payload.shape, HUGE))]


def _ask_all_states(guest: Guest) -> Iterator[Send]:
    """Ask every neighbour every AGAIN_S seconds for each stage's latest state, and for its first piece."""
    t = guest.peer.progress.committed
    if not guest.once("states", int(guest.peer.ctx.clock.now / AGAIN_S)):
        return
    for peer in sorted(guest.peer.ctx.links.up):
        for stage in range(guest.peer.ctx.run.settings.stages + 1):
            yield Send(peer, msg.FetchState(stage, -1))
            yield Send(peer, msg.FetchPiece(stage, t, 0))


def negated(inputs: tuple[Payload, ...], right: Result, signs: bool = True) -> Result:
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


def false_part(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate the guest's gradient sum."""
    if not isinstance(task, tasks.Freeze):
        return right
    guest.told.add(("false part", task.t))
    return negated(inputs, right)


def _unsigned(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Sign the right activations and gradients, and send their negations."""
    trains = isinstance(task, tasks.InputGradient) or (isinstance(task, tasks.Forward) and task.train)
    return negated(inputs, right, signs=False) if trains else right


def _false_audit(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate sums that are computed again in audits of others."""
    return negated(inputs, right) if isinstance(task, tasks.AuditSum) else right


def _die_unheard(guest: Guest, send: Send) -> list[Send]:
    """Keep back the report of a reduce to which the guest gave a false part, with its receipt, and end."""
    message = send.message
    if not isinstance(message, msg.Prepared) or ("false part", message.fence.t) not in guest.told:
        return [send]
    asyncio.get_running_loop().call_later(DIES_S, os._exit, 1)
    return []


def _with_receipt(guest: Guest, send: Send, false: Callable[[Receipt], Receipt]) -> list[Send]:
    """The message, a `Prepared` with the receipt that `false` makes of the guest's own; any other message,
    and one of a receipt without units, unchanged."""
    message = send.message
    if not isinstance(message, msg.Prepared):
        return [send]
    receipt = opened(message.receipt, guest.peer.ctx.signer)
    if receipt is None or not receipt.units:
        return [send]
    data = signed(false(receipt), guest.peer.ctx.signer)
    return [structs.replace(send, message=structs.replace(message, receipt=data))]


def _made_up_seal(guest: Guest, send: Send) -> list[Send]:
    """State in the receipt that another peer sent a false activation, with a seal that it never made."""

    def false(receipt: Receipt) -> Receipt:
        first, *others = receipt.units
        came = structs.replace(first.activation_in, hash=FALSE_HASH, seal=b"made up")
        return structs.replace(receipt, units=(structs.replace(first, activation_in=came), *others))

    return _with_receipt(guest, send, false)


def _lacking_receipt(guest: Guest, send: Send) -> list[Send]:
    """Leave the first microbatch out of the receipt."""
    return _with_receipt(guest, send, lambda receipt: structs.replace(receipt, units=receipt.units[1:]))


def _false_throughout(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate the guest's own gradient sum, and sums that are computed again in audits of others."""
    return negated(inputs, right) if isinstance(task, tasks.Freeze | tasks.AuditSum) else right


def _long_names(guest: Guest, send: Send) -> list[Send]:
    """Name a tensor in the sums of squares by a text that takes more than its stage's part of half a
    message."""
    if isinstance(send.message, msg.Prepared):
        named = structs.replace(send.message, squares={"w" * NAME: 1.0})
        return [structs.replace(send, message=named)]
    return [send]


def _claim_all(guest: Guest, send: Send) -> list[Send]:
    """Claim all microbatches of the stage as soon as the guest has one; print those that it has."""
    message = send.message
    if not isinstance(message, msg.Claim) or not message.units:
        return [send]
    print("has", message.fence.t, *message.units, flush=True)
    units = tuple(sorted(guest.peer.ctx.run.cover(message.stage, message.fence.t)))
    return [structs.replace(send, message=structs.replace(message, units=units))]


def _tell_given(guest: Guest, event: Received) -> bool:
    """Print the units of each reduce that the leader ordered this guest to add."""
    message, me = event.message, guest.peer.ctx.me
    if isinstance(message, msg.Attempt) and me in message.members:
        mine = message.members.index(me)
        given = [unit for unit, owner in enumerate(message.owners) if owner == mine]
        print("given", message.fence.t, *given, flush=True)
    return True


def _infinite_losses(guest: Guest, send: Send) -> list[Send]:
    message = send.message
    if not isinstance(message, msg.Claim) or not message.losses:
        return [send]
    losses = dict.fromkeys(message.losses, LOSS)
    return [structs.replace(send, message=structs.replace(message, losses=losses))]


def _blame(guest: Guest, send: Send) -> list[Send]:
    """Report an overflow in one microbatch of each iteration, with inputs of another relay each time."""
    message, run = send.message, guest.peer.ctx.run
    if not isinstance(message, msg.Forward) or not message.train or not guest.once("blame", message.fence.t):
        return [send]
    relays = run.membership.live(run.stage - 1, message.fence.t)
    blamed = relays[message.fence.t % len(relays)]
    overflow = msg.Overflow(message.fence, run.stage, message.index, "made up", blamed)
    return [guest.to_leader(overflow), send]


def _call_back(guest: Guest, send: Send) -> list[Send]:
    """Call each microbatch back again and again, as soon as it is sent."""
    message = send.message
    if not isinstance(message, msg.Forward):
        return [send]
    call = msg.CallBack(message.fence, {message.index: message.way}, CALLS)
    return [send, *[Send(send.peer, call)] * CALLS]


def _tell_old_state(guest: Guest) -> Iterator[Send]:
    """Report the state that the Welcome named once no proof of it is remembered, every AGAIN_S seconds."""
    peer = guest.peer
    announced = peer.joining.fetching.announced
    waits = peer.joining.step is Step.FETCHING and peer.progress.committed > announced.t + VOUCHED_KEPT
    if waits and guest.once("ready", int(peer.ctx.clock.now / AGAIN_S)):
        yield guest.to_leader(msg.Ready(announced.t, peer.ctx.run.stage, announced.fingerprint))


def _send_large_parts(guest: Guest) -> Iterator[Send]:
    """Send a replica of the stage, in turn, parts of a reduce that nobody ordered. They are dropped if they
    come after the step: to all replicas at once they would take longer than that."""
    import torch

    run, progress = guest.peer.ctx.run, guest.peer.progress
    t = progress.committed + 1
    if not guest.once("parts", t // LARGE_EVERY):
        return
    fence, attempt = guest.peer.ctx.fence(t, progress.base), msg.AttemptId(guest.peer.ctx.log.term + 9, t)
    others = [peer for peer in run.membership.live(run.stage, t) if peer != guest.peer.ctx.me]
    for part in range(LARGE_PARTS if others else 0):
        peer, payload = others[t // LARGE_EVERY % len(others)], torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        yield Send(peer, msg.ReducePart(fence, run.stage, attempt, part), payload)


def _call_copies_spoilt(guest: Guest) -> Iterator[Send]:
    """Say of every copy of every stage's state that it is not what it should be."""
    peer = guest.peer
    for point in peer.shared.summary.points(peer.progress.committed).values():
        if guest.once("spoilt", point.t):
            for stage in range(len(point.fingerprints)):
                for holder in peer.ctx.run.membership.members:
                    yield guest.to_leader(msg.Spoilt(stage, point.t, holder))


def _move_a_carrier(guest: Guest) -> Iterator[Send]:
    """Offer to carry at another address each time."""
    number = len(guest.told)
    if guest.once("carry", number):
        yield guest.to_leader(msg.Carry(f"127.9.9.9:{number + 1}"))


def _ask_gradients(guest: Guest) -> Iterator[Send]:
    """Ask every neighbour every AGAIN_S seconds for the first gradients of each stage."""
    if not guest.once("gradients", int(guest.peer.ctx.clock.now / AGAIN_S)):
        return
    for peer in sorted(guest.peer.ctx.links.up):
        for stage in range(guest.peer.ctx.run.settings.stages + 1):
            yield Send(peer, msg.FetchGradient(1, stage))


FURTHER: dict[str, Deed] = {
    deed.name: deed
    for deed in (
        Deed("opens no iteration", Role.SERVES, withhold(msg.Slots, msg.Have, msg.Lack)),
        Deed("claims nothing", Role.SERVES, withhold(msg.Claim)),
        Deed("no report of its state", Role.SERVES, withhold(msg.Applied)),
        Deed("withheld gradients", Role.SERVES, withhold(msg.Backward)),
        Deed("withheld parts", Role.SERVES, withhold(msg.ReducePart, msg.ReducedPart, msg.Prepared)),
        Deed("inputs that overflow", Role.SERVES, _send_huge),
        Deed("all states for a newcomer", Role.MEMBER, NEVER_READY, _ask_all_states),
        Deed("all states for a stranger", Role.STRANGER, withhold(msg.JoinRequest), _ask_all_states),
        WorkerDeed("false part, then gone", Role.SERVES, _die_unheard, compute=false_part),
        WorkerDeed("false part", Role.SERVES, compute=false_part),
        WorkerDeed("other bytes than it signed", Role.SERVES, compute=_unsigned),
        WorkerDeed("false audits", Role.SERVES, compute=_false_audit),
        Deed("made-up seal", Role.SERVES, _made_up_seal),
        Deed("receipt that lacks a result", Role.SERVES, _lacking_receipt),
        WorkerDeed("false work and audits", Role.SERVES, compute=_false_throughout),
        Deed("long names of tensors", Role.SERVES, _long_names),
        WorkerDeed("claims its whole stage", Role.SERVES, _claim_all, hear=_tell_given),
        Deed("losses without a sum", Role.SERVES, _infinite_losses),
        Deed("blames others", Role.SERVES, _blame),
        Deed("calls back again and again", Role.SERVES, _call_back),
        Deed("state of long ago", Role.MEMBER, FETCH_NOTHING, _tell_old_state),
        Deed("large parts of no reduce", Role.SERVES, None, _send_large_parts),
        Deed("calls copies spoilt", Role.SERVES, withhold(msg.Holds), _call_copies_spoilt),
        Deed("carrier that moves", Role.STRANGER, withhold(msg.JoinRequest), _move_a_carrier),
        Deed("gradients for a stranger", Role.STRANGER, withhold(msg.JoinRequest), _ask_gradients),
    )
}
