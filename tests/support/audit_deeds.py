"""Deeds of hostile guests in runs with audits: lies that a guest chooses by what is audited and by whom, and
lies that it tells together with another guest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from msgspec import structs

from anabranch.node.chaos.guests.guest_process import run_guest
from anabranch.node.chaos.guests.member_deeds import Deed, Guest, Role
from anabranch.node.driver.worker_thread import Computer
from anabranch.protocol import messages as msg
from anabranch.protocol.audit import draw
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.tasks import Payload, Result, Task
from support.further_deeds import false_part, negated
from support.lying_peer import LyingPeer, WorkerDeed

#: Names of guests begin so (see `HostileRun.invite`): by it a guest knows its accomplice.
GUEST = "guest-"
#: Bytes at the end of a state's snapshot that a guest changes: some weights, of four bytes each.
CHANGED_BYTES = 64


@dataclass
class AuditedGuest(Guest):
    """Hostile guest that can have tasks of its own computed. computer: its worker, once it is built."""

    computer: Computer | None = None


class AuditedPeer(LyingPeer):
    """Peer of an `AuditedGuest`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guest = AuditedGuest(self.peer)

    def _built(self, stage: int, built: tuple[Computer, str]) -> None:
        assert isinstance(self.guest, AuditedGuest)
        self.guest.computer = built[0]
        super()._built(stage, built)


def run_audited_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be a guest with a deed of this module (see `run_guest`)."""
    run_guest(name, arguments, log, namespace, environment, AUDIT_DEEDS, AuditedPeer)


def _pair(guest: Guest) -> set[str]:
    """Ids of the guests among the members."""
    members = guest.peer.ctx.run.membership.members
    return {peer for peer, member in members.items() if member.name.startswith(GUEST)}


def _where_no_audit_is_foreseen(
    guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result
) -> Result:
    """Negate the guest's sum once, where a draw from what it knows before the commit spares it."""
    reduce = guest.peer.replica.all_reduce.reduce
    if not isinstance(task, tasks.Freeze) or reduce is None or reduce.message.fence.t != task.t:
        return right
    settings, position = guest.peer.ctx.run.settings, reduce.position
    number = draw._number(reduce.message.fence.base, guest.peer.ctx.run.stage, position)
    chance = draw.chance(settings.audit_share, reduce.message.owners.count(position))
    lies = number >= chance * 2.0**64 and guest.once("foreseen")
    return negated(inputs, right) if lies else right


def _false_part_once(guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result) -> Result:
    """Negate the guest's sum in the first step to which it contributes."""
    lies = isinstance(task, tasks.Freeze) and guest.once("false part once")
    return negated(inputs, right) if lies else right


def _accuse_together(guest: Guest, send: Send) -> list[Send]:
    """Find the accomplice's work right, and work of others different where both are drawn to look at it
    first."""
    message = send.message
    if not isinstance(message, msg.Audited):
        return [send]
    pair, drawn = _pair(guest), guest.peer.iterations.auditor._drawn.get((message.t, message.subject))
    if message.subject in pair:
        said = structs.replace(message, verdict="same", what="", receipt=b"")
    elif drawn is not None and set(drawn.jury[:2]) == pair:
        said = structs.replace(message, verdict="different", what="part 0 of the sum")
    else:
        said = message
    return [send] if said == message else [structs.replace(send, message=said)]


def _find_right(guest: Guest, send: Send) -> list[Send]:
    """Find the accomplice's false work right."""
    message = send.message
    if isinstance(message, msg.Audited) and message.subject in _pair(guest) and message.verdict != "same":
        said = structs.replace(message, verdict="same", what="", receipt=b"")
        return [structs.replace(send, message=said)]
    return [send]


def _false_state_for_auditors(
    guest: Guest, task: Task, inputs: tuple[Payload, ...], right: Result
) -> Result:
    """Copy the state with some weights changed, and its fingerprint, if only auditors wait for the copy."""
    run, waiting = guest.peer.ctx.run, guest.peer.states._waiting
    asked = waiting.get((run.stage, task.t), set())
    if not isinstance(task, tasks.Snapshot) or not asked or not asked <= run.membership.auditors.keys():
        return right
    assert isinstance(guest, AuditedGuest) and guest.computer is not None
    pieces: list[Any] = list(right.outputs)
    pieces[-1] = pieces[-1].clone()
    pieces[-1][-CHANGED_BYTES:] ^= 1
    found = guest.computer.run(tasks.CheckState(task.t, run.stage), tuple(pieces))
    assert not found.error and found.fingerprint != right.fingerprint
    return structs.replace(right, outputs=tuple(pieces), fingerprint=found.fingerprint, hashes=found.hashes)


AUDIT_DEEDS: dict[str, Deed] = {
    deed.name: deed
    for deed in (
        WorkerDeed("false part", Role.SERVES, compute=false_part),
        WorkerDeed("false part once", Role.SERVES, compute=_false_part_once),
        WorkerDeed("false where no audit is foreseen", Role.SERVES, compute=_where_no_audit_is_foreseen),
        Deed("accuses with another", Role.SERVES, _accuse_together),
        Deed("finds another's lies right", Role.SERVES, _find_right),
        WorkerDeed("false state for auditors", Role.SERVES, compute=_false_state_for_auditors),
    )
}
