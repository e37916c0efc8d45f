"""Deeds of hostile guests that `anabranch chaos --hostile` does not draw: some hold a step up for a dozen
times its usual duration, others compute, sign or audit falsely, which only a run with audits finds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from msgspec import structs

from anabranch.node.chaos.guests.guest_process import HostilePeer, run_guest
from anabranch.node.chaos.guests.member_deeds import (
    AGAIN_S,
    DEEDS,
    FALSE_HASH,
    NEVER_READY,
    Deed,
    Guest,
    Role,
    withhold,
)
from anabranch.node.driver.worker_thread import Computer
from anabranch.protocol import messages as msg
from anabranch.protocol.audit.receipts import opened, signed
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.tasks import Payload, Result, Task

#: Activation or gradient of which no norm is finite in single precision.
HUGE = 3e38
#: Seconds after which a guest that keeps its receipt back ends: its parts of the sum have arrived by then.
DIES_S = 0.5

Compute = Callable[[Guest, Task, tuple[Payload, ...], Result], Result]


@dataclass(frozen=True)
class WorkerDeed(Deed):
    """Deed of a guest that computes falsely. compute: gets each task of its worker with the inputs and the
    right result, returns the result used instead, on the worker's thread."""

    compute: Compute | None = None


class LyingComputer:
    """Worker of a hostile guest: its deed `lie` changes results of `computer`. begun: called at a change."""

    def __init__(
        self, computer: Computer, lie: Callable[[Task, tuple[Payload, ...], Result], Result],
        begun: Callable[[], None],
    ) -> None:  # fmt: skip
        self._computer, self._lie, self._begun = computer, lie, begun

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        right = self._computer.run(task, inputs)
        said = self._lie(task, inputs, right)
        if said is not right:
            self._begun()
        return said


class LyingPeer(HostilePeer):
    """Hostile peer whose worker lies, too, if that is its deed."""

    def _built(self, stage: int, built: tuple[Computer, str]) -> None:
        computer, fingerprint = built
        lie = self.deed.compute if isinstance(self.deed, WorkerDeed) else None
        if lie is not None:
            computer = LyingComputer(computer, lambda *task: lie(self.guest, *task), self.begin)
        super()._built(stage, (computer, fingerprint))


def run_further_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be a guest that may do any deed (see `run_guest`)."""
    run_guest(name, arguments, log, namespace, environment, DEEDS | FURTHER, LyingPeer)


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
        WorkerDeed("false part, then gone", Role.SERVES, _die_unheard, compute=_false_part),
        WorkerDeed("other bytes than it signed", Role.SERVES, compute=_unsigned),
        WorkerDeed("false audits", Role.SERVES, compute=_false_audit),
        Deed("made-up seal", Role.SERVES, _made_up_seal),
    )
}
